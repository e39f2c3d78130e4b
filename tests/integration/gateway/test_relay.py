"""Requests go out as they came in, and answers come back as they are."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.integration.gateway.harness import (
    ADAPTER,
    BODY,
    MODEL,
    SSE_HEAD,
    FakeEngine,
    Slow,
    Talk,
    always,
    chunk,
    eventually,
    house,
    post,
    reply,
)

USAGE = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
JSON_ANSWER = b'{"choices":[{"text":"\\"usage\\": {}"}],"usage":' + json.dumps(USAGE).encode() + b',"x":null}'


async def test_a_request_goes_through_and_the_answer_comes_back() -> None:
    async with house(always(reply(JSON_ANSWER, b"200 OK", b"Content-Type: application/json", b"X-Own: a, b"))) as home:
        client = await home.client()
        answer = await client.ask(BODY, b"/v1/completions?a=1&b=%2e", b"Authorization: Bearer k", b"X-Extra:  v")
        assert (answer.status, answer.phrase, answer.body) == (200, b"OK", JSON_ANSWER)
        assert answer.one(b"x-own") == b"a, b"
        assert answer.one(b"target-pod") == b"engine-0"
        assert answer.one(b"target-pod-ip") == b"127.0.0.1:%d" % home.engine.port
        assert answer.one(b"routing-strategy") == b"kv-aware"
        (request,) = home.engine.requests
        assert request.line == b"POST /v1/completions?a=1&b=%2e HTTP/1.1"
        assert request.body == BODY
        assert request.get(b"host") == [b"127.0.0.1:%d" % home.engine.port]
        assert request.get(b"authorization") == [b"Bearer k"]
        assert request.get(b"x-extra") == [b"v"]
        assert request.get(b"x-request-id") == answer.get(b"request-id")
        assert request.get(b"x-data-parallel-rank") == []
        (ticket,) = home.routing.tickets
        assert (ticket.first, ticket.ends) == (1, ["ok"])
        ((decision, status, usage),) = home.answers
        assert (decision.chosen.worker, status, usage) == ("engine-0", 200, USAGE)
        assert home.counters.answers == {("/v1/completions", 200, "engine"): 1}
        client.close()


async def test_both_sides_keep_their_connections() -> None:
    async with house(always(reply(b"{}"))) as home:
        client = await home.client()
        for _ in range(5):
            assert (await client.ask()).status == 200
        assert home.engine.connections == 1
        assert home.counters.connections["opened"] == 1
        assert home.gateway.idle_upstreams() == 1


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_a_stream_that_comes_byte_by_byte_is_the_same_stream(newline: bytes) -> None:
    """(P1)"""
    text = "".join(f"data: {json.dumps({'t': t}, ensure_ascii=False)}\n\n" for t in ["héllo", "日本語", "🙂🙃", "x"])
    body = text.encode().replace(b"\n", newline) + b"data: [DONE]" + newline * 2

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        for at in range(len(body)):
            await talk.send(chunk(body[at : at + 1]))
        await talk.send(b"0\r\n\r\n")

    async with house(script) as home:
        client = await home.client()
        answer = await client.ask()
        assert answer.whole
        assert answer.body == body
        assert answer.one(b"content-type") == b"text/event-stream"


async def test_chunks_split_anywhere_and_trailers_do_not_show() -> None:
    wire = SSE_HEAD + chunk(b"data: a\n\n") + b"5;ext=1\r\nda\r\na\r\n" + b"0\r\nX-Trailer: t\r\n\r\n"

    async def script(engine: FakeEngine, talk: Talk) -> None:
        while await talk.request():
            for at in range(len(wire)):
                await talk.send(wire[at : at + 1])

    async with house(script) as home:
        client = await home.client()
        for _ in range(2):
            answer = await client.ask()
            assert answer.body == b"data: a\n\nda\r\na"
            assert answer.get(b"x-trailer") == []
        assert home.engine.connections == 1


async def test_the_head_of_a_stream_and_each_piece_come_at_once() -> None:
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        await go.wait()
        go.clear()
        await talk.send(chunk(b"data: 1\n\n"))
        await go.wait()
        await talk.send(chunk(b"data: 2\n\n"), b"0\r\n\r\n")

    async with house(script) as home:
        client = await home.client()
        await client.send(post())
        status, _, _ = await client.head()
        assert status == 200
        assert home.routing.tickets[0].first == 0  # the head alone says nothing of the prompt
        go.set()
        assert await client.chunk() == b"data: 1\n\n"
        assert home.routing.tickets[0].first == 1
        go.set()
        assert await client.chunk() == b"data: 2\n\n"
        assert await client.chunk() == b""


@pytest.mark.parametrize(
    ("wire", "status", "body"),
    [
        (reply(b'{"error":{"message":"too long"}}', b"400 Bad Request"), 400, b'{"error":{"message":"too long"}}'),
        (reply(b"plain text", b"500 Oh Dear"), 500, b"plain text"),
        (reply(b"null"), 200, b"null"),
        (reply(b""), 200, b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", 304, b""),
        (b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + reply(b"late"), 200, b"late"),
        (reply(b"big" * 400_000), 200, b"big" * 400_000),
    ],
    ids=["400", "500", "null", "empty", "204", "304", "no-phrase", "1xx", "1MB"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_pass_unchanged(wire: bytes, status: int, body: bytes, stream: bool) -> None:
    """(P6) Whatever was asked for: an engine may refuse a stream with plain JSON, or say ``null``."""
    asked = b'{"model": "m", "stream": true}' if stream else BODY
    async with house(always(wire), inject_usage=stream) as home:
        client = await home.client()
        for _ in range(2):
            answer = await client.ask(asked)
            if status not in (204, 304):
                assert answer.one(b"content-length") == b"%d" % len(body)
            assert (answer.status, answer.body, answer.whole) == (status, body, True)
        assert home.engine.connections == 1
        expected = "ok" if status < 400 else "request_error" if status < 500 else "engine_error"
        assert [ticket.ends for ticket in home.routing.tickets] == [[expected], [expected]]


async def test_the_engines_words_for_a_status_pass() -> None:
    async with house(always(reply(b"", b"503 Model Is Loading"))) as home:
        assert (await (await home.client()).ask()).phrase == b"Model Is Loading"


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"])
async def test_a_body_that_ends_with_the_connection(head: bytes) -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(head, b"one ", b"two")

    async with house(script) as home:
        for _ in range(2):
            client = await home.client()
            answer = await client.ask()
            assert (answer.body, answer.whole) == (b"one two", True)
            # Nobody knows whether that was all: the gateway does not say that it was.
            assert (answer.get(b"transfer-encoding"), answer.one(b"connection")) == ([], b"close")
        assert home.engine.connections == 2


async def test_http_1_0_clients_get_no_chunks_and_may_keep_their_connection() -> None:
    stream = SSE_HEAD + chunk(b"data: a\n\n") + b"0\r\n\r\n"
    async with house(always(reply(b"{}")), always(stream)) as home:
        client = await home.client()
        await client.send(post(BODY, b"/v1/completions", b"Connection: keep-alive", version=b"1.0"))
        answer = await client.answer()
        assert answer.one(b"connection") == b"keep-alive"
        assert answer.body == b"{}"
        home.routing.engines.reverse()
        await client.send(post(BODY, b"/v1/completions", b"Connection: keep-alive", version=b"1.0"))
        answer = await client.answer()  # reads to the end of the connection
        assert answer.get(b"transfer-encoding") == []
        assert answer.one(b"connection") == b"close"
        assert answer.body == b"data: a\n\n"


async def test_the_chosen_rank_travels_and_the_clients_does_not() -> None:
    async with house(always(reply(b"{}")), data_parallel_size=4) as home:
        home.routing.rank = 3
        client = await home.client()
        await client.ask(BODY, b"/v1/completions", b"X-Data-Parallel-Rank: 1", b"x-DATA-parallel-rank: 0")
        assert home.engine.requests[0].get(b"x-data-parallel-rank") == [b"3"]
        assert home.routing.tickets[0].worker == "engine-0#3"


async def test_the_tokenizer_sees_path_body_model_and_adapter() -> None:
    tokenizing = Slow()
    tokenizing.go.set()
    async with house(always(reply(b"{}")), tokenizing=tokenizing) as home:
        client = await home.client()
        body = b'{"model": "m-adapter", "messages": []}'
        assert (await client.ask(body, b"/v1//chat/completions")).status == 200
        assert tokenizing.seen == [
            ("/v1/chat/completions", {"model": ADAPTER, "messages": []}, MODEL, ADAPTER),
        ]
        assert home.engine.requests[0].body == body
        assert home.routing.queries[0].tokenized.source == "remote"
        assert (home.routing.queries[0].model, home.routing.queries[0].adapter) == (MODEL, ADAPTER)


async def test_usage_at_the_end_of_a_stream_is_found_and_the_stream_untouched() -> None:
    events = [b'data: {"t":"\\"usage\\": {\\"a\\": 1}","usage":null}\n\n'] * 3
    events += [b'data: {"choices":[],"usage":{"prompt_tokens":7}}\n\n', b"data: [DONE]\n\n"]
    wire = SSE_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"
    async with house(always(wire)) as home:
        answer = await (await home.client()).ask()
        assert answer.body == b"".join(events)
        assert home.answers[0][2] == {"prompt_tokens": 7}


async def test_a_hundred_streams_at_once() -> None:
    waiting = 0
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        nonlocal waiting
        request = await talk.request()
        assert request is not None
        number = json.loads(request.body)["n"]
        await talk.send(SSE_HEAD)
        waiting += 1
        await go.wait()
        for piece in range(20):
            await talk.send(chunk(b"data: %d.%d\n\n" % (number, piece)))
            await asyncio.sleep(0)
        await talk.send(b"0\r\n\r\n")

    async with house(script) as home:

        async def one(number: int) -> None:
            client = await home.client()
            answer = await client.ask(json.dumps({"model": MODEL, "n": number}).encode())
            assert answer.body == b"".join(b"data: %d.%d\n\n" % (number, piece) for piece in range(20))
            client.close()

        clients = [asyncio.create_task(one(number)) for number in range(100)]
        await eventually(lambda: waiting == 100)
        go.set()
        await asyncio.gather(*clients)
        assert home.counters.answers == {("/v1/completions", 200, "engine"): 100}
        assert all(ticket.ends == ["ok"] for ticket in home.routing.tickets)


async def test_a_slow_client_slows_the_engine_and_memory_stays_bounded() -> None:
    sent = 0
    total = 64 << 20

    async def script(engine: FakeEngine, talk: Talk) -> None:
        nonlocal sent
        await talk.request()
        await talk.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        talk.writer.transport.set_write_buffer_limits(1 << 16)
        while sent < total:
            await talk.send(b"x" * (1 << 16))
            sent += 1 << 16

    async with house(script) as home:
        client = await home.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post())
        # The engine stops when the sockets' and the gateway's buffers are full: far below the whole answer.
        await eventually(lambda: sent > 0)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < total // 2
        (connection,) = home.gateway._connections
        assert connection._transport.get_write_buffer_size() < 2 << 20
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.answer()
        assert len(answer.body) == total
        assert answer.whole


async def test_an_engine_that_answers_before_it_read_the_body() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.reader.readuntil(b"\r\n\r\n")
        talk.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await talk.send(reply(b"too much", b"413 Payload Too Large"))
        await engine.left.wait()

    async with house(script) as home:
        client = await home.client()
        answer = await client.ask(b'{"model": "m"}'.ljust(16 << 20))
        assert (answer.status, answer.body, answer.whole) == (413, b"too much", True)
        assert home.gateway.idle_upstreams() == 0
        home.engine.left.set()


async def test_the_wait_for_a_streams_first_piece_is_the_wait_for_the_first_byte() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        await asyncio.sleep(0.6)  # a queue and a long prompt, longer than the idle limit
        await talk.send(chunk(b"data: 1\n\n"), b"0\r\n\r\n")

    async with house(script, first_byte_timeout=5, idle_timeout=0.2) as home:
        answer = await (await home.client()).ask()
        assert (answer.body, answer.whole) == (b"data: 1\n\n", True)


async def test_an_engine_with_an_ipv6_address() -> None:
    engine = FakeEngine("six", always(reply(b"{}")))
    try:
        await engine.start(host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with house(urls=[f"http://[::1]:{engine.port}"]) as home:
        answer = await (await home.client()).ask()
        assert answer.one(b"target-pod-ip") == b"[::1]:%d" % engine.port
        assert engine.requests[0].get(b"host") == [b"[::1]:%d" % engine.port]
    await engine.stop()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("inject_usage", [False, True])
async def test_every_piece_of_a_stream_comes_at_once_and_as_it_is(version: bytes, inject_usage: bool) -> None:
    """Each is a chunk that the gateway could pass as it came; a client of HTTP/1.0, or one that did not ask for usage,
    must get it otherwise."""
    events = [b"data: {}\n\n", b'data: {"choices":[{}]}\n\n', b": " + 300 * b"x" + b"\n\n"]
    events += [b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(USAGE).encode(), b"data: [DONE]\n\n"]
    passing = [event for event in events if not (inject_usage and b'"usage"' in event)]
    had = asyncio.Semaphore(0)

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        for event in events:
            await talk.send(chunk(event))
            if event in passing:
                await had.acquire()
        await talk.send(b"0\r\n\r\n")

    async with house(script, inject_usage=inject_usage) as home:
        client = await home.client()
        await client.send(post(b'{"model": "m", "stream": true}', version=version))
        status, _, fields = await client.head()
        assert (status, (b"transfer-encoding", b"chunked") in fields) == (200, version == b"1.1")
        for event in passing:
            framed = chunk(event) if version == b"1.1" else event
            assert await asyncio.wait_for(client.reader.readexactly(len(framed)), 5) == framed
            had.release()
        assert await (client.chunk() if version == b"1.1" else client.ended()) == b""
        await eventually(lambda: len(home.answers) == 1)
        assert home.answers[0][2] == USAGE
