"""Every metric is registered, updated, and goes with what it is about."""

from __future__ import annotations

import re
from itertools import count

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvsync.telemetry.aibrix import ZmqFigures
from kvsync.telemetry.metrics import ALARMS, CONTENT_TYPE, GONE, STREAM_STATES, Metrics


def everything(metrics: Metrics, worker: str = "w", model: str = "m") -> None:
    """Each thing that can happen, once."""
    metrics.add_worker(worker)
    metrics.answered("/v1/completions", 200, 0.5, "engine")
    metrics.cut("/v1/completions", "client_gone")
    metrics.first_byte("/v1/completions", 0.1)
    metrics.retried("connect_refused")
    metrics.retry_refused("retry_budget")
    metrics.connection("opened")
    metrics.extproc_stream("opened")
    metrics.extproc_decided(0.001)
    metrics.extproc_streams(2)
    metrics.model_answered(model, 200)
    metrics.model_answered(model, 500)
    metrics.decided(model, "prefix-cache", "exact", 1e-4, 100, 60)
    metrics.selected(model, "prefix_match", "exact", True)
    metrics.refused("no_target")
    metrics.index_failed(model)
    metrics.tried(worker, "ok")
    metrics.routing_failed()
    metrics.breaker(worker, "open")
    metrics.hints({"expected": 1, "observed": 2}, 3)
    metrics.log_dropped(4)
    metrics.modes({worker: "partial"}, {model: "observed"})
    metrics.load(worker, 3, 400)
    metrics.in_flight(3)
    metrics.tokenized(model, "remote", None, 0.002)
    metrics.tokenizers(2, 1)
    metrics.kv_sync("running")
    metrics.discovered("*", "failing", 2.5, {"lists": 3}, {"timeout": 1})
    metrics.pods({"ready": 2, "no_address": 1})
    metrics.indexed(worker, "partial", 77, {"orphans": 5})
    metrics.index_bytes(4096)
    metrics.streamed(
        worker,
        "live",
        ZmqFigures(
            connected=True,
            last_sequence=9,
            connections=2,
            disconnections=1,
            reconnect_attempts=1,
            missed_events=4,
            replay_requests=3,
            replay_success=2,
            replay_failures=1,
            received={"BlockStored": 8},
            processed={"BlockStored": 7},
            errors={"undecodable": 1},
        ),
        {"gaps": 6},
    )
    metrics.watched(worker, False, "silent", {"timeout": 2})
    metrics.applied(worker, 1e-4)
    metrics.audited(worker, "right", 64, 64)
    metrics.audited(worker, "several_prompts")
    metrics.contradicted(worker)
    metrics.engine_hits(worker, 700, 300)
    metrics.reloaded("applied")
    metrics.redis_state("up")
    metrics.limited("user", "rpm_exceeded", "shared")
    metrics.limit_fault("no_usage")
    metrics.replicas(2)
    metrics.load_news_unusable("malformed")
    metrics.load_elsewhere(worker, 5, 600)
    metrics.redis_called("limits", "timeout", 0.05)
    metrics.snapshot("read", "found", 20)
    metrics.replay_turn("granted", 0.002)
    metrics.start(warm=1, cold=2, behind=3, seconds=0.5)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(prefix_cache=True)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


