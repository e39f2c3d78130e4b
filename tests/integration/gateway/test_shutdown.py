"""SIGTERM: no new requests, open ones end, and it all takes a bounded time."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.faults.client import until
from tests.faults.process import running
from tests.integration.gateway.harness import (
    BODY,
    SSE_HEAD,
    Client,
    FakeEngine,
    Talk,
    chunk,
    ends,
    eventually,
    house,
    post,
    reply,
    stall,
)

MODELS = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"


async def test_shutdown_lets_open_answers_end() -> None:
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        engine.requests.append(await talk.request() or pytest.fail("no request"))
        await go.wait()
        await talk.send(reply(b"late"))

    async with house(script, drain_timeout=5) as home:
        idle, busy = await home.client(), await home.client()
        await busy.send(post())
        await eventually(lambda: len(home.engine.requests) == 1)
        await eventually(lambda: home.gateway.open_connections() == 2)
        port = home.gateway.port
        stopping = asyncio.create_task(home.gateway.stop())
        assert await idle.ended() == b""
        assert home.gateway.draining
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        assert not stopping.done()
        go.set()
        answer = await busy.answer()
        assert (answer.body, answer.one(b"connection")) == (b"late", b"close")
        assert await busy.ended() == b""
        await asyncio.wait_for(stopping, 2)


async def test_shutdown_ends_what_does_not_end() -> None:
    async with house(stall, drain_timeout=0.1) as home:
        client = await home.client()
        await client.send(post(BODY))
        await eventually(lambda: len(home.engine.requests) == 1)
        await home.gateway.stop()
        assert await client.ended() == b""
        await asyncio.wait_for(home.engine.left.wait(), 5)
        assert ends(home) == [("engine-0", ["shutdown"])]
        assert home.counters.cuts == {("/v1/completions", "shutdown"): 1}


async def test_before_it_closes_it_serves_on_and_has_connections_end() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            await talk.send(reply(request.body))

    async with house(script, drain_timeout=5) as home:
        kept, idle = await home.client(), await home.client()
        assert (await kept.ask()).get(b"connection") == []
        home.gateway.leave()
        answer = await kept.ask()
        assert (answer.status, answer.one(b"connection")) == (200, b"close")
        assert await kept.ended() == b""
        new = await home.client()
        answer = await new.ask()
        assert (answer.status, answer.one(b"connection")) == (200, b"close")
        home.gateway._sweep()
        answer = await idle.ask()  # not closed before it had asked
        assert (answer.status, answer.one(b"connection")) == (200, b"close")


async def test_a_stream_goes_on_and_its_connection_closes_after_it() -> None:
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD, chunk(b"data: 1\n\n"))
        await go.wait()
        await talk.send(chunk(b"data: 2\n\n"), b"0\r\n\r\n")

    async with house(script, drain_timeout=5) as home:
        client = await home.client()
        await client.send(post())
        _, _, fields = await client.head()
        assert (b"connection", b"close") not in fields  # said before anybody knew
        assert await client.chunk() == b"data: 1\n\n"
        stopping = asyncio.create_task(home.gateway.stop())
        await eventually(lambda: home.gateway.draining)
        go.set()
        assert await client.chunk() == b"data: 2\n\n"
        assert await client.chunk() == b""
        assert await client.ended() == b""
        await asyncio.wait_for(stopping, 2)
        assert ends(home) == [("engine-0", ["ok"])]


async def test_a_request_that_has_begun_to_come_in_is_served_with_those_before_it() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            await talk.send(reply(request.body))

    async with house(script, drain_timeout=5) as home:
        client = await home.client()
        await client.send(post()[:-1])
        await eventually(lambda: home.reading() == 1)
        stopping = asyncio.create_task(home.gateway.stop())
        await eventually(lambda: home.gateway.draining)
        await client.send(post()[-1:])
        answer = await client.answer()
        assert (answer.status, answer.body, answer.one(b"connection")) == (200, BODY, b"close")
        await client.send(post())  # one more would be one too many
        assert await client.ended() == b""
        await asyncio.wait_for(stopping, 2)
        assert len(home.routing.tickets) == 1


async def test_what_a_client_sent_ahead_is_not_served_any_more() -> None:
    """It has to ask again for what was not answered when a connection closes (RFC 9112, 9.3.2)."""
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        engine.left.set()
        await go.wait()
        await talk.send(reply(b"one"))

    async with house(script, drain_timeout=5) as home:
        client = await home.client()
        await client.send(post() + post() + MODELS)
        await home.engine.left.wait()
        stopping = asyncio.create_task(home.gateway.stop())
        await eventually(lambda: home.gateway.draining)
        go.set()
        answer = await client.answer()
        assert (answer.body, answer.one(b"connection")) == (b"one", b"close")
        assert await client.ended() == b""
        await asyncio.wait_for(stopping, 2)


async def test_a_client_that_never_ends_its_request_does_not_hold_up_the_end() -> None:
    async with house(stall, drain_timeout=0.1, client_timeout=60) as home:
        halves = [await home.client() for _ in range(3)]
        for half in halves:
            await half.send(post()[:-1])
        await eventually(lambda: home.reading() == 3)
        await asyncio.wait_for(home.gateway.stop(), 2)
        assert home.gateway.open_connections() == 0


async def test_being_asked_again_ends_open_answers_at_once() -> None:
    async with house(stall, drain_timeout=60) as home:
        client = await home.client()
        await client.send(post())
        await eventually(lambda: len(home.engine.requests) == 1)
        stopping = asyncio.create_task(home.gateway.stop())
        await eventually(lambda: home.gateway.draining)
        home.gateway.hurry()
        await asyncio.wait_for(stopping, 2)
        assert await client.ended() == b""
        assert ends(home) == [("engine-0", ["shutdown"])]


async def test_stopping_with_nothing_open_takes_no_time() -> None:
    async with house(stall, drain_timeout=60) as home:
        await asyncio.wait_for(home.gateway.stop(), 2)


async def test_a_process_serves_on_for_a_while_and_ends_by_itself(tmp_path: Path) -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        while await talk.request() is not None:
            await talk.send(reply(b"{}"))

    engine = FakeEngine("e", script)
    await engine.start()
    config = {"models": [{"name": "m", "engines": [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]}]}
    for number, delay in enumerate((60, 0.2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with running(folder, config | {"gateway": {"drain_delay": delay}}) as gateway:
            assert (await gateway.ready())["ready"]
            gateway.process.signal(signal.SIGTERM)
            if delay == 60:

                async def unready() -> bool:
                    status, page = await gateway.admin.get("/readyz")
                    return status == 503 and b'"draining":true' in page

                await until(unready, "/readyz says no")
                client = await Client.open(int(gateway.url.rpartition(":")[2]))
                answer = await client.ask()
                assert (answer.status, answer.one(b"connection")) == (200, b"close")
                client.close()
                gateway.process.signal(signal.SIGTERM)
            assert await gateway.process.ended(20) == 0
            assert "Traceback" not in gateway.process.log
    await engine.stop()


async def test_a_process_says_that_it_is_not_ready_while_it_drains_and_ends_at_the_second_sigterm(
    tmp_path: Path,
) -> None:
    engine = FakeEngine("e", stall)
    await engine.start()
    config = {
        "gateway": {"drain_timeout": 60},
        "discovery": {"adapters": False},  # the engine sees the client's request only
        "models": [{"name": "m", "engines": [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]}],
    }
    async with running(tmp_path, config) as gateway:
        assert (await gateway.ready())["ready"]
        port = int(gateway.url.rpartition(":")[2])
        client = await Client.open(port)
        await client.send(post())
        await eventually(lambda: len(engine.requests) == 1)
        gateway.process.signal(signal.SIGTERM)

        async def refused() -> bool:
            try:
                other = await Client.open(port)
            except ConnectionError:
                return True
            other.close()
            return False

        await until(refused, "the port closed")
        status, page = await gateway.admin.get("/readyz")
        assert (status, b'"draining":true' in page) == (503, True)
        gateway.process.signal(signal.SIGTERM)
        assert await gateway.process.ended(20) == 0
        assert await client.ended() == b""
        client.close()
        assert "asked again: open answers are ended" in gateway.process.log
        assert "Traceback" not in gateway.process.log
    await engine.stop()
