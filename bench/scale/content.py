"""What a fleet's caches hold, made fast enough to fill them: 20 million blocks in less time than the index takes.

Prompts are of three lengths: a few of 131,072 tokens, some of 16,384, and 2,048 for the rest. The first 512 tokens of
each are one of 64 system prompts, so that a lookup finds many workers that hold a little, and one that holds all. Each
prompt is held by one worker; a worker stores a system prompt once. Blocks have the same names wherever they are.

Payloads are a template that msgpack encoded once, with hashes, parent and two tokens of each event patched in: the key
of a block hangs on all tokens before it, so that these two make all further blocks different. What must always hold: a
payload is what msgpack would make of its event, and a prompt's tokens are those that were stored.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from bench.traffic import payload
from bench.work import BLOCK, tokens

RUN = 16
"""Blocks of one event."""
FAMILIES = 64
PREFIX = 32
"""Blocks of a system prompt."""
LONG, MIDDLE, SHORT = 8_192, 1_024, 128
"""Blocks of a prompt."""
LONGS, MIDDLES = 32, 256
"""How many of these there are."""
IN_TURNS = 64
"""Prompts that are stored at one time, an event of each in turn."""
PATCHED = 2
"""Tokens of each event that tell whose it is, beyond any vocabulary (their width on the wire is fixed)."""
OWNERS = 1 << 20
"""Above all numbers of events, and below it no token that is patched in."""

_HOLE = (1 << 64) - 1
_TOKENS = tokens(1, RUN)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of blocks with an identity: a system prompt, or what one prompt has of its own."""

    number: int
    blocks: int

    def hashes(self) -> bytes:
        """All of them, 8 bytes each, as they are on the wire."""
        return random.Random(self.number).randbytes(8 * self.blocks)

    def tokens(self) -> array[int]:
        made = _TOKENS * (self.blocks // RUN)
        for event in range(self.blocks // RUN):
            made[event * RUN * BLOCK : event * RUN * BLOCK + PATCHED] = array("I", self._patch(event))
        return made

    def _patch(self, event: int) -> tuple[int, int]:
        return OWNERS + self.number, OWNERS + event

    def payloads(self, parent: bytes | None) -> Iterator[bytes]:
        """Batches that store it behind a block."""
        names = self.hashes()
        for event in range(self.blocks // RUN):
            of_event = names[8 * RUN * event : 8 * RUN * (event + 1)]
            template = _FIRST if parent is None else _NEXT
            yield template.filled(of_event, parent, self._patch(event))
            parent = of_event[-8:]


class _Template:
    def __init__(self, parent: int | None) -> None:
        ids = [(1 << 32) - 1] * PATCHED + _TOKENS.tolist()[PATCHED:]
        self._bytes = bytearray(payload(1.0, msgspec.msgpack.encode([_event([_HOLE] * RUN, parent, ids)]) + b"\0"))
        hole = b"\xcf" + b"\xff" * 8
        self._hashes = self._bytes.index(hole * RUN)
        self._parent = None if parent is None else self._bytes.index(hole, self._hashes + 9 * RUN) + 1
        self._tokens = self._bytes.index(b"\xce" + b"\xff" * 4) + 1

    def filled(self, hashes: bytes, parent: bytes | None, patch: tuple[int, int]) -> bytes:
        made, at = self._bytes, self._hashes + 1
        for byte in range(8):
            made[at + byte : at + byte + 9 * (RUN - 1) + 1 : 9] = hashes[byte::8]
        if parent is not None:
            assert self._parent is not None
            made[self._parent : self._parent + 8] = parent
        for number, token in enumerate(patch):
            made[self._tokens + 5 * number : self._tokens + 5 * number + 4] = token.to_bytes(4, "big")
        return bytes(made)


def _event(hashes: list[int], parent: int | None, ids: list[int]) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * RUN,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


_FIRST, _NEXT = _Template(None), _Template(_HOLE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a system prompt, and what follows."""

    number: int
    worker: int
    blocks: int

    @property
    def system(self) -> Part:
        return Part(self.number % FAMILIES, PREFIX)

    @property
    def own(self) -> Part:
        return Part(FAMILIES + self.number, self.blocks - PREFIX)

    def tokens(self) -> array[int]:
        """And one more: engines compute at least one."""
        return self.system.tokens() + self.own.tokens() + array("I", [0])


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many workers, which hold so many blocks in all (a block held by two counts twice)."""

    workers: int
    blocks: int

    def prompts(self) -> Iterator[Prompt]:
        """Dealt in turns, the long ones first, until all blocks are there."""
        seen: set[tuple[int, int]] = set()
        left = self.blocks
        for number in itertools.count():
            blocks = LONG if number < LONGS else MIDDLE if number < LONGS + MIDDLES else SHORT
            made = Prompt(number, number % self.workers, blocks)
            new = (made.worker, made.system.number) not in seen
            left -= blocks - (0 if new else PREFIX)
            if left < 0:
                return
            seen.add((made.worker, made.system.number))
            yield made


def payloads(prompts: Iterable[Prompt]) -> Iterator[tuple[int, bytes]]:
    """What storing these publishes, with the worker's number."""
    seen: set[tuple[int, int]] = set()
    left = iter(prompts)
    while some := list(itertools.islice(left, IN_TURNS)):
        lives = [_life(each, seen) for each in some]
        for batches in itertools.zip_longest(*lives):
            for each, body in zip(some, batches, strict=True):
                if body is not None:
                    yield each.worker, body


def _life(prompt: Prompt, seen: set[tuple[int, int]]) -> Iterator[bytes]:
    system = prompt.system
    if (prompt.worker, system.number) not in seen:
        seen.add((prompt.worker, system.number))
        yield from system.payloads(None)
    yield from prompt.own.payloads(system.hashes()[-8:])
