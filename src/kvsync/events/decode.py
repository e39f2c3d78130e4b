"""msgpack payload → :class:`EventBatch`, for every dialect of vLLM's publisher from 0.9 on.

What must always hold:

* One bad event costs that event, never its batch; a payload that is no batch raises :class:`UndecodableBatch` and
  nothing else, whatever the bytes are.
* Lengths that a payload declares are never trusted: nothing is allocated that the payload does not back with bytes.
* Nothing is guessed: a field of the wrong type makes a :class:`SkippedEvent` that says so.

The batch is an array ``[ts, events, data_parallel_rank?]`` (a map with the same names is taken too). Events are arrays
with positional fields up to vLLM 0.23 and maps from 0.24 on (vLLM #42892); both may be mixed in one batch. Shorter and
longer arrays and unknown map keys are fine. Each layer is decoded on its own with the inner ones left raw, so that a
fault is contained in the smallest thing that has it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from sys import byteorder
from typing import Any, Final

import msgspec
from msgspec import Raw
from typing_extensions import Buffer

from kvsync.events.types import (
    AllBlocksClearedEvent,
    BlockRemovedEvent,
    BlockStoredEvent,
    Embeds,
    EngineHash,
    EventBatch,
    ExtraKey,
    Image,
    KVEvent,
    Opaque,
    Salt,
    SkippedEvent,
    UndecodableBatch,
)

MAX_PAYLOAD: Final = 16 << 20
"""Bytes; a larger payload is refused unread. The largest real ones, one scheduler step's, are a few hundred kB."""
MAX_EVENTS: Final = 1 << 18
"""Of a batch; one with more is refused undecoded. A step stores and evicts a few thousand blocks at most."""
MAX_HASHES: Final = 1 << 17
"""Of a batch; one with more is refused, because lookups wait while a batch is applied, and see all of it or nothing."""
MAX_GROUPS: Final = 256
"""KV-cache groups of one engine. Models have a handful, and never more than layers; a removal that names none of them
is for all."""

_STORED_FIELDS: Final = (
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
"""Positions 1 … 11 of the array form, as they grew from 0.9.0 to 0.23.0."""
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")

_as_any = msgspec.msgpack.Decoder()
_as_array = msgspec.msgpack.Decoder(list[Raw])
_as_map = msgspec.msgpack.Decoder(dict[str, Raw])
_as_str = msgspec.msgpack.Decoder(str)
_as_optional_str = msgspec.msgpack.Decoder(str | None)
_as_optional_int = msgspec.msgpack.Decoder(int | None)
_as_ints = msgspec.msgpack.Decoder(list[int] | None)
_as_number = msgspec.msgpack.Decoder(float)

_BAD_BYTES: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)
_NIL: Final = 0xC0


class _Bad(Exception):
    """One event can't be read; the argument is the reason."""


def decode_batch(payload: Buffer) -> EventBatch:
    """Decode one message's payload.

    Raises:
        UndecodableBatch: the payload is not an event batch; ``reason`` is one of ``too_large``, ``not_msgpack``,
            ``not_a_batch``, ``missing_field``, ``wrong_type``.
    """
    view = memoryview(payload).cast("B")
    if len(view) > MAX_PAYLOAD:
        raise UndecodableBatch("too_large", f"{len(view)} bytes, at most {MAX_PAYLOAD} are read")
    fields = _batch_fields(view)
    try:
        ts = _as_number.decode(fields[0])
    except _BAD_BYTES as error:
        raise UndecodableBatch("wrong_type", f"timestamp: {error}") from None
    if _declared_length(fields[1]) > MAX_EVENTS:
        raise UndecodableBatch("too_large", f"more than {MAX_EVENTS} events")
    try:
        events = _as_array.decode(fields[1])
    except _BAD_BYTES as error:
        raise UndecodableBatch("wrong_type", f"events: {error}") from None
    try:
        rank = _as_optional_int.decode(fields[2]) if len(fields) > 2 else None
    except _BAD_BYTES as error:
        raise UndecodableBatch("wrong_type", f"data_parallel_rank: {error}") from None
    return EventBatch(ts, tuple(_decoded(events)), rank)


