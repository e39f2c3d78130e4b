"""Following engines over real sockets."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvsync.events.types import BlockRemovedEvent, BlockStoredEvent, EventBatch
from kvsync.index.reference import ReferenceIndex
from tests.faults.network import Proxy, bad_port
from tests.faults.publisher import Publisher, neighbours
from tests.integration.events.conftest import SETTINGS, SINKS, Fleet, engine_of


@pytest_asyncio.fixture(params=SINKS, ids=["polled", "drained"][: len(SINKS)])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with Fleet(recorder=request.param()) as it:
        yield it


@pytest.mark.parametrize("topic_frame", [True, False], ids=["since-0.26", "before-0.26"])
async def test_late_joiner_gets_all_of_the_history(fleet: Fleet, topic_frame: bool) -> None:
    publisher = fleet.publisher(topic_frame=topic_frame)
    for n in range(200):
        publisher.publish(n + 1)
    await fleet.follow(publisher)
    await fleet.live()
    await fleet.holds(range(1, 201))
    publisher.publish(201)
    await fleet.holds(range(1, 202))
    assert fleet.sink.trust["a"] == "exact"
    status = fleet.status()
    assert (status.last_sequence, status.whole, status.connected) == (200, True, True)
    assert status.counts.missed == status.counts.lost == 0
    assert publisher.requests[0] == 0


async def test_a_whole_drain_is_one_call(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    for n in range(500):
        publisher.publish(n + 1)
    await fleet.follow(publisher)
    await fleet.holds(range(1, 501))
    assert sum(fleet.sink.drains) == 500
    assert len(fleet.sink.drains) < 50


async def test_lost_replies_are_asked_for_until_nothing_is_missing(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    for n in range(100):
        publisher.publish(n + 1)
    publisher.drop = [*range(10, 20), *range(15, 18), 99]
    await fleet.follow(publisher)
    await fleet.live()
    await fleet.holds(range(1, 101))
    assert fleet.sink.trust["a"] == "exact"
    assert publisher.requests == [0, 9, 14, 99][: len(publisher.requests)]


async def test_a_gap_is_repaired_in_order(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    publisher.publish(1)
    await fleet.follow(publisher)
    await fleet.live()
    publisher.publish(2, lost=True)
    publisher.publish(3, lost=True)
    publisher.publish(4)
    await fleet.holds([1, 2, 3, 4])
    await fleet.live()
    assert fleet.status().counts.missed == 2
    assert ("forget", "a") not in fleet.sink.calls


async def test_a_number_that_was_never_published_is_stepped_over_and_its_batch_lost(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    await fleet.live()
    publisher.publish(1)
    publisher.burn()
    publisher.publish(3)
    await fleet.holds([3])
    await fleet.live()
    assert fleet.sink.trust["a"] == "partial"
    assert fleet.status().counts.lost == 1


UNTIL = "trust is partial until the engine clears its cache, restarts, or is followed from number 0 on"


async def test_a_truncated_buffer_makes_a_worker_partial(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    publisher = fleet.publisher(buffer_steps=5)
    for n in range(20):
        publisher.publish(n + 1)
    await fleet.follow(publisher)
    await fleet.live()
    await fleet.holds(range(16, 21))
    assert fleet.sink.trust["a"] == "partial"
    assert not fleet.status().whole
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert warning == f"a: events are lost and its blocks forgotten; {UNTIL}"


async def test_a_replay_that_never_answers_is_given_up(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    publisher.silent_replay = True
    publisher.publish(1)
    await fleet.follow(publisher)
    await fleet.live()
    publisher.publish(2)
    await fleet.holds([2])
    assert fleet.sink.trust["a"] == "partial"
    assert fleet.status().counts.replays_failed == len(publisher.requests) == 3


async def test_an_engine_without_replay(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvsync.events")
    publisher = fleet.publisher(replay_port=None)
    await fleet.follow(publisher)
    await fleet.live()
    assert fleet.sink.trust["a"] == "partial"
    told = [(r.levelno, r.getMessage()) for r in caplog.records if UNTIL in r.getMessage()]
    late = f"without replay: what it may have published before is out of reach; {UNTIL}"
    assert told == [(logging.INFO, f"a: following {publisher.events}, {late}")]
    publisher.publish(1)
    await fleet.holds([1])
    assert fleet.sink.trust["a"] == "exact"
    assert caplog.records[-1].getMessage() == "a: followed from number 0 on: nothing is missing"
    publisher.publish(2, lost=True)
    publisher.publish(3)
    await fleet.holds([3])
    assert fleet.sink.trust["a"] == "partial"
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert warning == f"a: events are lost and its blocks forgotten; {UNTIL}"


def reborn(fleet: Fleet, dead: Publisher, **options: Any) -> Publisher:
    """Another process on the ports of one that ended."""
    dead.close()
    fleet.publishers.remove(dead)
    assert dead.replay is not None
    ports = [int(e.rpartition(":")[2]) for e in (dead.events, dead.replay)]
    return fleet.publisher(events_port=ports[0], replay_port=ports[1], started=2_000.0, **options)


async def test_a_restart_on_the_same_port_is_a_new_epoch(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    for n in range(10):
        publisher.publish(n + 1)
    await fleet.follow(publisher)
    await fleet.holds(range(1, 11))
    publisher = reborn(fleet, publisher)
    publisher.publish(101)
    await fleet.holds([101])
    await fleet.live()
    assert fleet.sink.trust["a"] == "exact"
    assert fleet.status().counts.epochs == 1
    publisher.publish(102)
    await fleet.holds([101, 102])


async def test_a_restarted_engine_that_has_come_further_is_not_taken_for_the_old_one(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    for n in range(3):
        publisher.publish(n + 1)
    await fleet.follow(publisher)
    await fleet.live()
    await fleet.holds([1, 2, 3])
    # It has published before anybody can connect, and its next number continues the old ones without a gap.
    publisher = reborn(fleet, publisher, already=[101, 102, 103])
    await asyncio.to_thread(publisher.subscribed.wait, 10)
    publisher.publish(104)
    await fleet.holds([101, 102, 103, 104])
    assert ("new_epoch", "a") in fleet.sink.calls


async def test_the_same_engine_after_a_broken_connection_goes_on(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    async with Proxy(publisher.events) as proxy:
        await fleet.manager.add(replace(engine_of(publisher), events=proxy.endpoint))
        publisher.publish(1)
        await fleet.live()
        await fleet.holds([1])
        proxy.cut()
        await fleet.until(lambda: fleet.status().disconnections == 1)
        publisher.publish(2)
        await fleet.until(lambda: fleet.status().connections == 2)
        publisher.publish(3)
        await fleet.holds([1, 2, 3])
        await fleet.live()
        # While the proxy still runs: its end is another lost connection.
        assert fleet.sink.calls == [("add", "a")]
        assert fleet.sink.current == [False, True, False, True], "nobody may rely on it while its connection is down"


async def test_a_worker_is_not_current_while_a_gap_is_repaired(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    publisher.publish(0)
    await fleet.holds([0])
    await fleet.live()
    publisher.publish(1, lost=True)
    publisher.publish(2)
    await fleet.holds([0, 1, 2])
    await fleet.live()
    assert fleet.sink.current == [False, True, False, True]


async def test_broken_connections_leave_nothing_behind(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsync.events.followed.RECONNECT_LAST", 0.1)
    publisher = fleet.publisher()

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def own_threads() -> list[str]:
        """Without the event loop's pool, which resolves names: it is bounded and grows when two look-ups meet."""
        return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_"))

    async with Proxy(publisher.events) as proxy:
        await fleet.manager.add(replace(engine_of(publisher), events=proxy.endpoint))
        files, threads = 0, own_threads()
        for n in range(12):
            publisher.publish(n)
            await fleet.holds(range(n + 1))
            await fleet.live()
            if n == 1:  # whatever is made once is made by now
                files, threads = open_files(), own_threads()
            proxy.cut()
            await fleet.until(lambda n=n: fleet.status().connections == n + 2)  # type: ignore[misc]
        await fleet.live()
        await fleet.until(lambda: open_files() <= files)
        assert own_threads() == threads
    assert fleet.sink.calls == [("add", "a")]


