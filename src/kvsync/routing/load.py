"""What each worker is busy with, counted from the moment of choice.

What must always hold: every ticket's load is taken back exactly once, whatever way its request ends, and a worker that
was dropped and comes back under its old name starts from nothing: tickets hold the counter itself, not its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsync.routing.decision import Load


class Cell:
    """One worker's counts."""

    __slots__ = ("queued", "running")

    def __init__(self) -> None:
        self.running = 0
        self.queued = 0


class Expecting(Protocol):
    """What a choice lets others expect; see :mod:`kvsync.routing.expected`."""

    def computed(self) -> None: ...

    def end(self) -> None: ...


class Ticket:
    """The load of one choice, and what it lets others expect. Made by :meth:`LoadTable.reserve`."""

    __slots__ = ("_cell", "_expecting", "_queued", "_running")

    def __init__(self, cell: Cell, tokens: int, expecting: Sequence[Expecting]) -> None:
        self._cell = cell
        self._expecting = expecting
        self._queued = tokens
        self._running = True
        cell.running += 1
        cell.queued += tokens

    def first_byte(self) -> None:
        """The answer's first byte came: the prompt is computed."""
        if not self._running:
            return
        self._release_prefill()
        for expecting in self._expecting:
            expecting.computed()

    def end(self) -> None:
        """The request ended in whatever way. Later calls change nothing."""
        if not self._running:
            return
        self._running = False
        self._release_prefill()
        self._cell.running -= 1
        for expecting in self._expecting:
            expecting.end()

    def _release_prefill(self) -> None:
        self._cell.queued -= self._queued
        self._queued = 0


class LoadTable:
    """The load of all workers, as this gateway counts it."""

    def __init__(self) -> None:
        self._cells: dict[str, Cell] = {}

    def cell(self, worker: str) -> Cell:
        """The worker's counts, to be read."""
        found = self._cells.get(worker)
        if found is None:
            found = self._cells[worker] = Cell()
        return found

    def reserve(self, worker: str, prefill_tokens: int, expecting: Sequence[Expecting] = ()) -> Ticket:
        """Count one request with so many uncached prompt tokens."""
        return Ticket(self.cell(worker), prefill_tokens, expecting)

    def drop(self, worker: str) -> None:
        """The worker is gone. Tickets that are still out end as they would have."""
        self._cells.pop(worker, None)

    def running(self) -> int:
        """Requests at all workers."""
        return sum(cell.running for cell in self._cells.values())

    def snapshot(self) -> dict[str, Load]:
        return {worker: Load(cell.running, cell.queued) for worker, cell in self._cells.items()}


__all__ = ["Cell", "Expecting", "LoadTable", "Ticket"]
