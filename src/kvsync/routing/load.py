"""What each worker is busy with: what this gateway sent it, counted from the moment of choice, and what others say that
they did.

The counts stand in columns, a seat in them for each worker: a choice among a thousand workers reads whole columns, not
a thousand objects.

What must always hold: every ticket's load is taken back exactly once, whatever way its request ends, and a worker that
was dropped and comes back under its old name starts from nothing: nobody gets a seat before the last ticket of the one
who had it has ended. What others say is only ever added on top, and as a whole: taken away, what is left is exactly our
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

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


class Busy(Protocol):
    """What somebody says of a worker."""

    @property
    def running(self) -> int: ...

    @property
    def queued_prefill_tokens(self) -> int: ...


_NOTHING: Final = Load()


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
    """The load of all workers.

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
        """By seat, others' included; to be read through a :class:`View`."""
        self.queued: list[int] = []
        self.busy: list[float] = []
        self._others: list[Load] = []
        """By seat, what others say of it."""
        self._told: Mapping[str, Busy] = {}
        """The same by worker, of those too that have no seat yet."""

    def reserve(self, worker: str, prefill_tokens: int, expecting: Sequence[Expecting] = ()) -> Ticket:
        """Count one request with so many uncached prompt tokens."""
        return Ticket(self, self._seat(worker), prefill_tokens, expecting)

    def view(self, workers: Sequence[str]) -> View:
        """The load of these workers, to be read until one of them is dropped."""
        seats = [self._seat(worker) for worker in workers]
        if len(seats) > 1:
            return View(self, itemgetter(*seats))
        return View(self, lambda column: [column[seat] for seat in seats])

    def others(self, loads: Mapping[str, Busy]) -> None:
        """What others have sent to workers, in place of what they said before; of those not named, nothing."""
        self._told = loads
        for worker, seat in self._seats.items():
            self._tell(seat, loads.get(worker, _NOTHING))

    def drop(self, worker: str) -> None:
        """The worker is gone. Tickets that are still out end as they would have."""
        seat = self._seats.pop(worker, None)
        if seat is not None:
            self._tell(seat, _NOTHING)
            if self.running[seat]:
                self._left.add(seat)
            else:
                self._free.append(seat)

    def total(self) -> int:
        """Requests of our own at all workers that are there."""
        return sum(self.running[seat] - self._others[seat].running for seat in self._seats.values())

    def snapshot(self) -> dict[str, Load]:
        """As choices see it."""
        return {worker: Load(self.running[seat], self.queued[seat]) for worker, seat in self._seats.items()}

    def own(self) -> dict[str, Load]:
        """What we sent."""
        found = {}
        for worker, seat in self._seats.items():
            others = self._others[seat]
            queued = self.queued[seat] - others.queued_prefill_tokens
            found[worker] = Load(self.running[seat] - others.running, queued)
        return found

    def elsewhere(self) -> dict[str, Load]:
        """What others say that they sent, where that is anything."""
        return {worker: Load(busy.running, busy.queued_prefill_tokens) for worker, busy in self._told.items()}

    def add(self, seat: int, running: int, queued: int) -> None:
        """For tickets, and for what others say."""
        self.running[seat] += running
        self.queued[seat] += queued
        self.busy[seat] = self.queued[seat] + self._decode_cost * self.running[seat]
        if self._left and not self.running[seat] and seat in self._left:
            self._left.remove(seat)
            self._free.append(seat)

    def _tell(self, seat: int, load: Busy) -> None:
        before = self._others[seat]
        running, queued = load.running - before.running, load.queued_prefill_tokens - before.queued_prefill_tokens
        if running or queued:
            self._others[seat] = Load(load.running, load.queued_prefill_tokens)
            self.add(seat, running, queued)

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
                self._others.append(_NOTHING)
            self._seats[worker] = seat
            if self._told:
                self._tell(seat, self._told.get(worker, _NOTHING))
        return seat


__all__ = ["Busy", "Columns", "Expecting", "LoadTable", "Ticket", "View"]