GARBAGE = [
    (b"topic only",),
    (b"topic", b"\0" * 8),
    (b"topic", b"\0" * 7, b"\x93"),
    (b"topic", b"\0" * 9, b"\x93"),
    (b"topic", b"\xff" * 8, b"\x93"),
    (b"topic", b"\0" * 8, b"\x93", b"one more"),
]


@pytest.mark.parametrize("frames", GARBAGE, ids=lambda f: f"{len(f)}-frames-{len(f[1]) if len(f) > 1 else 0}")
async def test_malformed_messages_are_counted_and_nothing_else(fleet: Fleet, frames: tuple[bytes, ...]) -> None:
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    await fleet.live()
    publisher.publish(1)
    publisher.send_live(*frames)
    publisher.publish(2)
    await fleet.holds([1, 2])
    assert sum(fleet.status().errors.values()) == 1
    assert fleet.status().connections == 1


async def test_an_undecodable_payload_goes_to_the_index_like_any_other(fleet: Fleet) -> None:
    """Whether it may have been a removal is for the index to judge; the sequence goes on."""
    publisher = fleet.publisher()
    seen: list[int] = []
    fleet.sink.undecodable = seen
    await fleet.follow(publisher)
    await fleet.live()
    publisher.publish(1)
    publisher.send_live(b"", (1).to_bytes(8, "big"), b"\xc1 no msgpack")
    await fleet.until(lambda: seen == [1])
    await fleet.until(lambda: fleet.status().last_sequence == 1)


