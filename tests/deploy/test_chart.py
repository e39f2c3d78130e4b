"""The Helm chart: what it renders is what an API server takes, holds together, and is what kvsync itself would run."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.deploy import render

from kvsync.config import Settings
from kvsync.config.loading import read
from tests.certificates import Authority
from tests.deploy.objects import Object, faults, only, parsed, selects

pytestmark = pytest.mark.usefixtures("helm")

Rendered = Callable[..., list[Object]]

EVERYTHING: Mapping[str, Any] = {
    "fullnameOverride": "gateway",
    "image": {"repository": "images.example/kvsync", "digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "pull"}]},
    "replicas": 3,
    "config": {
        "gateway": {
            "port": 9443,
            "drain_timeout": 30.5,
            "engine_api_key_file": "/etc/kvsync/secrets/engine-key/key",
            "tls": {"cert": "/etc/kvsync/secrets/tls.data/tls.crt", "key": "/etc/kvsync/secrets/tls.data/tls.key"},
        },
        "admin": {
            "host": "::",
            "port": 9444,
            "tls": {"cert": "/etc/kvsync/secrets/tls.data/tls.crt", "key": "/etc/kvsync/secrets/tls.data/tls.key"},
        },
        "index": {"max_bytes": 8 << 30},
        "models": [
            {"name": "m", "engines": [{"name": "a", "url": "http://10.0.0.1:8000", "events": "tcp://10.0.0.1:5557"}]}
        ],
        "tenants": [{"name": "t", "api_key_hashes": ["0" * 64]}],
    },
    "env": [
        {"name": "AIBRIX_PREFIX_CACHE_LOCAL_ROUTER_METRICS_ENABLED", "value": "true"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "secrets": [{"name": "engine-key"}, {"name": "tls.data"}],
    "volumes": [{"name": "tokenizers", "persistentVolumeClaim": {"claimName": "tokenizers", "readOnly": True}}],
    "volumeMounts": [{"name": "tokenizers", "mountPath": "/tokenizers", "readOnly": True}],
    "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "12Gi"}},
    "service": {
        "type": "LoadBalancer",
        "port": 443,
        "annotations": {"example/cost": "1"},
        "externalTrafficPolicy": "Local",
    },
    "serviceAccount": {"name": "router", "annotations": {"example/role": "r"}},
    "autoscaling": {"enabled": True},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}],
        "egress": {
            "enabled": True,
            "engines": [{"ipBlock": {"cidr": "10.0.0.0/16"}}],
            "apiServer": [{"ipBlock": {"cidr": "10.96.0.1/32"}}],
            "rules": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 8000, "protocol": "TCP"}]}],
        },
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "tlsConfig": {"insecureSkipVerify": True}},
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "rack",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "kvsync"}},
        }
    ],
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "gateway", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "high",
    "podLabels": {"team": "serving"},
    "podAnnotations": {"example/note": "yes"},
}
NOTHING: Mapping[str, Any] = {
    "replicas": 1,
    "config": {"events": {"enabled": False}, "tokenizer": {"remote": {"enabled": False, "endpoint": None}}},
    "serviceAccount": {"create": False},
    "rbac": {"create": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "preStopSeconds": 0,
    "topologySpreadConstraints": [],
}
MATRIX: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "nothing": NOTHING,
    "one replica": {"replicas": 1},
    "none": {"replicas": 0},
    "egress": {"networkPolicy": {"egress": {"enabled": True}}},
    "nobody scrapes": {"networkPolicy": {"scrapers": []}},
    "autoscaled": {"autoscaling": {"enabled": True}, "replicas": 1},
    "monitored": {"serviceMonitor": {"enabled": True}},
    "long name": {"nameOverride": "x" * 40},
}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    file = tmp_path_factory.mktemp("values") / "values.yaml"

    @functools.cache
    def text(values: str, name: str, namespace: str) -> str:
        file.write_text(values)
        return render.template(name, namespace, file)

    def render_with(values: Mapping[str, Any], name: str = "kv", namespace: str = "serving") -> list[Object]:
        return parsed(text(yaml.safe_dump(dict(values)), name, namespace))

    return render_with


@pytest.fixture
def refusal(rendered: Rendered) -> Callable[[Mapping[str, Any]], str]:
    """What helm says to values that it refuses."""

    def refused(values: Mapping[str, Any]) -> str:
        with pytest.raises(ValueError) as caught:
            rendered(values)
        return str(caught.value)

    return refused


def test_lint() -> None:
    done = render.helm("lint", "--strict", str(render.CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_objects_are_what_the_api_takes(values: Mapping[str, Any], rendered: Rendered) -> None:
    objects = rendered(values)
    assert [fault for item in objects for fault in faults(item)] == []
    assert all(item["metadata"]["namespace"] for item in objects if not item["kind"].startswith("Cluster"))
    named = [(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda spec: spec.update(replicas="2"), "replicas"),
        (lambda spec: spec["template"]["spec"].update(restartpolicy="Always"), "restartpolicy"),
        (
            lambda spec: spec["template"]["spec"]["containers"][0].update(lifecycle={"preStop": {"sleep": {}}}),
            "seconds",
        ),
        (lambda spec: spec["template"]["spec"]["containers"][0].update(env=None), "env is null"),
    ],
)
def test_the_judge_finds_what_is_wrong(change: Callable[[Any], None], fault: str, rendered: Rendered) -> None:
    deployment = only(rendered({}), "Deployment")
    change(deployment["spec"])
    assert any(fault in each for each in faults(deployment))


def test_the_judge_knows_the_fields_of_a_service_monitor(rendered: Rendered) -> None:
    monitor = only(rendered(MATRIX["monitored"]), "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["intervall"] = "15s"
    assert any("intervall" in fault for fault in faults(monitor))


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_objects_find_each_other(values: Mapping[str, Any], rendered: Rendered) -> None:
    objects = rendered(values)
    deployment = only(objects, "Deployment")
    template = deployment["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert selects(deployment["spec"]["selector"], labels)
    for item in objects:
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            assert selects(spec["selector"], labels)
            assert {port["targetPort"] for port in spec["ports"]} <= ports.keys()
        if item["kind"] == "PodDisruptionBudget":
            assert selects(spec["selector"], labels)
        if item["kind"] == "NetworkPolicy":
            assert selects(spec["podSelector"], labels)
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= ports.keys()
        if item["kind"] == "HorizontalPodAutoscaler":
            assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
            assert "replicas" not in deployment["spec"]
        if item["kind"] == "ServiceMonitor":
            services = [o for o in objects if o["kind"] == "Service"]
            (service,) = [o for o in services if selects(spec["selector"], o["metadata"]["labels"])]
            assert spec["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    accounts = [item["metadata"]["name"] for item in objects if item["kind"] == "ServiceAccount"]
    assert pod["serviceAccountName"] in [*accounts, "default"]
    budgets = [item for item in objects if item["kind"] == "PodDisruptionBudget"]
    assert len(budgets) <= 1
    if deployment["spec"].get("replicas") in (0, 1):
        assert not budgets


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_configuration_is_one_that_kvsync_starts_with(
    values: Mapping[str, Any], rendered: Rendered, tmp_path: Path
) -> None:
    objects = rendered(values)
    (name, text), *more = only(objects, "ConfigMap")["data"].items()
    assert not more
    (container,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
    # what the pod would see under /etc/kvsync/secrets: a folder for each Secret that it mounts
    secrets = tmp_path / "secrets"
    for folder in (mount["mountPath"] for mount in container["volumeMounts"] if "/secrets/" in mount["mountPath"]):
        inside = secrets / Path(folder).name
        inside.mkdir(parents=True)
        Authority(inside).issue("localhost", name="tls")
        (inside / "key").write_text("0123456789abcdef")
    text = text.replace("/etc/kvsync/secrets", str(secrets))
    loaded = read(tmp_path / name, environ, {}, content=text.encode())
    assert loaded.warnings == ()
    settings = loaded.settings
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings.gateway.port, "admin": settings.admin.port}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"] == ["serve", "--config", f"{mounts['config']}/{name}"]
    assert settings.admin.host in ("0.0.0.0", "::")


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_a_pod_may_do_what_the_restricted_profile_allows(values: Mapping[str, Any], rendered: Rendered) -> None:
    pod = only(rendered(values), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    inside = container["securityContext"]
    assert (inside["allowPrivilegeEscalation"], inside["readOnlyRootFilesystem"]) == (False, True)
    assert inside["capabilities"] == {"drop": ["ALL"]}
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


@pytest.mark.parametrize(("drain", "pre_stop"), [(120.0, 10), (0.5, 0), (3600.0, 300)])
def test_a_pod_has_the_time_that_its_end_takes(drain: float, pre_stop: int, rendered: Rendered) -> None:
    objects = rendered({"config": {"gateway": {"drain_timeout": drain}}, "preStopSeconds": pre_stop})
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= pre_stop + drain + 5
    lifecycle = pod["containers"][0].get("lifecycle")
    assert lifecycle == ({"preStop": {"sleep": {"seconds": pre_stop}}} if pre_stop else None)


def test_memory_follows_the_bounds_of_the_configuration(rendered: Rendered) -> None:
    """The defaults that the template knows are those of the settings."""
    for index in (None, 1 << 30, 20 << 30):
        values = {"config": {"index": {"max_bytes": index}}}
        container = only(rendered(values), "Deployment")["spec"]["template"]["spec"]["containers"][0]
        settings = Settings()
        tokenizer = settings.tokenizer
        most = (settings.index.max_bytes if index is None else index) * 1.1
        most += settings.events.receive_bytes + tokenizer.remote.cache_bytes + tokenizer.local.cache_bytes
        (limit,) = re.fullmatch(r"(\d+)Mi", container["resources"]["limits"]["memory"]).groups()  # type: ignore[union-attr]
        assert int(limit) == pytest.approx(most / 2**20 + 384, abs=2)
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


@pytest.mark.parametrize(
    ("values", "restarts"),
    [
        ({"config": {"models": [{"name": "new"}]}}, False),
        ({"config": {"tenants": [{"name": "t", "api_key_hashes": ["0" * 64]}]}}, False),
        ({"config": {"events": {"enabled": False}}}, False),
        ({"config": {"events": {"replay_timeout": 2.0}}}, True),
        ({"config": {"routing": {"policy": "random"}}}, True),
        ({"config": {"gateway": {"drain_timeout": 121.0}}}, True),
        ({"service": {"port": 80}}, False),
    ],
)
def test_pods_restart_with_what_they_do_not_follow(
    values: Mapping[str, Any], restarts: bool, rendered: Rendered
) -> None:
    before, after = (only(rendered(each), "Deployment")["spec"]["template"] for each in ({}, values))
    assert (before != after) is restarts


def test_two_releases_do_not_take_each_others_pods(rendered: Rendered) -> None:
    one, other = (only(rendered({}, name), "Deployment")["spec"] for name in ("one", "other"))
    assert not selects(one["selector"], other["template"]["metadata"]["labels"])


def test_a_release_named_like_the_chart_is_not_named_twice(rendered: Rendered) -> None:
    assert only(rendered({}, "kvsync"), "Deployment")["metadata"]["name"] == "kvsync"
    assert only(rendered({}, "a"), "Deployment")["metadata"]["name"] == "a-kvsync"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"networkPolicy": {"egress": {"port": 1}}}, "port"),
        ({"networkPolicy": {"clients": [{"podselector": {}}]}}, "podselector"),
        ({"config": {"events": {"enable": True}}}, "enable"),
        ({"config": {"gateway": {"port": 0}}}, "port"),
        ({"config": {"gateway": {"port": "8080"}}}, "port"),
        ({"config": {"gateway": None}}, "gateway"),
        ({"config": {"routing": {"policy": "kvaware"}}}, "policy"),
        ({"config": {"models": [{"name": "m", "engines": [{"name": "a"}]}]}}, "url"),
        ({"config": {"admin": {"host": "127.0.0.1"}}}, "probes come from outside"),
        ({"config": {"admin": {"tls": {"client_ca": "/ca"}}}}, "no probe could pass"),
        ({"env": [{"name": "KVSYNC_GATEWAY_PORT", "value": "1"}]}, "env/0/name"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"replicas": -1}, "replicas"),
        ({"preStopSeconds": 301}, "preStopSeconds"),
        ({"resources": {"limits": {"memory": "2 GB"}}}, "memory"),
    ],
)
def test_values_that_mean_nothing_are_refused(
    values: Mapping[str, Any], says: str, refusal: Callable[[Mapping[str, Any]], str]
) -> None:
    assert says in refusal(values)


def test_every_value_is_documented_and_in_the_schema() -> None:
    schema = json.loads(render.SCHEMA.read_text(encoding="utf-8"))
    text = (render.CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert values.keys() == schema["properties"].keys() - {"global"}
    for name, value in values.items():
        inner = schema["properties"][name].get("properties", {})
        if isinstance(value, dict) and inner:
            assert value.keys() == inner.keys(), name
    for paragraph in text.split("\n\n"):
        keys = re.findall(r"^([a-zA-Z]+):", paragraph, re.MULTILINE)
        assert not keys or "# " in paragraph, keys


def test_manifests_are_what_the_chart_renders() -> None:
    """After a change of the chart: make manifests."""
    for path, text in render.manifests().items():
        assert path.read_text(encoding="utf-8") == text, path


def test_manifests_are_what_the_api_takes() -> None:
    for text in render.manifests().values():
        assert [fault for item in parsed(text) if item["kind"] != "Namespace" for fault in faults(item)] == []
