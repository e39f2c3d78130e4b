"""Sample vLLM deployments: their flags exist, their ports are those that the pods declare, and kvsync can follow them.

What vLLM's flags are is known from its sources (0.9 to 0.33) and a server that ran (0.32): docs/operations.md, Engines.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.deploy.render import ROOT

from kvsync.config import ConfigError
from kvsync.config.loading import read
from kvsync.discovery.kubernetes.pods import judge
from tests.deploy.objects import Object, faults, only, parsed

FOLDER = ROOT / "deploy" / "samples"
SAMPLES = sorted(FOLDER.glob("vllm*.yaml"))
EVENTS_CONFIG = {
    "enable_kv_cache_events",
    "publisher",
    "endpoint",
    "replay_endpoint",
    "buffer_steps",
    "hwm",
    "max_queue_size",
    "topic",
}
"""Every field of vLLM's KVEventsConfig: another one and the server does not start."""
FLAGS = {
    "--served-model-name",
    "--port",
    "--enable-prompt-tokens-details",
    "--kv-events-config",
    "--data-parallel-size",
}
"""Those of `vllm serve` that samples may use: each was given to a server that ran."""


@dataclass
class Served:
    """What a sample's container does, as its arguments say."""

    pod: Object
    container: Object
    flags: dict[str, str]
    events: dict[str, Any]

    @property
    def ranks(self) -> int:
        return int(self.flags.get("--data-parallel-size", "1"))

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def served(file: Path) -> Served:
    pod = only(parsed(file.read_text(encoding="utf-8")), "Deployment")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["vllm", "serve"]
    model, *rest = container["args"]
    assert not model.startswith("-")
    flags: dict[str, str] = {}
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if name == "--kv-events-config":
            value = rest.pop(0)
        assert name not in flags
        flags[name] = value
    return Served(pod, container, flags, json.loads(flags["--kv-events-config"]))


def port_of(endpoint: str) -> int:
    found = re.fullmatch(r"tcp://\*:(\d+)", endpoint)
    assert found, f"{endpoint}: without * an engine connects instead of listening"
    return int(found[1])


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_objects_are_what_the_api_takes(file: Path) -> None:
    assert [fault for item in parsed(file.read_text(encoding="utf-8")) for fault in faults(item)] == []


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_flags_are_those_that_exist(file: Path) -> None:
    engine = served(file)
    assert engine.flags.keys() <= FLAGS
    assert engine.events.keys() <= EVENTS_CONFIG
    assert engine.events["enable_kv_cache_events"] is True
    # before 0.11.1 the default publishes nothing
    assert engine.events["publisher"] == "zmq"
    # of a release whose events kvsync reads, and not of whatever is newest
    assert re.search(r":v0\.\d+\.\d+$", engine.container["image"])


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_ports_are_declared_and_do_not_meet(file: Path) -> None:
    engine = served(file)
    events, replay = port_of(engine.events["endpoint"]), port_of(engine.events["replay_endpoint"])
    http = int(engine.flags["--port"])
    needed = [http, *(events + rank for rank in range(engine.ranks)), *(replay + rank for rank in range(engine.ranks))]
    assert len(set(needed)) == len(needed)
    assert sorted(engine.ports.values()) == sorted(needed)
    # by these names kvsync finds them
    assert (engine.ports["http"], engine.ports["kv-events"], engine.ports["kv-replay"]) == (http, events, replay)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine.container[probe]["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_pods_carry_what_kvsync_looks_for(file: Path) -> None:
    engine = served(file)
    labels = engine.pod["metadata"]["labels"]
    assert labels["model.aibrix.ai/name"] == engine.flags["--served-model-name"]
    assert labels["model.aibrix.ai/kv-events-enabled"] == "true"
    assert engine.pod["spec"]["enableServiceLinks"] is False
    gpus = engine.container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(gpus) == engine.ranks


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_kvsync_finds_in_the_pod_what_its_engine_does(file: Path) -> None:
    engine = served(file)
    meta = engine.pod["metadata"] | {"name": "engine-0", "namespace": "serving", "uid": "1"}
    running = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    verdict = judge(json.dumps({"metadata": meta, "spec": engine.pod["spec"], "status": running}).encode())
    assert verdict is not None
    assert verdict.notes == ()
    found = verdict.engine
    assert found is not None, verdict.detail
    assert found.model == engine.flags["--served-model-name"]
    assert found.data_parallel_size == engine.ranks
    assert found.url == f"http://10.0.0.1:{engine.flags['--port']}"
    assert found.events == f"tcp://10.0.0.1:{port_of(engine.events['endpoint'])}"
    assert found.replay == f"tcp://10.0.0.1:{port_of(engine.events['replay_endpoint'])}"
    assert (found.kv_events, found.ready, found.tokenizes) == (True, True, True)


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
@pytest.mark.parametrize("replay", [None, 5558])
def test_kvsync_takes_such_an_engine_and_finds_ports_that_meet(file: Path, replay: int | None, tmp_path: Path) -> None:
    """With AIBrix's replay port, which a second rank's events have, it is refused."""
    engine = served(file)
    where = {
        "name": "a",
        "url": f"http://10.0.0.1:{engine.flags['--port']}",
        "events": f"tcp://10.0.0.1:{port_of(engine.events['endpoint'])}",
        "replay": f"tcp://10.0.0.1:{replay or port_of(engine.events['replay_endpoint'])}",
        "data_parallel_size": engine.ranks,
    }
    text = yaml.safe_dump({"models": [{"name": engine.flags["--served-model-name"], "engines": [where]}]})
    if replay is not None and engine.ranks > 1:
        with pytest.raises(ConfigError, match="keep them apart"):
            read(tmp_path / "fleet.yaml", {}, {}, content=text.encode())
    else:
        read(tmp_path / "fleet.yaml", {}, {}, content=text.encode())


def test_some_sample_has_ranks_and_some_has_none() -> None:
    assert {served(file).ranks > 1 for file in SAMPLES} == {False, True}


def allowed(rules: list[Object]) -> set[int]:
    """TCP ports of a NetworkPolicy's rules."""
    ports = [port for rule in rules for port in rule["ports"] if port["protocol"] == "TCP"]
    return {each for port in ports for each in range(port["port"], port.get("endPort", port["port"]) + 1)}


def test_network_policies_let_the_samples_ports_through() -> None:
    engines = parsed((FOLDER / "engines-networkpolicy.yaml").read_text(encoding="utf-8"))
    gateway = parsed((ROOT / "deploy" / "manifests" / "gateway.yaml").read_text(encoding="utf-8"))
    into = only(engines, "NetworkPolicy")["spec"]
    out_of = only(gateway, "NetworkPolicy")["spec"]["egress"]
    for file in SAMPLES:
        engine = served(file)
        assert set(engine.ports.values()) <= allowed(into["ingress"]) & allowed(out_of)
        assert into["podSelector"]["matchLabels"].items() <= engine.pod["metadata"]["labels"].items()
    (peer,) = into["ingress"][0]["from"]
    gateways = only(gateway, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= gateways.items()
