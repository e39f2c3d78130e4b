"""Room for new blocks: what goes when all workers together hold more than they may.

Whole classes go, tails first: what has no key matches nothing; of the others the deepest, and those that were read
since the last time after all that were not. So the head of a chain outlives its tail, and a hot one outlives all.
What must always hold: a worker that lost blocks here says so; a key is read at all workers of its model, from the match
that found it on, until the next time or until none of them has it any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

from kvsync.events.types import EngineHash
from kvsync.index.keys import Key

if TYPE_CHECKING:
    from kvsync.index.worker import Worker

BLOCK_BYTES: Final = 512
"""What a block takes in this implementation, all told, with some to spare (330 were seen)."""

_Class: TypeAlias = tuple[int, int]
"""Sorts: (0, 0) without a key, (1, −depth) not read, (2, −depth) read."""


class Reads:
    """Which keys of one model were read since room was last made."""

    def __init__(self) -> None:
        self._holders: Counter[Key] = Counter()
        """By key: how many blocks have it, of all workers."""
        self._read: set[Key] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._read

    def held(self, key: Key) -> None:
        """A block of this key is there, one more."""
        self._holders[key] += 1

    def left(self, key: Key) -> None:
        """A block of this key is there no more."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self._read.discard(key)

    def note(self, keys: Iterable[Key]) -> None:
        """A match found these."""
        self._read.update(key for key in keys if key in self._holders)

    def clear(self) -> None:
        self._read.clear()


def make_room(workers: Collection[Worker], most: int) -> None:
    """Drop blocks while there are more than ``most``, until an eighth of it is free."""
    total = sum(worker.residence.blocks for worker in workers)
    if total <= most:
        return
    classes: dict[_Class, list[tuple[Worker, list[EngineHash]]]] = {}
    for worker in workers:
        for rank, hashes in _classes(worker).items():
            classes.setdefault(rank, []).append((worker, hashes))
    touched = {}
    for rank in sorted(classes):
        if total <= most - most // 8:
            break
        for worker, hashes in classes[rank]:
            worker.cap(hashes)
            total -= len(hashes)
            touched[id(worker)] = worker
    for worker in touched.values():
        worker.positions.lose()
    for worker in workers:
        worker.reads.clear()


def _classes(worker: Worker) -> dict[_Class, list[EngineHash]]:
    classes: dict[_Class, list[EngineHash]] = {}
    for engine_hash in worker.residence.hashes:
        spot = worker.placement.spot(engine_hash)
        rank = (0, 0) if spot is None else (2 if spot[0] in worker.reads else 1, -spot[1])
        classes.setdefault(rank, []).append(engine_hash)
    return classes


__all__ = ["BLOCK_BYTES", "Reads", "make_room"]