async def test_a_message_of_absurd_size_costs_its_connection_only(fleet: Fleet) -> None:
    bad, good = fleet.publisher(), fleet.publisher()
    await fleet.follow(bad)
    await fleet.follow(good, "b")
    await fleet.live()
    await fleet.live("b")
    bad.send_live(b"", b"\0" * 8, b"x" * (65 << 20))
    await fleet.until(lambda: fleet.status().disconnections == 1)
    good.publish(1)
    await fleet.holds([1], "b")
    assert fleet.status("b").connections == 1


@pytest.mark.parametrize("kind", ["refused", "http", "black hole"])
async def test_a_bad_engine_costs_only_itself(fleet: Fleet, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    good = fleet.publisher()
    async with bad_port(kind) as port:
        bad = replace(engine_of(good, "bad"), events=f"tcp://127.0.0.1:{port}", replay=f"tcp://127.0.0.1:{port}")
        await fleet.manager.add(bad)
        await fleet.follow(good)
        await fleet.live()
        for n in range(50):
            good.publish(n + 1)
        await fleet.holds(range(1, 51))
        await fleet.until(lambda: fleet.status("bad").errors.get("connect_timeout", 0) >= 1)
        assert fleet.status("bad").state == "connecting"
        assert fleet.status("bad").counts.replays == 0
        told = f"bad: no connection to tcp://127.0.0.1:{port} yet"
        if kind == "refused":
            told += ": nobody listens there; publishing has to be on there"
            await fleet.until(lambda: told in caplog.text)
            assert "something else answers" not in caplog.text
        else:
            told += ": something else answers there, without a ZMQ handshake"
            await fleet.until(lambda: told in caplog.text)
            assert caplog.text.count(told) == 1


async def test_events_of_another_rank_are_for_the_index_to_drop() -> None:
    index = ReferenceIndex()
    fleet = Fleet(sink=index)
    await fleet.manager.start()
    publisher = fleet.publisher()
    try:
        await fleet.follow(publisher)
        publisher.publish(1, rank=0)
        publisher.publish(2, rank=1)
        publisher.publish(3, rank=0)
        await fleet.until(lambda: fleet.status().last_sequence == 2)
        await fleet.until(lambda: index.match([1] * 4 + [0], "m")["a"].credit == 4)
        await fleet.until(lambda: index.match([3] * 4 + [0], "m")["a"].credit == 4)
        assert index.match([2] * 4 + [0], "m")["a"].credit == 0
        assert index.match([1] * 4 + [0], "m")["a"].trust == "partial", "what was dropped may have been meant"
    finally:
        await fleet.close()


async def test_the_ranks_of_an_engine_are_workers_of_their_own(fleet: Fleet) -> None:
    ranks = neighbours(2)
    fleet.publishers.extend(ranks)
    engine = replace(engine_of(ranks[0]), data_parallel_size=2, replay=None)
    await fleet.manager.add(engine)
    await fleet.live("a#0")
    await fleet.live("a#1")
    ranks[0].publish(10)
    ranks[1].publish(11, rank=1)
    await fleet.holds([10], "a#0")
    await fleet.holds([11], "a#1")
    assert fleet.sink.facts["a#1"]["rank"] == 1


async def test_ipv6(fleet: Fleet) -> None:
    publisher = fleet.publisher(host="::1")
    publisher.publish(1)
    await fleet.follow(publisher)
    await fleet.live()
    await fleet.holds([1])
    assert publisher.events.startswith("tcp://[::1]:")


async def test_a_reader_that_stood_still_drops_its_backlog_and_gets_it_back(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(SETTINGS.model_copy(update={"receive_high_water": 1_000}))
    await fleet.manager.start()
    try:
        publisher = fleet.publisher()
        await fleet.follow(publisher)
        await fleet.live()
        frozen, thaw = threading.Event(), threading.Event()

        def stand_still() -> None:
            frozen.set()
            assert thaw.wait(30)

        fleet.sink.slow = stand_still
        publisher.publish(1)
        assert await asyncio.to_thread(frozen.wait, 10)
        for n in range(2, 5_000):
            publisher.publish(n)
        fleet.sink.slow = None
        thaw.set()
        await fleet.holds(range(1, 5_000))
        await fleet.live()
        assert fleet.status().errors == {"overrun": 1}
        assert fleet.status().connections == 2
        assert fleet.sink.trust["a"] == "exact"
        assert fleet.sink.calls == [("add", "a")]
        assert "more comes than can be taken" in caplog.text
    finally:
        await fleet.close()


async def test_a_reader_that_stands_still_beyond_the_heartbeat_timeout_lives_on() -> None:
    """ZMQ itself would abort the process here if its queue had a high-water mark."""
    fleet = Fleet(SETTINGS.model_copy(update={"receive_high_water": 10}))
    await fleet.manager.start()
    try:
        publisher = fleet.publisher()
        async with Proxy(publisher.events) as proxy:
            await fleet.manager.add(replace(engine_of(publisher), events=proxy.endpoint))
            await fleet.live()
            frozen, thaw = threading.Event(), threading.Event()

            def stand_still() -> None:
                frozen.set()
                assert thaw.wait(30)

            fleet.sink.slow = stand_still
            publisher.publish(1)
            assert await asyncio.to_thread(frozen.wait, 10)
            for n in range(2, 500):
                publisher.publish(n)
            connections = proxy.connections
            proxy.swallow()
            await fleet.until(lambda: proxy.connections > connections)  # the heartbeat found it dead
            fleet.sink.slow = None
            thaw.set()
            await fleet.holds(range(1, 500))
            await fleet.live()
    finally:
        await fleet.close()


async def test_what_exceeds_the_byte_budget_is_dropped_and_replayed() -> None:
    fleet = Fleet(SETTINGS.model_copy(update={"receive_bytes": 1 << 20}))
    await fleet.manager.start()
    try:
        publisher = fleet.publisher()
        await fleet.follow(publisher)
        await fleet.live()
        publisher.publish(1, lost=True)
        publisher.silent_replay = True
        for n in range(2, 402):
            publisher.publish(*range(n, n + 200))
        await fleet.until(lambda: fleet.status().counts.received == 400)
        assert fleet.status().counts.over_budget > 0
        publisher.silent_replay = False
        await fleet.holds(range(1, 402))
        await fleet.live()
    finally:
        await fleet.close()


async def test_replays_are_few_at_a_time_and_each_gets_its_turn() -> None:
    fleet = Fleet(SETTINGS.model_copy(update={"replays_at_once": 1}))
    await fleet.manager.start()
    try:
        mute = fleet.publisher()
        mute.silent_replay = True
        await fleet.follow(mute, "mute")
        await fleet.until(lambda: len(mute.requests) == 1)
        others = [fleet.publisher() for _ in range(4)]
        for n, publisher in enumerate(others):
            publisher.publish(n + 1)
            await fleet.follow(publisher, f"w{n}")
        for n in range(4):
            await fleet.live(f"w{n}")
            await fleet.holds([n + 1], f"w{n}")
        await fleet.live("mute")
        assert fleet.status("mute").counts.replays_failed == 3
    finally:
        await fleet.close()


async def test_a_removed_engine_is_heard_no_more(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    await fleet.live()
    publisher.publish(1)
    await fleet.holds([1])
    await fleet.manager.remove("a")
    assert fleet.sink.calls[-1] == ("remove", "a")
    assert fleet.manager.workers() == []
    publisher.publish(2)
    await fleet.follow(publisher)
    await fleet.holds([1, 2])
    assert [c for c in fleet.sink.calls if c[0] in ("add", "remove")] == [("add", "a"), ("remove", "a"), ("add", "a")]


async def test_add_and_remove_in_a_storm_ends_as_the_last_word_says(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    publisher.publish(1)
    for _ in range(20):
        await fleet.follow(publisher)
        await fleet.manager.remove("a")
    await fleet.follow(publisher)
    await fleet.holds([1])
    await fleet.live()


async def test_only_a_change_that_matters_opens_the_stream_anew(fleet: Fleet) -> None:
    publisher, other = fleet.publisher(), fleet.publisher()
    publisher.publish(1)
    other.publish(7)
    engine = engine_of(publisher)
    await fleet.manager.add(engine)
    await fleet.holds([1])
    await fleet.manager.change(replace(engine, ready=False, labels={"x": "y"}, adapters=("l",)))
    publisher.publish(2)
    await fleet.holds([1, 2])
    assert fleet.sink.calls == [("add", "a")]
    await fleet.manager.change(replace(engine, events=other.events, replay=other.replay))
    await fleet.holds([7])
    await fleet.manager.change(replace(engine, kv_events=False))
    assert "a" not in fleet.sink.facts


async def test_facts_are_passed_on(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    await fleet.follow(publisher, model="big", usable_blocks=99, attention_chunk_size=128, spec_decode="eagle")
    await fleet.live()
    assert fleet.sink.facts["a"] == {
        "model": "big",
        "usable_blocks": 99,
        "attention_chunk_size": 128,
        "spec_decode": "eagle",
        "hit_alignment": None,
        "rank": 0,
    }


async def test_a_sink_that_fails_costs_belief_and_not_the_reader(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    await fleet.live()

    def fail() -> None:
        raise ZeroDivisionError

    fleet.sink.slow = fail
    publisher.publish(1)
    await fleet.until(lambda: ("forget", "a") in fleet.sink.calls)
    assert fleet.status().errors == {"sink": 1}
    assert "the index failed" in caplog.text
    fleet.sink.slow = None
    publisher.publish(2)
    await fleet.holds([2])


class CorePanicked(BaseException):
    """As ``pyo3_runtime.PanicException``: no :class:`Exception`, so that nobody takes it for an error of a call."""


@pytest.mark.parametrize("fault", [ZeroDivisionError, CorePanicked])
async def test_a_reader_that_fails_says_so_and_leaves_nothing_behind(fleet: Fleet, fault: type[BaseException]) -> None:
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    await fleet.live()

    def fail() -> None:
        raise fault

    fleet.sink.slow = fleet.sink.on_forget = fail
    publisher.publish(1)
    await fleet.until(lambda: fleet.manager.failed)
    await fleet.until(lambda: fleet.sink.facts == {})
    await fleet.manager.remove("a")
    await fleet.follow(publisher, "b")
    assert fleet.manager.failed


async def test_each_hand_over_is_timed() -> None:
    times: list[tuple[str, float]] = []

    class Clock:
        def applied(self, worker: str, seconds: float) -> None:
            times.append((worker, seconds))

    fleet = Fleet(timer=Clock())
    await fleet.manager.start()
    try:
        publisher = fleet.publisher()
        publisher.publish(1)
        await fleet.follow(publisher)
        await fleet.until(lambda: len(times) == 1)
        worker, seconds = times[0]
        assert worker == "a"
        assert 0 < seconds < 10
    finally:
        await fleet.close()


async def test_observers_see_decoded_batches_with_their_origin(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    seen: list[tuple[str, int, EventBatch]] = []
    end = fleet.manager.subscribe(lambda worker, seq, batch: seen.append((worker, seq, batch)))
    await fleet.follow(publisher)
    publisher.publish(1)
    publisher.publish(2, removed=True)
    await fleet.until(lambda: len(seen) == 2)
    end()
    publisher.publish(3)
    await fleet.holds([1, 3])
    assert [(worker, seq) for worker, seq, _ in seen] == [("a", 0), ("a", 1)]
    stored, removed = (batch.events[0] for _, _, batch in seen)
    assert isinstance(stored, BlockStoredEvent)
    assert isinstance(removed, BlockRemovedEvent)
    assert (stored.model_name, stored.source_pod) == (removed.model_name, removed.source_pod) == ("m", "ns/a")


async def test_an_observer_that_came_before_the_start_misses_nothing() -> None:
    fleet = Fleet()
    seen: list[int] = []
    end = fleet.manager.subscribe(lambda worker, seq, batch: seen.append(seq))
    await fleet.manager.start()
    try:
        publisher = fleet.publisher()
        publisher.publish(1)
        await fleet.follow(publisher)
        await fleet.until(lambda: seen == [0])
    finally:
        await fleet.close()
    end()


async def test_silence_of_a_serving_engine_is_noticed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsync.events.stream.SILENCE", 0.1)
    publisher = fleet.publisher()
    publisher.publish(1)
    await fleet.follow(publisher)
    await fleet.live()
    publisher.publish(2, lost=True)  # the live side drops the last batch; nothing shows it
    fleet.manager.served("a")
    await fleet.holds([1, 2])
    fleet.manager.served("nobody")


async def test_an_observer_that_raises_is_dropped(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    publisher = fleet.publisher()
    calls = []

    def bad(worker: str, seq: int, batch: EventBatch) -> None:
        calls.append(seq)
        raise ZeroDivisionError

    fleet.manager.subscribe(bad)
    await fleet.follow(publisher)
    publisher.publish(1)
    publisher.publish(2)
    await fleet.holds([1, 2])
    await fleet.until(lambda: "an observer of KV events failed" in caplog.text)
    assert calls == [0]


async def test_connection_states_are_logged(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvsync.events")
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    await fleet.live()
    publisher.close()
    fleet.publishers.remove(publisher)
    await fleet.until(lambda: fleet.status().state == "down")
    await fleet.until(lambda: "a: down" in caplog.text)
    assert "a: following tcp://127.0.0.1:" in caplog.text
    assert "a: live" in caplog.text
    assert [r for r in caplog.records if r.levelno == logging.WARNING and "a: down" in r.message]
