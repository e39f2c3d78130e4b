"""Which key each engine hash of one worker has, and the stores that wait for their parent's.

What must always hold: a hash has a key only while it is resident; a key that two hashes of the worker claimed at once
names nobody until all of them are gone; nothing hangs on the root but what the engine put there, and on an observed run
only guesses (:mod:`~kvsync.index.adoption`), which never take a key from a hash that is certain.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from kvsync.events.types import BlockStoredEvent, Embeds, EngineHash, Image, Opaque, Salt
from kvsync.index.adoption import Names, content
from kvsync.index.cap import Reads
from kvsync.index.keys import HiddenAdapter, Key, block_key, root_key
from kvsync.index.observed import Observed, Run
from kvsync.index.positions import Positions

PARKED_EVENTS: Final = 4096
PARKED_BYTES: Final = 16 << 20


class Placed(NamedTuple):
    """Where hashes stand."""

    spots: dict[EngineHash, tuple[Key, int]]
    """Key and depth of each that has a key."""
    shared: set[Key]
    """Keys that several hashes claimed."""


class Placement:
    """See the module. ``counts`` gets ``parked``, ``parked_dropped`` and ``adopted``, ``reads`` what keys there are."""

    def __init__(
        self, model: str, counts: Counter[str], positions: Positions, observed: Observed, reads: Reads
    ) -> None:
        self._model = model
        self._counts = counts
        self._positions = positions
        self._observed = observed
        self._reads = reads
        self._names = Names()
        self._key_of: dict[EngineHash, Key] = {}
        self._guesses: set[EngineHash] = set()
        """Hashes whose key hangs on a name."""
        self._depth_of: dict[EngineHash, int] = {}
        self._hash_of: dict[Key, EngineHash] = {}
        self.twins: dict[Key, set[EngineHash]] = {}
        """Keys that several hashes claimed: what was placed behind one may belong behind another block."""
        self._parked: OrderedDict[int, BlockStoredEvent] = OrderedDict()
        """By the position of the worker when they came."""
        self._parked_under: dict[EngineHash, list[int]] = {}
        self._parked_content: dict[Key, list[int]] = {}
        """By what their first block holds."""
        self._parked_bytes = 0
        self.incomplete = False
        """A store was dropped that waited, and its blocks are there: they get no key, even when its parent does."""

    @property
    def placed(self) -> int:
        """Hashes with a key."""
        return len(self._key_of)

    @property
    def parked(self) -> int:
        """Stores that wait."""
        return len(self._parked)

    @property
    def guesses(self) -> int:
        """Of ``placed``, those that hang on a name."""
        return len(self._guesses)

    def is_guess(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self._guesses

    def knows(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self._key_of

    def spot(self, engine_hash: EngineHash) -> tuple[Key, int] | None:
        """Its key, and how many blocks are before it in its chain; ``None`` without a key."""
        key = self._key_of.get(engine_hash)
        return None if key is None else (key, self._depth_of[engine_hash])

    def key_of(self, engine_hash: EngineHash) -> Key | None:
        """The key that the hash has for certain."""
        return None if engine_hash in self._guesses else self._key_of.get(engine_hash)

    def hash_of(self, key: Key) -> EngineHash | None:
        """The one hash that has this key; ``None`` without one, or where several claim it."""
        return None if key in self.twins else self._hash_of.get(key)

    def place(self, event: BlockStoredEvent, resident: Container[EngineHash]) -> None:
        """Give the event's hashes their keys, and then those whose parked events waited for them."""
        self._place_all([event], resident)

    @property
    def is_settled(self) -> bool:
        """No store waits, and nothing is a guess or may become one."""
        return not self._parked and not self._guesses and not self._names

    def copy(self) -> Placed:
        spots = {name: (key, self._depth_of[name]) for name, key in self._key_of.items()}
        return Placed(spots, set(self.twins))

    def put(self, engine_hash: EngineHash, key: Key, depth: int, *, shares: bool) -> None:
        """A resident hash has this key for certain; ``shares``: other hashes have or had it, too."""
        self._reads.held(key)
        self._key_of[engine_hash] = key
        self._depth_of[engine_hash] = depth
        self._hash_of[key] = engine_hash
        if shares:
            self.twins.setdefault(key, set()).add(engine_hash)

    def adopt_parked(self, run: Run, resident: Container[EngineHash]) -> None:
        """A run was recorded: what waits may continue it."""
        if run.follows is None:
            return
        for number in list(self._parked_content.get(run.follows, ())):
            event = self._parked.get(number)  # an earlier one may have placed it
            if event is not None and self._adopt(event):
                self._place_all([self._unpark(number)], resident)

    def _place_all(self, waiting: list[BlockStoredEvent], resident: Container[EngineHash]) -> None:
        while waiting:
            for engine_hash in self._place_one(waiting.pop(), resident):
                waiting += self._unpark_under(engine_hash)

    def unplace(self, engine_hash: EngineHash) -> None:
        """The hash is resident nowhere any more."""
        key = self._key_of.pop(engine_hash, None)
        if key is None:
            return
        del self._depth_of[engine_hash]
        self._guesses.discard(engine_hash)
        self._reads.left(key)
        twins = self.twins.get(key)
        if twins is not None:
            twins.discard(engine_hash)
            if twins:
                return
            del self.twins[key]
        del self._hash_of[key]

    def leave(self) -> None:
        """All hashes go at once, and this with them."""
        for key in self._key_of.values():
            self._reads.left(key)

    def _place_one(self, event: BlockStoredEvent, resident: Container[EngineHash]) -> list[EngineHash]:
        """Returns the hashes that have a key now and may be parents of parked events."""
        step = event.block_size * 4
        tokens = memoryview(event.raw_token_ids)
        parent: Key | None
        if event.parent_block_hash is None:
            parent, depth, guess = self._root(event), -1, False
        else:
            parent, depth, guess = self._as_parent(event.parent_block_hash)
            if parent is None and self._adopt(event):
                parent, depth, guess = self._as_parent(event.parent_block_hash)
        missing = False
        for i, engine_hash in enumerate(event.block_hashes):
            key = self._key_of.get(engine_hash)
            if key is not None:
                _, depth, guess = self._as_parent(engine_hash)
            elif parent is None:
                missing = True
                continue
            else:
                extra = event.extra_keys[i] if event.extra_keys else ()
                key = block_key(parent, tokens[i * step : (i + 1) * step], extra)
                depth += 1
                if engine_hash in resident:
                    self._set_key(engine_hash, key, depth, guess)
            parent = key
        if missing:
            self._park(event, resident)
        heads = [*event.block_hashes]
        if event.parent_block_hash is not None:
            heads.insert(0, event.parent_block_hash)  # it may have got a name just now
        return [h for h in heads if h in self._parked_under and self._as_parent(h)[0] is not None]

    def _set_key(self, engine_hash: EngineHash, key: Key, depth: int, guess: bool) -> None:
        other = self._hash_of.get(key)
        if other is not None and guess:
            return
        self._reads.held(key)
        if other is not None and other in self._guesses:
            self.unplace(other)
        self._key_of[engine_hash] = key
        self._depth_of[engine_hash] = depth
        if guess:
            self._guesses.add(engine_hash)
        if key in self.twins:  # hash_of may still name one that is gone, even this one
            self.twins[key].add(engine_hash)
        elif self._hash_of.setdefault(key, engine_hash) != engine_hash:
            self.twins[key] = {self._hash_of[key], engine_hash}

    def _root(self, event: BlockStoredEvent) -> Key:
        adapter = event.lora_name if event.lora_name is not None or event.lora_id < 0 else HiddenAdapter(event.lora_id)
        return root_key(self._model, adapter, event.block_size)

    def _as_parent(self, engine_hash: EngineHash) -> tuple[Key | None, int, bool]:
        """Its key, its depth, and whether both are a guess."""
        key = self._key_of.get(engine_hash)
        if key is not None:
            return key, self._depth_of[engine_hash], engine_hash in self._guesses
        name = self._names.get(engine_hash)
        return (None, -1, False) if name is None else (name.key, name.depth, True)

    # -- adoption

    def _content(self, event: BlockStoredEvent) -> Key | None:
        """What the event's first block holds; ``None`` where it has extra keys."""
        if event.extra_keys and event.extra_keys[0]:
            return None
        return content(self._root(event), event.raw_token_ids[: event.block_size * 4])

    def _adopt(self, event: BlockStoredEvent) -> bool:
        """Name the event's parent, of which nothing is known, if this continues an observed run."""
        if not self._observed or event.block_hashes[0] in self._key_of:
            return False
        follows = self._content(event)
        run = None if follows is None else self._observed.followed_by(follows)
        if run is None:
            return False
        assert event.parent_block_hash is not None
        self._names.add(event.parent_block_hash, run)
        self._counts["adopted"] += 1
        return True

    # -- parking

    def _park(self, event: BlockStoredEvent, resident: Container[EngineHash]) -> None:
        parent = event.parent_block_hash
        assert parent is not None
        number = self._positions.move()
        # nothing of it that placing does not need: it may be of any length
        self._parked[number] = event = replace(event, session_id=None, kv_cache_spec_kind=None)
        self._parked_under.setdefault(parent, []).append(number)
        follows = self._content(event)
        if follows is not None:
            self._parked_content.setdefault(follows, []).append(number)
        self._parked_bytes += _parked_size(event)
        self._counts["parked"] += 1
        while len(self._parked) > PARKED_EVENTS or self._parked_bytes > PARKED_BYTES:
            dropped = self._unpark(next(iter(self._parked)))
            self._counts["parked_dropped"] += 1
            self.incomplete |= any(engine_hash in resident for engine_hash in dropped.block_hashes)

    def _unpark_under(self, parent: EngineHash) -> list[BlockStoredEvent]:
        return [self._unpark(number) for number in list(self._parked_under.get(parent, ()))]

    def _unpark(self, number: int) -> BlockStoredEvent:
        event = self._parked.pop(number)
        assert event.parent_block_hash is not None
        _take(self._parked_under, event.parent_block_hash, number)
        follows = self._content(event)
        if follows is not None:
            _take(self._parked_content, follows, number)
        self._parked_bytes -= _parked_size(event)
        return event


_Label = TypeVar("_Label")


def _take(numbers: dict[_Label, list[int]], label: _Label, number: int) -> None:
    numbers[label].remove(number)
    if not numbers[label]:
        del numbers[label]


def _parked_size(event: BlockStoredEvent) -> int:
    """What it counts for against the limit of bytes: its tokens, hashes and extra keys, and the adapter's name."""
    size = len(event.raw_token_ids) + len((event.lora_name or "").encode())
    for engine_hash in event.block_hashes:
        size += 16 + (0 if isinstance(engine_hash, int) else _length(engine_hash))
    for key in (key for keys in event.extra_keys or () for key in keys):
        match key:
            case Image(text) | Salt(text):
                size += 64 + _length(text)
            case Embeds(raw) | Opaque(raw):
                size += 64 + len(raw)
    return size


def _length(content: str | bytes) -> int:
    return len(content.encode() if isinstance(content, str) else content)


__all__ = ["PARKED_BYTES", "PARKED_EVENTS", "Placed", "Placement"]
