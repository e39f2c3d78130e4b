"""What docs/migrate.md has `kubectl` do, done by kubectl before a real API server (`make test-kube`)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import KUBECTL, fetched
from tests.e2e.migrate.page import PAGE, block, run_text

from .pods import EVENTS, Kube, pod
from .real import RealApiServer

POLICY = "aibrix-gateway-plugins-extension-policy"
GROUP = "gateway.envoyproxy.io"
SYSTEM = "aibrix-system"
SERVICE = "kvsync-extproc"


@pytest.fixture
def administrator(api: RealApiServer, kube: Kube, tmp_path: Path) -> Mapping[str, str]:
    """The environment of somebody whose kubectl is in the namespace of ``kube``."""
    if trouble := fetched():
        pytest.skip(trouble)
    config: dict[str, Any] = yaml.safe_load(api.kubeconfig.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = kube.namespace
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return {"KUBECONFIG": str(file), "PATH": f"{KUBECTL.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


async def test_the_label_is_set_and_removed(kube: Kube, administrator: Mapping[str, str]) -> None:
    await kube.create(pod("p", labels={"model.aibrix.ai/name": "m"}))
    variables = {**administrator, "POD": "p"}
    await run_text(block("**By pod labels**"), variables)
    assert (await kube.get("p"))["metadata"]["labels"][EVENTS] == "true"
    (back,) = re.findall(r"\| one pod \| `([^`]+)`", PAGE)
    await run_text(back, variables)
    assert EVENTS not in (await kube.get("p"))["metadata"]["labels"]


async def test_envoy_s_policy_names_kvsync_and_then_the_plugin_again(
    kube: Kube, administrator: Mapping[str, str]
) -> None:
    """The policy as AIBrix's manifests have it. (Nobody acts on it here: Envoy Gateway was not run.)"""
    names = {"plural": "envoyextensionpolicies", "singular": "envoyextensionpolicy", "kind": "EnvoyExtensionPolicy"}
    anything = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced",
            "versions": [{"name": "v1alpha1", "served": True, "storage": True, "schema": anything}],
        },
    }
    policy = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": names["kind"],
        "metadata": {"name": POLICY, "namespace": SYSTEM},
        "spec": {"extProc": [{"backendRefs": [{"name": "aibrix-gateway-plugins", "port": 50052}]}]},
    }

    def apply(*objects: Mapping[str, object]) -> None:
        given = yaml.safe_dump_all(objects)
        command = [str(KUBECTL), "apply", "-f", "-"]
        environ = {**os.environ, **administrator}
        done = subprocess.run(command, input=given, capture_output=True, text=True, env=environ, timeout=60)
        assert done.returncode == 0, done.stderr

    async def backend() -> list[dict[str, object]]:
        path = f"/apis/{GROUP}/v1alpha1/namespaces/{SYSTEM}/{names['plural']}/{POLICY}"
        found: list[dict[str, object]] = (await kube.ask("GET", path))["spec"]["extProc"][0]["backendRefs"]
        return found

    apply(definition, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    await run_text(f"kubectl wait --for=condition=Established crd/{names['plural']}.{GROUP}", administrator)
    apply(policy)
    patch = block("### 3. In its place")
    await run_text(patch, administrator)
    assert await backend() == [{"name": SERVICE, "port": 50052}]
    await run_text(patch.replace(f'"value": "{SERVICE}"', '"value": "aibrix-gateway-plugins"'), administrator)
    assert await backend() == [{"name": "aibrix-gateway-plugins", "port": 50052}]
