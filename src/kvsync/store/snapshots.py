"""Snapshots of workers in Redis: one replica tells what it knows, so that another one starts warm.

*Writing.* Each replica goes through its workers, one after the other over ``interval``. Whoever gets a worker's turn
(a key that lives nearly as long) writes for all. *Reading.* A stream that is first followed is asked for here.

In Redis, below the fleet's prefix: ``snapshot:<worker>`` is the *head*, which says where the stream stood and what the
parts are; ``snapshot-part:<random>:<n>`` are those; ``snapshot-turn:<worker>`` is the turn. The head is written last,
so it names parts that are there; those of the one before live on for ``OVERLAP``, for who reads just now.

What must always hold
    * Whatever stands in Redis, nothing but a snapshot or ``None`` comes of it. What is in an image is judged by the
      index, and that it is of the process that answers by the stream.
    * No reply and no command is longer than a part, so neither Redis nor the event loop is held up; between two of
      them others have their turn.
    * Nothing here is waited for by a request, and what fails is counted and tried again the next time.
    * Telling takes ``SHARE`` of a thread's time at most: a worker is looked for among the blocks of all, so in a very
      large index a round takes longer than ``interval``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from random import Random
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec
import xxhash

from kvsync.config.warm import SnapshotSettings
from kvsync.events.contracts import Snapshot, Target
from kvsync.events.stream import Position
from kvsync.store.connection import Command, Store
from kvsync.store.replies import Unanswered

log = logging.getLogger(__name__)

PART: Final = 256 << 10
"""Bytes of an image that go in one command."""
AT_ONCE: Final = 4
"""Parts that are asked for in one go."""
OVERLAP: Final = 10
"""Seconds that the parts of the snapshot before live on."""
LONGEST_HEAD: Final = 4096
FORM: Final = 12
"""Bytes at an image's beginning that say its version and what is known of the worker as a whole."""
SHARE: Final = 0.05

Action: TypeAlias = Literal["write", "read"]
Result: TypeAlias = Literal[
    "written", "unchanged", "elsewhere", "not_now", "too_large", "unanswered", "found", "none", "unreadable"
]
"""Of a write: ``written`` · ``unchanged``: it stands there already · ``elsewhere``: another replica's turn ·
``not_now``: it can't be told at present. Of a read: ``found`` · ``none`` · ``unreadable``: no snapshot of this worker.
Of both: ``too_large`` · ``unanswered``: by Redis."""


class Telemetry(Protocol):
    def snapshot(self, action: Action, result: Result, size: int) -> None:
        """One was to be written or read. ``size``: bytes that were."""


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """What is said of a snapshot beside its parts."""

    worker: str
    model: str
    seq: int
    mark: bytes
    form: bytes
    """How the image begins."""
    parts: str
    """Their name."""
    size: int
    digest: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


