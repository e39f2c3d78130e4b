"""Which key each engine hash of one worker has, and the stores that wait for their parent's.

What must always hold: a hash has a key only while it is resident; a key that two hashes of the worker claimed at once
names nobody until all of them are gone; nothing hangs on the root but what the engine put there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from typing import Final

from kvsync.events.types import BlockStoredEvent, EngineHash
from kvsync.index.keys import HiddenAdapter, Key, block_key, root_key

PARKED_EVENTS: Final = 4096
PARKED_BYTES: Final = 16 << 20


class Placement:
    """See the module. ``counts`` gets ``parked`` and ``parked_dropped``."""

    def __init__(self, model: str, counts: Counter[str]) -> None:
        self._model = model
        self._counts = counts
        self._key_of: dict[EngineHash, Key] = {}
        self._hash_of: dict[Key, EngineHash] = {}
        self._twins: dict[Key, set[EngineHash]] = {}
        self._parked: OrderedDict[int, BlockStoredEvent] = OrderedDict()
        self._parked_under: dict[EngineHash, list[int]] = {}
        self._parked_bytes = 0
        self._parked_next = 0

    @property
    def placed(self) -> int:
        """Hashes with a key."""
        return len(self._key_of)

    @property
    def parked(self) -> int:
        """Stores that wait."""
        return len(self._parked)

    def knows(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self._key_of

    def hash_of(self, key: Key) -> EngineHash | None:
        """The one hash that has this key; ``None`` without one, or where several claim it."""
        return None if key in self._twins else self._hash_of.get(key)

    def place(self, event: BlockStoredEvent, resident: Container[EngineHash]) -> None:
        """Give the event's hashes their keys, and then those whose parked events waited for them."""
        waiting = [event]
        while waiting:
            event = waiting.pop()
            for engine_hash in self._place_one(event, resident):
                for number in self._parked_under.pop(engine_hash, ()):
                    waiting.append(self._unpark(number))

    def unplace(self, engine_hash: EngineHash) -> None:
        """The hash is resident nowhere any more."""
        key = self._key_of.pop(engine_hash, None)
        if key is None:
            return
        twins = self._twins.get(key)
        if twins is not None:
            twins.discard(engine_hash)
            if twins:
                return
            del self._twins[key]
        del self._hash_of[key]

    def _place_one(self, event: BlockStoredEvent, resident: Container[EngineHash]) -> list[EngineHash]:
        """Returns the hashes that have a key now and may be parents of parked events."""
        adapter = event.lora_name if event.lora_name is not None or event.lora_id < 0 else HiddenAdapter(event.lora_id)
        step = event.block_size * 4
        tokens = memoryview(event.raw_token_ids)
        parent: Key | None
        if event.parent_block_hash is None:
            parent = root_key(self._model, adapter, event.block_size)
        else:
            parent = self._key_of.get(event.parent_block_hash)
        missing = False
        for i, engine_hash in enumerate(event.block_hashes):
            key = self._key_of.get(engine_hash)
            if key is None:
                if parent is None:
                    missing = True
                    continue
                extra = event.extra_keys[i] if event.extra_keys else ()
                key = block_key(parent, tokens[i * step : (i + 1) * step], extra)
                if engine_hash in resident:
                    self._key_of[engine_hash] = key
                    if key in self._twins:  # hash_of may still name one that is gone, even this one
                        self._twins[key].add(engine_hash)
                    elif self._hash_of.setdefault(key, engine_hash) != engine_hash:
                        self._twins[key] = {self._hash_of[key], engine_hash}
            parent = key
        if missing:
            self._park(event)
        return [h for h in event.block_hashes if h in self._parked_under and h in self._key_of]

    def _park(self, event: BlockStoredEvent) -> None:
        assert event.parent_block_hash is not None
        number = self._parked_next
        self._parked_next += 1
        self._parked[number] = event
        self._parked_under.setdefault(event.parent_block_hash, []).append(number)
        self._parked_bytes += _parked_size(event)
        self._counts["parked"] += 1
        while len(self._parked) > PARKED_EVENTS or self._parked_bytes > PARKED_BYTES:
            oldest = next(iter(self._parked))
            parent = self._unpark(oldest).parent_block_hash
            assert parent is not None
            siblings = self._parked_under[parent]
            siblings.remove(oldest)
            if not siblings:
                del self._parked_under[parent]
            self._counts["parked_dropped"] += 1

    def _unpark(self, number: int) -> BlockStoredEvent:
        event = self._parked.pop(number)
        self._parked_bytes -= _parked_size(event)
        return event


def _parked_size(event: BlockStoredEvent) -> int:
    return len(event.raw_token_ids) + 16 * len(event.block_hashes)


__all__ = ["PARKED_BYTES", "PARKED_EVENTS", "Placement"]
