"""Streams: many, slow, finely cut, and clients that stop reading them."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest

from kvsync.gateway.exchange import Exchange
from kvsync.gateway.http1 import ClientConnection
from kvsync.gateway.upstream import UpstreamConnection
from tests.integration.gateway.harness import (
    BODY,
    MODEL,
    SSE_HEAD,
    FakeEngine,
    Talk,
    chunk,
    ends,
    eventually,
    house,
    post,
    reply,
)

DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Trickle:
    """An engine that sends a piece of every stream when told to."""

    def __init__(self) -> None:
        self.open: list[Talk] = []
        self.over = asyncio.Event()

    async def __call__(self, engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        self.open.append(talk)
        await self.over.wait()
        await talk.send(DONE)
        await talk.closed()


async def test_a_thousand_slow_streams_all_end_and_leave_nothing() -> None:
    """(P7) Each lasts several times the idle limit, which is the only one; twenty minutes are that many limits, too."""
    count, idle = 1000, 3.0  # a piece comes each sixth of it: a machine may be slow, by so much
    engine = Trickle()
    gc.collect()
    before = _alive()
    async with house(engine, idle_timeout=idle, first_byte_timeout=60, upstream_idle=0.5) as home:
        loop = asyncio.get_running_loop()
        rounds = 0

        async def one(number: int) -> None:
            client = await home.client()
            client.deadline = 60
            answer = await client.ask(json.dumps({"model": MODEL, "n": number}).encode())
            assert answer.whole
            assert answer.body == b"data: x\n\n" * rounds + b"data: [DONE]\n\n"
            client.close()

        clients = [asyncio.create_task(one(number)) for number in range(count)]
        await eventually(lambda: len(engine.open) == count, within=60)
        assert len(home.routing.tickets) == count
        started = loop.time()
        while loop.time() - started < 2.5 * idle:
            rounds += 1
            for talk in engine.open:
                talk.writer.write(chunk(b"data: x\n\n"))
            await asyncio.sleep(idle / 6)
        engine.over.set()
        await asyncio.gather(*clients)
        assert home.counters.answers == {("/v1/completions", 200, "engine"): count}
        assert home.counters.cuts == {}
        assert all(ticket.ends == ["ok"] for ticket in home.routing.tickets)
        await eventually(lambda: home.gateway.open_connections() == 0 and home.gateway.idle_upstreams() == 0)
        await eventually(lambda: home.engine.open == 0)
        home.clients.clear()
        clients.clear()
        gc.collect()
        assert _alive() <= before


def _alive() -> int:
    kinds = (Exchange, ClientConnection, UpstreamConnection)
    return sum(isinstance(thing, kinds) for thing in gc.get_objects())


async def test_a_client_that_stops_reading_its_stream_is_dropped_with_its_engines_connection() -> None:
    """Otherwise the engine would wait for it for ever: nothing is read from it meanwhile."""

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        try:
            while True:
                await talk.send(chunk(b"data: " + b"x" * 8000 + b"\n\n"))
        except ConnectionError:
            engine.left.set()

    async with house(script, client_timeout=0.4, idle_timeout=60) as home:
        client = await home.client()
        await client.send(post())
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await eventually(lambda: home.counters.connections["write_timeout"] == 1)
        await asyncio.wait_for(home.engine.left.wait(), 5)
        assert ends(home) == [("engine-0", ["client_gone"])]
        assert home.counters.cuts == {("/v1/completions", "client_gone"): 1}
        await eventually(lambda: home.gateway.open_connections() == 0)


async def test_a_client_that_reads_slowly_keeps_its_stream() -> None:
    size = 24 << 20

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(reply(b"x" * size))

    async with house(script, client_timeout=0.5, idle_timeout=0.5) as home:
        client = await home.client()
        transport = client.writer.transport
        await client.send(post())
        for _ in range(20):  # in all, longer than both limits
            transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.08)
            transport.resume_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.005)
        answer = await client.answer()
        assert (len(answer.body), answer.whole) == (size, True)
        assert ends(home) == [("engine-0", ["ok"])]


async def test_an_answer_in_chunks_of_one_byte_is_the_same_answer() -> None:
    """(P1) Hundreds of thousands of them, together with another client's request, which does not wait for them all."""
    body = b"".join(b"%d\n" % number for number in range(60_000))
    wire = SSE_HEAD + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"

    async def script(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            await talk.send(wire if b"fine" in request.body else reply(b"good"))

    async with house(script) as home:
        fine, other = await home.client(), await home.client()
        await fine.send(post(b'{"model": "m", "prompt": "fine"}'))
        answering = asyncio.create_task(fine.answer())
        assert (await other.ask()).body == b"good"
        answer = await answering
        assert (answer.body == body, answer.whole) == (True, True)


async def test_a_request_in_chunks_of_one_byte_is_the_same_request() -> None:
    body = b'{"model": "m", "prompt": "%b"}' % (b"y" * 200_000)

    async def script(engine: FakeEngine, talk: Talk) -> None:
        request = await talk.request()
        assert request is not None
        await talk.send(reply(b"same" if request.body == body else b"different"))

    async with house(script) as home:
        client = await home.client()
        wire = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        sending = asyncio.create_task(client.send(post(b"", framing=b"Transfer-Encoding: chunked") + wire))
        assert (await client.answer()).body == b"same"
        await sending


@pytest.mark.parametrize(
    ("end", "whole"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data: [DONE]\r\n\r\n", True),
        (b"data:[DONE]\n\n", True),
        (b"data: [DONE]", True),
        (b"", False),
        (b"data: [DO", False),
        (b"data: x data: [DONE]\n\n", False),
        (b'data: {"text": "data: [DONE]"}\n\n', False),
    ],
)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_stream_that_ends_with_its_connection_must_say_that_it_is_done(
    end: bytes, whole: bool, version: bytes
) -> None:
    """Nothing else tells it from one whose engine died: the kernel closes the connections of a killed process."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(head, b"data: 1\n\n", end)

    async with house(script) as home:
        client = await home.client()
        await client.send(post(BODY, version=version))
        answer = await client.answer()
        assert answer.whole == whole
        assert ends(home) == [("engine-0", ["ok" if whole else "upstream_died"])]
        assert len(home.answers) == whole
