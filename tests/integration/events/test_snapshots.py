"""One replica's snapshot is another one's beginning, over real sockets and with real indexes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvsync.events.contracts import Snapshot, Target, Turns, Warm
from kvsync.events.manager import WARMING, EventManager
from kvsync.events.reader import Reader
from kvsync.events.stream import Position
from kvsync.index import NATIVE, PrefixIndex
from kvsync.index.match import Index, Match
from kvsync.index.reference import ReferenceIndex
from tests.faults.publisher import Publisher, payload
from tests.integration.events.conftest import SETTINGS, engine_of

INDEXES = [ReferenceIndex, *[PrefixIndex] * NATIVE]
pytestmark = pytest.mark.parametrize("make", INDEXES, ids=["polled", "drained"][: len(INDEXES)])
Make = Callable[[], Index]


class Replica:
    """An index and who feeds it."""

    def __init__(self, make: Make, **options: Any) -> None:
        self.index = make()
        self.manager = EventManager(self.index, SETTINGS, **options)

    def match(self, block: int, worker: str = "a") -> Match:
        """What is known of a publisher's block."""
        return self.index.match([block % 1000] * 4 + [0], "m").get(worker) or Match(0)

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline, (self.manager.workers(), self.index.stats())
            await asyncio.sleep(0.005)

    async def knows(self, *blocks: int, trust: str = "exact") -> None:
        def known() -> bool:
            return all((self.match(b).credit, self.match(b).trust) == (4, trust) for b in blocks)

        await self.until(known)

    async def told(self, worker: str = "a") -> Snapshot:
        """A snapshot, as soon as one can be had."""
        found: list[Snapshot] = []
        deadline = time.monotonic() + 20.0
        while not found:
            assert time.monotonic() < deadline, (self.manager.workers(), self.index.stats())
            snapshot = await self.manager.snapshot(worker)
            found += [snapshot] if snapshot is not None else []
        return found[0]

    @property
    def status(self) -> Any:
        (status,) = self.manager.workers()
        return status


@asynccontextmanager
async def replica(make: Make, *publishers: Publisher, **options: Any) -> AsyncIterator[Replica]:
    it = Replica(make, **options)
    await it.manager.start()
    try:
        for uid, publisher in zip("abc", publishers, strict=False):
            await it.manager.add(engine_of(publisher, uid))
        yield it
    finally:
        await it.manager.stop()


@asynccontextmanager
async def publishing(**options: Any) -> AsyncIterator[Publisher]:
    publisher = Publisher(**options)
    try:
        yield publisher
    finally:
        publisher.close()


def given(snapshot: Snapshot | None) -> Warm:
    async def warm(target: Target) -> Snapshot | None:
        return snapshot

    return warm


async def snapshot_of(make: Make, publisher: Publisher, *blocks: int) -> Snapshot:
    async with replica(make, publisher) as first:
        await first.knows(*blocks)
        return await first.told()


async def test_a_replica_with_a_snapshot_is_exact_where_the_engine_no_longer_remembers_the_beginning(
    make: Make,
) -> None:
    async with publishing(already=range(1, 31), buffer_steps=20) as publisher, replica(make, publisher) as cold:
        await cold.until(lambda: cold.match(30).credit)
        assert cold.match(30).trust == "partial", "number 0 is out of reach"
        assert cold.match(1).credit == 0
        assert await cold.manager.snapshot("a") is None, "something was lost"
    async with publishing(already=range(1, 16), buffer_steps=20) as publisher:
        snapshot = await snapshot_of(make, publisher, 1, 15)
        assert snapshot.position.seq == 14
        for block in range(16, 31):
            publisher.publish(block)
        asked = len(publisher.requests)
        async with replica(make, publisher, warm=given(snapshot)) as warm:
            await warm.knows(1, 15, 16, 30)
            assert publisher.requests[asked] == 14
            assert (warm.status.whole, warm.status.restored, warm.status.last_sequence) == (True, True, 29)
            assert warm.status.counts.applied == 15
            publisher.publish(1, removed=True)
            publisher.publish(31)
            await warm.knows(31, 15)
            assert warm.match(1).credit == 0
        async with replica(make, publisher) as cold:
            await cold.until(lambda: cold.match(31).credit)
            assert cold.match(31).trust == "partial"


