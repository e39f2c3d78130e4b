"""What deploy/ holds, given to a real API server (`make test-kube`): strictly checked, applied, applied again without a
change; what the gateway's account may, and what it may not; and kvsync itself at work with those rights alone.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from scripts.deploy import render
from scripts.deploy.render import MANIFESTS, ROOT, template

from tests.deploy.objects import CRD, Object, only, parsed
from tests.deploy.tools import KUBECTL, fetched
from tests.deploy.values import MATRIX
from tests.faults.client import until
from tests.faults.process import running

from .conftest import Server
from .pods import Kube, pod
from .pods import running as status
from .real import RealApiServer

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
SAMPLES = ROOT / "deploy" / "samples"
ACCOUNT = "system:serviceaccount:kvsync:kvsync"


@pytest.fixture(scope="module")
def kubectl(real: RealApiServer | None, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    if real is None:
        pytest.skip("needs a real API server: make test-kube")
    if trouble := fetched():
        pytest.skip(trouble)
    cache = tmp_path_factory.mktemp("kubectl")
    head = [str(KUBECTL), "--kubeconfig", str(real.kubeconfig), "--cache-dir", str(cache)]

    def run(*args: str, given: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*head, *args], input=given, capture_output=True, text=True, check=False, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done

    run("apply", "--server-side", "-f", str(CRD))
    run("wait", "--for=condition=Established", f"crd/{json.loads(CRD.read_text())['metadata']['name']}")
    return run


def applied(kubectl: Kubectl, text: str, *options: str) -> None:
    """Strictly checked without being kept, then kept; and what the server has then is what was given."""
    kubectl("apply", "--validate=strict", "--dry-run=server", *options, "-f", "-", given=text)
    kubectl("apply", "--validate=strict", *options, "-f", "-", given=text)
    assert kubectl("diff", *options, "-f", "-", given=text).stdout == ""


@pytest.mark.parametrize("name", MATRIX)
async def test_what_the_chart_renders_is_taken_as_it_stands(
    name: str, kubectl: Kubectl, kube: Kube, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(dict(MATRIX[name])))
    text = template("kv", kube.namespace, file)
    for namespace in {item["metadata"].get("namespace", kube.namespace) for item in parsed(text)} - {kube.namespace}:
        kubectl("create", "namespace", namespace, check=False)
    applied(kubectl, text)
    kubectl("delete", "--wait=false", "-f", "-", given=text)


async def test_a_release_is_installed_changed_rolled_back_and_leaves_nothing_behind(
    real: RealApiServer, kubectl: Kubectl, kube: Kube, tmp_path: Path
) -> None:
    """By helm itself. No controller is here, so nothing is waited for."""
    place = ["--kubeconfig", str(real.kubeconfig), "--namespace", kube.namespace]

    def helm(*args: str) -> None:
        done = render.helm(*args, *place)
        assert done.returncode == 0, done.stderr

    def there() -> set[str]:
        """Everything of the release, in whatever namespace."""
        kinds = "deploy,svc,cm,sa,pdb,hpa,netpol,servicemonitor,role,rolebinding,clusterrole,clusterrolebinding"
        label = "app.kubernetes.io/instance=steps"
        return set(kubectl("get", kinds, "-A", "-l", label, "-o", "name").stdout.split())

    files = {}
    for name in ("everything", "Envoy", "nothing"):
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({**MATRIX[name], "fullnameOverride": "steps"}))
    helm("install", "steps", str(render.CHART), "--values", str(files["Envoy"]))
    first = there()
    assert {"deployment.apps/steps", "deployment.apps/steps-envoy", "service/steps-extproc"} <= first
    for name in ("everything", "nothing"):
        helm("upgrade", "steps", str(render.CHART), "--values", str(files[name]))
    assert there() == {"deployment.apps/steps", "service/steps", "service/steps-admin", "configmap/steps"}
    helm("rollback", "steps", "1")
    assert there() == first
    helm("uninstall", "steps")
    assert there() == set()


def test_a_fault_is_refused(kubectl: Kubectl) -> None:
    """Else the tests above could not fail."""
    text = (MANIFESTS / "gateway.yaml").read_text(encoding="utf-8")
    kubectl("apply", "-f", "-", given=next(part for part in text.split("---") if "kind: Namespace" in part))
    wrong = text.replace("failureThreshold:", "failurethreshold:")
    done = kubectl("apply", "--validate=strict", "--dry-run=server", "-f", "-", given=wrong, check=False)
    assert done.returncode
    assert "failurethreshold" in done.stderr


@pytest.fixture(scope="module")
def gateway(kubectl: Kubectl) -> list[Object]:
    """The plain manifests, in the namespace kvsync."""
    text = (MANIFESTS / "gateway.yaml").read_text(encoding="utf-8")
    # the namespace first: what is in it can't be checked before
    kubectl("apply", "-f", "-", given=next(part for part in text.split("---") if "kind: Namespace" in part))
    applied(kubectl, text)
    return parsed(text)


def test_manifests_and_samples_are_taken_as_they_stand(kubectl: Kubectl, gateway: list[Object]) -> None:
    for file in (MANIFESTS / "rbac.yaml", MANIFESTS / "rbac-all-namespaces.yaml"):
        applied(kubectl, file.read_text(encoding="utf-8"))
    for file in sorted(SAMPLES.glob("*.yaml")):
        applied(kubectl, file.read_text(encoding="utf-8"), "--namespace", "kvsync")
    kubectl("delete", "-f", str(MANIFESTS / "rbac-all-namespaces.yaml"))
    applied(kubectl, (MANIFESTS / "rbac.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("what", "allowed"),
    [
        ("list pods -n kvsync", True),
        ("watch pods -n kvsync", True),
        ("get pods -n kvsync", False),
        ("create pods -n kvsync", False),
        ("delete pods -n kvsync", False),
        ("patch pods -n kvsync", False),
        ("get pods/log -n kvsync", False),
        ("create pods/exec -n kvsync", False),
        ("list secrets -n kvsync", False),
        ("list configmaps -n kvsync", False),
        ("list nodes", False),
        ("list pods -n default", False),
        ("list pods -A", False),
        ("impersonate users", False),
    ],
)
def test_the_gateways_account_may_see_pods_and_nothing_else(
    what: str, allowed: bool, kubectl: Kubectl, gateway: list[Object]
) -> None:
    done = kubectl("auth", "can-i", *what.split(), "--as", ACCOUNT, check=False)
    assert (done.stdout.strip(), done.returncode) == (("yes", 0) if allowed else ("no", 1)), done.stderr


def test_everywhere_means_pods_everywhere_and_nothing_else(kubectl: Kubectl, gateway: list[Object]) -> None:
    file = str(MANIFESTS / "rbac-all-namespaces.yaml")
    kubectl("apply", "-f", file)
    try:
        for what, allowed in {"list pods -A": "yes", "list pods -n default": "yes", "list secrets -A": "no"}.items():
            done = kubectl("auth", "can-i", *what.split(), "--as", ACCOUNT, check=False)
            assert done.stdout.strip() == allowed, what
    finally:
        kubectl("delete", "-f", file)
        kubectl("apply", "-f", str(MANIFESTS / "rbac.yaml"))


def created(kubectl: Kubectl, namespace: str, spec: Object) -> str:
    """What the API server says against such a pod; empty: nothing."""
    bare = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "as-deployed", "namespace": namespace}}
    given = json.dumps({**bare, "spec": spec})
    return kubectl("create", "--dry-run=server", "-f", "-", given=given, check=False).stderr


def test_a_gateway_is_let_in_where_the_restricted_profile_is_enforced(kubectl: Kubectl, gateway: list[Object]) -> None:
    kubectl("create", "namespace", "restricted")
    kubectl("label", "namespace", "restricted", "pod-security.kubernetes.io/enforce=restricted")
    spec = only(gateway, "Deployment")["spec"]["template"]["spec"]
    assert created(kubectl, "restricted", spec) == ""
    assert "violates PodSecurity" in created(kubectl, "restricted", {**spec, "securityContext": {}})


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("vllm*.yaml")), ids=lambda file: file.stem)
def test_engines_are_let_in_beside_it(file: Path, kubectl: Kubectl, gateway: list[Object]) -> None:
    spec = only(parsed(file.read_text(encoding="utf-8")), "Deployment")["spec"]["template"]["spec"]
    assert created(kubectl, only(gateway, "Namespace")["metadata"]["name"], spec) == ""


async def test_kvsync_finds_pods_with_the_rights_of_its_account_alone(
    kubectl: Kubectl, gateway: list[Object], server: Server, kube: Kube, tmp_path: Path
) -> None:
    """The rendered configuration, but for the address of the API server and the ports."""
    token = tmp_path / "token"
    token.write_text(kubectl("create", "token", "kvsync", "-n", "kvsync").stdout.strip())
    config = yaml.safe_load(only(gateway, "ConfigMap")["data"]["kvsync.yaml"])
    outside = {"api_server": server.url, "token_file": str(token), "ca_file": str(server.ca_file)}
    config["kubernetes"] |= {**outside, "namespaces": ["kvsync"]}
    config["admin"]["host"] = "127.0.0.1"
    config["telemetry"]["log_format"] = "text"
    async with running(tmp_path, config) as serving:

        async def followed() -> bool:
            return "kvsync/engine" in {row["engine"] for row in (await serving.workers()).values()}

        await kube.inside("kvsync").create(pod("engine", labels={"model.aibrix.ai/name": "m"}), status("127.0.0.1"))
        try:
            await until(followed, "the pod among the workers")
            assert (await serving.ready())["kubernetes"]["state"] == "synced"
        finally:
            await kube.inside("kvsync").delete("engine")
