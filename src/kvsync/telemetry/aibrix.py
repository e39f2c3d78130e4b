"""The metrics that AIBrix has, under its names and with its labels, so that its dashboards and alerts go on working."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvsync.telemetry.families import Families, Totals

_LATENCY: Final = tuple(10e-6 * 2**i for i in range(15))
"""10 µs to 160 ms."""
_LONG: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class ZmqFigures:
    """One worker's stream in AIBrix's terms: totals since the start of the process."""

    connected: bool
    last_sequence: int | None = None
    connections: int = 0
    disconnections: int = 0
    reconnect_attempts: int = 0
    missed_events: int = 0
    """Batches missing in the live stream, before any repair."""
    replay_requests: int = 0
    replay_success: int = 0
    replay_failures: int = 0
    received: Mapping[str, int] = field(default_factory=dict)
    """By event type."""
    processed: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    """By error type."""


class Zmq:
    """``aibrix_kvcache_zmq_*``, by ``pod_key``: the worker's name."""

    def __init__(self, families: Families) -> None:
        def totals(name: str, text: str, *labels: str) -> Totals:
            return families.totals(f"aibrix_kvcache_zmq_{name}", text, "pod_key", *labels)

        self._plain: dict[str, Totals] = {
            name: totals(name, text)
            for name, text in (
                ("connections", "Connections made."),
                ("disconnections", "Connections lost."),
                ("reconnect_attempts", "Attempts to connect again."),
                ("missed_events", "Batches missing in the live stream, before any repair."),
                ("replay_requests", "Replays asked for."),
                ("replay_success", "Replays that ended properly."),
                ("replay_failures", "Replays without an answer, or cut short."),
            )
        }
        self._received = totals("events_received", "Events received.", "event_type")
        self._processed = totals("events_processed", "Events applied.", "event_type")
        self._errors = totals("errors", "What could not be used.", "error_type")
        self._status = families.gauge("aibrix_kvcache_zmq_connection_status", "1 when connected.", "pod_key")
        self._sequence = families.gauge("aibrix_kvcache_zmq_last_sequence_id", "The last batch applied.", "pod_key")
        self._duration = families.histogram(
            "aibrix_kvcache_zmq_event_processing_duration_seconds", "Time to apply.", "pod_key", buckets=_LATENCY
        )

    def put(self, worker: str, figures: ZmqFigures) -> None:
        for name, family in self._plain.items():
            family.put(getattr(figures, name), worker)
        for family, by_type in (
            (self._received, figures.received),
            (self._processed, figures.processed),
            (self._errors, figures.errors),
        ):
            for kind, total in by_type.items():
                family.put(total, worker, kind)
        self._status(worker).set(figures.connected)
        if figures.last_sequence is not None:
            self._sequence(worker).set(figures.last_sequence)

    def applied(self, worker: str, seconds: float) -> None:
        self._duration(worker).observe(seconds)


class Gateway:
    """``aibrix_gateway_*`` and ``aibrix_tokenizer_pool_*``."""

    def __init__(self, families: Families) -> None:
        self.requests = families.counter("aibrix_gateway_request", "Requests received.")()
        self.in_flight = families.gauge("aibrix_gateway_in_flight_requests", "Requests being served.")()
        self.seconds = families.histogram("aibrix_gateway_e2e_duration_seconds", "Time to serve.", buckets=_LONG)()
        self.successes = families.counter("aibrix_gateway_request_model_success", "Requests that succeeded.", "model")
        self.failures = families.counter("aibrix_gateway_request_model_fail", "Requests that failed.", "model")
        self.tokenizers = families.gauge("aibrix_tokenizer_pool_active_tokenizers", "Tokenizers in use.")()
        self.unhealthy = families.totals("aibrix_tokenizer_pool_unhealthy_tokenizers", "Tokenizers taken out of use.")
        self.tokenizer_requests = families.counter("aibrix_tokenizer_pool_requests", "Tokenizer requests.", "model")
        self.tokenizer_seconds = families.histogram(
            "aibrix_tokenizer_pool_latency_seconds", "Time to tokenize.", "model", buckets=_LATENCY
        )


class PrefixCache:
    """``aibrix_prefix_cache_*``. ``using_kv_sync`` is false where routing went by load alone."""

    def __init__(self, families: Families) -> None:
        prefix, sync = "aibrix_prefix_cache_", "using_kv_sync"
        self._decisions = families.counter(
            f"{prefix}routing_decisions", "Decisions by matched share.", "model", "match_percent_bucket", sync
        )
        self._indexer = families.gauge(f"{prefix}indexer_status", "1 for what serves.", "model", "indexer_type")
        self._latency = families.histogram(
            f"{prefix}routing_latency_seconds", "Time to choose.", "model", sync, buckets=_LATENCY
        )
        self._selection = families.counter(
            f"{prefix}routing_selection", "Ways that prefix-cache went.", "model", "selection", sync
        )
        self._errors = families.counter(f"{prefix}routing_errors", "Failures by reason.", "model", "reason", sync)
        self._imbalance = families.counter(f"{prefix}load_imbalance", "Choices under uneven load.", "model", sync)
        self.indexer(False)

    def indexer(self, synced: bool) -> None:
        self._indexer("_init_", "sync").set(synced)
        self._indexer("_init_", "local").set(not synced)

    def decided(self, model: str, mode: str, seconds: float, prompt_tokens: int, credit: int) -> None:
        percent = 100 * credit // prompt_tokens if prompt_tokens else 0
        self._decisions(model, _bucket(percent), _synced(mode)).inc()
        self._latency(model, _synced(mode)).observe(seconds)

    def selected(self, model: str, selection: str, mode: str, imbalanced: bool) -> None:
        self._selection(model, selection, _synced(mode)).inc()
        if imbalanced:
            self._imbalance(model, _synced(mode)).inc()

    def failed(self, model: str, reason: str) -> None:
        """One of AIBrix's reasons: ``tokenize_failed``, ``sync_indexer_unavailable``, ``no_target_pod``."""
        self._errors(model, reason, "true").inc()


def _synced(mode: str) -> str:
    return "true" if mode in ("exact", "partial") else "false"


def _bucket(percent: int) -> str:
    if percent <= 0:
        return "0"
    if percent <= 25:
        return "1-25"
    if percent <= 50:
        return "26-50"
    return "51-75" if percent <= 75 else "76-100"


__all__ = ["Gateway", "PrefixCache", "Zmq", "ZmqFigures"]
