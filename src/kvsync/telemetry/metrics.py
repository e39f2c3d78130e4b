"""Every metric of the gateway: its name, its labels and its meaning.

Our own stand here (prefix ``kvsync_``); AIBrix's stand in :mod:`kvsync.telemetry.aibrix`, for dashboards that exist,
and are fed from here too. Label values come from discovery, settings and code, never from a client: a request for a
model that nobody serves makes no series. Series go with the worker that they are about, and what still ends on a worker
that is gone is counted under :data:`GONE`, so that nothing brings its series back.

Other rooms count in plain attributes where that is cheaper; :meth:`Metrics.at_scrape` puts those in when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvsync.telemetry.aibrix import Gateway, PrefixCache, Zmq, ZmqFigures
from kvsync.telemetry.families import Families

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SHORT: Final = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)
_LONG: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TURNS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)

GONE: Final = "gone"
"""Stands for every worker that is not there any more."""
TRUSTS: Final = ("exact", "partial", "none")
MODES: Final = ("exact", "partial", "observed", "load-only")
BREAKER_STATES: Final = ("closed", "half-open", "open")
STREAM_STATES: Final = ("connecting", "catching_up", "live", "repairing", "silent", "down")
ALARMS: Final = ("not_located", "no_connection", "handshake", "silent")
DISCOVERY_STATES: Final = ("starting", "synced", "failing", "degraded")
KV_SYNC_STATES: Final = ("off", "waiting", "running")
REDIS_STATES: Final = ("off", "unavailable", "connecting", "up", "down")


class _Taken(Collector):
    def __init__(self, figures: Sequence[Metric]) -> None:
        self._figures = figures

    def collect(self) -> Sequence[Metric]:
        return self._figures


class Metrics:
    """All metrics. Methods say what happened; where it is counted is decided here.

    Args:
        registry: where they are registered; one of their own by default.
        prefix_cache: ``telemetry.prefix_cache_metrics``.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, prefix_cache: bool = False) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._scraped: list[Callable[[], None]] = []
        self._workers: set[str] = set()
        self._models: set[str] = set()
        """Those that have a mode."""
        self._families = families = Families(self.registry)
        self._add_requests(families)
        self._add_routing(families)
        self._add_knowledge(families)
        self._add_shared(families)
        self._gateway = Gateway(families)
        self._zmq = Zmq(families)
        self._prefix_cache = PrefixCache(families) if prefix_cache else None

    def _add_requests(self, families: Families) -> None:
        counter, gauge, histogram = families.counter, families.gauge, families.histogram
        self._requests = counter(
            "kvsync_requests", "Whole answers; reason: engine, or the gateway's own.", "path", "status", "reason"
        )
        self._cut = counter("kvsync_requests_cut", "Requests without a whole answer.", "path", "outcome")
        self._seconds = histogram(
            "kvsync_request_seconds", "From a request's arrival to its answer's end.", "path", buckets=_LONG
        )
        self._first_byte = histogram(
            "kvsync_first_byte_seconds", "From a request's last byte to its answer's first.", "path", buckets=_LONG
        )
        self._retries = counter("kvsync_retries", "Requests sent again.", "reason")
        self._refused_retries = counter("kvsync_retries_refused", "Requests not sent again, by reason.", "reason")
        self._connections = counter("kvsync_client_connections", "Client connections, by event.", "event")
        self._extproc_streams = gauge("kvsync_extproc_open_streams", "Requests that Envoy has open here.")()
        self._extproc_events = counter("kvsync_extproc_streams", "Envoy's streams, by event.", "event")
        self._extproc_seconds = histogram(
            "kvsync_extproc_decision_seconds", "From a request's last byte to what Envoy is told.", buckets=_SHORT
        )()
        self._model_requests = counter("kvsync_model_requests", "Answers of engines.", "model", "status")

    def _add_routing(self, families: Families) -> None:
        counter, gauge, histogram = families.counter, families.gauge, families.histogram
        self._decisions = counter(
            "kvsync_decisions", "Workers chosen, by the knowledge that served.", "model", "policy", "mode"
        )
        self._routing = histogram("kvsync_routing_seconds", "Time to choose a worker.", buckets=_SHORT)()
        self._refused = counter("kvsync_routing_refused", "Requests that could not be routed.", "reason")
        self._index_failures = counter("kvsync_routing_index_failures", "Lookups that failed: routed by load.")()
        self._routing_faults = counter("kvsync_routing_faults", "Faults in choosing: routed by load.")()
        self._prompt_tokens = counter("kvsync_prompt_tokens", "Prompt tokens routed.", "model")
        self._credited_tokens = counter(
            "kvsync_credited_tokens", "Prompt tokens that the chosen worker was credited with.", "model"
        )
        self._tries = counter("kvsync_worker_tries", "Tries at a worker, by how they ended.", "worker", "outcome")
        self._running = gauge("kvsync_worker_running", "Requests sent to the worker and not ended.", "worker")
        self._queued = gauge(
            "kvsync_worker_queued_prefill_tokens", "Uncached prompt tokens before their first byte.", "worker"
        )

        self._breaker = gauge(
            "kvsync_worker_breaker", "1 for the state of the worker's failure memory.", "worker", "state"
        )
        self._hints_dropped = families.totals(
            "kvsync_prefix_hints_dropped", "Expected or observed prefixes that had no room.", "kind"
        )
        self._log_dropped = families.totals(
            "kvsync_log_lines_dropped", "Log lines that could not be written, or not fast enough."
        )
        self._contradicted = families.totals(
            "kvsync_observed_contradicted", "Answers without any of the prefix that answers before let expect."
        )

    def _add_knowledge(self, families: Families) -> None:
        counter, gauge, totals = families.counter, families.gauge, families.totals
        self._worker_mode = gauge("kvsync_worker_mode", "1 for the knowledge that serves, as told.", "worker", "mode")
        self._model_mode = gauge("kvsync_model_mode", "1 for the knowledge that serves, as told.", "model", "mode")
        self._tokenized = counter("kvsync_tokenized", "Where requests' tokens came from.", "source", "reason")
        self._tokenizing = families.histogram(
            "kvsync_tokenizing_seconds", "Time to a request's tokens.", "source", buckets=_SHORT
        )
        self._kv_sync = gauge("kvsync_kv_sync", "1 for the state that KV sync is in.", "state")
        self._trust = gauge("kvsync_worker_trust", "1 for how far the index can be trusted.", "worker", "trust")
        self._blocks = gauge("kvsync_worker_blocks", "Blocks that the index knows on the worker.", "worker")
        self._index_bytes = gauge("kvsync_index_bytes", "Memory that the index takes.")()
        self._index_counts = totals(
            "kvsync_index_events", "What the index did not simply apply, by reason.", "worker", "reason"
        )
        self._stream = gauge("kvsync_stream_state", "1 for the state of the worker's stream.", "worker", "state")
        self._stream_counts = totals("kvsync_stream_events", "What happened on the stream.", "worker", "event")
        self._alarm = gauge("kvsync_stream_alarm", "1 for what keeps the stream from being of use.", "worker", "alarm")
        self._asleep = gauge("kvsync_worker_asleep", "1 while the worker's engine sleeps.", "worker")
        self._unseen = totals("kvsync_engine_metrics_failures", "Engines' /metrics not had.", "worker", "reason")
        self._audit = counter(
            "kvsync_audit_answers", "Answers beside their credit: right, over, under, or why not.", "worker", "verdict"
        )
        self._predicted = counter("kvsync_audit_predicted_tokens", "Credit of audited answers.", "worker")
        self._actual = counter("kvsync_audit_actual_tokens", "Cached tokens reported by audited answers.", "worker")
        self._contradictions = counter(
            "kvsync_audit_contradictions", "Times that answers spoke against a worker's credit.", "worker"
        )
        self._engine_queries = counter(
            "kvsync_engine_cache_queries_tokens", "Tokens that the engine looked up, by its own metrics.", "worker"
        )
        self._engine_hits = counter("kvsync_engine_cache_hits_tokens", "Of these, those that it had.", "worker")
        self._discovery = gauge("kvsync_discovery_state", "1 for how finding pods is doing.", "namespace", "state")
        self._discovery_age = gauge(
            "kvsync_discovery_age_seconds", "Since the last list or word of the watch.", "namespace"
        )
        self._discovery_counts = totals(
            "kvsync_discovery_events", "What happened between gateway and API server.", "namespace", "event"
        )
        self._discovery_failures = totals(
            "kvsync_discovery_failures", "What could not be had of the API server.", "namespace", "reason"
        )
        self._pods = gauge("kvsync_discovery_pods", "Pods with the labels, by what they are.", "verdict")
        self._verdicts: set[str] = set()
        self._reloads = counter("kvsync_config_reloads", "Changed files, by what came of it.", "result")

    def _add_shared(self, families: Families) -> None:
        self._redis = families.gauge("kvsync_redis", "1 for the state that Redis is in, as seen from here.", "state")
        self._redis_calls = families.counter(
            "kvsync_redis_calls", "Calls of Redis, by what they were for and what came of them.", "call", "result"
        )
        self._redis_seconds = families.histogram(
            "kvsync_redis_seconds", "How long whoever asked waited.", "call", buckets=_SHORT
        )
        self._limited = families.counter(
            "kvsync_limited", "Requests that a limit was held against.", "limit", "result", "counted"
        )
        self._limit_faults = families.counter(
            "kvsync_limit_faults", "What could not be counted as it should, by reason.", "reason"
        )
        self._replicas = families.gauge("kvsync_replicas", "Other replicas whose load counts here now.")()
        self._bad_news = families.counter(
            "kvsync_load_news_unusable", "What was told as another replica's load and is none.", "reason"
        )
        self._running_elsewhere = families.gauge(
            "kvsync_worker_running_elsewhere", "Requests that other replicas sent to the worker.", "worker"
        )
        self._queued_elsewhere = families.gauge(
            "kvsync_worker_queued_prefill_tokens_elsewhere", "Their uncached prompt tokens.", "worker"
        )
        self._snapshots = families.counter(
            "kvsync_snapshots", "Snapshots of workers, by what was to be done and what came of it.", "action", "result"
        )
        self._snapshot_bytes = families.counter("kvsync_snapshot_bytes", "Bytes of them.", "action")
        self._turns = families.histogram(
            "kvsync_replay_turn_seconds", "Until a stream that catches up got its turn.", "result", buckets=_TURNS
        )
        self._start_workers = families.gauge(
            "kvsync_start_workers", "Workers of ready engines, by how their streams caught up, or not yet.", "how"
        )
        self._start_seconds = families.gauge("kvsync_start_seconds", "From the start until enough had caught up.")

    def at_scrape(self, callback: Callable[[], None]) -> None:
        """Have it called before every :meth:`look`, to put in what other rooms count themselves."""
        self._scraped.append(callback)

    def look(self) -> Callable[[], bytes]:
        """Take all figures as they are now. The function makes the text of ``GET /metrics`` of them
        (:data:`CONTENT_TYPE`), in any thread: of a thousand workers there are 46,000 lines."""
        for callback in self._scraped:
            callback()
        taken = CollectorRegistry(auto_describe=False)
        taken.register(_Taken(list(self.registry.collect())))
        return lambda: generate_latest(taken)

    def render(self) -> bytes:
        """The text of this moment."""
        return self.look()()

    def add_worker(self, worker: str) -> None:
        """The worker may have series from now on."""
        self._workers.add(worker)

    def drop_worker(self, worker: str) -> None:
        """The worker is gone, and so are its series."""
        self._workers.discard(worker)
        self._families.drop("worker", worker)
        self._families.drop("pod_key", worker)

    # -- requests: kvsync.requests.ports.Telemetry --------------------------------------------------------------------

    def answered(self, path: str, status: int, seconds: float, reason: str) -> None:
        self._requests(path, str(status), reason).inc()
        self._seconds(path).observe(seconds)
        self._gateway.requests.inc()
        self._gateway.seconds.observe(seconds)

    def cut(self, path: str, outcome: str) -> None:
        self._cut(path, outcome).inc()
        self._gateway.requests.inc()

    def first_byte(self, path: str, seconds: float) -> None:
        self._first_byte(path).observe(seconds)

    def retried(self, reason: str) -> None:
        self._retries(reason).inc()

    def retry_refused(self, reason: str) -> None:
        self._refused_retries(reason).inc()

    def connection(self, event: str) -> None:
        self._connections(event).inc()

    def extproc_stream(self, event: str) -> None:
        self._extproc_events(event).inc()

    def extproc_decided(self, seconds: float) -> None:
        self._extproc_seconds.observe(seconds)

    def extproc_streams(self, open_now: int) -> None:
        self._extproc_streams.set(open_now)

    def model_answered(self, model: str, status: int) -> None:
        """An engine's whole answer for a model."""
        self._model_requests(model, str(status)).inc()
        (self._gateway.successes if status < 400 else self._gateway.failures)(model).inc()

    # -- routing -----------------------------------------------------------------------------------------------------

    def decided(self, model: str, policy: str, mode: str, seconds: float, prompt_tokens: int, credit: int) -> None:
        """A worker was chosen, credited with so many of the prompt's tokens."""
        self._decisions(model, policy, mode).inc()
        self._routing.observe(seconds)
        if prompt_tokens:
            self._prompt_tokens(model).inc(prompt_tokens)
            self._credited_tokens(model).inc(credit)
        if self._prefix_cache is not None:
            self._prefix_cache.decided(model, mode, seconds, prompt_tokens, credit)

    def selected(self, model: str, selection: str, mode: str, imbalanced: bool) -> None:
        """``prefix-cache`` went this way."""
        if self._prefix_cache is not None:
            self._prefix_cache.selected(model, selection, mode, imbalanced)

    def refused(self, reason: str) -> None:
        """A request could not be routed."""
        self._refused(reason).inc()

    def index_failed(self, model: str) -> None:
        """A lookup raised; the request goes by load."""
        self._index_failures.inc()
        if self._prefix_cache is not None:
            self._prefix_cache.failed(model, "sync_indexer_unavailable")

    def routing_failed(self) -> None:
        """A fault in choosing or recording a choice; the request is served all the same."""
        self._routing_faults.inc()

    def breaker(self, worker: str, state: str) -> None:
        """One of :data:`BREAKER_STATES`."""
        if worker not in self._workers:
            return
        for known in BREAKER_STATES:
            self._breaker(worker, known).set(known == state)

    def log_dropped(self, lines: int) -> None:
        """Lines of the log that were dropped so far."""
        self._log_dropped.put(lines)

    def hints(self, dropped: Mapping[str, int], contradicted: int) -> None:
        """Of expected and observed prefixes: totals of those that had no room, by kind, and of those proved wrong."""
        for kind, total in dropped.items():
            self._hints_dropped.put(total, kind)
        self._contradicted.put(contradicted)

    def tried(self, worker: str, outcome: str) -> None:
        """A try at a worker ended."""
        self._tries(self._known(worker), outcome).inc()

    def _known(self, worker: str) -> str:
        return worker if worker in self._workers else GONE

    def load(self, worker: str, running: int, queued_prefill_tokens: int) -> None:
        if worker not in self._workers:
            return
        self._running(worker).set(running)
        self._queued(worker).set(queued_prefill_tokens)

    def in_flight(self, requests: int) -> None:
        self._gateway.in_flight.set(requests)

    # -- what is known, and how well ---------------------------------------------------------------------------------

    def tokenized(self, model: str, source: str, reason: str | None, seconds: float) -> None:
        """A request's tokens came from a source, or are unknown for a reason."""
        self._tokenized(source, reason or "").inc()
        self._tokenizing(source).observe(seconds)
        if source == "remote":
            self._gateway.tokenizer_requests(model).inc()
            self._gateway.tokenizer_seconds(model).observe(seconds)

    def tokenizers(self, active: int, taken_out: int) -> None:
        """Endpoints in use, and how often one was taken out of use since the start."""
        self._gateway.tokenizers.set(active)
        self._gateway.unhealthy.put(taken_out)

    def kv_sync(self, state: str) -> None:
        """One of :data:`KV_SYNC_STATES`."""
        for known in KV_SYNC_STATES:
            self._kv_sync(known).set(known == state)
        if self._prefix_cache is not None:
            self._prefix_cache.indexer(state == "running")

    def modes(self, workers: Mapping[str, str], models: Mapping[str, str]) -> None:
        """What knowledge serves each worker and model; each one of :data:`MODES`."""
        for worker, mode in workers.items():
            if worker in self._workers:
                for known in MODES:
                    self._worker_mode(worker, known).set(known == mode)
        for model in self._models - models.keys():
            self._model_mode.drop("model", model)
        self._models = set(models)
        for model, mode in models.items():
            for known in MODES:
                self._model_mode(model, known).set(known == mode)

    def index_bytes(self, taken: int) -> None:
        """What the index takes in all, as it counts."""
        self._index_bytes.set(taken)

    def indexed(self, worker: str, trust: str, blocks: int, counts: Mapping[str, int]) -> None:
        """What the index says of a worker; totals by reason."""
        if worker not in self._workers:
            return
        for known in TRUSTS:
            self._trust(worker, known).set(known == trust)
        self._blocks(worker).set(blocks)
        for reason, total in counts.items():
            self._index_counts.put(total, worker, reason)

    def streamed(self, worker: str, state: str, figures: ZmqFigures, counts: Mapping[str, int]) -> None:
        """What a worker's stream says of itself; ``state`` is one of :data:`STREAM_STATES`."""
        if worker not in self._workers:
            return
        for known in STREAM_STATES:
            self._stream(worker, known).set(known == state)
        for event, total in counts.items():
            self._stream_counts.put(total, worker, event)
        self._zmq.put(worker, figures)

    def watched(self, worker: str, asleep: bool, alarm: str | None, failures: Mapping[str, int]) -> None:
        """How a worker's engine is as far as its events go; ``alarm`` is one of :data:`ALARMS`, if any is on.
        ``failures``: looks at its metrics that failed, by reason."""
        if worker not in self._workers:
            return
        self._asleep(worker).set(asleep)
        for known in ALARMS:
            self._alarm(worker, known).set(known == alarm)
        for reason, total in failures.items():
            self._unseen.put(total, worker, reason)

    def applied(self, worker: str, seconds: float) -> None:
        """A drain's batches of one worker entered the index."""
        self._zmq.applied(self._known(worker), seconds)

    def audited(self, worker: str, verdict: str, predicted: int = 0, actual: int = 0) -> None:
        """An answer was held against its credit: ``right``, ``over``, ``under``, or the reason why it can't be."""
        worker = self._known(worker)
        self._audit(worker, verdict).inc()
        if verdict in ("right", "over", "under"):
            self._predicted(worker).inc(predicted)
            self._actual(worker).inc(actual)

    def contradicted(self, worker: str) -> None:
        """A worker's answers spoke against its credit: it is followed anew."""
        self._contradictions(self._known(worker)).inc()

    def engine_hits(self, worker: str, queries: int, hits: int) -> None:
        """What an engine's own metrics say that its cache was asked for, and had, since the last time."""
        worker = self._known(worker)
        self._engine_queries(worker).inc(queries)
        self._engine_hits(worker).inc(hits)

    # -- what replicas share: kvsync.store.connection.Telemetry ------------------------------------------------------

    def redis_called(self, call: str, result: str, seconds: float) -> None:
        """Something was asked of Redis. ``result``: ``ok`` or a reason of :mod:`kvsync.store.replies`."""
        self._redis_calls(call, result).inc()
        self._redis_seconds(call).observe(seconds)

    def snapshot(self, action: str, result: str, size: int) -> None:
        """Another replica's snapshot was read, or one written for others. ``size``: bytes, where that was done."""
        self._snapshots(action, result).inc()
        if size:
            self._snapshot_bytes(action).inc(size)

    def replay_turn(self, result: str, seconds: float) -> None:
        """A stream that catches up got its turn after so long."""
        self._turns(result).observe(seconds)

    def start(self, warm: int, cold: int, behind: int, seconds: float | None) -> None:
        """How far this replica's start has come; ``seconds``: how long it took, once it is over."""
        for how, number in (("snapshot", warm), ("replay", cold), ("behind", behind)):
            self._start_workers(how).set(number)
        if seconds is not None:
            self._start_seconds().set(seconds)

    def redis_state(self, state: str) -> None:
        """One of :data:`REDIS_STATES`."""
        for known in REDIS_STATES:
            self._redis(known).set(known == state)

    def limited(self, kind: str, result: str, counted: str) -> None:
        """A request of a ``user`` or for a ``model`` was ``allowed`` or refused; counted ``shared`` or ``alone``."""
        self._limited(kind, result, counted).inc()

    def limit_fault(self, reason: str) -> None:
        """``bad_record``, ``no_usage`` or ``untold``."""
        self._limit_faults(reason).inc()

    def replicas(self, others: int) -> None:
        """So many others told their load of late."""
        self._replicas.set(others)

    def load_news_unusable(self, reason: str) -> None:
        """What stood as another replica's load was ``too_large``, ``malformed``, or one of ``too_many``."""
        self._bad_news(reason).inc()

    def load_elsewhere(self, worker: str, running: int, queued_prefill_tokens: int) -> None:
        """What other replicas say that they sent to the worker."""
        if worker in self._workers:
            self._running_elsewhere(worker).set(running)
            self._queued_elsewhere(worker).set(queued_prefill_tokens)

    def discovered(
        self, namespace: str, state: str, age: float | None, counts: Mapping[str, int], failures: Mapping[str, int]
    ) -> None:
        """How finding pods is doing; ``state`` is one of :data:`DISCOVERY_STATES`."""
        for known in DISCOVERY_STATES:
            self._discovery(namespace, known).set(known == state)
        if age is not None:
            self._discovery_age(namespace).set(age)
        for event, total in counts.items():
            self._discovery_counts.put(total, namespace, event)
        for reason, total in failures.items():
            self._discovery_failures.put(total, namespace, reason)

    def pods(self, verdicts: Mapping[str, int]) -> None:
        """Pods that have to do with models, by what they are."""
        self._verdicts.update(verdicts)
        for verdict in self._verdicts:
            self._pods(verdict).set(verdicts.get(verdict, 0))

    def reloaded(self, result: str) -> None:
        """A changed file was ``applied``, ``unchanged`` in its fleet, or ``broken``."""
        self._reloads(result).inc()


__all__ = [
    "ALARMS",
    "BREAKER_STATES",
    "CONTENT_TYPE",
    "DISCOVERY_STATES",
    "GONE",
    "KV_SYNC_STATES",
    "MODES",
    "REDIS_STATES",
    "STREAM_STATES",
    "TRUSTS",
    "Metrics",
]
