"""Clients that hold connections by sending or reading next to nothing: each is ended in time, on both ports, and others
are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import pytest

from tests.integration.gateway.harness import Client, always, eventually, house, post, reply
from tests.integration.gateway.test_admin import desk

GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
ENDLESS = 10_000
"""Times that a trickling client goes on, if it is let."""


async def trickle(client: Client, start: bytes, drops: Iterable[bytes]) -> None:
    """Send something fifty times a second at most, until the other side has had enough."""
    with suppress(ConnectionError):
        await client.send(start)
        for drop in drops:
            await client.send(drop)
            await asyncio.sleep(0.02)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
SLOW = {
    "nothing": (b"", ()),
    "a request line": (b"POST /", [b"v"] * ENDLESS),
    "fields": (HEAD, [b"X: y\r\n"] * ENDLESS),
    "a field": (HEAD + b"X: ", [b"y"] * ENDLESS),
    "a body": (HEAD + b"Content-Length: 10000\r\n\r\n", [b" "] * ENDLESS),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", [b"1\r\n \r\n"] * ENDLESS),
    "a chunk's size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", [b"0"] * ENDLESS),
    "half a request": (post()[:-1], ()),
}


@pytest.mark.parametrize("name", SLOW)
async def test_a_slow_request_on_the_data_port_ends_in_time(name: str) -> None:
    start, drops = SLOW[name]
    async with house(always(reply(b"good")), client_timeout=0.2) as home:
        slow = [await home.client() for _ in range(20)]
        trickling = [asyncio.create_task(trickle(client, start, drops)) for client in slow]
        quick = await home.client()
        assert (await quick.ask()).status == 200
        answers = await asyncio.gather(*(client.ended() for client in slow))
        assert all(answer.startswith(b"HTTP/1.1 408") or name == "nothing" for answer in answers), answers
        assert (await (await home.client()).ask()).status == 200
        for task in trickling:
            task.cancel()
        assert len(home.routing.queries) == 2


@pytest.mark.parametrize("name", SLOW)
async def test_a_slow_request_on_the_admin_port_ends_in_time(name: str) -> None:
    start, drops = SLOW[name]
    start = start.replace(b"/v1/completions", b"/v1/match")
    async with desk(patience=0.2) as made:
        slow = [await Client.open(made.admin.port) for _ in range(20)]
        trickling = [asyncio.create_task(trickle(client, start, drops)) for client in slow]
        quick = await Client.open(made.admin.port)
        await quick.send(GET)
        assert (await quick.answer()).body == b"ok\n"
        await asyncio.gather(*(client.ended() for client in slow))
        for task in trickling:
            task.cancel()
        again = await Client.open(made.admin.port)
        await again.send(GET)
        assert (await again.answer()).status == 200
        for client in (*slow, quick, again):
            client.close()


async def test_an_admin_client_that_asks_now_and_then_is_kept() -> None:
    """Prometheus keeps its connection; only one that begins nothing for too long is closed."""
    async with desk(patience=0.4) as made:
        client = await Client.open(made.admin.port)
        for _ in range(8):
            await client.send(GET)
            assert (await client.answer()).body == b"ok\n"
            await asyncio.sleep(0.1)
        assert await client.ended() == b""
        client.close()


async def test_an_admin_client_that_reads_nothing_is_closed() -> None:
    async with desk(patience=0.3) as made:
        client = await Client.open(made.admin.port)
        with suppress(ConnectionError):
            for _ in range(600):
                client.writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n")
                await asyncio.sleep(0)
        runner = made.admin._runner
        assert runner.server is not None
        server = runner.server
        await eventually(lambda: len(server.connections) == 0)
        client.close()