AIBRIX: list[tuple[str, dict[str, str], float]] = [
    ("gateway_request_total", {}, 2),
    ("gateway_in_flight_requests", {}, 3),
    ("gateway_e2e_duration_seconds_count", {}, 1),
    ("gateway_request_model_success_total", {"model": "m"}, 1),
    ("gateway_request_model_fail_total", {"model": "m"}, 1),
    ("tokenizer_pool_active_tokenizers", {}, 2),
    ("tokenizer_pool_unhealthy_tokenizers_total", {}, 1),
    ("tokenizer_pool_requests_total", {"model": "m"}, 1),
    ("tokenizer_pool_latency_seconds_count", {"model": "m"}, 1),
    (
        "prefix_cache_routing_decisions_total",
        {"model": "m", "match_percent_bucket": "51-75", "using_kv_sync": "true"},
        1,
    ),
    ("prefix_cache_indexer_status", {"model": "_init_", "indexer_type": "sync"}, 1),
    ("prefix_cache_indexer_status", {"model": "_init_", "indexer_type": "local"}, 0),
    ("prefix_cache_routing_latency_seconds_count", {"model": "m", "using_kv_sync": "true"}, 1),
    (
        "prefix_cache_routing_selection_total",
        {"model": "m", "selection": "prefix_match", "using_kv_sync": "true"},
        1,
    ),
    (
        "prefix_cache_routing_errors_total",
        {"model": "m", "reason": "sync_indexer_unavailable", "using_kv_sync": "true"},
        1,
    ),
    ("prefix_cache_load_imbalance_total", {"model": "m", "using_kv_sync": "true"}, 1),
    ("kvcache_zmq_connections_total", {"pod_key": "w"}, 2),
    ("kvcache_zmq_disconnections_total", {"pod_key": "w"}, 1),
    ("kvcache_zmq_reconnect_attempts_total", {"pod_key": "w"}, 1),
    ("kvcache_zmq_events_received_total", {"pod_key": "w", "event_type": "BlockStored"}, 8),
    ("kvcache_zmq_events_processed_total", {"pod_key": "w", "event_type": "BlockStored"}, 7),
    ("kvcache_zmq_event_processing_duration_seconds_count", {"pod_key": "w"}, 1),
    ("kvcache_zmq_missed_events_total", {"pod_key": "w"}, 4),
    ("kvcache_zmq_replay_requests_total", {"pod_key": "w"}, 3),
    ("kvcache_zmq_replay_success_total", {"pod_key": "w"}, 2),
    ("kvcache_zmq_replay_failures_total", {"pod_key": "w"}, 1),
    ("kvcache_zmq_errors_total", {"pod_key": "w", "error_type": "undecodable"}, 1),
    ("kvcache_zmq_connection_status", {"pod_key": "w"}, 1),
    ("kvcache_zmq_last_sequence_id", {"pod_key": "w"}, 9),
]


@pytest.mark.parametrize(("name", "labels", "wanted"), AIBRIX)
def test_aibrix_s_names_and_labels(metrics: Metrics, name: str, labels: dict[str, str], wanted: float) -> None:
    everything(metrics)
    assert value(metrics, f"aibrix_{name}", **labels) == wanted


OWN: list[tuple[str, dict[str, str], float]] = [
    ("discovery_state", {"namespace": "*", "state": "failing"}, 1),
    ("discovery_state", {"namespace": "*", "state": "synced"}, 0),
    ("discovery_age_seconds", {"namespace": "*"}, 2.5),
    ("discovery_events_total", {"namespace": "*", "event": "lists"}, 3),
    ("discovery_failures_total", {"namespace": "*", "reason": "timeout"}, 1),
    ("discovery_pods", {"verdict": "ready"}, 2),
    ("requests_total", {"path": "/v1/completions", "status": "200", "reason": "engine"}, 1),
    ("requests_cut_total", {"path": "/v1/completions", "outcome": "client_gone"}, 1),
    ("request_seconds_sum", {"path": "/v1/completions"}, 0.5),
    ("first_byte_seconds_sum", {"path": "/v1/completions"}, 0.1),
    ("retries_total", {"reason": "connect_refused"}, 1),
    ("retries_refused_total", {"reason": "retry_budget"}, 1),
    ("retries_refused_total", {"reason": "retry_budget"}, 1),
    ("client_connections_total", {"event": "opened"}, 1),
    ("model_requests_total", {"model": "m", "status": "500"}, 1),
    ("extproc_streams_total", {"event": "opened"}, 1),
    ("extproc_decision_seconds_count", {}, 1),
    ("extproc_open_streams", {}, 2),
    ("decisions_total", {"model": "m", "policy": "prefix-cache", "mode": "exact"}, 1),
    ("routing_seconds_count", {}, 1),
    ("routing_refused_total", {"reason": "no_target"}, 1),
    ("routing_index_failures_total", {}, 1),
    ("prompt_tokens_total", {"model": "m"}, 100),
    ("credited_tokens_total", {"model": "m"}, 60),
    ("worker_tries_total", {"worker": "w", "outcome": "ok"}, 1),
    ("worker_running", {"worker": "w"}, 3),
    ("worker_queued_prefill_tokens", {"worker": "w"}, 400),
    ("tokenized_total", {"source": "remote", "reason": ""}, 1),
    ("tokenizing_seconds_count", {"source": "remote"}, 1),
    ("kv_sync", {"state": "running"}, 1),
    ("kv_sync", {"state": "waiting"}, 0),
    ("worker_trust", {"worker": "w", "trust": "partial"}, 1),
    ("worker_trust", {"worker": "w", "trust": "exact"}, 0),
    ("worker_blocks", {"worker": "w"}, 77),
    ("index_bytes", {}, 4096),
    ("index_events_total", {"worker": "w", "reason": "orphans"}, 5),
    ("stream_state", {"worker": "w", "state": "live"}, 1),
    ("stream_state", {"worker": "w", "state": "down"}, 0),
    ("stream_events_total", {"worker": "w", "event": "gaps"}, 6),
    ("audit_answers_total", {"worker": "w", "verdict": "right"}, 1),
    ("audit_answers_total", {"worker": "w", "verdict": "several_prompts"}, 1),
    ("audit_predicted_tokens_total", {"worker": "w"}, 64),
    ("audit_actual_tokens_total", {"worker": "w"}, 64),
    ("audit_contradictions_total", {"worker": "w"}, 1),
    ("engine_cache_queries_tokens_total", {"worker": "w"}, 700),
    ("engine_cache_hits_tokens_total", {"worker": "w"}, 300),
    ("config_reloads_total", {"result": "applied"}, 1),
    ("redis", {"state": "up"}, 1),
    ("limited_total", {"limit": "user", "result": "rpm_exceeded", "counted": "shared"}, 1),
    ("limit_faults_total", {"reason": "no_usage"}, 1),
    ("replicas", {}, 2),
    ("load_news_unusable_total", {"reason": "malformed"}, 1),
    ("worker_running_elsewhere", {"worker": "w"}, 5),
    ("worker_queued_prefill_tokens_elsewhere", {"worker": "w"}, 600),
    ("redis", {"state": "down"}, 0),
    ("redis_calls_total", {"call": "limits", "result": "timeout"}, 1),
    ("redis_seconds_sum", {"call": "limits"}, 0.05),
    ("routing_faults_total", {}, 1),
    ("worker_breaker", {"worker": "w", "state": "open"}, 1),
    ("worker_breaker", {"worker": "w", "state": "closed"}, 0),
    ("prefix_hints_dropped_total", {"kind": "observed"}, 2),
    ("observed_contradicted_total", {}, 3),
    ("log_lines_dropped_total", {}, 4),
    ("worker_mode", {"worker": "w", "mode": "partial"}, 1),
    ("worker_mode", {"worker": "w", "mode": "exact"}, 0),
    ("model_mode", {"model": "m", "mode": "observed"}, 1),
    ("stream_alarm", {"worker": "w", "alarm": "silent"}, 1),
    ("worker_asleep", {"worker": "w"}, 0),
    ("engine_metrics_failures_total", {"worker": "w", "reason": "timeout"}, 2),
    ("snapshots_total", {"action": "read", "result": "found"}, 1),
    ("snapshot_bytes_total", {"action": "read"}, 20),
    ("replay_turn_seconds_sum", {"result": "granted"}, 0.002),
    ("start_workers", {"how": "behind"}, 3),
    ("start_seconds", {}, 0.5),
]


