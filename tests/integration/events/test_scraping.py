"""What engines say in their metrics: sleep takes all credit at once, a new start is looked into, hits are told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvsync.discovery.access import EngineAccess
from kvsync.discovery.model import Engine
from kvsync.events import scrape
from kvsync.events.scrape import EngineMetrics, RankMetrics, Scraper
from kvsync.index import PrefixIndex
from kvsync.index.match import Index, Match
from tests.faults.engine import Engine as ScriptedEngine
from tests.faults.network import Proxy
from tests.integration.events.conftest import SETTINGS, Fleet

OFTEN = SETTINGS.model_copy(update={"metrics_interval": 0.05})
AWAKE = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"}'
OLD = list(range(1_000, 1_033))
NEW = list(range(2_000, 2_033))


class Rig:
    """One scripted engine, followed into a real index."""

    def __init__(self, engine: ScriptedEngine, fleet: Fleet, index: Index) -> None:
        self.engine = engine
        self.fleet = fleet
        self.index = index

    def match(self, prompt: list[int]) -> Match:
        return self.index.match(prompt, "tiny")["a"]

    async def follow(self, **other: Any) -> None:
        entry = self.engine.entry | other
        await self.fleet.manager.add(Engine(uid="a", model="tiny", **entry))  # type: ignore[arg-type]

    async def credits(self, prompt: list[int], credit: int) -> None:
        await self.fleet.until(lambda: "a" in self.index.match(prompt, "tiny") and self.match(prompt).credit == credit)

    def sleep(self) -> None:
        """As vLLM does it: the cache is gone, and the clear waits for the next step."""
        self.engine.clear(told=False)
        self.engine.gauges[AWAKE] = 0

    def wake(self) -> None:
        self.engine.gauges[AWAKE] = 1

    async def knows_sleep(self, asleep: bool) -> None:
        await self.fleet.until(lambda: self.fleet.status().asleep is asleep)

    async def forgotten(self) -> None:
        await self.knows_sleep(True)

        def blocks() -> int:
            workers: Any = self.index.stats()["workers"]
            return int(workers["a"]["blocks"])

        await self.fleet.until(lambda: blocks() == 0)

    async def applied(self, seq: int) -> None:
        await self.fleet.until(lambda: self.fleet.status().last_sequence == seq)


@asynccontextmanager
async def rig(**engine: Any) -> AsyncIterator[Rig]:
    index = PrefixIndex()
    async with ScriptedEngine("a", **engine) as scripted, Fleet(OFTEN, sink=index) as fleet:
        yield Rig(scripted, fleet, index)


@pytest.mark.faults
async def test_a_sleeping_engine_has_no_credit_and_is_exact_again_after_its_first_step() -> None:
    """(I3) It sleeps and says so in its metrics only; then a clear leaves nothing, and what is new counts."""
    async with rig() as it:
        it.engine.store(OLD)
        await it.follow()
        await it.credits(OLD, 32)
        it.sleep()
        await it.forgotten()
        assert (it.match(OLD).credit, it.match(OLD).expected, it.match(OLD).trust) == (0, 0, "none")
        it.wake()
        await it.knows_sleep(False)
        await it.fleet.until(lambda: it.match(OLD).trust == "partial")
        assert it.match(OLD).credit == 0
        it.engine.tell({"type": "AllBlocksCleared"})
        it.engine.store(NEW)
        await it.credits(NEW, 32)
        assert it.match(NEW).trust == "exact"
        assert it.match(OLD).credit == 0


async def test_what_was_stored_before_the_sleep_and_comes_late_is_not_credited() -> None:
    async with rig() as it:
        await it.follow()
        it.engine.store(NEW)
        await it.credits(NEW, 32)
        it.engine.store(OLD, lost=True)  # the live side dropped it
        it.sleep()
        await it.knows_sleep(True)
        it.wake()
        await it.knows_sleep(False)
        await it.fleet.live()
        # The next batch shows the gap, and a replay brings the old one. Not even this one is of after the sleep.
        it.engine.tell({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"})
        await it.applied(2)
        await it.fleet.until(lambda: it.match(OLD).trust == "partial")
        assert it.match(OLD).credit == it.match(NEW).credit == 0
        it.engine.tell({"type": "AllBlocksCleared"})
        it.engine.store(NEW)
        await it.credits(NEW, 32)
        assert it.match(OLD).credit == 0


async def test_an_engine_that_sleeps_already_is_not_credited_though_it_was_cleared_before() -> None:
    """A gateway that starts while an engine sleeps: an older clear in the replayed history ends nothing."""
    async with rig() as it:
        it.engine.store(OLD)
        it.engine.tell({"type": "AllBlocksCleared"})
        it.engine.store(OLD)
        it.sleep()
        await it.follow()
        await it.knows_sleep(True)
        await it.applied(2)
        it.wake()
        await it.knows_sleep(False)
        await it.fleet.until(lambda: it.match(OLD).trust == "partial")
        assert it.match(OLD).credit == 0
        it.engine.tell({"type": "AllBlocksCleared"})
        it.engine.store(OLD)
        await it.credits(OLD, 32)


async def test_a_restart_ends_a_sleep_s_doubts_too() -> None:
    async with rig() as it:
        it.engine.store(OLD)
        await it.follow()
        await it.credits(OLD, 32)
        it.sleep()
        await it.knows_sleep(True)
        it.engine.restart()
        it.wake()
        it.engine.store(NEW)
        await it.credits(NEW, 32)
        assert it.match(NEW).trust == "exact"


async def test_a_worker_is_resumed_only_when_stream_and_metrics_agree() -> None:
    async with ScriptedEngine("a") as engine, Fleet(OFTEN) as fleet, Proxy(engine.publisher.events) as proxy:
        await fleet.manager.add(Engine(uid="a", model="tiny", **(engine.entry | {"events": proxy.endpoint})))  # type: ignore[arg-type]
        await fleet.until(lambda: fleet.sink.current == [False, True])
        await proxy.refuse()
        proxy.cut()
        await fleet.until(lambda: fleet.status().state == "down")
        engine.gauges[AWAKE] = 0
        await fleet.until(lambda: fleet.status().asleep)
        await proxy.accept()
        await fleet.live()
        assert fleet.sink.current == [False, True, False], "the stream is current and the engine sleeps"
        await proxy.refuse()
        proxy.cut()
        await fleet.until(lambda: fleet.status().state == "down")
        engine.gauges[AWAKE] = 1
        await fleet.until(lambda: not fleet.status().asleep)
        assert fleet.sink.current == [False, True, False], "it is awake and its stream is down"
        await proxy.accept()
        await fleet.live()
        await fleet.until(lambda: fleet.sink.current == [False, True, False, True])
        assert fleet.sink.calls.count(("forget", "a")) == 1, "a cache is lost once"


async def test_sleep_outlasts_a_new_registration() -> None:
    """Facts learned later make the worker new; that must not wake it."""
    async with ScriptedEngine("a", blocks=None) as engine, Fleet(OFTEN) as fleet:
        await fleet.manager.add(Engine(uid="a", model="tiny", **engine.entry))  # type: ignore[arg-type]
        await fleet.live()
        engine.gauges[AWAKE] = 0
        await fleet.until(lambda: fleet.sink.current == [False, True, False])
        del engine.gauges[AWAKE]  # nothing that is looked at afterwards says it again
        engine.gauges['vllm:cache_config_info{engine="0",num_gpu_blocks="101"}'] = 1
        fleet.manager._relocate("a")
        await fleet.until(lambda: fleet.sink.facts["a"]["usable_blocks"] == 100)
        await fleet.live()
        assert fleet.status().asleep
        assert fleet.sink.current == [False, True, False, False]


async def test_hits_are_told_per_worker_as_they_grow() -> None:
    told: list[tuple[str, int, int]] = []
    queries, hits = (f'vllm:prefix_cache_{name}_total{{engine="0",model_name="tiny"}}' for name in ("queries", "hits"))
    async with ScriptedEngine("a") as engine:
        engine.gauges |= {queries: 1_000, hits: 900, AWAKE: 0}
        async with Fleet(OFTEN, on_hits=lambda *news: told.append(news)) as fleet:
            await fleet.manager.add(Engine(uid="a", model="tiny", **engine.entry))  # type: ignore[arg-type]
            await fleet.until(lambda: fleet.manager.asleep == {"a"})  # whatever the first look saw is of before
            for n in range(1, 4):
                engine.gauges |= {queries: 1_000 + 10 * n, hits: 900 + 5 * n}
                await fleet.until(lambda n=n: len(told) == n)  # type: ignore[misc]
    assert told == [("a", 10, 5)] * 3


async def test_another_start_time_has_the_stream_look_at_once() -> None:
    told: list[tuple[str, int, int]] = []
    queries, hits = (f'vllm:prefix_cache_{name}_total{{engine="0"}}' for name in ("queries", "hits"))
    async with ScriptedEngine("a") as engine, Fleet(OFTEN, on_hits=lambda *news: told.append(news)) as fleet:
        engine.gauges |= {"process_start_time_seconds": 1_000.5, queries: 0, hits: 0}
        engine.store(OLD)
        await fleet.manager.add(Engine(uid="a", model="tiny", **engine.entry))  # type: ignore[arg-type]
        await fleet.live()
        await fleet.until(lambda: fleet.status().counts.replays >= 2)
        while not told:  # two looks saw the first start
            engine.gauges[queries] += 1
            await asyncio.sleep(0.01)
        asked = fleet.status().counts.replays
        engine.gauges["process_start_time_seconds"] = 2_000.5
        await fleet.until(lambda: fleet.status().counts.replays > asked)


# -- the poller itself ----------------------------------------------------------------------------------------------


class Pages:
    """A server of ``/metrics`` for any number of engines, which it tells apart by their path."""

    def __init__(self) -> None:
        self.body = b'vllm:engine_sleep_state{sleep_state="awake"} 1\n'
        self.status = 200
        self.hang: set[str] = set()
        self.hung = asyncio.Event()
        """Set: those that hang answer after all."""
        self.asked: list[str] = []
        self.open = 0
        self.most = 0

    async def get(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.asked.append(name)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if name in self.hang:
                await self.hung.wait()
            return web.Response(body=self.body, status=self.status)
        finally:
            self.open -= 1


@asynccontextmanager
async def polling(
    interval: float = 0.05, patience: float = 20.0
) -> AsyncIterator[tuple[Pages, Scraper, list[tuple[str, EngineMetrics]], Callable[[str], Engine]]]:
    pages = Pages()
    seen: list[tuple[str, EngineMetrics]] = []
    app = web.Application()
    app.router.add_get("/{name}/metrics", pages.get)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        scraper = Scraper(
            session, interval, patience, lambda engine, news: seen.append((engine.uid, news)), EngineAccess()
        )

        def engine(name: str) -> Engine:
            return Engine(uid=name, name=name, url=str(server.make_url(f"/{name}")), model="m")

        scraper.start()
        try:
            yield pages, scraper, seen, engine
        finally:
            await scraper.stop()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_engines_that_hang_cost_a_bounded_number_of_looks_and_are_asked_less_often() -> None:
    async with polling(patience=1) as (pages, scraper, seen, engine):
        pages.hang = {f"hung-{n}" for n in range(scrape.AT_ONCE + 4)}
        for name in sorted(pages.hang):
            scraper.look(engine(name))
        scraper.look(engine("well"))
        await until(lambda: sum(uid == "well" for uid, _ in seen) >= 5)
        assert {uid for uid, _ in seen} == {"well"}
        assert pages.most <= scrape.AT_ONCE
        await until(lambda: scraper.failures("hung-0").get("timeout", 0) >= 2)
        await until(lambda: pages.asked.count("well") > 5 * pages.asked.count("hung-0"))
        assert scraper.failures("well") == {}


@pytest.mark.parametrize(("status", "body", "reason"), [(503, b"", "status"), (200, b"x" * 200_001, "too_large")])
async def test_failures_are_counted_by_reason_and_conclude_nothing(
    status: int, body: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "MAX_METRICS_BYTES", 200_000)
    async with polling() as (pages, scraper, seen, engine):
        pages.status, pages.body = status, body
        scraper.look(engine("a"))
        await until(lambda: scraper.failures("a").get(reason, 0) >= 2)
        scraper.look(replace(engine("b"), url="http://127.0.0.1:9"))
        await until(lambda: scraper.failures("b").get("unreachable", 0) >= 2)
        assert seen == []


async def test_an_engine_without_the_page_is_no_failure() -> None:
    async with polling() as (pages, scraper, seen, engine):
        pages.status = 404
        scraper.look(engine("a"))
        await until(lambda: len(pages.asked) >= 3)
        assert (seen, scraper.failures("a")) == ([], {})


async def test_nothing_is_reported_of_an_engine_that_is_gone_and_a_new_one_begins_anew() -> None:
    async with polling() as (pages, scraper, seen, engine):
        pages.hang = {"a"}
        scraper.look(engine("a"))
        await until(lambda: pages.open == 1)
        scraper.remove("a")
        pages.hung.set()
        await until(lambda: not scraper._looks)
        assert seen == [], "it was answered, and nobody wants to know any more"
        scraper.look(engine("a"))
        await until(lambda: len(seen) >= 2)
        assert seen[0] == ("a", EngineMetrics({0: RankMetrics(asleep=False)}, restarted=False))
        scraper.remove("a")
        await until(lambda: not scraper._looks)
        count = len(seen)
        scraper.look(engine("b"))
        await until(lambda: sum(uid == "b" for uid, _ in seen) >= 3)
        assert sum(uid == "a" for uid, _ in seen) == count


async def test_whom_to_look_at_anew_is_looked_at_now() -> None:
    async with polling(interval=1_000) as (_, scraper, seen, engine):
        for n in range(1, 4):
            scraper.look(engine("a"))
            await until(lambda n=n: len(seen) == n)  # type: ignore[misc]
