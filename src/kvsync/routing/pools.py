"""Who can be chosen for a request: the workers of its model and adapter, less those that are passed over.

What must always hold: a worker that sleeps or failed lately is passed over only while others are left. All of it is
worked out once per change of the fleet; while workers are passed over, once per set of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvsync.index.match import Trust
from kvsync.routing import filters
from kvsync.routing.breaker import Breakers, Guard
from kvsync.routing.decision import Query
from kvsync.routing.errors import NoReadyEngine, NoSuchModel, NoTarget
from kvsync.routing.fleet import Fleet, Slot
from kvsync.routing.load import LoadTable


class Pool:
    """Candidates, a row each. ``guards`` are their failure memories."""

    __slots__ = ("_loads", "_narrowed", "_unknown", "guards", "load", "rows", "slots")

    def __init__(self, slots: Sequence[Slot], guards: Sequence[Guard], loads: LoadTable) -> None:
        self.slots = slots
        self.guards = guards
        self.rows = {slot.worker: row for row, slot in enumerate(slots)}
        self.load = loads.view([slot.worker for slot in slots])
        self._loads = loads
        self._narrowed: tuple[list[int], Pool] | None = None
        self._unknown: tuple[Sequence[str], Mapping[str, Trust]] = (), dict.fromkeys(self.rows, "none")

    def narrowed(self, rows: list[int]) -> Pool:
        """Of these rows only. The last answer is kept: who sleeps or rests now will a request later, too."""
        if self._narrowed is None or self._narrowed[0] != rows:
            pool = Pool([self.slots[row] for row in rows], [self.guards[row] for row in rows], self._loads)
            self._narrowed = rows, pool
        return self._narrowed[1]

    def unknown(self, registered: Sequence[str]) -> Mapping[str, Trust]:
        """The workers that are not registered with the index, each with the trust ``none``. The last answer is kept:
        hardly ever is there another."""
        if self._unknown[0] != registered:
            self._unknown = registered, dict.fromkeys(self.rows.keys() - set(registered), "none")
        return self._unknown[1]

    def others(self, pool: Pool) -> list[str]:
        """The workers that are not in a narrower pool."""
        return [slot.worker for slot in self.slots if slot.worker not in pool.rows]


class Pools:
    """Finds the candidates.

    Args:
        asleep: the workers whose engines are known to sleep now.
    """

    def __init__(
        self, fleet: Fleet, loads: LoadTable, breakers: Breakers, asleep: Callable[[], Collection[str]]
    ) -> None:
        self._fleet = fleet
        self._loads = loads
        self._breakers = breakers
        self._asleep = asleep
        self._version = fleet.version
        self._pools: dict[tuple[str, str | None], Pool] = {}
        """As of this version of the fleet."""

    def of(self, query: Query) -> tuple[Pool, dict[str, object]]:
        """The candidates, and the workers passed over, by reason.

        Raises:
            RoutingError: there are none.
        """
        pool = self._served(query.model, query.adapter)
        if query.exclude or query.label_filter:
            rows = fitting(query, pool.slots)
            if not rows:
                raise NoTarget(query.adapter or query.model)
            pool = pool.narrowed(rows)
        passed_over: dict[str, object] = {}
        # One that may have come back since it failed is better than one that sleeps: sleep comes first. When all sleep,
        # or all rest, passing over helps nobody.
        if asleep := self._asleep():
            rows = [row for row, slot in enumerate(pool.slots) if slot.worker not in asleep]
            if 0 < len(rows) < len(pool.slots):
                awake = pool.narrowed(rows)
                passed_over["asleep"] = pool.others(awake)
                pool = awake
        if self._breakers.resting:
            rows = [row for row, guard in enumerate(pool.guards) if guard.permits]
            if 0 < len(rows) < len(pool.slots):
                permitted = pool.narrowed(rows)
                passed_over["resting"] = pool.others(permitted)
                pool = permitted
        return pool, passed_over

    def _served(self, model: str, adapter: str | None) -> Pool:
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._pools.clear()
        key = (model, adapter)
        pool = self._pools.get(key)
        if pool is not None:
            return pool
        slots = self._fleet.slots(model, adapter)
        if not slots:  # not kept: names that nobody serves come from clients and would fill the memory
            known = self._fleet.resolve(model) is not None
            raise NoReadyEngine(adapter or model) if known else NoSuchModel(adapter or model)
        guards = [self._breakers.guard(slot.engine, slot.worker) for slot in slots]
        self._pools[key] = pool = Pool(slots, guards, self._loads)
        return pool


def fitting(query: Query, slots: Sequence[Slot]) -> list[int]:
    """The rows that were not tried yet and have the labels that are asked for."""
    selector = filters.parse(query.label_filter) if query.label_filter else ()
    return [
        row
        for row, slot in enumerate(slots)
        if slot.worker not in query.exclude and filters.matches(selector, slot.engine.labels)
    ]


__all__ = ["Pool", "Pools", "fitting"]
