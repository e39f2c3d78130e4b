"""Where one worker's losses stand: what was removed since a match was answered.

What must always hold: nothing that may have taken a block is overlooked. A removal is remembered by the key of what it
took; where no key is known it may have been any block that only an answer told of, and where too many came to remember,
all of them count.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Final

from kvsync.index.keys import Key

REMOVALS: Final = 4096
"""Removals with a key that are remembered, newest kept."""

_registrations = count(1)
"""Over the whole process: a position of one index is never taken for one of another."""


class Positions:
    """A counter that moves on with everything whose order against a match matters (:mod:`kvsync.index.reference`)."""

    def __init__(self) -> None:
        self.now = next(_registrations) << 40
        self.lost_at = self.now
        """When all that was known went for the last time."""
        self.keyless_at = self.now
        """When a block without a key was removed for the last time."""
        self._dropped_at = self.now
        self._removals: deque[tuple[int, Key]] = deque()
        self._removed_at: dict[Key, int] = {}

    def move(self) -> int:
        self.now += 1
        return self.now

    def lose(self) -> None:
        """All that is known goes."""
        self.lost_at = self.move()
        self._removals.clear()
        self._removed_at.clear()

    def remove(self, key: Key | None) -> None:
        """A removal names a block with this key."""
        at = self.move()
        if key is None:
            self.keyless_at = at
            return
        self._removals.append((at, key))
        self._removed_at[key] = at
        if len(self._removals) > REMOVALS:
            self._dropped_at, oldest = self._removals.popleft()
            if self._removed_at[oldest] == self._dropped_at:
                del self._removed_at[oldest]

    def known_since(self, position: int) -> bool:
        """Whether everything that went since then is remembered."""
        return max(self.lost_at, self._dropped_at) <= position <= self.now

    def removed_since(self, key: Key, position: int) -> bool:
        """Whether a removal named this key since a position of which :meth:`known_since` holds."""
        return self._removed_at.get(key, 0) > position


__all__ = ["REMOVALS", "Positions"]