@pytest.mark.parametrize(("name", "labels", "wanted"), OWN)
def test_our_own(metrics: Metrics, name: str, labels: dict[str, str], wanted: float) -> None:
    everything(metrics)
    assert value(metrics, f"kvsync_{name}", **labels) == wanted


def test_nothing_is_registered_that_is_never_updated(metrics: Metrics) -> None:
    everything(metrics)
    names = {name for name, _ in samples(metrics)}
    families = {
        family.name for family in text_string_to_metric_families(metrics.render().decode()) if not family.samples
    }
    assert families == set()
    tested = {f"aibrix_{name}" for name, _, _ in AIBRIX} | {f"kvsync_{name}" for name, _, _ in OWN}
    untested = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} - {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in tested
    }
    assert untested == set()
    assert not [name for name in names if name.endswith("_created")]


def test_the_prefix_cache_metrics_are_there_only_when_switched_on() -> None:
    metrics = Metrics()
    everything(metrics)
    text = metrics.render()
    assert b"aibrix_prefix_cache" not in text
    assert b"aibrix_gateway_request_total" in text
    assert b"aibrix_kvcache_zmq_connections_total" in text


def test_a_look_has_the_figures_of_its_moment(metrics: Metrics) -> None:
    everything(metrics)
    text, look = metrics.render(), metrics.look()
    everything(metrics)
    assert look() == text
    assert metrics.render() != text


def test_series_go_with_their_worker(metrics: Metrics) -> None:
    everything(metrics, "w")
    before = samples(metrics)
    everything(metrics, "other")
    assert len(samples(metrics)) > len(before)
    metrics.drop_worker("other")
    metrics.drop_worker("never-there")
    assert samples(metrics).keys() == before.keys()
    everything(metrics, "other")
    assert value(metrics, "kvsync_worker_tries_total", worker="other", outcome="ok") == 1


def test_workers_that_come_and_go_leave_nothing(metrics: Metrics) -> None:
    everything(metrics)
    before = samples(metrics).keys()
    for i in range(300):
        everything(metrics, f"w{i}")
        metrics.drop_worker(f"w{i}")
    assert samples(metrics).keys() == before


