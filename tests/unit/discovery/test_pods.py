"""What engine a pod is, and why another one is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.discovery.kubernetes.pods import GROUP_INDEX, NETWORK_STATUS, PREFIX, RAY_NODE_TYPE, REASONS, Verdict, judge
from kvsync.discovery.kubernetes.reflector import Unreadable
from kvsync.discovery.model import Engine

Json = dict[str, Any]


def pod(
    labels: Json | None = None,
    annotations: Json | None = None,
    *,
    ports: dict[str, int] | None = None,
    meta: Json | None = None,
    status: Json | None = None,
    containers: object = ...,
) -> Json:
    """One that runs, is ready, and serves ``m``; labels by their names behind the prefix."""
    given = {"name": "m"} if labels is None else labels
    full = {name if "/" in name else PREFIX + name: value for name, value in given.items()}
    listed = [{"name": name, "containerPort": port} for name, port in (ports or {}).items()]
    running = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "startTime": "2026-01-01T00:00:00Z",
        "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}],
    }
    return {
        "metadata": {
            "name": "p",
            "namespace": "n",
            "uid": "u",
            "labels": full,
            "annotations": {PREFIX + name: value for name, value in (annotations or {}).items()},
            **(meta or {}),
        },
        "spec": {"containers": [{"name": "vllm", "ports": listed}] if containers is ... else containers},
        "status": running | (status or {}),
    }


def verdict(*arguments: Any, **keywords: Any) -> Verdict:
    found = judge(json.dumps(pod(*arguments, **keywords)).encode())
    assert found is not None
    return found


def engine(*arguments: Any, **keywords: Any) -> Engine:
    found = verdict(*arguments, **keywords)
    assert found.engine is not None, found
    return found.engine


def test_the_least() -> None:
    assert engine() == Engine(
        uid="n/p@u",
        name="n/p",
        url="http://10.0.0.1:8000",
        model="m",
        kv_events=False,
        labels={PREFIX + "name": "m"},
    )


def test_everything() -> None:
    labels = {
        "name": "m",
        "kv-events-enabled": "true",
        "port": "8001",
        "data-parallel-size": "2",
        "scheme": "https",
        "spec-decode": "eagle",
        "attention-chunk-size": "8192",
        "engine": "sglang",
        "lora-id": "7",
        "example.com/tier": "gold",
    }
    found = verdict(labels, {"adapters": "x, org/y ,,x"}, ports={"kv-events": 7000, "kv-replay": 7100})
    assert found.notes == ()
    assert found.engine == Engine(
        uid="n/p@u",
        name="n/p",
        url="https://10.0.0.1:8001",
        model="m",
        adapters=("x", "org/y"),
        data_parallel_size=2,
        kv_events=True,
        events="tcp://10.0.0.1:7000",
        replay="tcp://10.0.0.1:7100",
        spec_decode="eagle",
        attention_chunk_size=8192,
        labels={name if "/" in name else PREFIX + name: value for name, value in labels.items()},
        tokenizes=False,
    )


def test_a_label_comes_before_an_annotation() -> None:
    assert engine({"name": "label"}, {"name": "org/annotation"}).model == "label"
    assert engine({"port": "1"}, {"name": "org/annotation", "port": "2"}).model == "org/annotation"
    assert engine({"port": "1"}, {"name": "m", "port": "2"}).url == "http://10.0.0.1:1"
    assert engine({"name": ""}, {"name": "org/annotation"}).model == "org/annotation"


@pytest.mark.parametrize("value", ["True", "TRUE", "1", "yes", "on", " true", "true ", "", "false"])
def test_events_are_followed_for_exactly_true(value: str) -> None:
    found = verdict({"name": "m", "kv-events-enabled": value})
    assert found.engine is not None
    assert not found.engine.kv_events
    assert bool(found.notes) == (value not in ("", "false"))


def test_events_are_switched_on_by_a_label_only() -> None:
    found = verdict({"name": "m"}, {"kv-events-enabled": "true"})
    assert found.engine is not None
    assert not found.engine.kv_events
    assert found.notes == (f"{PREFIX}kv-events-enabled is an annotation: events are not followed; make it a label",)


def test_default_ports_of_one_rank() -> None:
    found = engine({"name": "m", "kv-events-enabled": "true"})
    assert (found.events, found.replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")


@pytest.mark.parametrize(
    ("ranks", "ports", "free"),
    [
        (2, {}, 6557),
        (4, {}, 6557),
        (3, {"kv-replay": 5559}, 6557),
        (2, {"kv-events": 5558, "kv-replay": 5557}, 6558),
        (1, {"kv-replay": 5557}, 6557),
        (2, {"kv-events": 65_000, "kv-replay": 65_535}, 64_996),
    ],
)
def test_replay_ports_among_those_of_the_ranks_events(ranks: int, ports: dict[str, int], free: int) -> None:
    """(I13) Each rank adds its number to both ports, so 5557 and 5558 are for one rank only: the engine is asked."""
    labels = {"name": "m", "kv-events-enabled": "true", "data-parallel-size": str(ranks)}
    found = verdict(labels, ports=ports)
    assert found.engine is not None
    assert found.engine.replay is None
    assert found.engine.events == f"tcp://10.0.0.1:{ports.get('kv-events', 5557)}"
    (note,) = found.notes
    assert f"Set replay_endpoint to tcp://*:{free}, and a container port kv-replay of that number" in note
    mended = verdict(labels, ports={**ports, "kv-replay": free})
    assert mended.notes == ()
    assert mended.engine is not None
    assert mended.engine.replay == f"tcp://10.0.0.1:{free}"


NETWORKS = [
    {"name": "cbr0", "ips": ["10.0.0.1"], "default": True},
    {"name": "llm/events", "interface": "net1", "ips": ["fd01::7", "192.168.0.7"], "mac": "02:23:45:67:89:01"},
    {"name": "llm/empty"},
]


def test_events_from_a_network_of_their_own() -> None:
    labels = {"name": "m", "kv-events-enabled": "true"}
    both = {"kv-events-network": "llm/events"}
    status = {"annotations": {NETWORK_STATUS: json.dumps(NETWORKS), **{PREFIX + k: v for k, v in both.items()}}}
    found = engine(labels, meta=status)
    assert found.url == "http://10.0.0.1:8000"
    assert (found.events, found.replay) == ("tcp://[fd01::7]:5557", "tcp://[fd01::7]:5558")
    assert verdict(labels, meta=status).assumed == {"events", "replay"}  # an annotation takes no other pod's events
    own = status | {"status": {"podIP": "fd01::7"}}
    assert verdict(labels, meta={"annotations": status["annotations"]}, status=own["status"]).assumed == set()


@pytest.mark.parametrize("status", [None, "", "{", "{}", "[7]", "[" * 100_000, json.dumps(NETWORKS)])
@pytest.mark.parametrize("network", ["llm/empty", "llm/none"])
def test_a_network_that_the_pod_is_not_in(status: str | None, network: str) -> None:
    """Its events are not sought elsewhere: where they should not go, they would be taken from nobody knows whom."""
    said = {PREFIX + "kv-events-network": network} | ({} if status is None else {NETWORK_STATUS: status})
    found = verdict({"name": "m", "kv-events-enabled": "true"}, meta={"annotations": said})
    assert found.engine is not None
    assert (found.engine.kv_events, found.engine.events) == (False, None)
    (note,) = found.notes
    assert network in note


@pytest.mark.parametrize(
    ("containers", "said"),
    [
        ([("kv-events", 7001), ("kv-events", 7002)], "several container ports are named kv-events (7001, 7002)"),
        ([("kv-replay", 7001), ("kv-replay", 7002)], "several container ports are named kv-replay (7001, 7002)"),
        ([("kv-events", 0)], "the container port kv-events is 0, which is no port"),
        ([("kv-replay", -5)], "the container port kv-replay is -5, which is no port"),
        ([("kv-events", 70_000)], "the container port kv-events is 70000, which is no port"),
        ([("kv-events", 10**300)], "the container port kv-events is 10000000000000000000, which is no port"),
    ],
)
def test_ports_that_do_not_say_where_are_told_and_not_guessed(containers: list[tuple[str, int]], said: str) -> None:
    """Requests go there all the same."""
    listed = [{"name": f"c{n}", "ports": [{"name": a, "containerPort": b}]} for n, (a, b) in enumerate(containers)]
    found = verdict({"name": "m", "kv-events-enabled": "true"}, containers=listed)
    assert found.engine is not None
    assert (found.engine.kv_events, found.engine.events, found.engine.replay) == (False, None, None)
    assert found.notes == (f"{said}: its events are not followed; give each name to one port",)
    assert verdict({"name": "m"}, containers=listed).notes == ()
    twice = [{"name": name, "ports": [{"name": "kv-events", "containerPort": 7001}]} for name in "ab"]
    assert engine({"name": "m", "kv-events-enabled": "true"}, containers=twice).events == "tcp://10.0.0.1:7001"


def test_in_a_nodes_network_a_port_that_no_container_names_is_assumed() -> None:
    labels = {"name": "m", "kv-events-enabled": "true"}
    for on_node, ports, assumed in (
        (None, {}, set()),
        (False, {}, set()),
        (True, {}, {"events", "replay"}),
        (True, {"kv-events": 5557}, {"replay"}),
        (True, {"kv-events": 5557, "kv-replay": 5558}, set()),
    ):
        said = pod(labels, ports=ports)
        said["spec"]["hostNetwork"] = on_node
        found = judge(json.dumps(said).encode())
        assert found is not None
        assert found.assumed == assumed


def test_who_was_started_last_has_the_greater_claim() -> None:
    """The container, not the pod: after a node's restart a pod may have the address that another had before. One that
    is about to end still has its address, but for a node's."""

    def claim(began: str | None = None, *, ending: bool = False, on_node: bool = False) -> tuple[bool, str, str]:
        state = {"running": {"startedAt": began}} if began else {"waiting": {"reason": "CrashLoopBackOff"}}
        said = pod(
            status={"containerStatuses": [{"name": "vllm", "state": state}]},
            meta={"deletionTimestamp": "2026-02-01T00:00:00Z"} if ending else {},
        )
        said["spec"]["hostNetwork"] = on_node
        found = judge(json.dumps(said).encode())
        assert found is not None
        return found.claim

    assert claim("2026-01-03T00:00:00Z") > claim("2026-01-02T00:00:00Z") > claim() == claim(ending=True)
    assert claim("2026-01-03T00:00:00Z", ending=True, on_node=True) < claim(on_node=True)