def _decoded(events: list[Raw]) -> Iterator[KVEvent | SkippedEvent]:
    hashes = 0
    for raw in events:
        event = _event(raw)
        if isinstance(event, (BlockStoredEvent, BlockRemovedEvent)):
            hashes += len(event.block_hashes)
        if hashes > MAX_HASHES:
            raise UndecodableBatch("too_large", f"more than {MAX_HASHES} block hashes")
        yield event


def _batch_fields(view: memoryview) -> list[Raw]:
    if not view:
        raise UndecodableBatch("not_msgpack", "empty payload")
    try:
        if _is_array(view[0]):
            fields = _as_array.decode(view)
        elif _is_map(view[0]):
            named = _as_map.decode(view)
            fields = [named[name] for name in ("ts", "events", "data_parallel_rank") if name in named]
            if "ts" not in named or "events" not in named:
                raise UndecodableBatch("missing_field", "a batch needs ts and events")
        else:
            raise UndecodableBatch("not_a_batch", f"first byte 0x{view[0]:02x} opens neither array nor map")
    except _BAD_BYTES as error:
        raise UndecodableBatch("not_msgpack", str(error)) from None
    if len(fields) < 2:
        raise UndecodableBatch("missing_field", f"a batch has at least 2 items, not {len(fields)}")
    return fields


def _is_array(first: int) -> bool:
    return first & 0xF0 == 0x90 or first in (0xDC, 0xDD)


def _is_map(first: int) -> bool:
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def _declared_length(raw: Raw) -> int:
    """How many items an array says that it has; 0 for anything else."""
    view = memoryview(raw)
    if view[0] & 0xF0 == 0x90:
        return view[0] & 0x0F
    return int.from_bytes(view[1 : {0xDC: 3, 0xDD: 5}.get(view[0], 1)], "big")


def _is_nil(raw: Raw) -> bool:
    return memoryview(raw)[0] == _NIL


def _event(raw: Raw) -> KVEvent | SkippedEvent:
    first = memoryview(raw)[0]
    tag = ""
    try:
        if _is_array(first):
            items = _as_array.decode(raw)
            if not items:
                raise _Bad("no_tag")
            tag = _tag(items[0])
            return _build(tag, None, items[1:])
        if _is_map(first):
            fields = _as_map.decode(raw)
            if "type" not in fields:
                raise _Bad("no_tag")
            tag = _tag(fields["type"])
            return _build(tag, fields, ())
        raise _Bad("not_an_event")
    except _Bad as bad:
        return SkippedEvent(tag, str(bad), _may_remove(tag))
    except _BAD_BYTES:
        return SkippedEvent(tag, "wrong_type", _may_remove(tag))


def _tag(raw: Raw) -> str:
    try:
        return _as_str.decode(raw)
    except _BAD_BYTES:
        raise _Bad("no_tag") from None


def _may_remove(tag: str) -> bool:
    folded = tag.casefold()
    return not tag or any(word in folded for word in ("remove", "clear", "evict"))


def _build(tag: str, named: dict[str, Raw] | None, items: list[Raw] | tuple[()]) -> KVEvent:
    if tag == "BlockStored":
        return _stored(named if named is not None else dict(zip(_STORED_FIELDS, items, strict=False)))
    if tag == "BlockRemoved":
        return _removed(named if named is not None else dict(zip(_REMOVED_FIELDS, items, strict=False)))
    if tag == "AllBlocksCleared":
        return AllBlocksClearedEvent()
    raise _Bad("unknown_tag")


def _stored(fields: dict[str, Raw]) -> BlockStoredEvent:
    hashes = _hashes(fields)
    parent = fields.get("parent_block_hash")
    parent_hash = None if parent is None or _is_nil(parent) else _hash(_as_any.decode(parent))
    lora_name = _optional_str(fields, "lora_name")
    lora_id = _optional_int(fields, "lora_id")
    block_size = _optional_int(fields, "block_size") or 0
    if not 0 <= block_size < 1 << 31:
        raise _Bad("bad_block_size")
    return BlockStoredEvent(
        block_hashes=hashes,
        parent_block_hash=parent_hash,
        raw_token_ids=_tokens(fields.get("token_ids")),
        block_size=block_size,
        lora_id=-1 if lora_id is None else lora_id,
        lora_name=lora_name,
        medium=_optional_str(fields, "medium"),
        extra_keys=_extra_keys(fields.get("extra_keys"), len(hashes), lora_name, parent_hash is None),
        group_idx=_group(fields),
        kv_cache_spec_kind=_optional_str(fields, "kv_cache_spec_kind"),
        kv_cache_spec_sliding_window=_optional_int(fields, "kv_cache_spec_sliding_window"),
        session_id=_optional_str(fields, "session_id"),
    )


