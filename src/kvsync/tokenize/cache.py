"""What was tokenized before, least recently used out first, bounded in bytes.

Always holds: ``bytes <= limit`` after every call, with an estimate of Python's own overhead counted in. Entries may
carry an age limit: a rendering that prints the date, or a template that was rolled out since, must not live on.
Safe to use from several threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

OVERHEAD: Final = 250
"""Bytes that an entry costs beyond its value: key and value objects, tuple, dictionary slot and links."""


class TokenCache:
    """Digest → packed tokens."""

    def __init__(
        self, limit: int, *, max_age: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._max_age = max_age
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = 0

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and self._max_age is not None and self._clock() - entry[1] > self._max_age:
                self._drop(key)
                entry = None
            if entry is None:
                self._misses += 1
                return None
            self._entries.move_to_end(key)
            self._hits += 1
            return entry[0]

    def put(self, key: bytes, tokens: bytes) -> None:
        """Remember. A value larger than the whole cache is not kept."""
        with self._lock:
            if key in self._entries:
                self._drop(key)
            if len(tokens) + OVERHEAD > self._limit:
                return
            self._entries[key] = (tokens, self._clock())
            self._bytes += len(tokens) + OVERHEAD
            while self._bytes > self._limit:
                self._drop(next(iter(self._entries)))
                self._evictions += 1

    def refresh(self, keys: Iterable[bytes]) -> None:
        """Mark as used, the last key most recently."""
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._entries.move_to_end(key)

    def _drop(self, key: bytes) -> None:
        tokens, _ = self._entries.pop(key)
        self._bytes -= len(tokens) + OVERHEAD

    def stats(self) -> dict[str, int]:
        return {
            "entries": len(self._entries),
            "bytes": self._bytes,
            "hits": self._hits,
            "misses": self._misses,
            "evictions": self._evictions,
        }


__all__ = ["OVERHEAD", "TokenCache"]
