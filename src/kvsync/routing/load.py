"""What each worker is busy with, counted from the moment of choice.

The counts stand in columns, a seat in them for each worker: a choice among a thousand workers reads whole columns, not
a thousand objects.

What must always hold: every ticket's load is taken back exactly once, whatever way its request ends, and a worker that
was dropped and comes back under its old name starts from nothing: nobody gets a seat before the last ticket of the one
who had it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from kvsync.routing.decision import Load


class Expecting(Protocol):
    """What a choice lets others expect; see :mod:`kvsync.routing.expected`."""

    def computed(self) -> None: ...

    def end(self) -> None: ...


class Ticket:
    """The load of one choice, and what it lets others expect. Made by :meth:`LoadTable.reserve`."""

    __slots__ = ("_expecting", "_queued", "_running", "_seat", "_table")

    def __init__(self, table: LoadTable, seat: int, tokens: int, expecting: Sequence[Expecting]) -> None:
        self._table = table
        self._seat = seat
        self._expecting = expecting
        self._queued = tokens
        self._running = True
        table.add(seat, 1, tokens)

    def first_byte(self) -> None:
        """The answer's first byte came: the prompt is computed."""
        if not self._running:
            return
        if self._queued:
            self._table.add(self._seat, 0, -self._queued)
            self._queued = 0
        for expecting in self._expecting:
            expecting.computed()

    def end(self) -> None:
        """The request ended in whatever way. Later calls change nothing."""
        if not self._running:
            return
        self._running = False
        self._table.add(self._seat, -1, -self._queued)
        for expecting in self._expecting:
            expecting.end()


class Columns(NamedTuple):
    """The load of some workers, a row each."""

    running: Sequence[int]
    queued: Sequence[int]
    busy: Sequence[float]
    """Both together, in tokens of prefill."""


class View:
    """The load of some workers, in their order. Made by :meth:`LoadTable.view`."""

    __slots__ = ("_gather", "_table")

    def __init__(self, table: LoadTable, gather: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._table = table
        self._gather = gather

    def read(self) -> Columns:
        """What they are busy with now; later changes do not show in it."""
        table, gather = self._table, self._gather
        return Columns(gather(table.running), gather(table.queued), gather(table.busy))


class LoadTable:
    """The load of all workers, as this gateway counts it.

    Args:
        decode_cost: tokens of prefill that a running request is worth (``routing.decode_cost``).
    """

    def __init__(self, decode_cost: float) -> None:
        self._decode_cost = decode_cost
        self._seats: dict[str, int] = {}
        self._free: list[int] = []
        self._left: set[int] = set()
        """Seats of workers that are gone, with tickets that are still out."""
        self.running: list[int] = []
        """By seat; to be read through a :class:`View`."""
        self.queued: list[int] = []
        self.busy: list[float] = []

    def reserve(self, worker: str, prefill_tokens: int, expecting: Sequence[Expecting] = ()) -> Ticket:
        """Count one request with so many uncached prompt tokens."""
        return Ticket(self, self._seat(worker), prefill_tokens, expecting)

    def view(self, workers: Sequence[str]) -> View:
        """The load of these workers, to be read until one of them is dropped."""
        seats = [self._seat(worker) for worker in workers]
        if len(seats) > 1:
            return View(self, itemgetter(*seats))
        return View(self, lambda column: [column[seat] for seat in seats])

    def drop(self, worker: str) -> None:
        """The worker is gone. Tickets that are still out end as they would have."""
        seat = self._seats.pop(worker, None)
        if seat is not None:
            if self.running[seat]:
                self._left.add(seat)
            else:
                self._free.append(seat)

    def total(self) -> int:
        """Requests at all workers that are there."""
        return sum(map(self.running.__getitem__, self._seats.values()))

    def snapshot(self) -> dict[str, Load]:
        return {worker: Load(self.running[seat], self.queued[seat]) for worker, seat in self._seats.items()}

    def add(self, seat: int, running: int, queued: int) -> None:
        """For tickets."""
        self.running[seat] += running
        self.queued[seat] += queued
        self.busy[seat] = self.queued[seat] + self._decode_cost * self.running[seat]
        if self._left and not self.running[seat] and seat in self._left:
            self._left.remove(seat)
            self._free.append(seat)

    def _seat(self, worker: str) -> int:
        seat = self._seats.get(worker)
        if seat is None:
            if self._free:
                seat = self._free.pop()
            else:
                seat = len(self.running)
                self.running.append(0)
                self.queued.append(0)
                self.busy.append(0.0)
            self._seats[worker] = seat
        return seat


__all__ = ["Columns", "Expecting", "LoadTable", "Ticket", "View"]
