"""What the index knows of one worker, as bytes: made by one replica's index, taken by another's.

Both implementations write and read the same. What must always hold: an image is taken as a whole or not at all, and
whatever the bytes are, nothing but ``ValueError`` comes of them; a worker that took one answers and goes on as the one
that it was made of. What can't be told so is not told
(:mod:`kvsync.index.snapshot`).

Layout, little-endian
    ====================  ==========================================================================================
    8 bytes               ``MAGIC``
    u16                   ``VERSION``: names this layout *and* how block keys are made (:mod:`kvsync.index.keys`)
    u16                   flags, see ``_FLAGS``; two bits each from 5 on for the two marks: none, settled, fresh
    u16, u16              number of groups, of places
    u32                   length of the model's name
    u64, u64              number of plain blocks, of others
    text                  the model's name, UTF-8
    groups, 22 bytes      i64 number, ascending · i64 window · u32 block size · u8 kind (``KINDS``) · u8 sparse
    places, 9 bytes       u8 tier (``_TIERS``) · i64 group; the first one is *home*
    plain blocks, 20 B    u64 key · u64 engine hash · u32 depth: one copy at home, of a key that no other block has
    other blocks          u8 form: bits 0–1 the hash's kind (unsigned, negative, bytes, text), 2 it has a key, 3 other
                          hashes have had that key too · u16 number of places · the hash: 8 bytes, or u16 and so many ·
                          with a key: u64 key, u32 depth · for each place: u16 place + 0x8000 if in doubt, u32 copies
    u64                   XXH3-64 of all before
    ====================  ==========================================================================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import xxhash

from kvsync.events.decode import MAX_GROUPS
from kvsync.events.types import EngineHash
from kvsync.index.hits import kind_of
from kvsync.index.keys import Key
from kvsync.index.match import Tier

MAGIC: Final = b"kvsimage"
VERSION: Final = 1
"""Counted up with every change of the layout, and of how a block's key is made: older images mean nothing then."""

Flag: TypeAlias = Literal["hides_keys", "shows_unknown_keys", "lost", "overfull", "eagle"]
_FLAGS: Final[tuple[Flag, ...]] = ("hides_keys", "shows_unknown_keys", "lost", "overfull", "eagle")
_MARKS_AT: Final = len(_FLAGS)
_TIERS: Final[tuple[Tier, ...]] = ("gpu", "cpu", "storage")
KINDS: Final = (None, "full_attention", "sliding_window", "mamba", "chunked_local_attention", "unproven")
"""One of each rule, for all that follow it."""
_KIND_NUMBERS: Final = {"full": 1, "window": 2, "state": 3, "chunked": 4, "unproven": 5}

_HEAD: Final = struct.Struct("<8sHHHHIQQ")
_GROUP: Final = struct.Struct("<qqIBB")
_PLACE: Final = struct.Struct("<Bq")
_PLAIN: Final = struct.Struct("<QQI")
_OTHER: Final = struct.Struct("<BH")
_SPOT: Final = struct.Struct("<QI")
_COPIES: Final = struct.Struct("<HI")
_DIGEST: Final = struct.Struct("<Q")
_MAX_PLACES: Final = len(_TIERS) * MAX_GROUPS
_DEEPEST: Final = (1 << 30) - 1
_MOST_COPIES: Final = (1 << 32) - 1
_HAS_KEY, _SHARES_KEY, _DOUBT = 4, 8, 0x8000


@dataclass(frozen=True, slots=True)
class GroupImage:
    number: int
    kind: str | None
    window: int
    block_size: int
    sparse: bool


@dataclass(frozen=True, slots=True)
class BlockImage:
    """A block that is not plain."""

    name: EngineHash
    spot: tuple[Key, int] | None
    """Key and depth."""
    shares_key: bool
    copies: tuple[tuple[int, int, bool], ...]
    """Number of the place, copies, whether in doubt; ascending."""


