"""What the gateway says of itself: readiness and modes, its workers, and the figures that are read when asked for.

Read-only: it looks at fleet, streams, index, router and audit, and changes none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from kvsync.discovery.kubernetes.source import KubernetesStatus
from kvsync.events.contracts import WorkerStatus
from kvsync.events.sync import KVSync
from kvsync.index import Index
from kvsync.index.match import Trust
from kvsync.routing.audit import Audit
from kvsync.routing.fleet import Fleet
from kvsync.routing.load import LoadTable
from kvsync.routing.modes import Modes, Moment
from kvsync.routing.router import Router
from kvsync.telemetry import logs
from kvsync.telemetry.aibrix import ZmqFigures
from kvsync.telemetry.metrics import Metrics
from kvsync.warmup import Start, WarmUp

_EVENT_TYPES: Final = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
"""The index's counts that AIBrix counts by event type."""


class Report:
    """See the module.

    Args:
        modes: kept up to date with :meth:`moments` by whoever has the time.
        tokenizing: what the tokenizer says of itself.
        draining: whether shutdown has begun.
        redis: how Redis is doing.
        warmup: how the start is coming on.
        kubernetes: how finding engines among pods is doing, where that is asked for.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: Index,
        loads: LoadTable,
        router: Router,
        audit: Audit,
        modes: Modes,
        kv_sync: KVSync,
        metrics: Metrics,
        tokenizing: Callable[[], Mapping[str, Any]],
        draining: Callable[[], bool],
        redis: Callable[[], Mapping[str, object]],
        warmup: WarmUp,
        kubernetes: Callable[[], KubernetesStatus] | None = None,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._loads = loads
        self._router = router
        self._audit = audit
        self._modes = modes
        self._kv_sync = kv_sync
        self._metrics = metrics
        self._tokenizing = tokenizing
        self._draining = draining
        self._redis = redis
        self._warmup = warmup
        self._kubernetes = kubernetes
        metrics.at_scrape(self._scrape)

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Ready: not shutting down, an engine to route to, the pods listed once (or given up for now: a dead API
        server must not take the gateways out), and enough workers caught up since the start. The details say what
        knowledge serves, per model."""
        workers = self._modes.workers
        models: dict[str, Counter[str]] = {}
        for engine in self._fleet:
            if engine.ready:
                modes = [workers.get(worker, "load-only") for worker in map(engine.worker, engine.ranks)]
                models.setdefault(engine.model, Counter()).update(modes)
        sync = self._kv_sync.status()
        details: dict[str, object] = {
            "draining": self._draining(),
            "kv_sync": {"state": sync.state, "unmet": sync.unmet},
            "redis": self._redis(),
            "models": {
                model: {"mode": self._modes.models.get(model, "load-only"), "workers": dict(modes)}
                for model, modes in models.items()
            },
        }
        if self._kubernetes is not None:
            details["kubernetes"] = _discovery(self._kubernetes())
        start = self.start()
        if start is not None:
            details["start"] = {**asdict(start), "behind": start.behind}
        return not self._draining() and start is not None and start.seconds is not None, details

    def start(self) -> Start | None:
        """How the start is coming on; to be asked now and then. ``None`` while it is not known who is to catch up: no
        engine to route to, or pods that were not listed yet. Without KV sync nobody is waited for."""
        listed = self._kubernetes is None or self._kubernetes().state != "starting"
        if not listed or not any(engine.ready for engine in self._fleet):
            return None
        followed: set[str] = set()
        if self._kv_sync.status().state == "running":
            engines = (engine for engine in self._fleet if engine.ready and engine.kv_events)
            followed = {engine.worker(rank) for engine in engines for rank in engine.ranks}
        return self._warmup.look(followed, self._kv_sync.workers())

    def moments(self) -> dict[str, Moment]:
        """What is known of every worker of the fleet at this moment."""
        streams = {status.worker: status for status in self._kv_sync.workers()}
        trusts: dict[str, dict[str, Trust]] = {}
        found = {}
        for engine in self._fleet:
            if engine.model not in trusts:
                # No tokens, no hashing: what is asked is the trust that a request would meet now.
                matches = self._index.match(b"", engine.model)
                trusts[engine.model] = {worker: match.trust for worker, match in matches.items()}
            for worker in map(engine.worker, engine.ranks):
                trust = trusts[engine.model].get(worker, "none")
                why = _why(streams.get(worker), trust)
                if trust != "none":
                    moment = Moment(engine.model, trust, why, engine.ready)
                elif self._router.observes(worker):
                    moment = Moment(engine.model, "observed", f"{why}; answers of late serve", engine.ready)
                else:
                    moment = Moment(engine.model, "load-only", why, engine.ready)
                found[worker] = moment
        return found

    def workers(self) -> list[dict[str, object]]:
        """Every worker of the fleet, whether or not its events are followed."""
        streams = {status.worker: status for status in self._kv_sync.workers()}
        indexed = self._indexed()
        loads, elsewhere = self._loads.own(), self._loads.elsewhere()
        modes, breakers = self._modes.workers, self._router.breakers()
        found = []
        for engine in self._fleet:
            for rank in engine.ranks:
                worker = engine.worker(rank)
                stream, known = streams.get(worker), indexed.get(worker, {})
                load, others = loads.get(worker), elsewhere.get(worker)
                found.append(
                    {
                        "worker": worker,
                        "engine": engine.name,
                        "model": engine.model,
                        "adapters": engine.adapters,
                        "rank": rank,
                        "url": engine.url,
                        "ready": engine.ready,
                        "state": stream.state.value if stream else "off",
                        "trust": known.get("trust"),
                        "mode": modes.get(worker, "load-only"),
                        "breaker": breakers.get(worker, "closed"),
                        "last_sequence": stream.last_sequence if stream else None,
                        "blocks": known.get("blocks", 0),
                        "block_size": known.get("block_size", 0),
                        "running": load.running if load else 0,
                        "queued_prefill_tokens": load.queued_prefill_tokens if load else 0,
                        "running_elsewhere": others.running if others else 0,
                        "queued_prefill_tokens_elsewhere": others.queued_prefill_tokens if others else 0,
                        "asleep": stream.asleep if stream else False,
                        "alarm": stream.alarm if stream else None,
                        "problem": stream.problem if stream else None,
                        "index": {name: value for name, value in known.items() if name not in _SHOWN_ABOVE},
                        "stream": _stream(stream) if stream else None,
                        "audit": self._audit.describe(worker),
                    }
                )
        return found

    def _indexed(self) -> Mapping[str, Mapping[str, Any]]:
        return _workers(self._index.stats())

    def _scrape(self) -> None:
        self._metrics.log_dropped(logs.dropped())
        self._metrics.kv_sync(self._kv_sync.status().state)
        self._metrics.modes(self._modes.workers, self._modes.models)
        start = self.start()
        if start is not None:
            self._metrics.start(start.warm, start.cold, start.behind, start.seconds)
        if self._kubernetes is not None:
            found = self._kubernetes()
            self._metrics.pods(found.pods)
            for scope in found.scopes:
                self._metrics.discovered(scope.scope, scope.state, scope.age, scope.counts, scope.failures)
        remote = self._tokenizing()["remote"]
        if remote is not None:
            self._metrics.tokenizers(remote["active"], remote["taken_out"])
        stats = self._index.stats()
        self._metrics.index_bytes(int(str(stats["bytes"])))
        indexed = _workers(stats)
        for worker, known in indexed.items():
            self._metrics.indexed(worker, known["trust"], known["blocks"], known["counts"])
        for status in self._kv_sync.workers():
            counts = indexed.get(status.worker, {}).get("counts", {})
            self._metrics.streamed(status.worker, status.state.value, _figures(status, counts), asdict(status.counts))
            self._metrics.watched(status.worker, status.asleep, status.alarm, status.scrapes_failed)


