"""The pool of remote tokenizers, against real servers on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvsync.config import RemoteTokenizerSettings
from kvsync.tokenize.endpoints import LARGE
from kvsync.tokenize.errors import RemoteFailed, Untokenized
from kvsync.tokenize.pool import BoundedPool
from kvsync.tokenize.remote import RemoteTokenizer, question
from kvsync.tokenize.request import Chat, Text
from tests.integration.tokenize.fake import FakeEngine, Trouble, engine_tokens, running, until
from tests.unit.tokenize.support import unpack

HELLO = question(Text("hello world"), "tiny")
HELLO_IDS = [0, 282, 79, 332, 1559, 506]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """Engines and the client that tokenizes by them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.clock = Clock()
        self.engines: list[FakeEngine] = []
        self.urls: Sequence[str] = ()

    async def client(self, engines: int = 1, **settings: Any) -> RemoteTokenizer:
        for _ in range(engines):
            self.engines.append(await self.stack.enter_async_context(running(FakeEngine())))
        self.urls = [engine.url for engine in self.engines]
        pool = BoundedPool(1, 8)
        self.stack.callback(pool.close)
        merged = {"enabled": True, "endpoint": "engines", **settings}
        client = RemoteTokenizer(RemoteTokenizerSettings(**merged), lambda _: self.urls, pool, clock=self.clock)
        await client.start()
        self.stack.push_async_callback(client.close)
        return client


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack)


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


async def test_a_text_and_what_it_teaches(fleet: Fleet) -> None:
    client = await fleet.client()
    answer = await client.ask(HELLO, "tiny")
    assert (unpack(answer.tokens), answer.max_model_len) == (HELLO_IDS, 1024)


def test_a_question_holds_every_field_that_affects_the_tokens() -> None:
    chat = Chat(
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        template="{{ messages }}",
        kwargs={"z": 1, "a": [1.5, None]},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
    )
    assert json.loads(question(chat, "m")) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"z": 1, "a": [1.5, None]},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
    }
    assert json.loads(question(Text("p", False), "m")) == {"model": "m", "prompt": "p", "add_special_tokens": False}


@pytest.mark.parametrize("depth", [100_000])
def test_a_question_that_can_not_be_written(depth: int) -> None:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    for work in (Text("\ud800"), Chat(messages=[{"role": "user", "content": "hi"}], kwargs={"a": nested})):
        with pytest.raises(Untokenized) as failed:
            question(work, "m")
        assert failed.value.reason == "invalid_request"


class TestRetries:
    @pytest.mark.parametrize("trouble", [408, 429, 500, 502, 503, 504, "reset", b"{", b'{"tokens":[1],"count":2}'])
    async def test_elsewhere_where_there_is_an_elsewhere(self, fleet: Fleet, trouble: Trouble) -> None:
        client = await fleet.client(engines=2)
        for engine in fleet.engines:
            engine.troubles = [trouble]
        fleet.engines[0].troubles = [trouble] * 9
        for _ in range(2):
            assert unpack((await client.ask(HELLO, "tiny")).tokens) == HELLO_IDS
        assert client.stats()["retries"] >= 1

    async def test_the_same_endpoint_when_it_is_the_only_one(self, fleet: Fleet) -> None:
        client = await fleet.client(retries=2)
        fleet.engines[0].troubles = [503, 503]
        assert unpack((await client.ask(HELLO, "tiny")).tokens) == HELLO_IDS
        assert len(fleet.engines[0].bodies) == 3

    async def test_tries_end(self, fleet: Fleet) -> None:
        client = await fleet.client(retries=1)
        fleet.engines[0].troubles = [500] * 9
        with pytest.raises(RemoteFailed) as failed:
            await client.ask(HELLO, "tiny")
        assert (failed.value.cause, failed.value.reason) == ("status_500", "tokenizer_failed")
        assert len(fleet.engines[0].bodies) == 2
        assert client.stats()["failures"] == {"status_500": 2}

    async def test_a_refused_connection(self, fleet: Fleet) -> None:
        client = await fleet.client(retries=1)
        fleet.urls = [closed_port(), fleet.urls[0]]
        for _ in range(4):
            assert unpack((await client.ask(HELLO, "tiny")).tokens) == HELLO_IDS
        assert client.stats()["failures"]["connect"] >= 1

    async def test_an_answer_that_takes_too_long(self, fleet: Fleet) -> None:
        client = await fleet.client(retries=0, timeout=0.1)
        fleet.engines[0].troubles = ["hang"]
        with pytest.raises(RemoteFailed) as failed:
            await client.ask(HELLO, "tiny")
        assert failed.value.cause == "timeout"
        await asyncio.wait_for(fleet.engines[0].left.wait(), 5)

    @pytest.mark.parametrize(
        ("status", "reason"), [(400, "invalid_request"), (404, "tokenizer_failed"), (403, "tokenizer_failed")]
    )
    async def test_a_refusal_is_final(self, fleet: Fleet, status: int, reason: str) -> None:
        client = await fleet.client(engines=2)
        for engine in fleet.engines:
            engine.troubles = [status]
        with pytest.raises(RemoteFailed) as failed:
            await client.ask(HELLO, "tiny")
        assert (failed.value.cause, failed.value.reason) == (f"status_{status}", reason)
        assert client.stats()["calls"] == 1

    async def test_nobody_to_ask(self, fleet: Fleet) -> None:
        client = await fleet.client(engines=0)
        with pytest.raises(RemoteFailed, match="no_endpoint"):
            await client.ask(HELLO, "tiny")