def test_ports_are_looked_for_in_all_containers() -> None:
    containers = [
        {"name": "proxy", "ports": None},
        {"name": "vllm", "ports": [{"containerPort": 8000}, {"name": "kv-events", "containerPort": 7001}]},
    ]
    found = engine({"name": "m", "kv-events-enabled": "true"}, containers=containers)
    assert found.events == "tcp://10.0.0.1:7001"


@pytest.mark.parametrize("containers", [None, [], [{"name": "c"}]])
def test_no_containers_are_no_ports(containers: object) -> None:
    """A bookmark's object has ``null`` there."""
    assert engine({"name": "m", "kv-events-enabled": "true"}, containers=containers).events == "tcp://10.0.0.1:5557"


@pytest.mark.parametrize(
    ("ip", "url"),
    [
        ("fd00::11", "http://[fd00::11]:8000"),
        ("::1", "http://[::1]:8000"),
        ("FD00:0:0::11", "http://[fd00::11]:8000"),
        ("127.0.0.12", "http://127.0.0.12:8000"),
        ("::ffff:10.0.0.7", "http://10.0.0.7:8000"),
    ],
)
def test_addresses(ip: str, url: str) -> None:
    assert engine(status={"podIP": ip}).url == url


def test_the_first_address_counts() -> None:
    both = [{"ip": "fd00::1"}, {"ip": "10.0.0.7"}]
    assert engine(status={"podIP": "", "podIPs": both}).url == "http://[fd00::1]:8000"
    assert engine(status={"podIP": "10.0.0.7", "podIPs": both}).url == "http://10.0.0.7:8000"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"status": {"podIP": None}}, "no_address"),
        ({"status": {"podIP": ""}}, "no_address"),
        ({"status": {"podIP": "  ", "podIPs": [{"ip": ""}]}}, "no_address"),
        ({"status": {"phase": "Pending"}}, "not_running"),
        ({"status": {"phase": None}}, "not_running"),
        ({"status": {"phase": "Unknown"}}, "not_running"),
        ({"status": {"phase": "Succeeded"}}, "finished"),
        ({"status": {"phase": "Failed"}}, "finished"),
        ({"labels": {"name": "m", RAY_NODE_TYPE: "worker"}}, "ray_worker"),
        ({"labels": {"name": "m", GROUP_INDEX: "1"}}, "group_member"),
        ({"labels": {"name": "m", GROUP_INDEX: "12345678901234567890"}}, "group_member"),
        ({"labels": {"kv-events-enabled": "true"}}, "no_model"),
        ({"labels": {"name": " "}}, "no_model"),
    ],
)
def test_no_engine(what: Json, reason: str) -> None:
    found = verdict(**what)
    assert (found.engine, found.reason) == (None, reason)
    assert reason in REASONS
    assert found.detail


