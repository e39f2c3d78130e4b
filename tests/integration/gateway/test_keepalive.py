"""Engines close connections that are idle; a client must never feel it."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.integration.gateway.harness import BODY, FakeEngine, House, Script, Talk, ends, house, reply

CLIENTS = 20
POSTS = 50
"""Of each client."""
LIMIT = 0.05
"""Seconds after which an engine closes an idle connection: a hundredth of vLLM's 5 s."""


async def closes_when_idle(engine: FakeEngine, talk: Talk) -> None:
    """As vLLM's server does: a new connection has all the time for its first request."""
    first = True
    while True:
        try:
            async with asyncio.timeout(None if first else LIMIT):
                request = await talk.request()
        except TimeoutError:
            return
        if request is None:
            return
        first = False
        assert request.body == BODY
        await talk.send(reply(b"ok"))


def closes_on_a_request(*, reset: bool) -> Script:
    """Closes just when the next request arrives: the gateway can't have known."""

    async def script(engine: FakeEngine, talk: Talk) -> None:
        for _ in range(1 + talk.number % 3):
            if await talk.request() is None:
                return
            await talk.send(reply(b"ok"))
        await talk.reader.read(1 if reset else 1 << 16)
        if reset:
            talk.reset()

    return script


async def posts(home: House, pauses: bool) -> None:
    """Every POST gets its answer."""
    chance = random.Random(7)

    async def one() -> None:
        client = await home.client()
        for _ in range(POSTS):
            answer = await client.ask()
            assert (answer.status, answer.body, answer.whole) == (200, b"ok", True)
            if pauses:
                await asyncio.sleep(LIMIT * chance.uniform(0.6, 1.2))

    await asyncio.gather(*(one() for _ in range(CLIENTS)))
    assert home.counters.answers == {("/v1/completions", 200, "engine"): CLIENTS * POSTS}
    assert home.counters.cuts == {}
    assert [outcomes for _, outcomes in ends(home)] == [["ok"]] * (CLIENTS * POSTS)  # each chosen, and counted, once


@pytest.mark.parametrize("upstream_idle", [0.8 * LIMIT, 1.0 * LIMIT, 10.0], ids=["before", "at", "never"])
async def test_a_thousand_posts_with_pauses_around_the_engines_limit(upstream_idle: float) -> None:
    """(P5) Whether the gateway drops its connections before the engine does, with it, or not at all."""
    settings = {"upstream_idle": upstream_idle, "connect_timeout": 30.0, "retry_fresh_reset": False, "retries": 0}
    async with house(closes_when_idle, **settings) as home:  # type: ignore[arg-type]
        home.routing.budget = 0
        await posts(home, pauses=True)
        assert home.engine.connections > CLIENTS  # some were closed


@pytest.mark.parametrize("reset", [False, True])
async def test_a_thousand_posts_to_an_engine_that_closes_while_a_request_is_on_its_way(reset: bool) -> None:
    """(P5) A POST may be sent again there: not one byte of an answer came, and the connection was used before."""
    script = closes_on_a_request(reset=reset)
    async with house(script, upstream_idle=60.0, connect_timeout=30.0, retry_fresh_reset=False, retries=0) as home:
        home.routing.budget = 0
        await posts(home, pauses=False)
        assert home.counters.retries["reset"] > CLIENTS
