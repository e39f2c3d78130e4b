"""The gateway's own counts as plain attributes: what a test reads, and what serves where no metrics are wanted.

Satisfies :class:`kvsync.requests.ports.Telemetry`. Keys are bounded: paths come from the allow-list, reasons from the
gateway's code, never from a client.
"""

from __future__ import annotations

from collections import Counter

from kvsync.requests.ports import Outcome


class Counters:
    """Counts by reason."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int, str]] = Counter()
        """By path, status and reason."""
        self.cuts: Counter[tuple[str, str]] = Counter()
        """By path and outcome."""
        self.retries: Counter[str] = Counter()
        self.refused_retries: Counter[str] = Counter()
        self.connections: Counter[str] = Counter()
        self.first_bytes = 0

    def answered(self, path: str, status: int, seconds: float, reason: str) -> None:
        self.answers[path, status, reason] += 1

    def cut(self, path: str, outcome: Outcome) -> None:
        self.cuts[path, outcome] += 1

    def first_byte(self, path: str, seconds: float) -> None:
        self.first_bytes += 1

    def retried(self, reason: Outcome) -> None:
        self.retries[reason] += 1

    def retry_refused(self, reason: str) -> None:
        self.refused_retries[reason] += 1

    def connection(self, event: str) -> None:
        self.connections[event] += 1


__all__ = ["Counters"]