def test_heads_and_first_members_are_engines() -> None:
    assert engine({"name": "m", RAY_NODE_TYPE: "head", GROUP_INDEX: "0"})
    assert engine({"name": "m", GROUP_INDEX: "none"})


@pytest.mark.parametrize(
    "labels",
    [
        {"port": "0"},
        {"port": "65536"},
        {"port": "http"},
        {"port": "8000.5"},
        {"port": "-1"},
        {"port": "٨٠٠٠"},
        {"port": "9" * 100},
        {"data-parallel-size": "0"},
        {"data-parallel-size": "129"},
        {"scheme": "tcp"},
        {"spec-decode": "ngram"},
        {"attention-chunk-size": "x"},
        {"name": "two words"},
        {"name": "n" * 254},
        {"adapters": "two words"},
    ],
)
def test_a_setting_that_can_not_be_is_told_with_its_mend(labels: Json) -> None:
    found = verdict({"name": "m", "kv-events-enabled": "true", **labels})
    assert (found.engine, found.reason) == (None, "bad_setting")
    assert PREFIX in found.detail
    assert ":" in found.detail


@pytest.mark.parametrize(
    "ip", ["0.0.0.0", "::", "224.0.0.1", "fe80::1", "host", "10.0.0.1:80", "fe80::1%eth0", "fd00::1%eth0"]
)
def test_an_address_that_can_not_be_dialled(ip: str) -> None:
    assert verdict(status={"podIP": ip}).reason == "bad_setting"


