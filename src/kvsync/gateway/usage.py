"""Finding the ``usage`` object in an answer that passes by, without touching or delaying its bytes.

Only the end of the body is remembered (:data:`TAIL` bytes), and it is read once, when the answer is whole. In JSON an
unescaped ``"usage"`` is a key (inside a text its quotes would be escaped); the last one counts, which is the final
figure in every dialect: the JSON body, the last chunks of an SSE stream, ``message_delta``, ``response.completed``.
"""

from __future__ import annotations

import re
from collections import deque

import msgspec

TAIL = 64 << 10
_KEY = b'"usage"'
_OBJECT = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_END = 256
_done = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\][\r\n]*\Z").search
_decode = msgspec.json.Decoder(dict[str, object]).decode


class UsageTail:
    """The end of one body."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL:
            self._size -= len(self._pieces.popleft())

    def ends_with_done(self) -> bool:
        """Whether the last event of a stream said that all was sent."""
        return _done(self._joined()[-_END:]) is not None

    def find(self) -> dict[str, object] | None:
        """The last usage object, or ``None``."""
        tail = self._joined()
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

    def _joined(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


__all__ = ["TAIL", "UsageTail"]
