"""An engine's random life, followed by one replica after the other, each from a snapshot that another took at some
moment of it: over real sockets, with batches lost, a buffer that is too small and processes that end meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from random import Random

import pytest

from kvsync.events.contracts import Snapshot
from kvsync.events.manager import EventManager
from kvsync.index import NATIVE, PrefixIndex
from kvsync.index.match import Index, Match
from kvsync.index.reference import ReferenceIndex
from tests.faults.publisher import Publisher
from tests.integration.events.conftest import SETTINGS, engine_of

INDEXES = [ReferenceIndex, *[PrefixIndex] * NATIVE]
BLOCKS = range(1, 40)


class Life:
    """The engine. ``held`` is the truth."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.held: set[int] = set()
        self.process = 0
        self.publisher = self._publisher(0, 0)

    def _publisher(self, events: int, replay: int) -> Publisher:
        steps = self.rng.choice([15, 60, 1000])
        return Publisher(
            events_port=events, replay_port=replay, buffer_steps=steps, started=1_000.0 * (self.process + 1)
        )

    def goes_on(self, batches: int) -> None:
        """The last batch comes, so that whatever was lost before it shows."""
        for left in reversed(range(batches)):
            lost = left > 0 and self.rng.random() < 0.1
            free = [block for block in BLOCKS if block not in self.held]
            if not free or (self.held and self.rng.random() < 0.45):
                block = self.rng.choice(sorted(self.held))
                self.held.discard(block)
                self.publisher.publish(block, removed=True, lost=lost)
            else:
                block = self.rng.choice(free)
                self.held.add(block)
                self.publisher.publish(block, lost=lost)

    def restarts(self) -> None:
        ports = [int(str(endpoint).rpartition(":")[2]) for endpoint in (self.publisher.events, self.publisher.replay)]
        self.publisher.close()
        self.process += 1
        self.held.clear()
        self.publisher = self._publisher(*ports)


class Replica:
    def __init__(self, make: Callable[[], Index], life: Life, snapshot: Snapshot | None) -> None:
        async def warm(_: object) -> Snapshot | None:
            return snapshot

        self.life = life
        self.index = make()
        self.manager = EventManager(self.index, SETTINGS, warm=warm)

    async def start(self) -> None:
        await self.manager.start()
        await self.manager.add(engine_of(self.life.publisher))

    def match(self, block: int) -> Match:
        return self.index.match([block] * 4 + [0], "m").get("a") or Match(0)

    async def is_true(self) -> str:
        """Return once it has all, and what it credits was found to be there; how far that is known."""
        publisher = self.life.publisher
        deadline = time.monotonic() + 20.0
        while True:
            (status,) = self.manager.workers()
            assert time.monotonic() < deadline, (status, publisher.published)
            trust = self.match(1).trust
            if trust != "none" and status.last_sequence == publisher.published - 1:
                break
            await asyncio.sleep(0.005)
        credited = {block for block in BLOCKS if self.match(block).credit}
        assert credited <= self.life.held, f"credit for what the engine has not: {credited - self.life.held}"
        assert trust != "exact" or credited == self.life.held
        return trust


async def live(make: Callable[[], Index], rng: Random) -> AsyncGenerator[str, None]:
    """One life. Yields how far what replicas credited was known, and ``restored`` where a snapshot was of use."""
    life = Life(rng)
    snapshots: list[Snapshot] = []
    replica = Replica(make, life, None)
    try:
        await replica.start()
        for _ in range(12):
            going = threading.Thread(target=life.goes_on, args=(rng.choice([1, 5, 40]),))
            going.start()
            while going.is_alive():
                snapshot = await replica.manager.snapshot("a")
                snapshots += [snapshot] if snapshot is not None else []
                await asyncio.sleep(0)
            yield await replica.is_true()
            what = rng.randrange(4)
            if what == 0:
                life.restarts()
                life.goes_on(rng.choice([1, 3, 30]))
            if what <= 2:
                await replica.manager.stop()
                life.goes_on(rng.choice([1, 3, 30]))
                replica = Replica(make, life, rng.choice(snapshots[-3:]) if snapshots else None)
                await replica.start()
                yield await replica.is_true()
                (status,) = replica.manager.workers()
                if status.restored:
                    yield "restored"
    finally:
        await replica.manager.stop()
        life.publisher.close()


@pytest.mark.parametrize("make", INDEXES, ids=["polled", "drained"][: len(INDEXES)])
async def test_whoever_takes_over_credits_what_is_there(make: Callable[[], Index]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        async with aclosing(live(make, Random(seed))) as said:
            async for word in said:
                seen[word] += 1
    assert seen.keys() == {"exact", "partial", "restored"}
