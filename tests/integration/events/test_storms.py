"""Many at once, again and again, and nothing at all: what must stay bounded does."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvsync.discovery.model import Engine
from tests.faults.network import Proxy, bad_port
from tests.faults.publisher import Publisher
from tests.integration.events.conftest import SETTINGS, Fleet, engine_of
from tests.integration.events.farm import Farm


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads_of_this_process() -> int:
    """ZMQ's own included, without the event loop's pool, which resolves names: it is bounded, and grows when two
    look-ups meet."""
    pool = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    return len(list(Path("/proc/self/task").iterdir())) - pool


@asynccontextmanager
async def farm_of(count: int, length: int) -> AsyncIterator[Farm]:
    farm = Farm(count, length)
    try:
        yield farm
    finally:
        farm.close()


@pytest.mark.faults
async def test_a_hundred_engines_want_a_replay_at_start_and_live_events_go_on() -> None:
    """(S10) Few replays at a time and one for each engine, none broken off; a live batch waits for none of them."""
    count, length = 100, 200
    settings = SETTINGS.model_copy(update={"replays_at_once": 8, "replay_timeout": 20.0, "batch_size": 64})
    async with farm_of(count, length) as farm, Fleet(settings) as fleet:
        live = fleet.publisher()
        await fleet.follow(live, "live")
        await fleet.live("live")
        for i, member in enumerate(farm.members):
            await fleet.manager.add(
                Engine(
                    uid=f"w{i}",
                    name=f"w{i}",
                    url="http://127.0.0.1:9",
                    model="m",
                    events=member.events,
                    replay=member.replay,
                    usable_blocks=10_000,
                )
            )
        await fleet.until(lambda: farm.under_way == 8)
        published: list[int] = []
        while sum(map(len, fleet.sink.applied.values())) < count * length + len(published):
            published.append(1_000_000 + len(published))
            live.publish(published[-1])
            await fleet.holds(published, "live")  # though replays stand still, or go on, in between
            farm.grant(1_000)
        farm.grant(count * length)  # for whatever is asked twice
        for i in range(count):
            await fleet.live(f"w{i}")
            assert fleet.sink.applied[f"w{i}"] == list(range(i * length + 1, (i + 1) * length + 1))
            assert fleet.sink.trust[f"w{i}"] == "exact"
        assert len(published) >= 20
        assert farm.most <= 8
        assert farm.doubled == set()
        counts = [fleet.status(f"w{i}").counts for i in range(count)]
        assert sum(c.replays_failed + c.stray for c in counts) == 0
        assert max(farm.requests.values()) <= 3, (
            "one brings all, one shows that nothing is missing; then it is looked on"
        )


@pytest.mark.faults
async def test_half_open_connections_are_found_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """(S8) Packets vanish, and another process takes the address: 20 times its first event is seen."""
    monkeypatch.setattr("kvsync.events.followed.RECONNECT_LAST", 0.1)
    settings = SETTINGS.model_copy(update={"heartbeat_interval": 0.1, "heartbeat_timeout": 0.25})
    async with Fleet(settings) as fleet:
        publisher = fleet.publisher()
        async with Proxy(publisher.events) as proxy:
            await fleet.manager.add(replace(engine_of(publisher), events=proxy.endpoint))
            await fleet.live()
            files = threads = 0
            for n in range(20):
                proxy.swallow()
                publisher = reborn(fleet, publisher, started=2_000.0 * (n + 2))
                publisher.publish(n + 1)
                await fleet.holds([n + 1])
                await fleet.live()
                if n == 1:  # whatever is made once is made by now
                    await fleet.until(lambda: proxy.open == 1)
                    files, threads = open_files(), threads_of_this_process()
            await fleet.until(lambda: proxy.open == 1)
            await fleet.until(lambda: open_files() <= files)
            await fleet.until(lambda: threads_of_this_process() <= threads)
            assert fleet.sink.trust["a"] == "exact"


@pytest.mark.faults
async def test_an_idle_healthy_connection_is_left_alone(fleet: Fleet) -> None:
    """(S8) Six heartbeats and their answers are more than two of its timeouts."""
    publisher = fleet.publisher()
    async with Proxy(publisher.events) as proxy:
        await fleet.manager.add(replace(engine_of(publisher), events=proxy.endpoint))
        await fleet.live()
        pieces = proxy.pieces
        await fleet.until(lambda: proxy.pieces >= pieces + 12)
        assert (fleet.status().connections, fleet.status().disconnections, proxy.connections) == (1, 0, 1)


async def test_a_storm_of_lost_connections_is_met_with_patience(fleet: Fleet) -> None:
    """Each connection that does not last makes the pause before the next one longer."""
    publisher = fleet.publisher(already=range(1, 501))
    async with Proxy(publisher.events) as proxy:
        await fleet.manager.add(replace(engine_of(publisher), events=proxy.endpoint))
        started = time.monotonic()
        for n in range(5):
            await fleet.until(lambda n=n: fleet.status().connections == n + 1)  # type: ignore[misc]
            proxy.cut(reset=n % 2 == 1)
            await fleet.until(lambda n=n: fleet.status().disconnections == n + 1)  # type: ignore[misc]
        await fleet.live()
        assert time.monotonic() - started >= 0.1 + 0.2 + 0.4 + 0.8 + 1.6
        await fleet.holds(range(1, 501))
        assert fleet.sink.trust["a"] == "exact"
        assert fleet.status().connections == 6


@pytest.mark.faults
async def test_a_refused_port_is_tried_less_and_less_often(fleet: Fleet) -> None:
    """(K4) And once somebody listens there, it is followed."""
    started = time.monotonic()
    async with bad_port("refused") as port:
        endpoint = f"tcp://127.0.0.1:{port}"
        publisher = fleet.publisher(already=[1])
        await fleet.manager.add(replace(engine_of(publisher), events=endpoint))
        await fleet.until(lambda: fleet.status().reconnect_attempts >= 4)
        assert time.monotonic() - started >= 0.1 + 0.2 + 0.4
        await fleet.until(lambda: fleet.status().alarm == "no_connection")
        assert "with an endpoint that has * or ::" in str(fleet.status().problem)
        assert fleet.status().counts.replays == 0
    late = fleet.publisher(events_port=port, already=[1])
    assert late.events == endpoint
    await fleet.holds([1])
    await fleet.live()
    assert fleet.status().alarm is None


@pytest.mark.faults
async def test_an_engine_that_serves_and_publishes_nothing_is_an_alarm(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """(O1) Nobody relies on what it does not say, the sentence names the mend, and its first batch ends it."""
    monkeypatch.setattr("kvsync.events.stream.SILENCE", 0.1)
    publisher = fleet.publisher()
    await fleet.follow(publisher)
    await fleet.live()
    await fleet.until(lambda: fleet.sink.current == [False, True])

    def alarmed() -> bool:
        fleet.manager.served("a")
        return fleet.status().alarm == "silent"

    await fleet.until(alarmed)
    assert fleet.status().state == "silent"
    await fleet.until(lambda: fleet.sink.current == [False, True, False])
    problem = fleet.status().problem
    assert problem is not None
    for mend in ('"enable_kv_cache_events": true', '"publisher": "zmq"', "prefix caching", publisher.events):
        assert mend in problem
    await fleet.until(lambda: caplog.messages.count(f"a: {problem}") == 1)  # written by the reader's thread
    publisher.publish(1)
    await fleet.holds([1])
    await fleet.until(lambda: fleet.sink.current == [False, True, False, True])
    assert (fleet.status().alarm, fleet.status().problem) == (None, None)


async def test_an_engine_that_published_and_now_only_hits_is_no_alarm(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsync.events.stream.SILENCE", 0.1)
    publisher = fleet.publisher(already=[1])
    await fleet.follow(publisher)
    await fleet.live()

    def silent() -> bool:
        fleet.manager.served("a")
        return fleet.status().state == "silent"

    await fleet.until(silent)
    assert fleet.status().alarm is None
    assert fleet.sink.current == [False, True], "what is known of it stays"


def reborn(fleet: Fleet, dead: Publisher, *, started: float) -> Publisher:
    """Another process on the ports of one that ended."""
    dead.close()
    fleet.publishers.remove(dead)
    assert dead.replay is not None
    ports = [int(endpoint.rpartition(":")[2]) for endpoint in (dead.events, dead.replay)]
    return fleet.publisher(events_port=ports[0], replay_port=ports[1], started=started)