def test_ranks_beyond_the_last_port() -> None:
    labels = {"name": "m", "kv-events-enabled": "true", "data-parallel-size": "2"}
    assert verdict(labels, ports={"kv-events": 65_535}).reason == "bad_setting"
    assert engine({**labels, "kv-events-enabled": "false"}, ports={"kv-events": 65_535}).events is None


@pytest.mark.parametrize(
    ("status", "meta", "ready"),
    [
        ({}, {}, True),
        ({}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, False),
        ({"conditions": None}, {}, False),
        ({"conditions": []}, {}, False),
        ({"conditions": [{"type": "Ready", "status": "False"}]}, {}, False),
        ({"conditions": [{"type": "Ready", "status": "Unknown"}]}, {}, False),
        ({"conditions": [{"type": "ContainersReady", "status": "True"}]}, {}, False),
        ({"conditions": [{"type": "Ready", "status": s} for s in ("True", "False")]}, {}, False),
        ({"conditions": [{"type": "Ready", "status": "true"}]}, {}, False),
    ],
)
def test_readiness(status: Json, meta: Json, ready: bool) -> None:
    """(K3) A terminating pod is not ready, whatever its condition says."""
    assert engine(status=status, meta=meta).ready is ready


def test_another_start_of_its_container_is_another_engine() -> None:
    statuses = [{"name": "sidecar", "restartCount": 9}, {"name": "vllm", "restartCount": 2}]
    found = engine(ports={"kv-events": 5557}, status={"containerStatuses": statuses})
    assert (found.uid, found.name) == ("n/p@u.2", "n/p")
    two = [{"name": "sidecar"}, {"name": "vllm", "ports": [{"containerPort": 8000}]}]
    assert engine(containers=two, status={"containerStatuses": statuses}).uid == "n/p@u.2"
    assert engine(status={"containerStatuses": [{"name": "vllm", "restartCount": -1}]}).uid == "n/p@u"


PROFILES = {"default": {"routingStrategy": "random"}, "other": {"routingStrategy": "round-robin"}}