class TestHostileAnswers:
    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"not json",
            b"[]",
            b"null",
            b"{}",
            b'{"tokens":null}',
            b'{"tokens":"1"}',
            b'{"tokens":[1.5]}',
            b'{"tokens":[true]}',
            b'{"tokens":["1"]}',
            b'{"tokens":[-1]}',
            b'{"tokens":[4294967296]}',
            b'{"tokens":[1,2],"count":1}',
            b'{"tokens":[1],"count":"1"}',
            b'{"tokens":[1,2',
            b'{"tokens":' + b"[" * 100_000,
            b'\xff{"tokens":[1]}',
        ],
    )
    async def test_are_counted_failures(self, fleet: Fleet, answer: bytes) -> None:
        client = await fleet.client(retries=0)
        fleet.engines[0].troubles = [answer]
        with pytest.raises(RemoteFailed) as failed:
            await client.ask(HELLO, "tiny")
        assert failed.value.cause == "bad_answer"
        assert client.stats()["failures"] == {"bad_answer": 1}

    async def test_an_answer_without_end_is_not_read_on(self, fleet: Fleet) -> None:
        client = await fleet.client(retries=0)
        fleet.engines[0].troubles = [b'{"tokens":[' + b"1," * (1 << 20) + b"1]}"]
        with pytest.raises(RemoteFailed) as failed:
            await client.ask(HELLO, "tiny")
        assert failed.value.cause == "too_large"

    @pytest.mark.parametrize("limit", ["0", "-5", "null"])
    async def test_a_model_length_that_is_none(self, fleet: Fleet, limit: str) -> None:
        client = await fleet.client()
        fleet.engines[0].troubles = [b'{"tokens":[1],"max_model_len":%s}' % limit.encode()]
        answer = await client.ask(HELLO, "tiny")
        assert (unpack(answer.tokens), answer.max_model_len) == ([1], None)

    async def test_a_redirect_is_not_followed(self, fleet: Fleet) -> None:
        client = await fleet.client(retries=0)
        fleet.engines[0].troubles = [302]
        with pytest.raises(RemoteFailed, match="status_302"):
            await client.ask(HELLO, "tiny")


