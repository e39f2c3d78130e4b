"""Block keys: our own names for blocks, the same for every engine that holds the same content.

A key is XXH3-64 over a block's tokens, seeded with the parent's key; extra keys, where a block has some, are hashed
over that in a domain of their own, so that no extra key can pass for a further block's tokens. The root of each chain
is made from the context (model, adapter, block size). Engine hashes are never predicted from it or compared with it.

Both implementations make the same keys, in every process and on every machine: snapshots carry them from one replica to
another. Who changes how a key is made counts up ``VERSION`` in :mod:`kvsync.index.image`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import Final, TypeAlias

import xxhash

from kvsync.events.types import Embeds, ExtraKey, Image, Opaque, Salt
from kvsync.index.match import Tokens

Key: TypeAlias = int

_EXTRA_DOMAIN: Final = 0x6578_7472_6120_6B65
"""Tells the hash of a block's extra keys from that of a child block."""


@dataclass(frozen=True, slots=True)
class HiddenAdapter:
    """An adapter that the engine gives by number only (vLLM < 0.14): a context of its own that no request can name."""

    lora_id: int


def root_key(model: str, adapter: str | HiddenAdapter | None, block_size: int) -> Key:
    """The seed of a context: what the first block's parent key is."""
    match adapter:
        case None:
            kind, name = b"-", b""
        case HiddenAdapter(lora_id):
            kind, name = b"#", lora_id.to_bytes(8, "little", signed=True)
        case _:
            kind, name = b"@", adapter.encode()
    texts = b"".join(len(text).to_bytes(8, "little") + text for text in (model.encode(), name))
    return xxhash.xxh3_64_intdigest(texts + kind + block_size.to_bytes(4, "little"))


def block_key(parent: Key, tokens: bytes | memoryview, extra: Iterable[ExtraKey] = ()) -> Key:
    """The key of one block. ``tokens`` are its tokens as packed big-endian uint32."""
    words = array("I", bytes(tokens))
    words.byteswap()  # hashed as little-endian
    plain = xxhash.xxh3_64_intdigest(words.tobytes(), seed=parent)
    parts = [_canonical(key) for key in extra]
    if not parts:
        return plain
    parts.sort(key=lambda part: part[:1])  # by kind; images keep their order
    return xxhash.xxh3_64_intdigest(b"".join(parts), seed=plain ^ _EXTRA_DOMAIN)


def _canonical(key: ExtraKey) -> bytes:
    """Kind, length, content: no two different keys share bytes, whatever their kinds."""
    match key:
        case Image(identifier, offset):
            tag = b"\x00" + bytes([offset is not None]) + (offset or 0).to_bytes(16, "little", signed=True)
            body = identifier.encode()
        case Salt(value):
            tag, body = b"\x01", value.encode()
        case Embeds(digest):
            tag, body = b"\x02", digest
        case Opaque(raw):
            tag, body = b"\x03", raw
    return tag + len(body).to_bytes(8, "little") + body


def packed(tokens: Tokens) -> bytes:
    """A prompt as packed big-endian uint32.

    Raises:
        TypeError: not ints, or a buffer of another item type than uint32 (``array('I')``, numpy ``uint32``) or bytes.
        ValueError: bytes whose length is no multiple of 4, or a buffer that is not contiguous.
        OverflowError: a token below 0 or above 2**32 − 1.
    """
    if isinstance(tokens, Sequence) and not isinstance(tokens, (bytes, bytearray, memoryview, array)):
        native = array("I", tokens)
    else:
        view = memoryview(tokens)
        if not view.c_contiguous:
            raise ValueError("tokens must be a contiguous buffer")
        if view.format not in ("I", "B"):
            raise TypeError(f"tokens must be uint32 (format 'I') or bytes, not format {view.format!r}")
        if view.nbytes % 4:
            raise ValueError(f"packed tokens are 4 bytes each, {view.nbytes} bytes are no multiple of 4")
        native = array("I")
        native.frombytes(view.cast("B"))
    if byteorder == "little":
        native.byteswap()
    return native.tobytes()


class KeyChain:
    """The block keys of one prompt in one context, computed as far as somebody asks."""

    def __init__(self, root: Key, tokens: bytes, block_size: int, extra: Sequence[Sequence[ExtraKey] | None]) -> None:
        self._keys: list[Key] = []
        self._last = root
        self._tokens = memoryview(tokens)
        self._step = block_size * 4
        self._extra = extra

    def __getitem__(self, i: int) -> Key:
        keys = self._keys
        while len(keys) <= i:
            at = len(keys)
            extra = self._extra[at] if at < len(self._extra) else None
            self._last = block_key(self._last, self._tokens[at * self._step : (at + 1) * self._step], extra or ())
            keys.append(self._last)
        return keys[i]


__all__ = ["HiddenAdapter", "Key", "KeyChain", "block_key", "packed", "root_key"]
