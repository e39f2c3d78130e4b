"""Guesses: which engine hash is the last block of an observed run.

A store whose parent has no key and whose first block continues an observed run names that run's last block. Another
prompt may go on with the same tokens, so that is a guess.

What must always hold: what hangs on a name is expected, never credit by events; the removal of such a block may be one
of any block.
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
    depth: int
    """Blocks before it in its chain."""


class Names:
    """The names of one worker."""

    def __init__(self) -> None:
        self._names: OrderedDict[EngineHash, Name] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._names)

    def get(self, engine_hash: EngineHash) -> Name | None:
        return self._names.get(engine_hash)

    def add(self, parent: EngineHash, run: Run) -> None:
        self._names[parent] = Name(run.last, len(run.keys) - 1)
        if len(self._names) > NAMES:
            self._names.popitem(last=False)


__all__ = ["NAMES", "Name", "Names", "content"]
