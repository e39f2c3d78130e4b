"""The second check of local tokenizing: do engines ever store the first blocks that we expect of them?

Every prompt that an engine computes begins in some first block, and the engine announced that block's tokens when it
stored it. If local tokenizing goes wrong from the start (a missing BOS, another system text), its first blocks are
never announced. One absence proves nothing: the block may have been announced before we listened. So answers are
judged late, after ``window`` further ones, and only a long row of absences without one presence is a suspicion. The
row that it takes doubles after each, since a proof that succeeded again says that the suspicion was wrong.

Safe to call from several threads: events come from the reader's.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from hashlib import blake2b
from sys import byteorder
from typing import Final

MOST_TOKENS: Final = 4096
"""Of a local answer that are kept to be compared; larger first blocks are not checked."""
_MOST_SIZES: Final = 8
_SEEN: Final = 16_384


class FirstBlocks:
    """First blocks seen in events, and local answers that wait to be judged."""

    def __init__(self, suspect: Callable[[str, str], None], *, window: int = 256, row: int = 64) -> None:
        self._suspect = suspect
        self._window = window
        self._first_row = row
        self._seen: dict[str, OrderedDict[bytes, None]] = {}
        self._sizes: dict[str, set[int]] = {}
        self._waiting: dict[str, deque[tuple[str, str, bytes]]] = {}
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._confirmed = self._absent = self._unusable = 0

    def observe(self, model: str, token_ids: bytes) -> None:
        """The tokens of a stored block without parent, as ``BlockStoredEvent.token_ids`` has them (big-endian)."""
        size = len(token_ids)
        with self._lock:
            sizes = self._sizes.setdefault(model, set())
            if not size or size % 4 or size > MOST_TOKENS * 4 or (size not in sizes and len(sizes) >= _MOST_SIZES):
                self._unusable += 1
                return
            sizes.add(size)
            tokens = array("I", token_ids)
            if byteorder == "little":
                tokens.byteswap()
            seen = self._seen.setdefault(model, OrderedDict())
            key = _digest(tokens.tobytes())
            seen[key] = None
            seen.move_to_end(key)
            if len(seen) > _SEEN:
                seen.popitem(last=False)

    def answered(self, model: str, name: str, shape: str, tokens: bytes) -> None:
        """A local answer was used for a request to ``model`` (``name``: its adapter's or its own)."""
        with self._lock:
            if not self._sizes.get(model):
                return
            waiting = self._waiting.setdefault(model, deque())
            waiting.append((name, shape, tokens[: MOST_TOKENS * 4]))
            judged = waiting.popleft() if len(waiting) > self._window else None
            suspicious = judged is not None and self._judge(model, *judged)
        if suspicious and judged is not None:
            self._suspect(judged[0], judged[1])

    def _judge(self, model: str, name: str, shape: str, tokens: bytes) -> bool:
        # A prompt of exactly one block is computed whole; a shorter one stores nothing.
        sizes = [size for size in self._sizes[model] if size <= len(tokens)]
        if not sizes:
            return False
        absent, limit = self._rows.get((name, shape), (0, self._first_row))
        if any(_digest(tokens[:size]) in self._seen[model] for size in sizes):
            self._confirmed += 1
            self._rows[name, shape] = (0, limit)
            return False
        self._absent += 1
        absent += 1
        suspicious = absent >= limit
        self._rows[name, shape] = (0, limit * 2) if suspicious else (absent, limit)
        return suspicious

    def stats(self) -> dict[str, int]:
        return {"confirmed": self._confirmed, "absent": self._absent, "unusable": self._unusable}


def _digest(tokens: bytes) -> bytes:
    return blake2b(tokens, digest_size=16).digest()


__all__ = ["MOST_TOKENS", "FirstBlocks"]
