"""The sample deployments are engines without a fault, as this gateway reads their pods."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvsync.discovery.kubernetes.pods import judge

SAMPLES = Path(__file__).parents[3] / "deploy" / "samples"
DEPLOYMENTS = [
    pytest.param(document, id=document["metadata"]["name"])
    for file in sorted(SAMPLES.glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
    if document["kind"] == "Deployment"
]


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_a_sample(deployment: dict[str, object]) -> None:
    template = deployment["spec"]["template"]  # type: ignore[index]
    meta = {"name": "p", "namespace": "n", "uid": "u", **template["metadata"]}
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    verdict = judge(json.dumps({"metadata": meta, "spec": template["spec"], "status": status}).encode())
    assert verdict is not None
    assert verdict.notes == ()
    engine = verdict.engine
    assert engine is not None, verdict.detail
    arguments = template["spec"]["containers"][0]["args"]
    flags = dict(each.removeprefix("--").split("=", 1) for each in arguments if each.startswith("--") and "=" in each)
    events = json.loads(arguments[arguments.index("--kv-events-config") + 1])
    assert engine.model == flags["served-model-name"]
    assert engine.url == f"http://10.0.0.1:{flags['port']}"
    assert engine.data_parallel_size == int(flags.get("data-parallel-size", 1))
    assert engine.events == events["endpoint"].replace("*", "10.0.0.1")
    assert engine.replay == events["replay_endpoint"].replace("*", "10.0.0.1")


def test_there_are_samples() -> None:
    assert len(DEPLOYMENTS) >= 2