def test_what_ends_on_a_worker_that_is_gone_does_not_bring_its_series_back(metrics: Metrics) -> None:
    everything(metrics, "w")
    metrics.drop_worker("w")
    before = {key for key in samples(metrics) if "w" in dict(key[1]).values()}
    metrics.tried("w", "client_gone")
    metrics.audited("w", "over", 10, 5)
    metrics.applied("w", 1e-4)
    metrics.load("w", 1, 1)
    metrics.load_elsewhere("w", 1, 1)
    metrics.breaker("w", "open")
    metrics.modes({"w": "exact"}, {})
    metrics.contradicted("w")
    metrics.engine_hits("w", 1, 1)
    metrics.indexed("w", "exact", 1, {"orphans": 1})
    metrics.streamed("w", "live", ZmqFigures(connected=True), {"gaps": 1})
    metrics.watched("w", True, None, {"timeout": 1})
    after = samples(metrics)
    assert before == set()
    assert {key for key in after if "w" in dict(key[1]).values()} == set()
    assert after["kvsync_worker_tries_total", (("outcome", "client_gone"), ("worker", GONE))] == 1
    assert after["kvsync_audit_predicted_tokens_total", (("worker", GONE),)] == 10


def test_every_state_has_its_series_and_one_of_them_is_on(metrics: Metrics) -> None:
    metrics.add_worker("w")
    for state in STREAM_STATES:
        metrics.streamed("w", state, ZmqFigures(connected=False), {})
        states = {known: value(metrics, "kvsync_stream_state", worker="w", state=known) for known in STREAM_STATES}
        assert [known for known, on in states.items() if on] == [state]
    assert value(metrics, "aibrix_kvcache_zmq_connection_status", pod_key="w") == 0
    assert value(metrics, "aibrix_kvcache_zmq_last_sequence_id", pod_key="w") is None


def test_an_alarm_is_on_until_it_is_not(metrics: Metrics) -> None:
    metrics.add_worker("w")
    for alarm in (*ALARMS, None):
        metrics.watched("w", alarm is None, alarm, {"status": 3})
        on = [known for known in ALARMS if value(metrics, "kvsync_stream_alarm", worker="w", alarm=known)]
        assert on == ([] if alarm is None else [alarm])
        assert value(metrics, "kvsync_worker_asleep", worker="w") == (alarm is None)
    assert value(metrics, "kvsync_engine_metrics_failures_total", worker="w", reason="status") == 3


@pytest.mark.parametrize(
    ("credit", "bucket"),
    [(0, "0"), (1, "1-25"), (25, "1-25"), (26, "26-50"), (75, "51-75"), (76, "76-100"), (100, "76-100")],
)
def test_buckets_of_the_matched_share(metrics: Metrics, credit: int, bucket: str) -> None:
    metrics.decided("m", "kv-aware", "load-only", 0, 100, credit)
    labels = {"model": "m", "match_percent_bucket": bucket, "using_kv_sync": "false"}
    assert value(metrics, "aibrix_prefix_cache_routing_decisions_total", **labels) == 1


def test_unknown_tokens_are_no_share(metrics: Metrics) -> None:
    metrics.decided("m", "kv-aware", "load-only", 0, 0, 0)
    labels = {"model": "m", "match_percent_bucket": "0", "using_kv_sync": "false"}
    assert value(metrics, "aibrix_prefix_cache_routing_decisions_total", **labels) == 1
    assert value(metrics, "kvsync_prompt_tokens_total", model="m") is None


def test_what_others_count_is_put_in_when_asked_for(metrics: Metrics) -> None:
    metrics.add_worker("w")
    running = count(1)
    metrics.at_scrape(lambda: metrics.load("w", next(running), 0))
    assert value(metrics, "kvsync_worker_running", worker="w") == 1
    assert value(metrics, "kvsync_worker_running", worker="w") == 2
    assert CONTENT_TYPE.startswith("text/plain")


def test_labels_from_hostile_names_stay_one_sample(metrics: Metrics) -> None:
    name = 'w"}\n\\evil{x="1'
    metrics.add_worker(name)
    metrics.tried(name, "ok")
    assert value(metrics, "kvsync_worker_tries_total", worker=name, outcome="ok") == 1


def test_a_model_without_workers_has_no_mode(metrics: Metrics) -> None:
    metrics.modes({}, {"m": "exact", "n": "partial"})
    metrics.modes({}, {"n": "load-only"})
    assert value(metrics, "kvsync_model_mode", model="m", mode="exact") is None
    assert value(metrics, "kvsync_model_mode", model="n", mode="load-only") == 1
    assert value(metrics, "kvsync_model_mode", model="n", mode="partial") == 0