class Snapshots:
    """See the module. Belongs to one event loop.

    Args:
        take: a worker's snapshot at this moment.
        workers: those that are followed, and their models.
    """

    def __init__(
        self,
        store: Store,
        settings: SnapshotSettings,
        take: Callable[[str], Awaitable[Snapshot | None]],
        workers: Callable[[], Collection[tuple[str, str]]],
        telemetry: Telemetry,
        *,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._settings = settings
        self._take = take
        self._workers = workers
        self._telemetry = telemetry
        self._random = random or Random()
        self._clock = clock
        self._round: list[tuple[str, str]] = []
        """Workers that this round has still to come to."""
        self._later: set[str] = set()
        """Those that could not be told when it came to them: a stream that is just looked at can be a moment later."""
        self._pause = 0.0
        self._took = 0.0
        """Seconds that the last worker took to be told."""

    # -- reading

    async def read(self, target: Target) -> Snapshot | None:
        """What was told of a worker. Takes as long as Redis does: who asks has a limit."""
        await self._store.looked()
        try:
            snapshot, result = await self._read(target)
        except Unanswered as unanswered:
            log.info("no snapshot of %s: %s", target.worker, unanswered)
            snapshot, result = None, "unanswered"
        self._telemetry.snapshot("read", result, 0 if snapshot is None else len(snapshot.image))
        return snapshot

    async def _read(self, target: Target) -> tuple[Snapshot | None, Result]:
        for _ in range(2):  # the parts may be replaced meanwhile
            head, result = await self._head(target.worker, target.model)
            if head is None:
                return None, result
            if head.size > self._settings.max_bytes:
                return None, "too_large"
            image = await self._parts(head)
            if image is not None:
                return Snapshot(Position(head.seq, head.mark), image), "found"
        return None, "unreadable"

    async def _head(self, worker: str, model: str) -> tuple[_Head | None, Result]:
        key = self._store.key("snapshot", worker)
        try:
            (reply,) = await self._ask("snapshot_head", ("GETRANGE", key, 0, LONGEST_HEAD))
        except Unanswered as unanswered:
            if unanswered.reason == "error":  # the key holds something that has no range
                return None, "unreadable"
            raise
        if not reply:
            return None, "none"
        try:
            head = _decode(reply)
        except msgspec.DecodeError:
            return None, "unreadable"
        of_it = (head.worker, head.model) == (worker, model)
        sound = head.size > 0 and 0 <= head.seq < 1 << 63 and 1 <= len(head.mark) <= 32 and len(head.parts) == 32
        return (head, "found") if of_it and sound else (None, "unreadable")

    async def _parts(self, head: _Head) -> bytes | None:
        names = self._names(head)
        parts: list[bytes] = []
        for first in range(0, len(names), AT_ONCE):
            # a range, so that no reply is longer than was asked for
            commands: list[Command] = [("GETRANGE", name, 0, PART - 1) for name in names[first : first + AT_ONCE]]
            replies = await self._ask("snapshot_part", *commands)
            some = [reply for reply in replies if reply]
            if len(some) < len(commands):
                return None
            parts += some
        image = b"".join(parts)
        return image if len(image) == head.size and xxhash.xxh3_64_intdigest(image) == head.digest else None

    def _names(self, head: _Head) -> list[str]:
        return [self._store.key("snapshot-part", head.parts, str(n)) for n in range(-(-head.size // PART))]

    # -- writing

    async def step(self) -> None:
        """See to the next worker, and wait so long that a round takes ``interval``."""
        if not self._round:
            self._round = list(self._workers())
            self._random.shuffle(self._round)
            self._pause = self._settings.interval / max(1, len(self._round))
            self._later.clear()
        self._took = 0.0
        if self._round and self._store.up:
            worker, model = self._round.pop()
            if await self.write(worker, model) == "not_now" and worker not in self._later:
                self._later.add(worker)
                self._round.insert(0, (worker, model))
        await asyncio.sleep(max(self._pause, self._took / SHARE))

    async def write(self, worker: str, model: str) -> Result:
        """Tell of a worker, if nobody has done so of late. Returns what came of it."""
        result: Result
        size = 0
        try:
            result, size = await self._write(worker, model)
        except Unanswered as unanswered:
            log.info("the snapshot of %s is not written: %s", worker, unanswered)
            result = "unanswered"
        self._telemetry.snapshot("write", result, size)
        return result

    async def _write(self, worker: str, model: str) -> tuple[Result, int]:
        turn = self._store.key("snapshot-turn", worker)
        lasts = max(1, round(900 * self._settings.interval))
        (mine,) = await self._ask("snapshot_turn", ("SET", turn, "1", "NX", "PX", lasts))
        if not mine:
            return "elsewhere", 0
        begun = self._clock()
        snapshot = await self._take(worker)
        self._took = self._clock() - begun
        if snapshot is None:
            await self._ask("snapshot_turn", ("DEL", turn))  # another replica may know more
            return "not_now", 0
        if len(snapshot.image) > self._settings.max_bytes:
            return "too_large", 0
        before, _ = await self._head(worker, model)
        if before is not None and before.size > self._settings.max_bytes:
            before = None  # so many parts that it is none of ours
        if before is not None and _is_of(before, snapshot) and await self._renew(worker, before):
            return "unchanged", 0
        await self._put(worker, model, snapshot)
        if before is not None:
            await self._expire(self._names(before), OVERLAP)
        return "written", len(snapshot.image)

    async def _put(self, worker: str, model: str, snapshot: Snapshot) -> None:
        image, lifetime = snapshot.image, round(1000 * self._settings.lifetime)
        seq, mark = snapshot.position
        digest = xxhash.xxh3_64_intdigest(image)
        head = _Head(worker, model, seq, mark, image[:FORM], secrets.token_hex(16), len(image), digest)
        names = self._names(head)
        view = memoryview(image)
        try:
            for number, name in enumerate(names):
                part = bytes(view[number * PART : (number + 1) * PART])
                await self._ask("snapshot_part", ("SET", name, part, "PX", lifetime))
            key = self._store.key("snapshot", worker)
            await self._ask("snapshot_head", ("SET", key, _encode(head), "PX", lifetime))
        except Unanswered:
            if self._store.up:
                await self._expire(names, OVERLAP)
            raise

    async def _renew(self, worker: str, head: _Head) -> bool:
        """Have a snapshot live on, if it is still there."""
        names = [*self._names(head), self._store.key("snapshot", worker)]
        return await self._expire(names, round(self._settings.lifetime))

    async def _expire(self, names: list[str], seconds: int) -> bool:
        """Whether all were there."""
        there = True
        for first in range(0, len(names), 64):
            some = names[first : first + 64]
            replies = await self._ask("snapshot_head", *(("EXPIRE", name, seconds) for name in some))
            there &= all(replies)
        return there

    async def _ask(self, kind: str, *commands: Command) -> list[Any]:
        return await self._store.ask(kind, *commands, budget=self._store.settings.timeout)


def _is_of(head: _Head, snapshot: Snapshot) -> bool:
    """Whether another one would say no more. At the same number it may: another version of kvsync wrote it, or what was
    known was given up since."""
    same_place = (head.seq, head.mark) == snapshot.position
    return same_place and (head.form, head.size) == (snapshot.image[:FORM], len(snapshot.image))


__all__ = ["PART", "Action", "Result", "Snapshots", "Telemetry"]
