"""Sizes and numbers on either side of every limit, and what is said beyond it."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.integration.gateway.harness import (
    BODY,
    GOOD,
    Answer,
    Client,
    FakeEngine,
    Talk,
    eventually,
    house,
    post,
    reply,
    stall,
)

LIMIT = 1 << 20
PATH = b"/v1/completions"
UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


async def echo(engine: FakeEngine, talk: Talk) -> None:
    while (request := await talk.request()) is not None:
        engine.requests.append(request)
        await talk.send(reply(request.body))


def chunked(body: bytes, size: int = 60_000) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def ask(client: Client, body: bytes, framing: str) -> Answer:
    if framing == "expect":
        await client.send(post(body, PATH, b"Expect: 100-continue")[: -len(body)])
        answer = await client.answer()
        if answer.status != 100:
            return answer
        await client.send(body)
    elif framing == "length":
        await client.send(post(body))
    else:
        await client.send(post(b"", framing=b"Transfer-Encoding: chunked") + chunked(body))
    return await client.answer()


# ---- bodies


@pytest.mark.parametrize("framing", ["length", "chunked", "expect"])
@pytest.mark.parametrize("size", [len(BODY), 32 << 10, 128 << 10, 256 << 10, (256 << 10) + 1, LIMIT - 1, LIMIT])
async def test_bodies_up_to_the_limit_arrive_whole(size: int, framing: str) -> None:
    """(P8) The sizes at which others stop: 32 KiB buffers, 128 KiB echoes; and where ours are read in their turn."""
    async with house(echo, max_body_bytes=LIMIT) as home:
        client = await home.client()
        body = BODY.ljust(size)
        for _ in range(2):
            answer = await ask(client, body, framing)
            assert (answer.status, answer.body == body) == (200, True)
        assert home.engine.requests[0].get(b"content-length") == [b"%d" % size]


@pytest.mark.parametrize("framing", ["length", "chunked", "expect"])
@pytest.mark.parametrize("beyond", [1, 20 << 20])
async def test_a_body_beyond_it_gets_one_clear_413(beyond: int, framing: str) -> None:
    """(P8) With Expect the body is not even sent."""
    async with house(echo, max_body_bytes=LIMIT) as home:
        client = await home.client()
        asking = asyncio.create_task(ask(client, BODY.ljust(LIMIT + beyond), framing))  # all of it, whatever is said
        answer = await asking
        assert (answer.status, answer.message) == (413, f"the request body exceeds {LIMIT} bytes")
        assert answer.one(b"connection") == b"close"
        assert UUID.fullmatch(answer.one(b"request-id"))
        assert await client.ended() == b""
        assert home.counters.answers == {("other", 413, "body_too_large"): 1}
        assert home.engine.connections == 0


@pytest.mark.parametrize("framing", ["length", "chunked", "expect"])
async def test_20_mb_by_default(framing: str) -> None:
    """(P8)"""
    async with house(echo) as home:
        body = b'{"model": "m", "prompt": "%b"}' % (b"y" * (20 << 20))
        answer = await ask(await home.client(), body, framing)
        assert (answer.status, answer.body == body) == (200, True)


@pytest.mark.parametrize("body", [b"", b" ", b"{}", b"null"])
async def test_next_to_nothing_is_refused_in_words(body: bytes) -> None:
    async with house(echo) as home:
        for framing in ("length", "chunked"):
            answer = await ask(await home.client(), body, framing)
            assert (answer.status, bool(answer.message)) == (400, True)


async def test_a_body_of_too_many_values_is_refused_and_its_connection_lives_on() -> None:
    async with house(echo) as home:
        client = await home.client()
        answer = await client.ask(b'{"model":"m","messages":[%b]}' % b",".join([b"{}"] * 1_000_000))
        assert (answer.status, answer.message) == (
            413,
            "the request body holds more than 250000 texts, arrays and objects",
        )
        assert (await client.ask()).status == 200
        assert home.counters.answers["/v1/completions", 413, "too_many_values"] == 1


# ---- a request's end


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_final_chunk_sent_twice_ends_one_request(size: int) -> None:
    """(P9) One decision, the exact body, and what follows is refused: it is no request."""
    wire = post(b"", framing=b"Transfer-Encoding: chunked") + chunked(BODY, 5) + b"0\r\n\r\n"
    async with house(echo) as home:
        client = await home.client()
        for at in range(0, len(wire), size):
            await client.send(wire[at : at + size])
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, BODY)
        answer = await client.answer()
        assert answer.status == 400
        assert await client.ended() == b""
        assert len(home.routing.queries) == len(home.engine.requests) == 1
        assert home.engine.requests[0].body == BODY


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_an_engines_final_chunk_sent_twice_ends_one_answer(size: int) -> None:
    """(P9) And the connection with it: nobody else gets what follows."""
    wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"exactly this", 5) + b"0\r\n\r\n"

    async def script(engine: FakeEngine, talk: Talk) -> None:
        while await talk.request() is not None:
            for at in range(0, len(wire), size):
                await talk.send(wire[at : at + size])

    async with house(script) as home:
        client = await home.client()
        for _ in range(3):
            answer = await client.ask()
            assert (answer.status, answer.body, answer.whole) == (200, b"exactly this", True)
        assert len(home.routing.queries) == 3


# ---- heads


@pytest.mark.parametrize(("size", "status"), [(4000, 200), (4096, 431), (100_000, 431)])
async def test_header_fields_on_either_side_of_the_limit(size: int, status: int) -> None:
    async with house(GOOD, max_header_bytes=4096) as home:
        client = await home.client()
        await client.send(post(BODY, PATH, b"X: " + b"y" * (size - 5)))
        answer = await client.answer()
        assert answer.status == status
        if status != 200:
            assert answer.message == "request line and headers exceed 4096 bytes"


@pytest.mark.parametrize(("size", "status"), [(8 << 10, 200), ((8 << 10) + 1, 414)])
async def test_urls_on_either_side_of_the_limit(size: int, status: int) -> None:
    async with house(GOOD) as home:
        answer = await (await home.client()).ask(BODY, PATH + b"?" + b"q" * (size - len(PATH) - 1))
        assert answer.status == status


# ---- every refusal has a name


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nrequest-id: r-1\r\nX: y\r\nX Y: bad\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nrequest-id: r-1\r\n\r\n", 400),
        (post(b"x", b"/nowhere", b"request-id: r-1"), 501),
        (post(b"", PATH, b"request-id: r-1", framing=b"Content-Length: 99999999999"), 413),
        (post(b"x", PATH, b"request-id: r-1", b"Content-Encoding: gzip"), 415),
        (post(b"", PATH, b"request-id: r-1").replace(b"POST", b"GET", 1), 405),
        (post(b"x", PATH, b"request-id: r-1"), 400),
        (b"GET /v1/models/nobody HTTP/1.1\r\nHost: g\r\nrequest-id: r-1\r\n\r\n", 404),
        (b"GET /v1/models HTTP/1.1\r\nHost: g\r\nrequest-id: r-1\r\n\r\n", 200),
        (b"OPTIONS /v1/models HTTP/1.1\r\nHost: g\r\nrequest-id: r-1\r\n\r\n", 204),
        (post(b"", PATH, b"request-id: r-1")[:-4], 408),
    ],
)
async def test_whatever_is_refused_carries_a_request_id(wire: bytes, status: int) -> None:
    """The client's own, as soon as it was read."""
    async with house(GOOD, client_timeout=0.3) as home:
        client = await home.client()
        await client.send(wire)
        answer = await client.answer()
        assert answer.status == status
        name = answer.one(b"request-id")
        assert name == b"r-1" if b"r-1" in wire else UUID.fullmatch(name)


