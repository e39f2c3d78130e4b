"""What the native core reads from live sockets by itself: that it does, when it must not, and what is told of it.

``test_following.py`` runs over both ways; here is what only the one way has.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvsync.events import inlet
from kvsync.events.types import BlockStoredEvent, EventBatch
from tests.integration.events.conftest import SETTINGS, DrainedSink, Fleet

pytest.importorskip("kvsync_core")


class Drains:
    """Both a sink's record and what the metrics hear."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def applied(self, worker: str, seconds: float) -> None:
        assert 0 <= seconds < 10
        self.told.append(worker)


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(recorder=DrainedSink(), timer=Drains()) as it:
        yield it


async def live(fleet: Fleet, *, applied: int = 1) -> None:
    """Engine ``a`` has published so many batches, all applied."""
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    await fleet.live()
    for n in range(applied):
        publisher.publish(n)
    await fleet.holds(range(applied))


async def test_what_continues_a_stream_takes_no_turn_in_python() -> None:
    sink = DrainedSink()
    # A reader that was held up looks everywhere itself, which is another test's matter.
    async with Fleet(SETTINGS.model_copy(update={"heartbeat_timeout": 30.0}), recorder=sink) as fleet:
        await live(fleet)
        publisher = fleet.publishers[0]
        while not sink.taken:  # what comes between being live and the core's first wait is Python's
            publisher.publish(publisher.published)
            await fleet.holds(range(publisher.published))
        in_python = list(sink.drains)
        for n in range(publisher.published, 300):
            publisher.publish(n)
        await fleet.holds(range(300))
        assert sink.drains == in_python
        assert sink.taken == 300 - sum(in_python)
        await fleet.until(lambda: fleet.status().last_sequence == 299)
        status = fleet.status()
        assert (status.counts.received, status.counts.applied) == (300, 300)
        assert status.whole
        assert sink.trust["a"] == "exact"


async def test_how_a_stream_is_doing_is_told_while_the_core_reads() -> None:
    sink = DrainedSink()
    async with Fleet(SETTINGS.model_copy(update={"poll_timeout": 60.0}), recorder=sink) as fleet:
        publisher = fleet.publisher()
        publisher.publish(0)
        await fleet.follow(publisher)
        await fleet.live()
        for n in range(1, 200):
            publisher.publish(n)
            await fleet.until(lambda n=n: fleet.status().last_sequence == n)  # type: ignore[misc]
            assert sink.index.match([n] * 4 + [0], "m")["a"].credit == 4
            counts = fleet.status().counts
            assert (counts.received, counts.applied) == (n, n + 1)
        assert sink.taken == 0, "no turn of Python ended this wait"


async def test_what_it_took_is_timed(fleet: Fleet) -> None:
    timer = fleet.manager._timer
    assert isinstance(timer, Drains)
    await live(fleet)
    fleet.publishers[0].publish(1)
    await fleet.holds([0, 1])
    assert isinstance(fleet.sink, DrainedSink)
    await fleet.until(lambda: len(timer.told) == 2)
    assert (fleet.sink.taken, timer.told) == (1, ["a", "a"])


async def test_an_observer_sees_every_batch_from_the_first_one_published_afterwards(fleet: Fleet) -> None:
    await live(fleet)
    seen: list[int] = []

    def observer(worker: str, seq: int, batch: EventBatch) -> None:
        assert all(isinstance(event, BlockStoredEvent) for event in batch.events)
        seen.append(seq)

    publisher = fleet.publishers[0]
    for _ in range(20):  # each time the core waits, or pauses, or reads
        end = fleet.manager.subscribe(observer)
        first = publisher.published
        for n in range(first, first + 5):
            publisher.publish(n)
        await fleet.holds(range(first + 5))
        await fleet.until(lambda: len(seen) >= 5)  # observers hear of a batch after the sink
        end()
        assert seen == list(range(first, first + 5))
        seen.clear()
    assert isinstance(fleet.sink, DrainedSink)
    taken = fleet.sink.taken
    while fleet.sink.taken == taken:  # nobody looks on any more: the core reads again
        publisher.publish(publisher.published)
        await fleet.holds(range(publisher.published))
    assert seen == []


async def test_a_worker_that_ended_gets_nothing_and_its_successor_begins_anew(fleet: Fleet) -> None:
    await live(fleet, applied=20)
    sink = fleet.sink
    assert isinstance(sink, DrainedSink)
    publisher = fleet.publishers[0]
    flood, stop = threading.Event(), threading.Event()

    def publish() -> None:
        n = 20
        while not stop.is_set() and n < 900:
            publisher.publish(n)
            flood.set()
            n += 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        await asyncio.to_thread(flood.wait, 10)
        for _ in range(5):
            await fleet.manager.remove("a")
            assert sink.index.stats()["workers"] == {}
            await fleet.follow(publisher)
            await fleet.live()
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)
    await fleet.until(lambda: fleet.status().last_sequence == publisher.published - 1)
    await fleet.live()
    await fleet.until(lambda: sink.index.stats()["workers"]["a"]["blocks"] == publisher.published)
    # A stream is live a moment before the index is told that its worker is current again.
    await fleet.until(lambda: sink.index.stats()["workers"]["a"]["trust"] == "exact")


async def test_how_a_worker_is_doing_is_not_how_one_of_its_name_was() -> None:
    sink = DrainedSink()
    async with Fleet(recorder=sink) as fleet:
        await live(fleet, applied=3)
        busy, go_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            busy.set()
            assert go_on.wait(30)

        publisher = fleet.publishers[0]
        sink.slow = stand_still
        publisher.publish(3, lost=True)  # a gap is Python's
        publisher.publish(4)
        assert await asyncio.to_thread(busy.wait, 10)
        try:
            await fleet.manager.remove("a")
            assert fleet.manager.workers() == []
            await fleet.follow(publisher)
            status = fleet.status()
            assert (status.state, status.last_sequence, status.connected) == ("connecting", None, False)
        finally:
            sink.slow = None
            go_on.set()
        await fleet.live()
        await fleet.until(lambda: sink.index.stats()["workers"]["a"]["blocks"] == 5)


async def test_a_stream_that_is_too_far_behind_is_dropped_and_replayed() -> None:
    sink = DrainedSink()
    async with Fleet(SETTINGS.model_copy(update={"receive_high_water": 200, "batch_size": 50}), recorder=sink) as fleet:
        await live(fleet, applied=3)
        publisher = fleet.publishers[0]
        frozen, thaw = threading.Event(), threading.Event()

        def stand_still() -> None:
            frozen.set()
            assert thaw.wait(30)

        sink.slow = stand_still
        publisher.publish(3, lost=True)
        publisher.publish(4)
        assert await asyncio.to_thread(frozen.wait, 10)
        for n in range(5, 900):
            publisher.publish(n)
        sink.slow = None
        thaw.set()
        await fleet.holds(range(900))
        await fleet.live()
        assert fleet.status().errors == {"overrun": 1}
        assert sink.trust["a"] == "exact"


async def test_without_a_library_to_read_with_python_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inlet, "libzmq", lambda: "/nowhere/_zmq.so")
    sink = DrainedSink()
    async with Fleet(recorder=sink) as fleet:
        await live(fleet, applied=10)
    assert sink.taken == 0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["KV events take the slower way through Python: /nowhere/_zmq.so is not loaded"]
