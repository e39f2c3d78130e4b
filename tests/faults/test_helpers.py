"""Services beside the gateway that hang, crawl or are not there: a bounded delay, another way, and recovery.

Of such services there is the tokenizer now; what a gateway keeps in Redis will have to pass the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from .client import until
from .engine import Engine
from .gateway import Decision
from .network import Proxy
from .serving import Serving, serving
from .words import text

pytestmark = pytest.mark.faults

BUDGET = 0.3
SLACK = 5.0
"""Seconds that a busy machine may add to a budget."""
REMOTE = {"enabled": True, "timeout": 0.2, "budget": BUDGET, "breaker_failures": 2, "breaker_rest": 0.2}


@asynccontextmanager
async def beside(tmp_path: Path, *, there: bool = True) -> AsyncIterator[tuple[Serving, Proxy, Engine]]:
    """A gateway whose tokenizer is a service of its own, behind a proxy."""
    async with Engine("a") as engine, Engine("tokenizer") as service, Proxy(service.url) as proxy:
        engine.caches = True
        if not there:
            await proxy.refuse()
        remote = {**REMOTE, "endpoint": proxy.endpoint}
        async with serving(tmp_path, engine, followed=there, tokenizer={"remote": remote}) as gateway:
            yield gateway, proxy, engine


async def ask(gateway: Serving, prompt: str) -> Decision:
    """One request that has to be answered, and soon."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    answer, decision = await gateway.complete("tiny", prompt, max_tokens=2)
    assert answer.text == "o k"
    assert loop.time() - started < BUDGET + SLACK
    return decision


async def knows(gateway: Serving) -> None:
    """Return once a prompt's tokens are known, and credited when it is asked again."""
    prompt = text()

    async def look() -> bool:
        return (await ask(gateway, prompt)).credited > 0

    await until(look, "credit for a text")


async def test_a_tokenizer_that_hangs_costs_a_request_its_budget_only(tmp_path: Path) -> None:
    """(D1) Black-holed: connections stay, nothing comes back."""
    async with beside(tmp_path) as (gateway, proxy, _):
        await knows(gateway)
        proxy.hold()
        reasons = [(await ask(gateway, text())).record["tokens"]["reason"] for _ in range(6)]
        assert set(reasons) <= {"tokenizer_timeout", "tokenizer_failed"}
        # It rests now and then, so that not everybody waits for it.
        assert (await gateway.metrics()).total("aibrix_tokenizer_pool_unhealthy_tokenizers_total") >= 1
        proxy.release()
        await knows(gateway)


async def test_a_tokenizer_that_answers_after_the_budget_is_no_better(tmp_path: Path) -> None:
    """(D1) Replies that take many times the budget (5 s there, 1 s here beside 0.3 s)."""
    async with beside(tmp_path) as (gateway, proxy, _):
        await knows(gateway)
        proxy.delay = 1.0
        for _ in range(4):
            assert (await ask(gateway, text())).record["tokens"]["source"] == "none"
        proxy.delay = 0.0
        await knows(gateway)


async def test_a_tokenizer_that_is_cut_again_and_again(tmp_path: Path) -> None:
    """(D1) Every connection is reset while requests wait for it: each is answered all the same."""
    async with beside(tmp_path) as (gateway, proxy, _):
        await knows(gateway)
        for _ in range(5):
            proxy.hold("from")
            asked = asyncio.create_task(ask(gateway, text()))

            async def waiting() -> bool:
                return proxy.open > 0

            await until(waiting, "a question under way")
            proxy.cut(reset=True)
            proxy.release()
            await asked
        await knows(gateway)


async def test_a_tokenizer_that_is_absent_at_the_start_keeps_nobody_from_an_answer(tmp_path: Path) -> None:
    """(D1) The gateway starts, says what is missing, routes by load, and syncs once it is there."""
    async with beside(tmp_path, there=False) as (gateway, proxy, _):
        assert (await gateway.ready())["kv_sync"]["state"] == "waiting"
        (sentence,) = (await gateway.ready())["kv_sync"]["unmet"]
        assert proxy.endpoint in sentence
        assert (await ask(gateway, text())).record["tokens"]["source"] == "none"
        await proxy.accept()

        async def runs() -> bool:
            return bool((await gateway.ready())["kv_sync"]["state"] == "running")

        await until(runs, "KV sync runs")
        await gateway.live("a")
        await knows(gateway)
