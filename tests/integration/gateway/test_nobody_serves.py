"""Requests that nobody can serve, with the real fleet and router: an answer at once, in words, each case by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvsync.config import GatewaySettings, RoutingSettings
from kvsync.discovery.model import Change, Engine
from kvsync.gateway.counters import Counters
from kvsync.gateway.server import Gateway
from kvsync.requests.rooms import Rooms
from kvsync.routing.fleet import Fleet
from kvsync.routing.load import LoadTable
from kvsync.routing.router import Router
from kvsync.telemetry.metrics import Metrics
from tests.integration.gateway.harness import (
    GOOD,
    AtOnce,
    Client,
    FakeEngine,
    Script,
    Talk,
    chunk,
    post,
)


class Town:
    """A gateway with the real fleet and router."""

    def __init__(self, gateway: Gateway, router: Router, fleet: Fleet, counters: Counters) -> None:
        self.gateway = gateway
        self.router = router
        self.fleet = fleet
        self.counters = counters
        self.engines: list[FakeEngine] = []
        self.clients: list[Client] = []

    async def add(self, name: str, script: Script) -> Engine:
        """A ready engine of the model ``m``."""
        fake = FakeEngine(name, script)
        await fake.start()
        self.engines.append(fake)
        engine = Engine(uid=name, name=name, url=f"http://127.0.0.1:{fake.port}", model="m", adapters=("m-lora",))
        self.router.apply(Change("added", engine))
        return engine

    async def client(self) -> Client:
        client = await Client.open(self.gateway.port)
        self.clients.append(client)
        return client


@asynccontextmanager
async def town(**settings: object) -> AsyncIterator[Town]:
    fleet, metrics, counters = Fleet(["m"]), Metrics(), Counters()
    routing = RoutingSettings(policy="least-request")
    router = Router(None, fleet, LoadTable(routing.decode_cost), routing, metrics)
    rooms = Rooms.furnish(
        GatewaySettings.model_validate({"host": "127.0.0.1", "port": 0, "drain_timeout": 0.2, **settings}),
        fleet=fleet,
        tokenizing=AtOnce(),
        routing=router,
        telemetry=counters,
        on_answer=lambda *_: None,
    )
    gateway = Gateway(rooms)
    await gateway.start()
    made = Town(gateway, router, fleet, counters)
    try:
        yield made
    finally:
        for client in made.clients:
            client.close()
        await gateway.stop()
        rooms.close()
        for fake in made.engines:
            await fake.stop()


UNKNOWN = (400, "model_not_found", "model nobody does not exist")
NOT_NOW = (503, "no_ready_engine", "error on getting pods for model m")


@pytest.mark.parametrize("case", ["no engines", "none ready", "all terminating", "all gone"])
async def test_a_model_that_nobody_serves_now_is_told_from_one_that_nobody_ever_served(case: str) -> None:
    """(R6) AIBrix's statuses: 400 for a name that is none, where OpenAI has 404; 503 for one that comes back.

    To the router, an engine that terminates is one that is not ready.
    """
    async with town() as made:
        if case != "no engines":
            engines = [await made.add(name, GOOD) for name in ("a", "b")]
            client = await made.client()
            assert (await client.ask()).body == b"good"
            for engine in engines:
                change = (
                    Change("gone", engine) if case == "all gone" else Change("changed", replace(engine, ready=False))
                )
                made.router.apply(change)
        client = await made.client()
        for body, (status, reason, message) in ((b'{"model":"nobody"}', UNKNOWN), (b'{"model":"m"}', NOT_NOW)):
            answer = await client.ask(body)
            assert (answer.status, answer.message) == (status, message)
            assert answer.get(b"x-error-no-model-backends") == [b"true"]
            assert made.counters.answers["/v1/completions", status, reason] == 1
        await client.send(b"GET /v1/models/nobody HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (await client.answer()).status == 404
        answer = await client.ask(b'{"model":"m-lora"}')
        assert answer.status == (503 if case in ("none ready", "all terminating") else 400)


async def test_a_filter_that_nobody_fits_is_a_case_of_its_own() -> None:
    """(R6)"""
    async with town() as made:
        await made.add("a", GOOD)
        answer = await (await made.client()).ask(b'{"model":"m"}', b"/v1/completions", b"external-filter: zone=east")
        assert (answer.status, answer.message) == (503, "error on selecting target pod")
        assert answer.get(b"x-error-routing") == [b"true"]


async def test_terminating_engines_end_their_streams_and_get_no_new_requests() -> None:
    go = asyncio.Event()

    async def streaming(engine: FakeEngine, talk: Talk) -> None:
        while await talk.request():
            await talk.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"1"))
            await go.wait()
            await talk.send(chunk(b"2"), b"0\r\n\r\n")

    async with town() as made:
        old = await made.add("old", streaming)
        client = await made.client()
        await client.send(post())
        await client.head()
        assert await client.chunk() == b"1"
        made.router.apply(Change("changed", replace(old, ready=False)))
        await made.add("new", GOOD)
        other = await made.client()
        for _ in range(5):
            assert (await other.ask()).one(b"target-pod") == b"new"
        made.router.apply(Change("gone", old))
        go.set()
        assert await client.chunk() == b"2"
        assert await client.chunk() == b""


async def test_all_engines_down_are_told_within_the_time_that_connecting_takes() -> None:
    """And an engine that comes back serves, although all of them rest."""
    async with town(connect_timeout=0.5) as made:
        for name in ("a", "b"):
            await made.add(name, GOOD)
        for fake in made.engines:
            fake.server.close()
            await fake.server.wait_closed()
        client = await made.client()
        for _ in range(10):
            answer = await client.ask()
            assert (answer.status, answer.message) == (502, "no engine could answer (connect_refused)")
        await made.add("c", GOOD)
        assert (await client.ask()).one(b"target-pod") == b"c"


async def test_a_storm_of_resets_ends_at_the_budget() -> None:
    """When half of a fleet resets connections, requests that go on elsewhere must not double the load on the rest."""

    async def resets(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        talk.reset()

    async with town() as made:
        for name in ("a", "b", "c"):
            await made.add(name, resets)
        client = await made.client()
        for _ in range(60):
            assert (await client.ask()).status == 502
        tried = sum(made.counters.retries.values())
        assert 0 < tried < 30
        assert made.counters.refused_retries["retry_budget"] == 60 - tried
