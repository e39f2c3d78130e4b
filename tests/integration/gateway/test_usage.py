"""What an answer tells: usage that the gateway asks for and takes out again, and how much of a prompt was cached."""

from __future__ import annotations

import json

import pytest

from kvsync.index.match import Match
from tests.integration.gateway.harness import SSE_HEAD, FakeEngine, Talk, always, chunk, eventually, house, post, reply

ASKED = b'{"model": "m", "prompt": "hello", "stream": true}'
USAGE = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
ONE, TWO = b'data: {"choices":[{"text":"1"}]}\n\n', b'data: {"choices":[{"text":"2"}]}\n\n'
LAST = b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n"
DONE = b"data: [DONE]\n\n"


async def as_asked(engine: FakeEngine, talk: Talk) -> None:
    """A stream as vLLM sends it: with usage if that was asked for."""
    while (request := await talk.request()) is not None:
        engine.requests.append(request)
        wanted = (json.loads(request.body).get("stream_options") or {}).get("include_usage")
        events = [ONE, TWO, LAST, DONE] if wanted else [ONE, TWO, DONE]
        await talk.send(SSE_HEAD, *map(chunk, events), b"0\r\n\r\n")


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions"])
async def test_usage_is_asked_for_and_the_client_sees_the_stream_that_it_asked_for(path: bytes) -> None:
    async with house(as_asked, inject_usage=True) as home:
        client = await home.client()
        for _ in range(2):
            answer = await client.ask(ASKED, path, b"Accept-Encoding: gzip", b"X-Own: 1")
            assert (answer.body, answer.whole) == (ONE + TWO + DONE, True)
        assert [usage for _, _, usage in home.answers] == [USAGE, USAGE]
        request = home.engine.requests[0]
        assert request.body == b'{"stream_options":{"include_usage":true},' + ASKED[1:]
        assert (request.get(b"accept-encoding"), request.get(b"x-own")) == ([], [b"1"])
        assert home.engine.connections == 1


async def test_clients_that_ask_themselves_see_it_and_it_is_off_by_default() -> None:
    own = b'{"model": "m", "stream": true, "stream_options": {"include_usage": true}}'
    async with house(as_asked, inject_usage=True) as home:
        client = await home.client()
        assert (await client.ask(own, b"/v1/completions", b"Accept-Encoding: gzip")).body == ONE + TWO + LAST + DONE
        assert home.engine.requests[0].body == own
        assert home.engine.requests[0].get(b"accept-encoding") == [b"gzip"]
        plain = b'{"model": "m"}'
        assert (await client.ask(plain)).body == ONE + TWO + DONE
        assert home.engine.requests[1].body == plain
    async with house(as_asked) as home:
        assert (await (await home.client()).ask(ASKED)).body == ONE + TWO + DONE
        assert home.engine.requests[0].body == ASKED
        assert home.answers[0][2] is None


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
async def test_the_chunk_is_found_however_the_engine_sends_it(size: int) -> None:
    stream = ONE + TWO + LAST + DONE

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        for at in range(0, len(stream), size):
            await talk.send(chunk(stream[at : at + size]))
        await talk.send(b"0\r\n\r\n")

    async with house(script, inject_usage=True) as home:
        assert (await (await home.client()).ask(ASKED)).body == ONE + TWO + DONE
        assert home.answers[0][2] == USAGE


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_every_framing_of_a_stream(version: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\n"
    stream = ONE + LAST + DONE

    async def closing(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(head, b"\r\n", stream)

    with_length = always(head + b"content-length: %d\r\n\r\n" % len(stream) + stream)
    for script in (closing, with_length):
        async with house(script, inject_usage=True) as home:
            client = await home.client()
            await client.send(post(ASKED, version=version))
            answer = await client.answer()
            assert (answer.body, answer.whole, answer.get(b"content-length")) == (ONE + DONE, True, [])


@pytest.mark.parametrize(
    "wire",
    [
        reply(LAST, b"400 Bad Request", b"content-type: text/event-stream"),
        reply(b'{"choices":[],"usage":{}}\n\n', b"200 OK", b"content-type: application/json"),
        reply(LAST, b"200 OK", b"content-type: text/event-stream", b"content-encoding: gzip"),
    ],
    ids=["error", "json", "compressed"],
)
async def test_an_answer_that_is_no_stream_is_passed_as_it_is(wire: bytes) -> None:
    async with house(always(wire), inject_usage=True) as home:
        answer = await (await home.client()).ask(ASKED)
        assert wire.endswith(b"\r\n\r\n" + answer.body)
        assert answer.one(b"content-length") == b"%d" % len(answer.body)


async def test_what_was_held_back_comes_before_the_break() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD, chunk(ONE + b'data: {"choices":[],"usa'))

    async with house(script, inject_usage=True) as home:
        answer = await (await home.client()).ask(ASKED)
        assert (answer.body, answer.whole) == (ONE + b'data: {"choices":[],"usa', False)
        assert home.counters.cuts == {("/v1/completions", "upstream_died"): 1}


async def test_events_are_passed_when_they_are_whole() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD, chunk(ONE))
        await engine.left.wait()
        await talk.send(chunk(LAST + DONE), b"0\r\n\r\n")

    async with house(script, inject_usage=True) as home:
        client = await home.client()
        await client.send(post(ASKED))
        await client.head()
        assert await client.chunk() == ONE
        home.engine.left.set()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
        await eventually(lambda: len(home.answers) == 1)


@pytest.mark.parametrize("reveal", [False, True])
async def test_no_answer_tells_how_much_was_cached_unless_that_is_switched_on(reveal: bool) -> None:
    """(X3)"""
    wire = reply(b"{}", b"200 OK", b"X-KVSync-Match: credit=9;expected=9;trust=exact")
    async with house(always(wire), reveal_match=reveal) as home:
        answers = []
        for credit in (0, 48_000):  # the same answers, whatever was cached
            home.routing.match = Match(credit, 16, {"gpu": credit}, "partial")
            client = await home.client()
            answers.append(await client.ask(b'{"model": "m"}', b"/v1/completions", b"request-id: r"))
            answers.append(await client.ask(b'{"model": "nobody"}', b"/v1/completions", b"request-id: r"))
        told = [value for answer in answers for name, value in answer.fields if b"match" in name.lower()]
        if reveal:
            assert told == [b"credit=0;expected=16;trust=partial", b"credit=48000;expected=16;trust=partial"]
        else:
            assert answers[:2] == answers[2:]
            assert told == []
