"""Names for parents that no event placed: which engine hash is the last block of an observed run.

A store whose parent has no key and whose first block continues an observed run names that run's last block. That is a
guess, which another prompt with the same continuation refutes: the request that was observed computed that block too,
and its own store names another parent. One contradiction gives up all names, since names build on each other.

What must always hold: once all stores that were sent have come, no name is wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvsync.events.types import EngineHash
from kvsync.index.keys import Key, block_key
from kvsync.index.observed import Run

NAMES: Final = 4096
"""Names of a worker, newest kept."""


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
    """The names of one worker."""

    def __init__(self) -> None:
        self._names: OrderedDict[EngineHash, Name] = OrderedDict()
        self._by_key: dict[Key, EngineHash] = {}
        self._by_content: dict[Key, EngineHash] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, engine_hash: object) -> bool:
        return engine_hash in self._names

    def get(self, engine_hash: EngineHash) -> Name | None:
        return self._names.get(engine_hash)

    def add(self, parent: EngineHash, follows: Key, run: Run) -> None:
        """``parent`` is the last block of the run; nothing contradicts that."""
        self._names[parent] = Name(run.last, follows, len(run.keys) - 1)
        self._by_key[run.last] = parent
        self._by_content[follows] = parent
        if len(self._names) > NAMES:
            _, oldest = self._names.popitem(last=False)
            del self._by_key[oldest.key]
            del self._by_content[oldest.follows]

    def continued_by(self, parent: EngineHash, follows: Key) -> bool:
        """Whether a name was given for a block like this one behind another parent: which of them was it?"""
        return self._by_content.get(follows, parent) != parent

    def contradicted_by(self, engine_hash: EngineHash, key: Key) -> bool:
        """Whether a name says otherwise than that this hash has this key."""
        name = self._names.get(engine_hash)
        return self._by_key.get(key, engine_hash) != engine_hash or (name is not None and name.key != key)

    def clear(self) -> None:
        self._names.clear()
        self._by_key.clear()
        self._by_content.clear()


__all__ = ["NAMES", "Name", "Names", "content"]
