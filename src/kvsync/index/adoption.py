"""Names for parents that no event placed: which engine hash is the last block of an observed run.

A store whose parent has no key and whose first block continues an observed run names that run's last block. That is a
guess, which another prompt with the same continuation refutes: the request that was observed computed that block too,
and its own store names another parent. So a second parent *disputes* the key: what is behind it in a chain may belong
to either, and no event counts there any more; nor is what was removed by such a name known.

What must always hold: once all stores that were sent have come, a name that is wrong is disputed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvsync.events.types import EngineHash
from kvsync.index.keys import Key, block_key
from kvsync.index.observed import Run

NAMES: Final = 4096
"""Names of a worker, newest kept; and the disputed keys from which on nothing is named any more."""


def content(root: Key, tokens: bytes | memoryview) -> Key:
    """A block without extra keys apart from its parent: equal for equal tokens in one context."""
    return block_key(root, tokens)


@dataclass(frozen=True, slots=True)
class Name:
    """What an engine hash is taken for."""

    key: Key
    follows: Key
    """Content of the block that told."""
    depth: int
    """Blocks before it in its chain."""


class Names:
    """The names of one worker. ``counts`` gets ``adopted`` and ``adoption_disputed``.

    ``mistrusted`` hears of every key that gets disputed.
    """

    def __init__(self, counts: Counter[str], mistrusted: Callable[[], None]) -> None:
        self._counts = counts
        self._mistrusted = mistrusted
        self._names: OrderedDict[EngineHash, Name] = OrderedDict()
        self._by_key: dict[Key, EngineHash] = {}
        self._by_content: dict[Key, EngineHash] = {}
        self.disputed: set[Key] = set()

    def __bool__(self) -> bool:
        return bool(self._names)

    def get(self, engine_hash: EngineHash) -> Name | None:
        return self._names.get(engine_hash)

    def adopt(self, parent: EngineHash, follows: Key, run: Run) -> bool:
        """Take ``parent`` for the last block of the one run that this content follows; False where that is refuted."""
        if run.last in self.disputed or len(self.disputed) >= NAMES:
            return False
        if run.last in self._by_key:
            self._dispute(run.last)
            return False
        self._names[parent] = Name(run.last, follows, len(run.keys) - 1)
        self._by_key[run.last] = parent
        self._by_content[follows] = parent
        self._counts["adopted"] += 1
        if len(self._names) > NAMES:
            _, oldest = self._names.popitem(last=False)
            del self._by_key[oldest.key]
            del self._by_content[oldest.follows]
        return True

    def refuted(self, follows: Key) -> bool:
        """An orphan of this content came; whether some name is in dispute for that."""
        named = self._by_content.get(follows)
        if named is None:
            return False
        self._dispute(self._names[named].key)
        return True

    def placed(self, engine_hash: EngineHash, key: Key) -> None:
        """A hash got this key from an event: a name that says otherwise is in dispute."""
        if self._by_key.get(key, engine_hash) != engine_hash:
            self._dispute(key)
        name = self._names.get(engine_hash)
        if name is not None and name.key != key:
            self._dispute(name.key)

    def _dispute(self, key: Key) -> None:
        if key not in self.disputed:
            self.disputed.add(key)
            self._counts["adoption_disputed"] += 1
            self._mistrusted()


__all__ = ["NAMES", "Name", "Names", "content"]
