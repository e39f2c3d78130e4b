"""The work that all sides get, from seeds (nothing has to be sent along): prompts, and what engines do with them.

A *script* is the life of one engine's cache: batches of events, in no particular format. ``bench.traffic`` writes them
as vLLM does; :func:`ready` writes them as Dynamo's radix tree takes them, decoded and hashed.

Standard library only: peers' environments use it too.
"""

from __future__ import annotations

import json
import random
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

BLOCK = 16
"""Tokens per block."""
VOCABULARY = 1 << 17
"""Token ids are spread evenly below this: half of them need five bytes on the wire."""
GIVEN = 1 << 41
"""Where the seeds of prompts begin whose tokens were given: only their hashes come from them."""
Chain: TypeAlias = tuple[int, int]
"""Seed and blocks of one prompt."""


def tokens(seed: int, blocks: int) -> array[int]:
    """The token ids of a prompt. A shorter prompt of the same seed is the beginning of a longer one."""
    count = blocks * BLOCK
    raw = int.from_bytes(random.Random(seed).randbytes(4 * count), "little")
    mask = int.from_bytes(struct.pack("<I", VOCABULARY - 1) * count, "little")
    return array("I", (raw & mask).to_bytes(4 * count, "little"))


def hashes(seed: int, blocks: int) -> array[int]:
    """64-bit hashes for the blocks of a prompt, as different as random numbers."""
    return array("Q", random.Random(f"hashes {seed}").randbytes(8 * blocks))


class Prompt:
    """One prompt in an engine's cache.

    Args:
        salt: what the engine's names of blocks hang on beside the tokens: 0 where all engines seed alike.
    """

    def __init__(self, chain: Chain, salt: int = 0) -> None:
        self.seed, self.blocks = chain
        self._salt = salt

    @cached_property
    def ids(self) -> list[int]:
        return tokens(self.seed, self.blocks).tolist()

    @cached_property
    def names(self) -> list[int]:
        """The engine's hashes."""
        return hashes(self.seed + (self._salt << 32), self.blocks).tolist()

    @cached_property
    def ready(self) -> list[int]:
        """What stands for the hash of each block's own tokens where those are not hashed."""
        return hashes(self.seed + (1 << 40), self.blocks).tolist()


@dataclass(frozen=True, slots=True)
class Store:
    prompt: Prompt
    at: int
    """The first block."""
    count: int

    @property
    def parent(self) -> int | None:
        return self.prompt.names[self.at - 1] if self.at else None

    @property
    def span(self) -> slice:
        return slice(self.at, self.at + self.count)


@dataclass(frozen=True, slots=True)
class Remove:
    name: int


@dataclass(frozen=True, slots=True)
class Clear:
    pass


Event: TypeAlias = Store | Remove | Clear
Batches: TypeAlias = Iterator[list[Event]]


def store(wanted: Sequence[Chain], per_batch: int, salt: int = 0) -> Batches:
    """Store prompts, one after the other."""
    for chain in wanted:
        prompt = Prompt(chain, salt)
        for at in range(0, prompt.blocks, per_batch):
            yield [Store(prompt, at, min(per_batch, prompt.blocks - at))]


def given(prompts: Sequence[Sequence[int]], per_batch: int) -> Batches:
    """Store prompts of these token ids, whole blocks of them."""
    for number, ids in enumerate(prompts):
        prompt = Prompt((GIVEN + number, len(ids) // BLOCK))
        prompt.ids = list(ids)
        for at in range(0, prompt.blocks, per_batch):
            yield [Store(prompt, at, min(per_batch, prompt.blocks - at))]


def churn(first: int, count: int, length: int, per_batch: int, live: int) -> Batches:
    """``count`` prompts, numbered from ``first``, each stored by a cache that then holds more than ``live`` blocks and
    evicts what was stored longest ago, tails first, in the same batches. It begins full, with the prompts before
    ``first``: so a life can be told in parts."""
    old = deque(Prompt((first - n, length)).names for n in range(live // length, 0, -1))
    for number in range(first, first + count):
        prompt = Prompt((number, length))
        gone = old.popleft()
        for at in range(0, length, per_batch):
            some = min(per_batch, length - at)
            yield [*(Remove(gone.pop()) for _ in range(some)), Store(prompt, at, some)]
        old.append(list(prompt.names))


def clears(wanted: Sequence[Chain], per_batch: int) -> Batches:
    """Clear the cache, then store prompts."""
    yield [Clear()]
    yield from store(wanted, per_batch)


SCRIPTS: Mapping[str, Callable[..., Batches]] = {"store": store, "given": given, "churn": churn, "clears": clears}


def script(kind: str, **arguments: Any) -> Batches:
    """A script by name: how it is told to other processes."""
    return SCRIPTS[kind](**arguments)


def ready(event: Event, number: int) -> bytes:
    """An event as ``RadixTree.apply_event`` takes it: JSON, with the blocks' hashes in it."""
    match event:
        case Store(prompt):
            pairs = zip(prompt.names[event.span], prompt.ready[event.span], strict=True)
            blocks = [{"block_hash": name, "tokens_hash": hash_} for name, hash_ in pairs]
            data: Any = {"stored": {"parent_hash": event.parent, "blocks": blocks}}
        case Remove(name):
            data = {"removed": {"block_hashes": [name]}}
        case Clear():
            data = "cleared"
    return json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()
