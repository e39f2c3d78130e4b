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


_LINES: Final = {len(line) + size + 2: line for size in range(1, 2048) if (line := b"%x\r\n" % size)}
"""By the length of a chunk with all that frames it: the only size line that it can have."""


def plain_chunks(data: bytes) -> bytes | None:
    """The body in ``data``, or ``None`` when that is not just whole and plain chunks."""
    line = _LINES.get(len(data))
    if line is not None and data.startswith(line) and data.endswith(b"\r\n"):
        return data[len(line) : -2]
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
        # What int() lets pass (signs, blanks, zeros, 0x, _) does not look the same when it is written.
        if size <= 0 or line != b"%x" % size or data[stop : stop + 2] != b"\r\n":
            return None
        pieces.append(data[at + 2 : stop])
        start = stop + 2
    return b"".join(pieces) or None


__all__ = ["MOST", "plain_chunks"]
