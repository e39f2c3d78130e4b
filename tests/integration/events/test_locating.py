"""Finding streams by asking engines over HTTP."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvsync.discovery.access import EngineAccess
from kvsync.discovery.model import Engine
from kvsync.events.contracts import Located, NotLocated, Target
from kvsync.events.reader import FILES_OF_A_STREAM
from kvsync.events.sources import MAX_SOURCES_BYTES, HttpLocator
from tests.faults.network import bad_port
from tests.integration.events.conftest import Fleet, engine_of


class EngineHttp:
    """The two pages of an engine that are asked for."""

    def __init__(self) -> None:
        self.sources: Any = {}
        self.blocks: int | None = 64
        self.status = 200
        self.body: bytes | None = None
        self.asked: list[str] = []
        self.url = ""

    async def get_sources(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.body is not None:
            return web.Response(body=self.body)
        return web.json_response(self.sources, status=self.status)

    async def get_metrics(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        text = f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{self.blocks}"}} 1.0\n'
        return web.Response(text=text, status=self.status)


@asynccontextmanager
async def serving() -> AsyncIterator[EngineHttp]:
    it = EngineHttp()
    app = web.Application()
    app.router.add_get("/kv_event_sources", it.get_sources)
    app.router.add_get("/metrics", it.get_metrics)
    async with TestServer(app) as server:
        it.url = str(server.make_url("")).rstrip("/")
        yield it


async def locate(engine: Engine, seconds: float = 5.0) -> Located:
    async with aiohttp.ClientSession() as session:
        return await HttpLocator(session, seconds, EngineAccess()).locate(engine)


def source(events: int, replay: int | None = None, host: str = "*") -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{host}:{events}",
        "replay_endpoint": None if replay is None else f"tcp://{host}:{replay}",
    }


def engine(url: str, **facts: Any) -> Engine:
    return Engine(uid="e", name="ns/e", url=url, model="m", **facts)


async def test_all_from_the_engine() -> None:
    async with serving() as http:
        http.sources = {"0": source(5557, 6557, host="203.0.113.9")}
        located = await locate(engine(http.url))
    assert located == Located(
        (
            Target(
                worker="e",
                engine="e",
                source_pod="ns/e",
                model="m",
                rank=0,
                events="tcp://127.0.0.1:5557",  # never the host that the engine names
                replay="tcp://127.0.0.1:6557",
                usable_blocks=63,
            ),
        ),
        complete=True,
    )


async def test_nothing_is_asked_that_is_configured() -> None:
    async with serving() as http:
        it = engine(http.url, events="tcp://127.0.0.1:1", replay="tcp://127.0.0.1:2", usable_blocks=5)
        located = await locate(it)
        assert http.asked == []
    assert located.complete
    assert located.targets[0].usable_blocks == 5


async def test_an_old_engine_without_the_page_has_no_replay_unless_configured() -> None:
    async with serving() as http:
        http.status = 404
        located = await locate(engine(http.url, events="tcp://127.0.0.1:1"))
    assert located.complete
    assert (located.targets[0].replay, located.targets[0].usable_blocks) == (None, None)


async def test_an_engine_that_does_not_answer_is_followed_as_configured_and_asked_again() -> None:
    it = engine("http://127.0.0.1:9", events="tcp://localhost:1", replay="tcp://localhost:2")
    located = await locate(it)
    assert not located.complete
    assert located.targets[0].events == "tcp://127.0.0.1:1"


async def test_an_engine_that_hangs_costs_the_timeout() -> None:
    async with bad_port("black hole") as port:
        located = await locate(engine(f"http://127.0.0.1:{port}", events="tcp://127.0.0.1:1"), 0.2)
    assert not located.complete


async def test_an_address_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that hangs, and every thread with it, is no matter to engines that are known by address."""
    looked_up: list[str] = []

    async def hang(host: str, port: int, **_: Any) -> None:
        looked_up.append(host)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hang)
    for address in ("203.0.113.9", "[2001:db8::9]"):
        it = engine("http://127.0.0.1:9", events=f"tcp://{address}:1", replay=f"tcp://{address}:2", usable_blocks=5)
        target = (await locate(it)).targets[0]
        assert (target.events, target.replay) == (f"tcp://{address}:1", f"tcp://{address}:2")
    assert looked_up == []
    with pytest.raises(NotLocated, match="has no address: timeout"):
        await locate(engine("http://127.0.0.1:9", events="tcp://engine:1", replay="tcp://engine:2", usable_blocks=5), 0)
    assert looked_up == ["engine"]


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engine_in_trouble_is_asked_again(status: int) -> None:
    async with serving() as http:
        http.status = status
        located = await locate(engine(http.url, events="tcp://127.0.0.1:1"))
    assert not located.complete


@pytest.mark.parametrize("body", [b"no json", b"x" * (MAX_SOURCES_BYTES + 1)], ids=["garbage", "endless"])
async def test_an_answer_that_is_none_is_no_endpoint(body: bytes) -> None:
    async with serving() as http:
        http.body = body
        with pytest.raises(NotLocated, match="kv_event_sources"):
            await locate(engine(http.url))