# ---- connections


async def test_connections_beyond_the_limit_are_turned_away_in_words() -> None:
    async with house(stall, max_connections=3) as home:
        clients = [await home.client() for _ in range(3)]
        for client in clients:
            await client.send(post())
        await eventually(lambda: len(home.engine.requests) == 3)
        for number in range(5):
            late = await home.client()
            await late.send(post() if number % 2 else b"")
            answer = await late.answer()
            assert (answer.status, answer.message) == (503, "too many open connections")
            assert (answer.one(b"retry-after"), answer.one(b"connection")) == (b"1", b"close")
            assert UUID.fullmatch(answer.one(b"request-id"))
            assert await late.ended() == b""
            late.close()
        assert home.counters.connections == {"opened": 3, "turned_away": 5}
        assert home.counters.answers == {("other", 503, "too_many_connections"): 5}
        assert len(home.engine.requests) == 3
        clients[0].reset()
        await eventually(lambda: home.gateway.open_connections() < 3)
        again = await home.client()
        await again.send(post())
        await eventually(lambda: len(home.engine.requests) == 4)


async def test_a_crowd_before_the_door_is_bounded_too() -> None:
    """Clients that are told and do not go: they neither hold memory for long nor more than so many connections."""
    async with house(GOOD, max_connections=1) as home:
        first = await home.client()
        assert (await first.ask()).status == 200
        crowd = [await home.client() for _ in range(300)]
        await eventually(lambda: home.counters.connections["turned_away"] == 300)
        assert home.gateway.open_connections() <= 1 + 256
        told = [await client.ended() for client in crowd]
        assert sum(text.startswith(b"HTTP/1.1 503 ") for text in told) == 256
        assert told.count(b"") == 44
        for client in crowd:
            client.close()
        await eventually(lambda: home.gateway.open_connections() == 1)
        assert (await first.ask()).status == 200