@pytest.mark.parametrize(
    ("config", "policy", "locked"),
    [
        ({"profiles": PROFILES}, "random", False),
        ({"defaultProfile": "other", "profiles": PROFILES}, "round-robin", False),
        ({"defaultProfile": "none", "profiles": PROFILES}, None, False),
        ({"lockedRoutingStrategy": "prefix-cache", "profiles": PROFILES}, "prefix-cache", True),
        ({"profiles": {"default": {"requestsPerSecond": 3}}}, None, False),
        ({}, None, False),
    ],
)
def test_a_policy_by_annotation(config: Json, policy: str | None, locked: bool) -> None:
    found = verdict({"name": "m"}, {"config": json.dumps(config)})
    assert found.notes == ()
    assert found.engine is not None
    assert (found.engine.policy, found.engine.policy_locked) == (policy, locked)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"profiles":[]}',
        '{"profiles":{"default":{"routingStrategy":7}}}',
        '{"lockedRoutingStrategy":"pd"}',
        '{"profiles":{"default":{"routingStrategy":"least-request:1,load-balance:0"}}}',
        "[" * 100_000,
    ],
)
def test_a_policy_that_is_none_is_told_and_costs_nothing_else(config: str) -> None:
    found = verdict({"name": "m"}, {"config": config})
    assert found.engine is not None
    assert (found.engine.policy, found.engine.policy_locked) == (None, False)
    assert f"{PREFIX}config" in found.notes[0]


def test_pods_of_others_are_no_business_of_ours() -> None:
    assert judge(json.dumps(pod({"example.com/app": "web"})).encode()) is None
    bare = {"metadata": {"name": "p", "namespace": "n", "uid": "u"}}
    assert judge(json.dumps(bare).encode()) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"metadata":null}',
        b'{"metadata":{"name":"p"}}',
        b'{"metadata":{"name":1,"uid":"u"}}',
        b'{"metadata":{"name":"p","uid":"u","labels":{"model.aibrix.ai/name":1}}}',
        b'{"metadata":{"name":"p","uid":"u","labels":["model.aibrix.ai/name"]}}',
        b'{"metadata":{"name":"p","uid":"u"},"status":{"podIP":5}}',
        b'{"metadata":{"name":"p","uid":"u"},"spec":{"containers":{}}}',
        b'{"metadata":{"name":"p","uid":"u"},"x":' + b"[" * 100_000,
        b'{"metadata":{"name":"\xff","uid":"u"}}',
    ],
)
def test_what_is_no_pod(raw: bytes) -> None:
    with pytest.raises(Unreadable):
        judge(raw)


_values = st.one_of(
    st.none(),
    st.text(max_size=12),
    st.integers(-5, 70_000).map(str),
    st.sampled_from(["true", "vllm", "m", "https", "eagle"]),
)
_NAMES = ("name", "port", "kv-events-enabled", "data-parallel-size", "adapters", "scheme", "engine", "spec-decode")


@given(
    labels=st.dictionaries(st.sampled_from(_NAMES), _values),
    annotations=st.dictionaries(st.sampled_from(_NAMES), _values),
    ports=st.dictionaries(st.sampled_from(["kv-events", "kv-replay", "http"]), st.integers(-1, 70_000)),
    ip=st.one_of(st.none(), st.ip_addresses().map(str), st.text(max_size=8)),
    phase=st.sampled_from(["Running", "Running", "Pending", None]),
)
def test_whatever_a_pod_says_there_is_one_verdict(
    labels: Json, annotations: Json, ports: dict[str, int], ip: str | None, phase: str | None
) -> None:
    said = pod(labels, annotations, ports=ports, status={"podIP": ip, "phase": phase})
    try:
        found = judge(json.dumps(said).encode())
    except Unreadable:
        assert None in (*labels.values(), *annotations.values())
        return
    if found is None:
        assert not labels
        assert not annotations
    elif found.engine is None:
        assert found.reason in REASONS
    else:
        assert found.engine.kv_events is (labels.get("kv-events-enabled") == "true")
        assert found.engine.url.startswith(("http://", "https://"))
        for endpoint in (found.engine.events, found.engine.replay):
            assert endpoint is None or endpoint.startswith("tcp://")
