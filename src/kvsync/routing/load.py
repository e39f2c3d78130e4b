"""What each worker is busy with, counted from the moment of choice.

What must always hold: every ticket's load is taken back exactly once, whatever way its request ends, and a worker that
was dropped and comes back under its old name starts from nothing: tickets hold the counter itself, not its name.

A worker that can't be reached rests for a while (1 s, doubling up to 30 s, until it answers again): without that, the
best prefix keeps attracting requests to an engine that is down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvsync.routing.decision import Load

UNREACHABLE = frozenset({"connect_refused", "connect_timeout", "connect_failed", "tls_failed", "reset"})
"""Outcomes after which a worker rests. An engine that answers, errors included, is reachable."""
ANSWERED = frozenset({"ok", "request_error", "engine_error"})

FIRST_REST = 1.0
LONGEST_REST = 30.0


class Cell:
    """One worker's counts."""

    __slots__ = ("failures", "queued", "rests_until", "running")

    def __init__(self) -> None:
        self.running = 0
        self.queued = 0
        self.failures = 0
        """Times in a row that it could not be reached."""
        self.rests_until = 0.0


class Expecting(Protocol):
    """What a choice lets others expect; see :mod:`kvsync.routing.expected`."""

    def computed(self) -> None: ...

    def end(self) -> None: ...


class Ticket:
    """The load of one choice, and what it lets others expect. Made by :meth:`LoadTable.reserve`."""

    __slots__ = ("_cell", "_clock", "_expecting", "_queued", "_running")

    def __init__(self, cell: Cell, tokens: int, expecting: Sequence[Expecting], clock: Callable[[], float]) -> None:
        self._cell = cell
        self._clock = clock
        self._expecting = expecting
        self._queued = tokens
        self._running = True
        cell.running += 1
        cell.queued += tokens

    def first_byte(self) -> None:
        """The answer's first byte came: the prompt is computed, the worker reachable."""
        if not self._running:
            return
        self._release_prefill()
        self._cell.failures = 0
        for expecting in self._expecting:
            expecting.computed()

    def end(self, outcome: str) -> None:
        """The request ended in whatever way (``ok``, ``client_gone``, …). Later calls change nothing."""
        if not self._running:
            return
        self._running = False
        self._release_prefill()
        cell = self._cell
        cell.running -= 1
        for expecting in self._expecting:
            expecting.end()
        if outcome in UNREACHABLE:
            rest = min(LONGEST_REST, FIRST_REST * 2.0 ** min(cell.failures, 10))
            cell.failures += 1
            cell.rests_until = self._clock() + rest
        elif outcome in ANSWERED:
            cell.failures = 0

    def _release_prefill(self) -> None:
        self._cell.queued -= self._queued
        self._queued = 0


class LoadTable:
    """The load of all workers, as this gateway counts it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._cells: dict[str, Cell] = {}
        self._clock = clock

    def cell(self, worker: str) -> Cell:
        """The worker's counts, to be read."""
        found = self._cells.get(worker)
        if found is None:
            found = self._cells[worker] = Cell()
        return found

    def reserve(self, worker: str, prefill_tokens: int, expecting: Sequence[Expecting] = ()) -> Ticket:
        """Count one request with so many uncached prompt tokens."""
        return Ticket(self.cell(worker), prefill_tokens, expecting, self._clock)

    def drop(self, worker: str) -> None:
        """The worker is gone. Tickets that are still out end as they would have."""
        self._cells.pop(worker, None)

    def snapshot(self) -> dict[str, Load]:
        return {worker: Load(cell.running, cell.queued) for worker, cell in self._cells.items()}


__all__ = ["ANSWERED", "UNREACHABLE", "Cell", "Expecting", "LoadTable", "Ticket"]
