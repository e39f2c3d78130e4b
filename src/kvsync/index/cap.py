"""Room for new blocks: what goes when all workers together hold more than they may.

Whole classes go, tails first: what has no key matches nothing; of the others the deepest, and those that were read
since the last time after all that were not. So the head of a chain outlives its tail, and a hot one outlives all.
What must always hold: a worker that lost blocks here says so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from kvsync.events.types import EngineHash
from kvsync.index.worker import Worker

_Class: TypeAlias = tuple[int, int]
"""Sorts: (0, 0) without a key, (1, −depth) not read, (2, −depth) read."""


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
        worker.read.clear()


def _classes(worker: Worker) -> dict[_Class, list[EngineHash]]:
    classes: dict[_Class, list[EngineHash]] = {}
    for engine_hash in worker.residence.hashes:
        depth = worker.placement.depth(engine_hash)
        rank = (0, 0) if depth is None else (2 if engine_hash in worker.read else 1, -depth)
        classes.setdefault(rank, []).append(engine_hash)
    return classes


__all__ = ["make_room"]
