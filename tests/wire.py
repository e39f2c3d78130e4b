"""Builds event batches as vLLM's publisher of any version encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Event = dict[str, Any]

STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED = ("block_hashes", "medium", "group_idx")
ARRAY_LENGTHS = {
    "0.9.0": (5, 1),
    "0.10.2": (6, 2),
    "0.14.0": (7, 2),
    "0.17.0": (8, 2),
    "0.20.0": (9, 3),
    "0.22.0": (11, 3),
}
"""Version → how many fields BlockStored and BlockRemoved have in it, the tag apart."""


def stored(
    hashes: Sequence[Any], tokens: Sequence[int], parent: Any = None, block_size: int = 4, **fields: Any
) -> Event:
    """A BlockStored event of a GPU cache as 0.32 sends it; ``fields`` adds or replaces (``...`` removes)."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | fields
    return {name: value for name, value in event.items() if value is not ...}


def removed(hashes: Sequence[Any], **fields: Any) -> Event:
    event = {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0} | fields
    return {name: value for name, value in event.items() if value is not ...}


def cleared() -> Event:
    return {"type": "AllBlocksCleared"}


def as_array(event: Event, version: str) -> list[Any]:
    """The positional form of an event in a version up to 0.23."""
    stored_length, removed_length = ARRAY_LENGTHS[version]
    names = {"BlockStored": STORED[:stored_length], "BlockRemoved": REMOVED[:removed_length]}.get(event["type"], ())
    return [event["type"], *(event.get(name) for name in names)]


def batch(*events: Any, ts: float = 1.0, rank: Any = 0) -> bytes:
    """One message's payload."""
    return msgspec.msgpack.encode([ts, list(events), rank])
