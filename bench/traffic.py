"""What engines publish: event batches in vLLM's wire format (maps, as of 0.23 and later), without the time of sending.

A *script* is the life of one stream: an endless supply of :class:`Step`, or a short one. Their payloads lack the first
fields, the time, because that is known when they are sent: :func:`payload`.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bench.work import BLOCK, hashes, tokens

encode = msgspec.msgpack.encode

Chain = tuple[int, int]
"""Seed and blocks of one prompt."""


def payload(sent: float, rest: bytes) -> bytes:
    """A message's payload: ``[time, events, rank]``."""
    return b"\x93\xcb" + struct.pack(">d", sent) + rest


def rest(*events: Mapping[str, Any]) -> bytes:
    return encode(events) + encode(0)


def stored(names: Sequence[int], parent: int | None, ids: Sequence[int]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(name: int) -> dict[str, Any]:
    """vLLM tells of each block that it evicts in an event of its own."""
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def _stores(chain: Chain, per_batch: int, salt: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """The events that tell of one chain. ``salt``: what an engine's names for blocks hang on beside the tokens."""
    seed, blocks = chain
    ids = tokens(seed, blocks).tolist()
    names = hashes(seed ^ salt, blocks).tolist()
    for at in range(0, blocks, per_batch):
        some = names[at : at + per_batch]
        yield some, stored(some, names[at - 1] if at else None, ids[at * BLOCK : (at + per_batch) * BLOCK])


def chains(wanted: Sequence[Chain], per_batch: int, salt: int = 0) -> Iterator[bytes]:
    """Store prompts, one after the other."""
    for chain in wanted:
        for _, event in _stores(chain, per_batch, salt):
            yield rest(event)


def churn(wanted: Sequence[Chain], per_batch: int, live: int) -> Iterator[bytes]:
    """The same by a full cache of ``live`` blocks: each batch also evicts what was stored longest ago, tails first."""
    order: deque[list[int]] = deque()
    held = 0
    for chain in wanted:
        parts = []
        for names, event in _stores(chain, per_batch, 0):
            gone: list[int] = []
            while order and held + len(names) > live:
                oldest = order[0]
                take = min(len(oldest), held + len(names) - live)
                gone += [oldest.pop() for _ in range(take)]
                held -= take
                if not oldest:
                    order.popleft()
            parts.append(names)
            held += len(names)
            yield rest(*map(removed, gone), event)
        order.append(list(itertools.chain.from_iterable(parts)))


def clears(wanted: Sequence[Chain], per_batch: int, rounds: int, seed: int) -> Iterator[bytes]:
    """Store as many blocks, each time new ones, and clear the cache; the last ``wanted`` chains stay."""
    for number in range(rounds):
        fresh = [(seed + number * len(wanted) + at, blocks) for at, (_, blocks) in enumerate(wanted)]
        yield from chains(fresh, per_batch)
        yield rest(cleared())
    yield from chains(wanted, per_batch)


SCRIPTS: Mapping[str, Callable[..., Iterator[bytes]]] = {"chains": chains, "churn": churn, "clears": clears}


def script(kind: str, **arguments: Any) -> Iterator[bytes]:
    return SCRIPTS[kind](**arguments)