@dataclass(slots=True)
class Image:
    """An image, read or about to be written."""

    model: str
    flags: frozenset[Flag] = frozenset()
    marks: tuple[int, int] = (0, 0)
    """``reannouncing`` and ``hidden_keys``: 0 none, 1 a batch came since, 2 none came."""
    groups: list[GroupImage] = field(default_factory=list)
    places: list[tuple[Tier, int]] = field(default_factory=list)
    plain: list[tuple[Key, int, int]] = field(default_factory=list)
    """Key, engine hash, depth."""
    others: list[BlockImage] = field(default_factory=list)


def kind_number(spec_kind: str | None) -> int:
    return 0 if spec_kind is None else _KIND_NUMBERS[kind_of(spec_kind)]


def encode(image: Image) -> bytes | None:
    """``None`` where a figure is larger than an engine can make it."""
    model = image.model.encode()
    flags = sum(1 << bit for bit, flag in enumerate(_FLAGS) if flag in image.flags)
    flags |= image.marks[0] << _MARKS_AT | image.marks[1] << (_MARKS_AT + 2)
    counts = (len(image.groups), len(image.places), len(model), len(image.plain), len(image.others))
    parts = [_HEAD.pack(MAGIC, VERSION, flags, *counts), model]
    for group in image.groups:
        kind = kind_number(group.kind)
        parts.append(_GROUP.pack(group.number, group.window, group.block_size, kind, group.sparse))
    parts += [_PLACE.pack(_TIERS.index(tier), group) for tier, group in image.places]
    parts += [_PLAIN.pack(key, name, min(depth, _DEEPEST)) for key, name, depth in image.plain]
    for block in image.others:
        if any(count > _MOST_COPIES for _, count, _ in block.copies):
            return None
        parts.append(_encode_block(block))
    body = b"".join(parts)
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def _encode_block(block: BlockImage) -> bytes:
    match block.name:
        case int():
            kind, name = (0, block.name.to_bytes(8, "little")) if block.name >= 0 else (1, _negative(block.name))
        case bytes():
            kind, name = 2, len(block.name).to_bytes(2, "little") + block.name
        case str():
            text = block.name.encode()
            kind, name = 3, len(text).to_bytes(2, "little") + text
    form = kind | _HAS_KEY * (block.spot is not None) | _SHARES_KEY * block.shares_key
    spot = b"" if block.spot is None else _SPOT.pack(block.spot[0], min(block.spot[1], _DEEPEST))
    copies = b"".join(_COPIES.pack(place | _DOUBT * doubt, count) for place, count, doubt in block.copies)
    return _OTHER.pack(form, len(block.copies)) + name + spot + copies


