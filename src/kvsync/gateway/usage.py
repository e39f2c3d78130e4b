"""Finding the ``usage`` object in an answer that passes by, without touching or delaying its bytes.

Only the end of the body is remembered (:data:`TAIL` bytes), and it is read once, when the answer is whole. In JSON an
unescaped ``"usage"`` is a key (inside a text its quotes would be escaped); the last one counts, which is the final
figure in every dialect: the JSON body, the last chunks of an SSE stream, ``message_delta``, ``response.completed``.
"""

from __future__ import annotations

import re

import msgspec

TAIL = 64 << 10
_SLACK = TAIL // 4
"""Bytes beyond it before the buffer is cut, so that it is not cut for every piece."""
_KEY = b'"usage"'
_OBJECT = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_END = 256
_done = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\][\r\n]*\Z").search
_decode = msgspec.json.Decoder(dict[str, object]).decode


class UsageTail:
    """The end of one body."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = bytearray()

    def add(self, piece: bytes) -> None:
        # One buffer, not the pieces: a stream's are small, and each would cost more than what is in it.
        self._tail += piece if len(piece) <= TAIL else memoryview(piece)[-TAIL:]
        if len(self._tail) > TAIL + _SLACK:
            del self._tail[:-TAIL]

    def ends_with_done(self) -> bool:
        """Whether the last event of a stream said that all was sent."""
        return _done(self._tail[-_END:]) is not None

    def find(self) -> dict[str, object] | None:
        """The last usage object, or ``None``."""
        tail = self._tail
        floor = max(0, len(tail) - TAIL)
        at = tail.rfind(_KEY, floor)
        while at >= 0:
            found = _OBJECT.match(tail, at + len(_KEY))
            if found is not None:
                try:
                    return _decode(found[1])
                except msgspec.DecodeError:
                    return None
            at = tail.rfind(_KEY, floor, at)  # "usage": null in the chunks that carry none
        return None


__all__ = ["TAIL", "UsageTail"]
