"""What the gateway says of itself: readiness and mode, its workers, and the figures that are read when asked for.

Read-only: it looks at fleet, streams, index and load, and changes none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from kvsync.events.contracts import WorkerStatus
from kvsync.events.sync import KVSync
from kvsync.index import Index
from kvsync.routing.fleet import Fleet
from kvsync.routing.load import LoadTable
from kvsync.telemetry.aibrix import ZmqFigures
from kvsync.telemetry.metrics import Metrics

_EVENT_TYPES: Final = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
"""The index's counts that AIBrix counts by event type."""


class Report:
    """See the module.

    Args:
        tokenizing: what the tokenizer says of itself.
        draining: whether shutdown has begun.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: Index,
        loads: LoadTable,
        kv_sync: KVSync,
        metrics: Metrics,
        tokenizing: Callable[[], Mapping[str, Any]],
        draining: Callable[[], bool],
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._loads = loads
        self._kv_sync = kv_sync
        self._metrics = metrics
        self._tokenizing = tokenizing
        self._draining = draining
        metrics.at_scrape(self._scrape)

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Ready: not shutting down, and an engine to route to. The details say what knowledge serves, per model."""
        models: dict[str, Counter[str]] = {}
        for worker in self.workers():
            if worker["ready"]:
                models.setdefault(str(worker["model"]), Counter())[str(worker["knowledge"])] += 1
        sync = self._kv_sync.status()
        details = {
            "draining": self._draining(),
            "kv_sync": {"state": sync.state, "unmet": sync.unmet},
            "models": {model: {"mode": _mode(known), "workers": dict(known)} for model, known in models.items()},
        }
        return not self._draining() and bool(models), details

    def workers(self) -> list[dict[str, object]]:
        """Every worker of the fleet, whether or not its events are followed."""
        streams = {status.worker: status for status in self._kv_sync.workers()}
        indexed = self._indexed()
        loads = self._loads.snapshot()
        found = []
        for engine in self._fleet:
            for rank in engine.ranks:
                worker = engine.worker(rank)
                stream, known, load = streams.get(worker), indexed.get(worker, {}), loads.get(worker)
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
                        "knowledge": _knowledge(stream, known),
                        "last_sequence": stream.last_sequence if stream else None,
                        "blocks": known.get("blocks", 0),
                        "block_size": known.get("block_size", 0),
                        "running": load.running if load else 0,
                        "queued_prefill_tokens": load.queued_prefill_tokens if load else 0,
                        "problem": stream.problem if stream else None,
                        "index": {name: value for name, value in known.items() if name not in _SHOWN_ABOVE},
                        "stream": _stream(stream) if stream else None,
                    }
                )
        return found

    def _indexed(self) -> Mapping[str, Mapping[str, Any]]:
        workers = self._index.stats()["workers"]
        assert isinstance(workers, Mapping)
        return workers

    def _scrape(self) -> None:
        self._metrics.kv_sync(self._kv_sync.status().state)
        remote = self._tokenizing()["remote"]
        if remote is not None:
            self._metrics.tokenizers(remote["active"], remote["taken_out"])
        indexed = self._indexed()
        for worker, known in indexed.items():
            self._metrics.indexed(worker, known["trust"], known["blocks"], known["counts"])
        for status in self._kv_sync.workers():
            counts = indexed.get(status.worker, {}).get("counts", {})
            self._metrics.streamed(status.worker, status.state.value, _figures(status, counts), asdict(status.counts))


_SHOWN_ABOVE: Final = frozenset({"model", "trust", "blocks", "block_size"})


def _knowledge(stream: WorkerStatus | None, known: Mapping[str, Any]) -> str:
    """What routing knows of a worker: ``exact``, ``partial``, or ``load-only``."""
    if stream is None or not known or known["trust"] == "none":
        return "load-only"
    return str(known["trust"])


def _mode(known: Counter[str]) -> str:
    """A model's mode is that of its worst-known worker, and ``load-only`` only when nothing is known of any."""
    if set(known) == {"load-only"}:
        return "load-only"
    return "exact" if set(known) == {"exact"} else "partial"


def _stream(status: WorkerStatus) -> dict[str, object]:
    return {
        "endpoint": status.endpoint,
        "replay_endpoint": status.replay_endpoint,
        "connected": status.connected,
        "connected_since": status.connected_since,
        "whole": status.whole,
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
