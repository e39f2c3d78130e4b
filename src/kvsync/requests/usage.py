"""Finding the ``usage`` object in an answer that passes by, without touching or delaying its bytes.

Only the end of the body is remembered (:data:`TAIL` bytes), and it is read once, when the answer is whole. In JSON an
unescaped ``"usage"`` is a key (inside a text its quotes would be escaped); the last one counts, which is the final
figure in every dialect: the JSON body, the last chunks of an SSE stream, ``message_delta``, ``response.completed``.
"""

from __future__ import annotations

import json
import re

TAIL = 64 << 10
_SLACK = TAIL // 4
"""Bytes beyond it before the buffer is cut, so that it is not cut for every piece."""
_KEY = b'"usage"'
_VALUE = re.compile(rb"\s*:\s*\{").match
_END = 256
_done = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\][\r\n]*\Z").search
_read = json.JSONDecoder().raw_decode  # msgspec reads whole texts only


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
        """The last usage object, or ``None`` also where it can't be read: an earlier one is an earlier figure.

        Raises nothing, whatever the bytes are, and takes time in proportion to them: at most one object is read.
        """
        tail = self._tail
        floor = max(0, len(tail) - TAIL)
        at = tail.rfind(_KEY, floor)
        while at >= 0:
            value = _VALUE(tail, at + len(_KEY))
            if value is not None:
                return _object(tail[value.end() - 1 :])
            at = tail.rfind(_KEY, floor, at)  # "usage": null in the chunks that carry none
        return None


def _object(text: bytearray) -> dict[str, object] | None:
    """The object that begins there. Its end is only known by reading it."""
    try:
        found: dict[str, object] = _read(text.decode("utf-8", "replace"))[0]
    except (ValueError, RecursionError):  # no JSON, or nested as deep as no usage is
        return None
    return found


__all__ = ["TAIL", "UsageTail"]