class TestBreakers:
    async def test_a_failing_endpoint_rests_and_is_tried_again(self, fleet: Fleet) -> None:
        client = await fleet.client(engines=2, retries=1, breaker_failures=2, breaker_rest=5)
        bad, good = fleet.engines
        bad.troubles = [500] * 3
        for _ in range(8):
            assert unpack((await client.ask(HELLO, "tiny")).tokens) == HELLO_IDS
        assert len(bad.bodies) == 2
        assert client.stats()["endpoints"][bad.url]["breaker"] == "open"
        fleet.clock.now += 5
        for _ in range(4):
            await client.ask(HELLO, "tiny")
        assert len(bad.bodies) == 3, "one trial failed: it rests again"
        fleet.clock.now += 5
        for _ in range(4):
            await client.ask(HELLO, "tiny")
        assert client.stats()["endpoints"][bad.url]["breaker"] == "closed"
        assert len(bad.bodies) > 3
        assert good.bodies
        assert (client.stats()["active"], client.stats()["taken_out"]) == (2, 2)
        fleet.urls = [good.url]
        await client.ask(HELLO, "tiny")
        assert (client.stats()["active"], client.stats()["taken_out"]) == (1, 2)

    async def test_refusals_neither_open_nor_heal(self, fleet: Fleet) -> None:
        client = await fleet.client(retries=0, breaker_failures=3)
        fleet.engines[0].troubles = [400] * 50
        for _ in range(50):
            with pytest.raises(RemoteFailed, match="status_400"):
                await client.ask(HELLO, "tiny")
        assert client.stats()["endpoints"][fleet.urls[0]]["breaker"] == "closed"
        fleet.engines[0].troubles = [500, 400, 500, 400, 500]
        for _ in range(5):
            with pytest.raises(RemoteFailed, match="status"):
                await client.ask(HELLO, "tiny")
        with pytest.raises(RemoteFailed, match="no_endpoint"):
            await client.ask(HELLO, "tiny")

    async def test_load_is_spread(self, fleet: Fleet) -> None:
        client = await fleet.client(engines=3)
        gate = asyncio.Event()
        for engine in fleet.engines:
            engine.gate = gate
        asking = [asyncio.ensure_future(client.ask(HELLO, "tiny")) for _ in range(9)]
        await until(lambda: sum(engine.waiting for engine in fleet.engines) == 9)
        assert [engine.waiting for engine in fleet.engines] == [3, 3, 3]
        gate.set()
        await asyncio.gather(*asking)

    async def test_engines_come_and_go(self, fleet: Fleet) -> None:
        client = await fleet.client(engines=2)
        first, second = fleet.urls
        fleet.urls = [second]
        await client.ask(HELLO, "tiny")
        assert client.stats()["endpoints"].keys() == {second}
        fleet.urls = [first]
        await client.ask(HELLO, "tiny")
        assert client.stats()["endpoints"].keys() == {first}


async def test_a_large_answer_is_read_in_the_pool(fleet: Fleet) -> None:
    client = await fleet.client()
    text = "hello world " * 20_000
    answer = await client.ask(question(Text(text), "tiny"), "tiny")
    expected = engine_tokens({"prompt": text})
    assert unpack(answer.tokens) == expected
    assert len(json.dumps(expected)) > LARGE


class TestProbe:
    async def test_an_answering_endpoint(self, fleet: Fleet) -> None:
        client = await fleet.client(engines=2)
        fleet.engines[0].troubles = [500]
        assert await client.probe("tiny") is None

    async def test_a_sentence_says_what_is_wrong(self, fleet: Fleet) -> None:
        client = await fleet.client()
        fleet.engines[0].troubles = [500, 404]
        assert fleet.urls[0] in str(await client.probe("tiny"))
        assert "refuses" in str(await client.probe("tiny"))
        fleet.urls = [closed_port()]
        assert "does not answer (connect" in str(await client.probe("tiny"))
        fleet.urls = []
        assert "no engine of model 'tiny'" in str(await client.probe("tiny"))

    async def test_an_answer_ends_the_rest(self, fleet: Fleet) -> None:
        client = await fleet.client(breaker_failures=1, retries=0)
        fleet.engines[0].troubles = [500]
        with pytest.raises(RemoteFailed):
            await client.ask(HELLO, "tiny")
        with pytest.raises(RemoteFailed, match="no_endpoint"):
            await client.ask(HELLO, "tiny")
        assert await client.probe("tiny") is None
        assert unpack((await client.ask(HELLO, "tiny")).tokens) == HELLO_IDS
