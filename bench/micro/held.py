"""Indexes that know what workers hold, for the benchmarks of calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from bench.traffic import payload, rest
from bench.work import BLOCK, Batches, store, tokens
from kvsync.index import PrefixIndex
from kvsync.index.match import Index

MODEL = "model"
PROMPT = 1
"""The seed of the prompt that is asked for."""


def names(workers: int) -> list[str]:
    return [f"worker-{number}" for number in range(workers)]


def empty(workers: int) -> Index:
    index = PrefixIndex()
    _add(index, workers)
    return index


def _add(index: Index, workers: int) -> None:
    for worker in names(workers):
        index.add_worker(worker, MODEL)


def wire(worker: str, batches: Batches) -> list[tuple[str, bytes]]:
    return [(worker, payload(1.0 + number, rest(events))) for number, events in enumerate(batches)]


def holding(workers: int, blocks: int) -> Index:
    """Every worker holds so many blocks of the prompt."""
    index = PrefixIndex()
    fill(index, workers, blocks)
    return index


def fill(index: Index, workers: int, blocks: int) -> None:
    """The same, of an index that has no workers yet."""
    _add(index, workers)
    for worker in names(workers):
        index.apply_many(wire(worker, store([(PROMPT, blocks)], 16)))


def prompt(blocks: int) -> array[int]:
    """A token more than its blocks: engines compute at least one."""
    asked = tokens(PROMPT, blocks)
    asked.append(0)
    return asked


def credited(index: Index, asked: array[int], workers: Sequence[str]) -> bool:
    """All of them hold all of it."""
    blocks = len(asked) // BLOCK
    return {name: match.credit for name, match in index.match(asked, MODEL).items()} == dict.fromkeys(
        workers, blocks * BLOCK
    )
