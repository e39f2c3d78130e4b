"""Chunks that can be passed on as they came, without a parser: what nearly all pieces of a stream are.

What must always hold: a piece is taken only when it can be read in one way alone and leaves nothing open: whole chunks
from its first byte to its last, each with its size in the fewest digits and no extension, none of them the last one.
Everything else, good or bad, is the parser's to judge.
"""

from __future__ import annotations

from typing import Final

_SIZE_LINE: Final = 18
"""Bytes in which the line of a chunk's size must end: sixteen digits, and its end."""
MOST: Final = 32
"""Chunks that are looked at. A piece of more is the parser's, which bounds what it takes in one turn."""


def plain_chunks(data: bytes) -> bytes | None:
    """The body in ``data``, or ``None`` when that is not just whole and plain chunks."""
    at = data.find(b"\r\n", 0, _SIZE_LINE)
    size = len(data) - at - 4
    # The size is written and compared, not read: what int() lets pass (signs, blanks, 0x, _) never looks the same.
    if size > 0 and at > 0 and data[:at] == b"%x" % size:
        return data[at + 2 : -2] if data.endswith(b"\r\n") else None
    return _several(data)


def _several(data: bytes) -> bytes | None:
    pieces: list[bytes] = []
    start, end = 0, len(data)
    while start < end:
        at = data.find(b"\r\n", start, start + _SIZE_LINE)
        if at < 0 or len(pieces) == MOST:
            return None
        line = data[start:at]
        try:
            size = int(line, 16)
        except ValueError:
            return None
        stop = at + 2 + size
        if size <= 0 or line != b"%x" % size or data[stop : stop + 2] != b"\r\n":
            return None
        pieces.append(data[at + 2 : stop])
        start = stop + 2
    return b"".join(pieces) or None


__all__ = ["MOST", "plain_chunks"]
