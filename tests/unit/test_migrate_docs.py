"""docs/migrate.md's tables say of everything that AIBrix has what becomes of it, and the code agrees.

What AIBrix has is listed here: the names of its gateway plugin of August 2026. What is true of requests and answers is
in ``e2e/migrate/test_contract.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from inspect import getsource
from typing import Any, get_args

import pytest

from kvsync.config import ConfigError, Settings, environment, read
from kvsync.config.model import PolicyName
from kvsync.discovery.kubernetes.pods import EVENTS_PORT, HTTP_PORT, REPLAY_PORT, judge
from kvsync.discovery.model import Engine
from kvsync.events.sync import unmet_conditions
from kvsync.store import limits
from kvsync.telemetry.metrics import Metrics
from tests.e2e.migrate.page import rows
from tests.kube.pods import pod, running
from tests.unit.telemetry.test_metrics import everything

PREFIX_CACHE = "AIBRIX_PREFIX_CACHE_"
VARIABLES = {
    *(
        PREFIX_CACHE + name
        for name in (
            *("KV_EVENT_SYNC_ENABLED", "USE_REMOTE_TOKENIZER", "TOKENIZER_TYPE", "REMOTE_TOKENIZER_ENDPOINT"),
            *("KV_EVENT_PUBLISH_ADDR", "KV_EVENT_SUBSCRIBE_ADDRS", "BLOCK_SIZE", "STANDARD_DEVIATION_FACTOR"),
            *("POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "BLOCK_NUMBER", "EVICTION_INTERVAL_SECONDS"),
            *("EVICTION_DURATION_MINS", "HASH_SEED", "LOCAL_ROUTER_METRICS_ENABLED"),
        )
    ),
    *("AIBRIX_SYNC_MAX_CONTEXTS", "AIBRIX_SYNC_MAX_PREFIXES_PER_CONTEXT", "AIBRIX_SYNC_EVICTION_INTERVAL_SECONDS"),
    *("AIBRIX_SYNC_EVICTION_DURATION_MINUTES", "AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE", "AIBRIX_TOKENIZER_TTL"),
    *("AIBRIX_TOKENIZER_HEALTH_CHECK_PERIOD", "AIBRIX_TOKENIZER_REQUEST_TIMEOUT", "AIBRIX_MAX_TOKENIZERS_PER_POOL"),
    *(
        "AIBRIX_STATESYNC_ENABLED",
        "AIBRIX_STATESYNC_SYNC_PERIOD",
        "AIBRIX_AUTH_BEARER_TOKEN",
        "AIBRIX_TTFT_THRESHOLD_S",
    ),
    *("AIBRIX_HTTPROUTE_CACHE_TTL", "AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", "ROUTING_ALGORITHM", "POD_NAME"),
    *("REDIS_HOST", "REDIS_PORT", "REDIS_PASSWORD"),
}
METRICS: Mapping[str, set[str]] = {
    "prefix_cache_routing_decisions_total": {"model", "match_percent_bucket", "using_kv_sync"},
    "prefix_cache_indexer_status": {"model", "indexer_type"},
    "prefix_cache_routing_latency_seconds": {"model", "using_kv_sync"},
    "prefix_cache_routing_selection_total": {"model", "selection", "using_kv_sync"},
    "prefix_cache_routing_errors_total": {"model", "reason", "using_kv_sync"},
    "prefix_cache_load_imbalance_total": {"model", "using_kv_sync"},
    "tokenizer_pool_active_tokenizers": set(),
    "tokenizer_pool_creation_successes_total": set(),
    "tokenizer_pool_creation_failures_total": set(),
    "tokenizer_pool_unhealthy_tokenizers_total": set(),
    "tokenizer_pool_requests_total": {"model"},
    "tokenizer_pool_latency_seconds": {"model"},
    "kvcache_zmq_connections_total": {"pod_key"},
    "kvcache_zmq_disconnections_total": {"pod_key"},
    "kvcache_zmq_reconnect_attempts_total": {"pod_key"},
    "kvcache_zmq_events_received_total": {"pod_key", "event_type"},
    "kvcache_zmq_events_processed_total": {"pod_key", "event_type"},
    "kvcache_zmq_event_processing_duration_seconds": {"pod_key"},
    "kvcache_zmq_missed_events_total": {"pod_key"},
    "kvcache_zmq_replay_requests_total": {"pod_key"},
    "kvcache_zmq_replay_success_total": {"pod_key"},
    "kvcache_zmq_replay_failures_total": {"pod_key"},
    "kvcache_zmq_errors_total": {"pod_key", "error_type"},
    "kvcache_zmq_connection_status": {"pod_key"},
    "kvcache_zmq_last_sequence_id": {"pod_key"},
}
VERDICTS = {"same", "better", "differs", "not"}
HEADINGS = (
    *("Environment", "Labels, annotations, ports of pods", "Headers of requests", "Headers to the engine"),
    *("Headers of answers", "Errors", "Metrics", "Ports and flags", "Redis keys"),
)


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_row_has_a_verdict_and_says_why_it_is_none(heading: str) -> None:
    found = rows(heading)
    assert found
    for name, row in found.items():
        assert row.verdict in VERDICTS, name
        assert row.text or row.verdict in ("same", "better", "not"), name


# ---- environment


def test_every_variable_is_listed() -> None:
    found = rows("Environment")
    known = {
        *environment._AIBRIX,
        *environment._UNUSED,
        *environment.REDIS,
        environment.TEMPLATE,
        environment.ALGORITHM,
    }
    assert set(found) == VARIABLES | known
    assert {name for name, row in found.items() if row.verdict == "not"} == {*environment._UNUSED, "POD_NAME"}


def test_variables_without_a_counterpart_change_nothing_and_are_told() -> None:
    none = [name for name, row in rows("Environment").items() if row.verdict == "not"]
    loaded = read(None, dict.fromkeys(none, "1"), {})
    assert loaded.settings == Settings()
    warned = {warning.partition(" ")[0] for warning in loaded.warnings}
    assert warned == set(none) - {"POD_NAME"}  # which is no name of AIBrix's own
    other = read(None, {"AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS": "100"}, {})
    assert (other.settings, len(other.warnings)) == (Settings(), 1)


def test_strategies() -> None:
    text = rows("Environment")["ROUTING_ALGORITHM"].text
    assert set(get_args(PolicyName)) == set(re.findall(r"`([a-z-]+)`", text))
    for foreign in ("least-kv-cache", "throughput", "pd", "prefix-cache:2,least-request:1"):
        with pytest.raises(ConfigError, match="ROUTING_ALGORITHM"):
            read(None, {"ROUTING_ALGORITHM": foreign}, {})


def test_the_tokenizers_type() -> None:
    """Left out, it is no condition; another than ``remote`` is one that is not met."""
    needed = {PREFIX_CACHE + "KV_EVENT_SYNC_ENABLED": "true", PREFIX_CACHE + "USE_REMOTE_TOKENIZER": "true"}
    needed |= {PREFIX_CACHE + "REMOTE_TOKENIZER_ENDPOINT": "http://t:8000"}
    for kind, unmet in (("", []), ("remote", []), ("character", [True]), ("tiktoken", [True])):
        settings = read(None, needed | {PREFIX_CACHE + "TOKENIZER_TYPE": kind}, {}).settings
        found = unmet_conditions(settings, zmq_installed=lambda: True)
        assert ["type to be remote" in sentence for sentence in found] == unmet, kind


# ---- pods


def engine(labels: Mapping[str, str], annotations: Mapping[str, str], ports: Mapping[str, int]) -> Engine | None:
    manifest = pod("p", labels=labels, annotations=annotations, ports=ports)
    manifest["metadata"] |= {"namespace": "n", "uid": "u"}
    verdict = judge(json.dumps(manifest | {"status": running("10.0.0.1")}).encode())
    return verdict.engine if verdict is not None else None


def found(
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    ports: Mapping[str, int] | None = None,
) -> Engine:
    name = {"model.aibrix.ai/name": "m", "model.aibrix.ai/kv-events-enabled": "true"}
    made = engine({**name, **(labels or {})}, annotations or {}, ports or {})
    assert made is not None
    return made


LOCKED = '{"lockedRoutingStrategy": "random"}'
PODS: Mapping[str, Callable[[], bool]] = {
    "model.aibrix.ai/name": lambda: (
        engine({}, {"model.aibrix.ai/name": "org/m"}, {}) is not None and engine({}, {}, {}) is None
    ),
    "model.aibrix.ai/kv-events-enabled": lambda: (
        found().kv_events and not found({"model.aibrix.ai/kv-events-enabled": "True"}).kv_events
    ),
    "model.aibrix.ai/port": lambda: found({"model.aibrix.ai/port": "9000"}).url == "http://10.0.0.1:9000",
    "model.aibrix.ai/engine": lambda: found().tokenizes and not found({"model.aibrix.ai/engine": "sglang"}).tokenizes,
    "model.aibrix.ai/lora-id": lambda: found({"model.aibrix.ai/lora-id": "7"}).adapters == (),
    "model.aibrix.ai/config": lambda: found(annotations={"model.aibrix.ai/config": LOCKED}).policy == "random",
    "kv-events": lambda: found(ports={"kv-events": 7001}).events == "tcp://10.0.0.1:7001",
    "kv-replay": lambda: found(ports={"kv-replay": 7002}).replay == "tcp://10.0.0.1:7002",
    "ray.io/node-type": lambda: engine({"model.aibrix.ai/name": "m", "ray.io/node-type": "worker"}, {}, {}) is None,
    "stormservice.orchestration.aibrix.ai/pod-group-index": lambda: (
        engine({"model.aibrix.ai/name": "m", "stormservice.orchestration.aibrix.ai/pod-group-index": "1"}, {}, {})
        is None
    ),
}


def test_every_label_is_listed() -> None:
    assert set(rows("Labels, annotations, ports of pods")) == set(PODS)


@pytest.mark.parametrize("name", PODS)
def test_what_a_label_means(name: str) -> None:
    assert PODS[name]()


# ---- metrics


def test_every_metric_is_listed_and_those_that_are_there_have_aibrix_s_labels() -> None:
    metrics = Metrics(prefix_cache=True)
    everything(metrics)
    there = {}
    for family in metrics.registry.collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        there[family.name + ("_total" if family.type == "counter" else "")] = labels
    listed = rows("Metrics")
    assert set(listed) == {f"aibrix_{name}" for name in METRICS}
    for name, row in listed.items():
        expected = None if row.verdict == "not" else METRICS[name.removeprefix("aibrix_")]
        assert there.get(name) == expected, name


def test_prefix_cache_metrics_have_to_be_switched_on() -> None:
    switch = PREFIX_CACHE + "LOCAL_ROUTER_METRICS_ENABLED"
    assert not read(None, {}, {}).settings.telemetry.prefix_cache_metrics
    assert read(None, {switch: "true"}, {}).settings.telemetry.prefix_cache_metrics
    off = {family.name for family in Metrics(prefix_cache=False).registry.collect()}
    assert not [name for name in off if name.startswith("aibrix_prefix_cache_")]


# ---- ports, keys


def test_ports() -> None:
    listed = {port for name in rows("Ports and flags") for port in re.findall(r"\d+", name)}
    assert listed == {"50052", "8080", "5557", "5558", "8000", "6060"}
    settings = Settings()
    assert (settings.extproc.port, settings.gateway.port, settings.admin.port) == (50052, 8080, 8081)
    assert settings.admin.host == "127.0.0.1"
    assert (EVENTS_PORT, REPLAY_PORT, HTTP_PORT) == (5557, 5558, 8000)


def test_redis_keys() -> None:
    for name, row in rows("Redis keys").items():
        parts = re.split(r"NAME|MODEL(?=_MODEL)|BIN", name)
        is_there = all(part in getsource(limits) for part in parts)
        assert is_there is (row.verdict != "not"), name


def test_what_is_limited_is_off() -> None:
    settings: Any = Settings()
    assert not settings.limits.users
    assert settings.tenants == ()
