"""Block keys: our own names for blocks, the same for every engine that holds the same content.

A key is a 64-bit XXH3 over (parent key, the block's tokens, its extra keys); the root of each chain is a seed made from
the context (model, adapter, block size). Engine hashes are never predicted from it or compared with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import TypeAlias

import xxhash

from kvsync.events.types import Embeds, ExtraKey, Image, Opaque, Salt
from kvsync.index.match import Tokens

Key: TypeAlias = int


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
            kind, name = b"#", str(lora_id).encode()
        case _:
            kind, name = b"@", adapter.encode()
    model_name = model.encode()
    return xxhash.xxh3_64_intdigest(
        b"%d\x00%s%d\x00%s%d" % (len(model_name), model_name, len(name), kind + name, block_size)
    )


def block_key(parent: Key, tokens: bytes | memoryview, extra: Iterable[ExtraKey] = ()) -> Key:
    """The key of one block. ``tokens`` are its tokens as packed big-endian uint32."""
    data = parent.to_bytes(8, "little") + bytes(tokens)
    if extra:
        parts: list[bytes] = [_canonical(key) for key in extra]
        parts.sort(key=lambda part: part[:1])  # by kind; images keep their order
        data += b"".join(parts)
    return xxhash.xxh3_64_intdigest(data)


def _canonical(key: ExtraKey) -> bytes:
    """Tag, length, content: no two different keys share bytes, whatever their kinds."""
    match key:
        case Image(identifier, offset):
            tag, body = b"i", identifier.encode() + (b"\x00" if offset is None else b"\x01%d" % offset)
        case Salt(value):
            tag, body = b"s", value.encode()
        case Embeds(digest):
            tag, body = b"t", digest
        case Opaque(raw):
            tag, body = b"u", raw
    return tag + len(body).to_bytes(4, "little") + body


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