def _negative(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


def decode(data: bytes) -> Image:
    """Read an image.

    Raises:
        ValueError: it is none: cut, damaged, of another version, or it says what can't be.
    """
    if len(data) < _HEAD.size + _DIGEST.size:
        raise ValueError(f"an image has at least {_HEAD.size + _DIGEST.size} bytes, not {len(data)}")
    magic, version, flags, groups, places, name_length, plain, others = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("not an image of an index")
    if version != VERSION:
        raise ValueError(f"an image of version {version}, and {VERSION} is read here")
    body = memoryview(data)[: -_DIGEST.size]
    if _DIGEST.unpack_from(data, len(body)) != (xxhash.xxh3_64_intdigest(body),):
        raise ValueError("a damaged image: its digest differs")
    levels = flags >> _MARKS_AT
    marks = levels & 3, levels >> 2 & 3
    _check(levels >> 4 == 0 and 3 not in marks, "flags that there are none of")
    reader = _Reader(body, _HEAD.size)
    try:
        model = str(reader.take(name_length), "utf-8")
    except UnicodeDecodeError:
        raise ValueError("a damaged image: the model's name is no text") from None
    image = Image(model, frozenset(flag for bit, flag in enumerate(_FLAGS) if flags >> bit & 1), marks)
    _check(groups <= MAX_GROUPS and places <= _MAX_PLACES, "more groups than an engine has")
    before = -1
    for number, window, size, kind, sparse in _GROUP.iter_unpack(reader.take(groups * _GROUP.size)):
        _check(before < number < MAX_GROUPS, "groups out of order")
        _check(size < 1 << 31 and kind < len(KINDS) and sparse < 2, "a group that can't be")
        before = number
        image.groups.append(GroupImage(number, KINDS[kind], window, size, bool(sparse)))
    for tier, group in _PLACE.iter_unpack(reader.take(places * _PLACE.size)):
        _check(tier < len(_TIERS) and 0 <= group < MAX_GROUPS, "a place that can't be")
        image.places.append((_TIERS[tier], group))
    _check(len(set(image.places)) == places, "a place twice")
    _check(not plain or places > 0, "blocks that are nowhere")
    image.plain = list(_PLAIN.iter_unpack(reader.take(plain * _PLAIN.size)))
    _check(all(depth <= _DEEPEST for _, _, depth in image.plain), "a chain too long")
    reader.needs(others * (_OTHER.size + 2 + _COPIES.size))  # no more than there can be
    image.others = [_decode_block(reader, places) for _ in range(others)]
    _check(reader.at == len(body), "bytes that belong to nothing")
    _check_names_and_keys(image)
    return image


class _Reader:
    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self.at = at

    def needs(self, size: int) -> None:
        _check(size <= len(self._data) - self.at, "it ends before all is said")

    def take(self, size: int) -> memoryview:
        self.needs(size)
        self.at += size
        return self._data[self.at - size : self.at]


def _decode_block(reader: _Reader, places: int) -> BlockImage:
    form, count = _OTHER.unpack(reader.take(_OTHER.size))
    _check(form < 16 and (not form & _SHARES_KEY or bool(form & _HAS_KEY)), "a block of no form")
    name = _decode_name(reader, form & 3)
    spot: tuple[Key, int] | None = None
    if form & _HAS_KEY:
        spot = _SPOT.unpack(reader.take(_SPOT.size))
        _check(spot[1] <= _DEEPEST, "a chain too long")
    copies = []
    before = -1
    for place, number in _COPIES.iter_unpack(reader.take(count * _COPIES.size)):
        doubt = bool(place & _DOUBT)
        place &= ~_DOUBT
        _check(before < place < places and number > 0, "copies that can't be")
        before = place
        copies.append((place, number, doubt))
    _check(bool(copies), "a block that is nowhere")
    return BlockImage(name, spot, bool(form & _SHARES_KEY), tuple(copies))


def _decode_name(reader: _Reader, kind: int) -> EngineHash:
    if kind < 2:
        number = int.from_bytes(reader.take(8), "little", signed=kind == 1)
        _check(kind == 0 or number < 0, "a hash of no form")
        return number
    length = int.from_bytes(reader.take(2), "little")
    _check(1 <= length <= (64 if kind == 2 else 256), "a hash of no form")
    raw = bytes(reader.take(length))
    if kind == 2:
        return raw
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError("a damaged image: a hash of no form") from None


def _check_names_and_keys(image: Image) -> None:
    names: set[EngineHash] = {name for _, name, _ in image.plain}
    names.update(block.name for block in image.others)
    _check(len(names) == len(image.plain) + len(image.others), "a hash twice")
    certain = [key for key, _, _ in image.plain]
    certain += [block.spot[0] for block in image.others if block.spot is not None and not block.shares_key]
    keys = set(certain)
    _check(len(keys) == len(certain), "a key twice")
    shared = (block.spot[0] for block in image.others if block.spot is not None and block.shares_key)
    _check(not any(key in keys for key in shared), "a key twice")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"a damaged image: {what}")


__all__ = ["KINDS", "MAGIC", "VERSION", "BlockImage", "Flag", "GroupImage", "Image", "decode", "encode", "kind_number"]
