"""What happened to the cache, before any dialect gives it a wire form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvsync.engine_sim.hashing import BlockHash

ExtraKeys: TypeAlias = tuple[str, ...] | None
"""What besides the tokens names one block: the adapter's name, then (first block only) the salt."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became findable. Window groups store only some blocks of the token range: ``hashes`` may be shorter than
    the range, and even empty."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: tuple[int, ...]
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[ExtraKeys, ...]
    """One per hash."""
    group: int
    kind: str
    window: int | None
    session_id: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """One physical copy left the cache."""

    block_hash: BlockHash
    group: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was emptied."""


CacheEvent: TypeAlias = Stored | Removed | Cleared
