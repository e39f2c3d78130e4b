"""The events that engines publish, as plain immutable values.

These are the types of the public API. They say what stood on the wire, nothing more: engine hashes are opaque
names chosen by the engine, token ids are packed big-endian, and every optional field that a dialect does not send
is ``None``. Nothing here knows of sockets, sequence numbers or the index.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import TypeAlias

EngineHash: TypeAlias = int | bytes | str
"""An engine's own name for a block: signed (vLLM ≤ 0.10) or unsigned 64-bit int, 8 to 32 bytes, or a string."""


@dataclass(frozen=True, slots=True)
class Salt:
    """A request's ``cache_salt``: travels with the first block only."""

    value: str


@dataclass(frozen=True, slots=True)
class Image:
    """A multimodal item that overlaps the block.

    ``offset`` is the item's first placeholder token relative to the block's first token (may be negative); ``None``
    in the dialects of vLLM 0.17 and 0.18, which send the identifier alone.
    """

    identifier: str
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Embeds:
    """A digest of prompt embeddings that overlap the block."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Opaque:
    """An extra key of a kind that this version doesn't know: it keeps blocks apart and matches no request."""

    raw: bytes


ExtraKey: TypeAlias = Salt | Image | Embeds | Opaque
"""What besides parent and tokens tells two blocks apart. The adapter is not among them: it is part of the context."""


def hash_to_int64(engine_hash: EngineHash) -> int:
    """An engine hash as AIBrix's contract gives it: a signed 64-bit integer.

    Ints above 2**63 − 1 are reinterpreted as two's complement; of bytes (and of a string's UTF-8) the first 8,
    big-endian, shorter ones padded with zeros on the left.
    """
    if isinstance(engine_hash, int):
        value = engine_hash & 0xFFFF_FFFF_FFFF_FFFF
    else:
        raw = engine_hash.encode() if isinstance(engine_hash, str) else engine_hash
        value = int.from_bytes(raw[:8], "big")
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True, slots=True)
class BlockStoredEvent:
    """One or more blocks entered a cache.

    ``raw_token_ids`` holds all tokens as big-endian uint32. It is *not* always ``len(block_hashes) × block_size``
    tokens long: window and state groups of hybrid models name only some of the blocks of their token range, and
    offload placeholders carry no tokens and block size 0.
    """

    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None
    raw_token_ids: bytes
    block_size: int
    lora_id: int = -1
    """AIBrix's form: −1 when the block belongs to no adapter, or to one that the dialect gives by name only."""
    lora_name: str | None = None
    medium: str | None = None
    """As on the wire, in any letter case; ``None`` in dialects without it (vLLM < 0.10.2: GPU)."""
    extra_keys: tuple[tuple[ExtraKey, ...], ...] | None = None
    """Per block, typed, the adapter's name taken out; ``None`` when the event carries none (they may be hidden)."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None
    model_name: str | None = None
    """Filled by whoever knows which engine published it; the wire does not say."""
    source_pod: str | None = None
    """As ``model_name``."""

    @property
    def hashes_int64(self) -> tuple[int, ...]:
        return tuple(hash_to_int64(h) for h in self.block_hashes)

    @property
    def token_ids(self) -> tuple[bytes, ...]:
        """Tokens per block, big-endian uint32; empty where they can't be split (see the class)."""
        step = self.block_size * 4
        if step <= 0 or len(self.raw_token_ids) != step * len(self.block_hashes):
            return ()
        return tuple(self.raw_token_ids[i : i + step] for i in range(0, len(self.raw_token_ids), step))


@dataclass(frozen=True, slots=True)
class BlockRemovedEvent:
    """One physical copy of each named block left a cache."""

    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    remaining_copy_counts: tuple[int, ...] | None = None
    """Copies left per hash after this removal, where an engine says so (vLLM proposal #48933); else ``None``."""
    lora_id: int = -1
    model_name: str | None = None
    source_pod: str | None = None

    @property
    def hashes_int64(self) -> tuple[int, ...]:
        return tuple(hash_to_int64(h) for h in self.block_hashes)


@dataclass(frozen=True, slots=True)
class AllBlocksClearedEvent:
    """The engine emptied its cache. It does not say which tier: read as every tier."""

    model_name: str | None = None
    source_pod: str | None = None


KVEvent: TypeAlias = BlockStoredEvent | BlockRemovedEvent | AllBlocksClearedEvent


@dataclass(frozen=True, slots=True)
class SkippedEvent:
    """An event that could not be read, in the place where it stood."""

    tag: str
    reason: str
    """One of: ``unknown_tag``, ``no_tag``, ``not_an_event``, ``missing_field``, ``wrong_type``, ``bad_hash``,
    ``bad_token``, ``bad_block_size``, ``bad_group``."""
    may_remove: bool
    """True when blocks may have left the cache by it (Remove, Clear or Evict in its tag, or no readable tag): then what
    is known of the worker can't be trusted any more."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One ZMQ message's payload."""

    ts: float
    events: tuple[KVEvent | SkippedEvent, ...]
    """In wire order; a :class:`SkippedEvent` keeps the place of what could not be read."""
    data_parallel_rank: int | None = None

    @property
    def skipped(self) -> tuple[SkippedEvent, ...]:
        return tuple(e for e in self.events if isinstance(e, SkippedEvent))


class UndecodableBatch(ValueError):
    """The payload is not an event batch at all. ``reason`` is a short word for a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"not an event batch ({reason}): {detail}")
        self.reason = reason


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as big-endian uint32.

    Raises:
        OverflowError: a token is negative or above 2**32 − 1.
        TypeError: a token is not an int.
    """
    packed = array("I", tokens)
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


__all__ = [
    "AllBlocksClearedEvent",
    "BlockRemovedEvent",
    "BlockStoredEvent",
    "Embeds",
    "EngineHash",
    "EventBatch",
    "ExtraKey",
    "Image",
    "KVEvent",
    "Opaque",
    "Salt",
    "SkippedEvent",
    "UndecodableBatch",
    "hash_to_int64",
    "pack_tokens",
]
