"""Engines that lie on their event streams, over real sockets: each costs itself only, and not the disk either."""

from __future__ import annotations

import gzip
import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvsync.discovery.model import Engine
from kvsync.events.contracts import Located, Target
from kvsync.events.manager import EventManager
from tests.integration.events.conftest import SETTINGS, Fleet, RecordingSink
from tests.integration.events.conftest import fleet as fleet  # a fixture


class Told:
    """A locator that was told."""

    def __init__(self, *targets: Target) -> None:
        self.targets = targets

    async def locate(self, engine: Engine) -> Located:
        return Located(self.targets, complete=True)


async def test_a_replay_endpoint_that_zmq_refuses_costs_its_own_stream(fleet: Fleet) -> None:
    publisher = fleet.publisher(already=[1, 2])
    target = Target(
        worker="a",
        engine="a",
        source_pod="a",
        model="m",
        rank=0,
        events=publisher.events,
        replay="tcp://127.0.0.1:nowhere",
    )
    sink = RecordingSink()
    manager = EventManager(sink, SETTINGS, locator=Told(target))
    await manager.start()
    try:
        for _ in range(2):  # it can be followed, ended, and followed again
            await manager.add(Engine(uid="a", name="a", url="http://127.0.0.1:9", model="m"))
            await fleet.until(lambda: any(status.errors.get("endpoint") for status in manager.workers()))
            await manager.remove("a")
            assert not manager.failed
            assert sink.facts == {}
    finally:
        await manager.stop()


async def test_an_engine_that_counts_to_and_fro_is_not_written_down_each_time(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = fleet.publisher(replay_port=None)
    await fleet.follow(publisher)
    await fleet.live()
    with caplog.at_level(logging.INFO, "kvsync.events"):
        for turn in range(500):
            publisher.send_live(
                b"", (turn % 2 * 5).to_bytes(8, "big"), b"\x93\xcb" + turn.to_bytes(8, "big") + b"\x90\x00"
            )
        await fleet.until(lambda: fleet.sink.calls.count(("new_epoch", "a")) > 200)
    # One of each kind a second, however many there are; a slow machine may need some seconds.
    assert len(caplog.records) < 50


async def test_engines_are_not_asked_for_packed_answers_and_their_cookies_are_not_kept(fleet: Fleet) -> None:
    asked: list[web.Request] = []
    bomb = gzip.compress(b"\0" * (64 << 20))

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        response = web.Response(body=bomb, headers={"Content-Encoding": "gzip"})
        response.set_cookie("c", "v")
        return response

    app = web.Application()
    app.router.add_get("/{page}", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        await fleet.manager.add(Engine(uid="a", name="a", url=url, model="m"))
        await fleet.until(lambda: len(asked) >= 4)  # both pages, twice
        assert "is not JSON" in str(fleet.status().problem)
    assert {request.headers["Accept-Encoding"] for request in asked} == {"identity"}
    assert not any("Cookie" in request.headers for request in asked)