async def test_why_there_is_no_stream() -> None:
    async with serving() as http:
        with pytest.raises(NotLocated, match=r"rank 0 of .* publishes no KV events"):
            await locate(engine(http.url))
        http.status = 404
        with pytest.raises(NotLocated, match="has no /kv_event_sources"):
            await locate(engine(http.url))
    with pytest.raises(NotLocated, match="does not tell it"):
        await locate(engine("http://127.0.0.1:9"))
    with pytest.raises(NotLocated, match="has no address"):
        await locate(engine("http://127.0.0.1:9", events="tcp://no.such.host.invalid:1"))


async def test_redirects_are_not_followed() -> None:
    async def away(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://203.0.113.9/kv_event_sources")

    app = web.Application()
    app.router.add_get("/kv_event_sources", away)
    async with TestServer(app) as server:
        with pytest.raises(NotLocated, match="has no /kv_event_sources"):
            await locate(engine(str(server.make_url("")).rstrip("/"), usable_blocks=1))


async def test_a_manager_follows_what_the_engine_says_and_learns_its_blocks_late(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsync.events.manager.RETRY_FIRST", 0.05)
    publisher = fleet.publisher()
    publisher.publish(1)
    assert publisher.replay is not None
    events, replay = (int(e.rpartition(":")[2]) for e in (publisher.events, publisher.replay))
    async with serving() as http:
        http.status = 503
        await fleet.manager.add(Engine(uid="a", name="ns/a", url=http.url, model="m"))
        await fleet.until(lambda: fleet.status().problem is not None)
        assert fleet.status().state == "connecting"
        http.sources = {"0": source(events, replay)}
        http.blocks = None
        http.status = 200
        await fleet.holds([1])
        assert fleet.status().problem is None
        assert fleet.sink.facts["a"]["usable_blocks"] is None
        # The engine is restarted with a larger cache: seen when the stream connects again.
        http.blocks = 101
        publisher.close()
        fleet.publishers.remove(publisher)
        publisher = fleet.publisher(events_port=events, replay_port=replay, started=2_000.0, already=[7])
        await fleet.until(lambda: fleet.sink.facts["a"]["usable_blocks"] == 100)
        await fleet.holds([7])


async def test_facts_learned_do_not_reopen_what_did_not_change(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    publisher.publish(1)
    async with serving() as http:
        await fleet.manager.add(
            Engine(uid="a", name="a", url=http.url, model="m", events=publisher.events, replay=publisher.replay)
        )
        await fleet.holds([1])
        asked = len(http.asked)
        fleet.manager._relocate("a")
        await fleet.until(lambda: len(http.asked) > asked)
        await asyncio.sleep(0)
        publisher.publish(2)
        await fleet.holds([1, 2])
    assert fleet.sink.calls == [("add", "a")]


async def test_an_engine_that_is_not_followed_is_not_asked(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    async with serving() as http:
        await fleet.manager.add(Engine(uid="a", name="a", url=http.url, model="m", kv_events=False))
        await fleet.follow(publisher, "b")
        await fleet.live("b")
        assert http.asked == []
    assert [s.worker for s in fleet.manager.workers()] == ["b"]
    assert engine_of(publisher, "b").uid == "b"


async def test_streams_leave_files_to_others(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is said to have a hundred ranks: without an end to it, nobody could connect to the gateway."""
    good, second, late = (fleet.publisher() for _ in range(3))
    await fleet.follow(good)
    await fleet.live()
    good.publish(1)
    await fleet.holds([1])
    before = len(os.listdir("/proc/self/fd"))
    await fleet.follow(second, "second")
    await fleet.live("second")

    def of_a_stream() -> bool:  # the publisher has its end of the connection
        return len(os.listdir("/proc/self/fd")) - before == FILES_OF_A_STREAM + 1

    await fleet.until(of_a_stream)  # what the replay took is gone
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10 * FILES_OF_A_STREAM, 1 << 20))
    many = Engine(
        uid="many", name="ns/many", url="http://127.0.0.1:9", model="m", usable_blocks=63, events="tcp://127.0.0.1:9",
        data_parallel_size=100,
    )  # fmt: skip
    await fleet.manager.add(many)

    def refused() -> bool:
        return all(s.problem is not None for s in fleet.manager.workers() if s.engine == "many")

    await fleet.until(refused)
    problem = fleet.status("many#0").problem or ""
    assert problem.startswith("5 event streams are open, and there are files for no more: each takes 4, and half of")
    assert sum(s.endpoint is not None for s in fleet.manager.workers()) == 5
    good.publish(2)
    await fleet.holds([1, 2])
    await fleet.follow(late, "late")
    await fleet.until(lambda: fleet.status("late").problem is not None)
    await fleet.manager.remove("many")
    await fleet.live("late")  # tried again by itself