def _removed(fields: dict[str, Raw]) -> BlockRemovedEvent:
    hashes = _hashes(fields)
    counts: list[int] | None = None
    if "remaining_copy_counts" in fields:
        counts = _as_ints.decode(fields["remaining_copy_counts"])
        if counts is not None and (len(counts) != len(hashes) or any(not 0 <= count < 1 << 32 for count in counts)):
            raise _Bad("wrong_type")
    return BlockRemovedEvent(
        block_hashes=hashes,
        medium=_optional_str(fields, "medium"),
        group_idx=_group(fields),
        remaining_copy_counts=None if counts is None else tuple(counts),
    )


def _optional_str(fields: dict[str, Raw], name: str) -> str | None:
    raw = fields.get(name)
    return None if raw is None else _as_optional_str.decode(raw)


def _optional_int(fields: dict[str, Raw], name: str) -> int | None:
    raw = fields.get(name)
    value = None if raw is None else _as_optional_int.decode(raw)
    if value is not None and not -(1 << 63) <= value < 1 << 63:
        raise _Bad("wrong_type")
    return value


def _group(fields: dict[str, Raw]) -> int | None:
    group = _optional_int(fields, "group_idx")
    if group is not None and not 0 <= group < MAX_GROUPS:
        raise _Bad("bad_group")
    return group


def _hashes(fields: dict[str, Raw]) -> tuple[EngineHash, ...]:
    raw = fields.get("block_hashes")
    if raw is None:
        raise _Bad("missing_field")
    hashes = _as_any.decode(raw)
    if not isinstance(hashes, list):
        raise _Bad("wrong_type")
    return tuple(map(_hash, hashes))


def _hash(value: Any) -> EngineHash:
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # msgpack can't hold more than 64 bits
    if isinstance(value, bytes) and 1 <= len(value) <= 64:
        return value
    if isinstance(value, str) and 1 <= len(value.encode()) <= 256:
        return value
    raise _Bad("bad_hash")


def _tokens(raw: Raw | None) -> bytes:
    if raw is None:
        return b""
    try:
        packed = array("I", _as_ints.decode(raw) or ())
    except _BAD_BYTES:
        raise _Bad("bad_token") from None
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def _extra_keys(
    raw: Raw | None, blocks: int, lora_name: str | None, at_root: bool
) -> tuple[tuple[ExtraKey, ...], ...] | None:
    if raw is None or _is_nil(raw):
        return None
    if _declared_length(raw) != blocks:
        raise _Bad("wrong_type")
    per_block = _as_array.decode(raw)
    return tuple(
        () if _is_nil(keys) else _typed(_as_array.decode(keys), lora_name, at_root and i == 0)
        for i, keys in enumerate(per_block)
    )


def _typed(keys: list[Raw], lora_name: str | None, first_block: bool) -> tuple[ExtraKey, ...]:
    """Give the untagged extra keys of one block their kinds (vLLM sends adapter, images, salt, embeds, in that order).

    The adapter's name is the first string that equals ``lora_name``; it is left out, since the adapter is part of the
    context. Another string is the salt in a prompt's first block, and an image's identifier in later ones (0.17, 0.18).
    """
    typed: list[ExtraKey] = []
    adapter = lora_name
    for raw in keys:
        key = _as_any.decode(raw)
        match key:
            case str() if key == adapter:
                adapter = None
            case str():
                typed.append(Salt(key) if first_block else Image(key))
            case [str() as identifier, int() as offset] if not isinstance(offset, bool):
                typed.append(Image(identifier, offset))
            case bytes():
                typed.append(Embeds(key))
            case _:
                typed.append(Opaque(bytes(raw)))
    return tuple(typed)


__all__ = ["MAX_EVENTS", "MAX_GROUPS", "MAX_HASHES", "MAX_PAYLOAD", "decode_batch"]
