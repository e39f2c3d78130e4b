"""Prefixes that workers will hold soon, because requests with them were just sent there.

Between a choice and the store event that follows it the index knows nothing of the prompt. In that gap siblings of a
burst would scatter over the fleet and each compute the same prefix. So a choice is remembered here, by hashes of the
prompt's prefixes on a grid, until its answer or failure or for a lifetime; it counts only beyond the credit, so the
store event ends it in effect.

What must always hold: this is a hint. It never enters the index, a match's credit or the audit, and it ends by itself.

The grid has a point every 64 tokens up to 1,024 and 8 points in each doubling from there: what two prompts share is
seen short by at most 64 tokens or an eighth, and a prompt of 131,072 tokens costs 72 points. The newest choice speaks
for a worker's prefix; when it ends, so does the expectation.

The table is used for answers of workers whose events don't tell, too: :mod:`kvsync.routing.observed`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import xxhash

CAPACITY: Final = 1 << 17
"""Prefixes that a table remembers at most, about 40 MB of them."""

_STEP = 64
_LONGEST = 1 << 24


def _grid() -> tuple[int, ...]:
    points, step = [_STEP], _STEP
    while points[-1] < _LONGEST:
        if points[-1] >= 16 * step:
            step *= 2
        points.append(points[-1] + step)
    return tuple(points)


GRID = _grid()
"""Prefix lengths in tokens, ascending."""


def prefix_keys(tokens: bytes, seed: int) -> list[int]:
    """Hashes of the prompt's prefixes at the grid's points.

    Args:
        tokens: packed uint32.
        seed: of whatever else tells two prompts apart (:func:`context_seed`).
    """
    view, begin, key, keys = memoryview(tokens), 0, seed, []
    for point in GRID[: bisect_right(GRID, len(tokens) // 4)]:
        end = 4 * point
        key = xxhash.xxh3_64_intdigest(view[begin:end], key)  # a chain: it tells all that came before apart
        keys.append(key)
        begin = end
    return keys


@lru_cache(1024)
def context_seed(*parts: str | None) -> int:
    """The seed for one model, adapter, cache salt and so on."""
    return int(xxhash.xxh3_64_intdigest(repr(parts).encode()))


class Hope(NamedTuple):
    """What is expected of one worker for one prompt."""

    tokens: int
    """From the prompt's first token on."""
    pending: bool
    """They are still to be computed: they wait in the worker's queue."""


class Expectation:
    """One choice's entry. Made by :meth:`ExpectedTable.expect`."""

    __slots__ = ("_table", "expires", "keys", "live", "pending", "worker")

    def __init__(self, table: ExpectedTable, worker: str, keys: Sequence[int], expires: float) -> None:
        self._table = table
        self.worker = worker
        self.keys = keys
        self.expires = expires
        self.pending = True
        self.live = True

    def computed(self) -> None:
        """The prompt is computed: what is expected now waits for its store event only."""
        self.pending = False

    def end(self) -> None:
        self._table.remove(self)


class ExpectedTable:
    """The expectations of all workers.

    Args:
        lifetime: seconds after which each ends.
        clock: monotonic seconds.
        capacity: prefixes that all of them together may have; above, the oldest ends first.
    """

    def __init__(self, lifetime: float, clock: Callable[[], float], capacity: int = CAPACITY) -> None:
        self._lifetime = lifetime
        self._clock = clock
        self._capacity = capacity
        self._by_key: dict[int, dict[str, Expectation]] = {}
        self._queue: deque[Expectation] = deque()
        """In order of expiry, since all live equally long; those that ended earlier are left in it for a while."""
        self._live = 0
        self._by_worker: Counter[str] = Counter()
        self._weight = 0
        """Prefixes of those that live."""
        self.dropped = 0
        """Ended because there were too many."""

    def __len__(self) -> int:
        """Expectations that may still count."""
        return self._live

    @property
    def keys(self) -> int:
        """Prefixes remembered, for all of them together."""
        return len(self._by_key)

    def of(self, worker: str) -> int:
        """Expectations of one worker."""
        self._expire()
        return self._by_worker[worker]

    def expect(self, worker: str, keys: Sequence[int]) -> Expectation:
        """The worker was just given a prompt with these prefixes (at least one)."""
        self._expire()
        expectation = Expectation(self, worker, keys, self._clock() + self._lifetime)
        by_key = self._by_key
        for key in keys:
            holders = by_key.get(key)
            if holders is None:
                by_key[key] = {worker: expectation}
                continue
            older = holders.get(worker)
            holders[worker] = expectation
            if older is not None and older.keys[-1] == key:  # it has no word left to say
                self.remove(older)
        self._queue.append(expectation)
        self._live += 1
        self._by_worker[worker] += 1
        self._weight += len(keys)
        self._bound()
        return expectation

    def lookup(self, keys: Sequence[int]) -> dict[str, Hope]:
        """What each worker may be expected to hold of the prompt with these prefixes."""
        self._expire()
        by_key = self._by_key
        hopes: dict[str, Hope] = {}
        for place in range(self._known(keys) - 1, -1, -1):
            for worker, expectation in by_key[keys[place]].items():
                if worker not in hopes:
                    hopes[worker] = Hope(GRID[place], expectation.pending)
        return hopes

    def end(self, worker: str, keys: Sequence[int]) -> None:
        """What is expected of the worker for the prompt with these prefixes has proved wrong."""
        self._expire()
        for place in range(self._known(keys) - 1, -1, -1):
            expectation = self._by_key[keys[place]].get(worker)
            if expectation is not None:
                self.remove(expectation)
                return

    def remove(self, expectation: Expectation) -> None:
        if not expectation.live:
            return
        expectation.live = False
        by_key, worker = self._by_key, expectation.worker
        for key in expectation.keys:
            holders = by_key.get(key)
            if holders is not None and holders.get(worker) is expectation:
                del holders[worker]
                if not holders:
                    del by_key[key]
        self._weight -= len(expectation.keys)
        expectation.keys = ()
        self._live -= 1
        self._by_worker[worker] -= 1
        if not self._by_worker[worker]:
            del self._by_worker[worker]

    def drop(self, worker: str) -> None:
        """The worker is gone."""
        for expectation in self._queue:
            if expectation.worker == worker:
                self.remove(expectation)

    def _known(self, keys: Sequence[int]) -> int:
        """How many of the prompt's prefixes anybody is expected to hold."""
        by_key = self._by_key
        known = 0
        for key in keys:
            if key not in by_key:
                break
            known += 1
        return known

    def _bound(self) -> None:
        queue = self._queue
        while self._weight > self._capacity:
            oldest = queue.popleft()
            self.dropped += oldest.live
            self.remove(oldest)
        if len(queue) > 2 * self._live + 1024:
            self._queue = deque(expectation for expectation in queue if expectation.live)

    def _expire(self) -> None:
        queue = self._queue
        if not queue:
            return
        now = self._clock()
        while queue and (queue[0].expires <= now or not queue[0].live):
            self.remove(queue.popleft())


__all__ = ["CAPACITY", "GRID", "Expectation", "ExpectedTable", "Hope", "context_seed", "prefix_keys"]