async def test_nothing_of_it_counts_before_the_engine_has_shown_that_it_is_the_same(make: Make) -> None:
    async with publishing(already=range(1, 6)) as publisher:
        snapshot = await snapshot_of(make, publisher, 1, 5)
        publisher.silent_replay = True
        async with replica(make, publisher, warm=given(snapshot)) as warm:
            await warm.until(lambda: warm.status.connected)
            assert (warm.match(1).credit, warm.match(1).expected, warm.match(1).trust) == (0, 4, "none")
            assert not warm.status.restored
            publisher.silent_replay = False
            await warm.knows(1, 5)


async def test_another_process_answers_in_the_meantime(make: Make) -> None:
    async with publishing(already=range(1, 6)) as publisher:
        snapshot = await snapshot_of(make, publisher, 1, 5)
    for already in (range(100, 103), range(100, 105), range(100, 120)):  # not as far, just as far, and further
        async with (
            publishing(already=already, started=5_000.0) as publisher,
            replica(make, publisher, warm=given(snapshot)) as warm,
        ):
            await warm.knows(*already)
            assert warm.match(1) == Match(0)
            assert (warm.status.restored, warm.status.whole, warm.status.counts.epochs) == (False, True, 1)
            assert publisher.requests[:2] == [4, 0]


async def test_what_can_not_be_taken_costs_a_replay_and_is_counted(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with publishing(already=range(1, 6)) as publisher:
        snapshot = await snapshot_of(make, publisher, 1, 5)
        damaged = Snapshot(snapshot.position, snapshot.image[:-1])
        async with replica(make, publisher, warm=given(damaged)) as warm:
            await warm.knows(1, 5)
            assert warm.status.errors == {"snapshot": 1}
            assert not warm.status.restored
    assert "its snapshot can't be used, so all is replayed" in caplog.text


async def test_a_snapshot_that_is_late_or_fails_is_gone_without(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def never(target: Target) -> Snapshot | None:
        await asyncio.Event().wait()
        return None

    async def fails(target: Target) -> Snapshot | None:
        raise RuntimeError("for the test")

    async with publishing(already=range(1, 6)) as publisher:
        for warm in (never, fails, given(None)):
            async with replica(make, publisher, warm=warm, warm_timeout=0.1) as cold:
                await cold.knows(1, 5)
                assert not cold.status.errors
    assert "no snapshot of a in 0.1 s" in caplog.text
    assert "for the test" in caplog.text


async def test_a_large_fleet_asks_for_few_at_a_time_and_each_has_its_own_patience(make: Make) -> None:
    asking, most = 0, 0

    async def warm(target: Target) -> Snapshot | None:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0.03)
        asking -= 1
        return snapshot

    async with publishing(already=range(1, 6)) as publisher:
        snapshot = await snapshot_of(make, publisher, 1, 5)
        async with replica(make, warm=warm, warm_timeout=0.5) as fleet:
            names = [f"e{number}" for number in range(3 * WARMING)]
            for name in names:
                await fleet.manager.add(engine_of(publisher, name))
            await fleet.until(lambda: all(fleet.match(5, name).credit for name in names))
            assert all(status.restored for status in fleet.manager.workers())
    assert most == WARMING


async def test_ranks_of_an_engine_are_asked_for_few_at_a_time(make: Make) -> None:
    """So that no more of them are in memory than of as many engines."""
    asking: set[str] = set()
    most: list[int] = []

    async def warm(target: Target) -> Snapshot | None:
        asking.add(target.worker)
        most.append(len(asking))
        await asyncio.sleep(0.005)
        asking.remove(target.worker)
        return None

    async with publishing() as publisher, replica(make, warm=warm) as wide:
        await wide.manager.add(engine_of(publisher, "a", data_parallel_size=2 * WARMING))
        await wide.until(lambda: len(most) == 2 * WARMING)
    assert max(most) == WARMING


async def test_without_a_replay_endpoint_nobody_asks_for_one(make: Make) -> None:
    asked = []

    async def warm(target: Target) -> Snapshot | None:
        asked.append(target)
        return Snapshot(Position(1, b"x"), b"")

    async with publishing(replay_port=None) as publisher, replica(make, publisher, warm=warm) as cold:
        await cold.until(lambda: cold.status.connected)
        publisher.publish(1)
        await cold.until(lambda: cold.match(1).credit)
    assert not asked


async def test_a_snapshot_is_of_one_moment_however_much_comes(make: Make) -> None:
    """Taken again and again while batches come: each has exactly what stood up to its number."""
    async with publishing() as publisher, replica(make, publisher) as first:
        stop = threading.Event()

        def publish() -> None:
            number = 0
            while not stop.is_set() and number < 900:
                number += 1
                publisher.publish(number)
                if number > 40:
                    publisher.publish(number - 40, removed=True)

        thread = threading.Thread(target=publish)
        thread.start()
        taken: dict[int, Snapshot] = {}
        try:
            while thread.is_alive() or not taken:
                snapshot = await first.manager.snapshot("a")
                if snapshot is not None:
                    taken[snapshot.position.seq] = snapshot
        finally:
            stop.set()
            thread.join()
        for seq, snapshot in taken.items():
            other = make()
            other.add_worker("a", "m")
            other.restore("a", snapshot.image)
            stored = seq + 1 if seq < 40 else 40 + (seq - 40) // 2 + 1
            gone = max(0, seq - 40 + 1) // 2
            held = {n for n in range(1, 950) if other.match([n] * 4 + [0], "m")["a"].credit}
            assert held == set(range(gone + 1, stored + 1)), seq
        assert taken


def reader_of(replica: Replica) -> Reader:
    reader = replica.manager._reader
    assert reader is not None
    return reader


class Slow:
    """Tells when it is let, and what it knew when it was asked."""

    def __init__(self, replica: Replica) -> None:
        self.asked = threading.Event()
        self.may = threading.Event()
        self.fails = False
        reader = reader_of(replica)
        self._submit = reader._teller.submit
        reader._teller.submit = self  # type: ignore[method-assign, assignment]

    def __call__(self, dump: Callable[[str], bytes | None], worker: str) -> Any:
        def slowly() -> bytes | None:
            image = dump(worker)
            self.asked.set()
            assert self.may.wait(20.0)
            if self.fails:
                raise ZeroDivisionError
            return image

        return self._submit(slowly)


@asynccontextmanager
async def being_told(replica: Replica) -> AsyncIterator[tuple[Slow, asyncio.Task[Snapshot | None]]]:
    """While a snapshot of the first worker is taken."""
    slow = Slow(replica)
    task = asyncio.create_task(replica.manager.snapshot("a"))
    try:
        await replica.until(slow.asked.is_set)
        yield slow, task
    finally:
        slow.may.set()


async def test_while_one_is_told_all_others_go_on_and_it_does_afterwards(make: Make) -> None:
    async with (
        publishing(already=range(1, 6)) as publisher,
        publishing(already=range(1, 6)) as neighbour,
        replica(make, publisher, neighbour) as first,
    ):
        await first.told("a")
        await first.told("b")
        reader = reader_of(first)
        wait = reader._inlet.wait
        # as if something had been read of each when the snapshot was asked for
        reader._inlet.wait = lambda *limits: [*wait(*limits), *reader._followed.values()]  # type: ignore[method-assign]
        async with being_told(first) as (slow, task):
            for publishes in (publisher, neighbour):
                publishes.publish(7)
                publishes.publish(1, removed=True)
            await first.until(lambda: first.match(7, "b").credit and not first.match(1, "b").credit)
            assert (first.match(7).credit, first.match(1).credit) == (0, 4)
            assert await first.manager.snapshot("a") is None, "it is told already"
            assert not task.done()
            slow.may.set()
            snapshot = await task
        assert snapshot is not None
        assert snapshot.position.seq == 4
        told = make()
        told.add_worker("a", "m")
        told.restore("a", snapshot.image)
        assert [b for b in range(1, 9) if told.match([b] * 4 + [0], "m")["a"].credit] == [1, 2, 3, 4, 5]
        await first.knows(7)
        assert first.match(1).credit == 0
        assert (await first.told()).position.seq == 6


async def test_what_was_read_when_it_was_asked_for_comes_next(make: Make) -> None:
    async with publishing(already=range(1, 6)) as publisher, replica(make, publisher) as first:
        await first.told()
        reader, asked = reader_of(first), len(publisher.requests)
        async with being_told(first) as (slow, task):
            seq = publisher.publish(6, lost=True)
            read = [b"", seq.to_bytes(8, "big"), payload(publisher.started + seq, 6)]
            reader._submit(lambda: reader._followed["a"].sockets.hand([read]))
            slow.may.set()
            snapshot = await task
            assert snapshot is not None
            assert snapshot.position.seq == 4
        await first.knows(6)
        assert len(publisher.requests) == asked, "no replay found it"
        publisher.publish(7)
        await first.knows(7)
        assert (first.status.counts.applied, first.status.counts.missed) == (7, 0)


@pytest.mark.parametrize("what", ["asleep", "doubted", "ended", "followed anew"])
async def test_to_whom_something_happens_meanwhile_is_not_told(make: Make, what: str) -> None:
    async with publishing(already=range(1, 6)) as publisher, replica(make, publisher) as first:
        await first.told()
        async with being_told(first) as (slow, task):
            reader = reader_of(first)
            followed = reader._followed["a"]
            if what == "asleep":
                reader.sleeping("a", True)
                reader.sleeping("a", False)
            elif what == "doubted":
                first.manager.resync("a")
            else:
                await first.manager.remove("a")
            if what == "followed anew":
                await first.manager.add(engine_of(publisher))
                await first.until(lambda: first.match(5).trust == "exact")
            await asyncio.wrap_future(reader._submit(lambda: None))
            slow.may.set()
            assert await task is None
        assert (followed.sockets.sub is None) is (what in ("ended", "followed anew"))
        if what in ("doubted", "followed anew"):
            await first.knows(1, 5)
            publisher.publish(6)
            await first.knows(6)
            await first.told()


async def test_a_stream_goes_on_though_nobody_waits_for_its_snapshot_any_more(make: Make) -> None:
    async with publishing(already=range(1, 6)) as publisher, replica(make, publisher) as first:
        await first.told()
        async with being_told(first) as (slow, task):
            task.cancel()
            publisher.publish(6)
            slow.may.set()
            await first.knows(6)
        await first.told()


async def test_a_sink_that_fails_to_tell_is_heard_and_its_stream_goes_on(make: Make) -> None:
    async with publishing(already=range(1, 6)) as publisher, replica(make, publisher) as first:
        await first.told()
        async with being_told(first) as (slow, task):
            slow.fails = True
            slow.may.set()
            with pytest.raises(ZeroDivisionError):
                await task
        publisher.publish(6)
        await first.knows(6)


async def test_who_is_asleep_behind_or_unknown_tells_nothing(make: Make) -> None:
    async with publishing(already=range(1, 6)) as publisher, replica(make, publisher) as first:
        await first.told()
        assert await first.manager.snapshot("nobody") is None
        publisher.silent_replay = True
        publisher.publish(6, lost=True)
        publisher.publish(7)
        await first.until(lambda: first.status.state != "live")
        assert await first.manager.snapshot("a") is None
        publisher.silent_replay = False
        await first.knows(6, 7)
        await first.told()
        reader_of(first).sleeping("a", True)
        assert await first.manager.snapshot("a") is None
    assert await first.manager.snapshot("a") is None, "it has ended"


class Gate:
    """Turns that are given by hand."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Callable[[], object]]] = []
        self.ended: list[str] = []

    def ask(self, engine: str, granted: Callable[[], object]) -> Any:
        self.asked.append((engine, granted))
        gate = self

        class Turn:
            def end(self) -> None:
                gate.ended.append(engine)

        return Turn()


async def test_a_stream_catches_up_when_its_turn_has_come(make: Make) -> None:
    gate = Gate()
    turns: Turns = gate
    async with publishing(already=range(1, 6)) as publisher, replica(make, publisher, turns=turns) as first:
        await first.until(lambda: gate.asked)
        publisher.publish(6)
        await first.until(lambda: first.status.counts.received)
        assert publisher.requests == []
        assert first.match(1).credit == 0
        while first.status.state == "catching_up":
            for _, granted in gate.asked[len(gate.ended) :]:
                granted()
            await asyncio.sleep(0.005)
        await first.knows(1, 5, 6)
        assert len(gate.ended) == len(gate.asked)
        before = len(gate.asked)
        publisher.publish(7, lost=True)
        publisher.publish(8)
        await first.knows(7, 8)
        assert len(gate.asked) == before, "a repair waits for nobody"


async def test_a_turn_that_comes_too_late_is_nobodys(make: Make) -> None:
    gate = Gate()
    async with publishing(already=range(1, 6)) as publisher, replica(make, publisher, turns=gate) as first:
        await first.until(lambda: gate.asked)
        await first.manager.remove("a")
        await first.until(lambda: gate.ended)
        gate.asked[0][1]()
        await first.manager.add(engine_of(publisher))
        await first.until(lambda: len(gate.asked) == 2)
        gate.asked[0][1]()
        await asyncio.wrap_future(first.manager._reader._submit(lambda: None))  # type: ignore[union-attr]
        assert publisher.requests == []
        gate.asked[1][1]()
        await first.until(lambda: publisher.requests)