def _discovery(found: KubernetesStatus) -> dict[str, object]:
    return {
        "state": found.state,
        "problems": {scope.scope: scope.problem for scope in found.scopes if scope.problem is not None},
        "age": {scope.scope: None if scope.age is None else round(scope.age, 1) for scope in found.scopes},
        "pods": dict(found.pods),
    }


def _workers(stats: Mapping[str, object]) -> Mapping[str, Mapping[str, Any]]:
    workers = stats["workers"]
    assert isinstance(workers, Mapping)
    return workers


_SHOWN_ABOVE: Final = frozenset({"model", "trust", "blocks", "block_size"})


def _why(stream: WorkerStatus | None, trust: Trust) -> str:
    """Why a worker is known as it is, in half a sentence."""
    if stream is None:
        return "its events are not followed"
    if trust == "exact":
        return "its events are whole"
    if trust == "partial":
        return "something of its events was lost"
    if stream.asleep:
        return "its engine sleeps"
    if stream.problem is not None:
        return stream.problem
    if stream.state.value != "live":
        return f"its stream is {stream.state.value}"
    return "its events can't be relied on (`index` in /v1/workers)"


def _stream(status: WorkerStatus) -> dict[str, object]:
    return {
        "endpoint": status.endpoint,
        "replay_endpoint": status.replay_endpoint,
        "connected": status.connected,
        "connected_since": status.connected_since,
        "whole": status.whole,
        "restored": status.restored,
        "caught_up_in": status.caught_up_in,
        "counts": asdict(status.counts),
        "errors": dict(status.errors),
    }


def _figures(status: WorkerStatus, index_counts: Mapping[str, int]) -> ZmqFigures:
    processed = {kind: index_counts[name] for name, kind in _EVENT_TYPES.items() if name in index_counts}
    skipped = sum(total for name, total in index_counts.items() if name.startswith("skipped_"))
    return ZmqFigures(
        connected=status.connected,
        last_sequence=status.last_sequence,
        connections=status.connections,
        disconnections=status.disconnections,
        reconnect_attempts=status.reconnect_attempts,
        missed_events=status.counts.missed,
        replay_requests=status.counts.replays,
        replay_success=status.counts.replays_answered,
        replay_failures=status.counts.replays_failed,
        received=processed | ({"skipped": skipped} if skipped else {}),
        processed=processed,
        errors=status.errors,
    )


__all__ = ["Report"]
