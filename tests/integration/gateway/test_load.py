"""Much work at once, and nobody else feels it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvsync.config import LocalTokenizerSettings, ModelSettings, TokenizerSettings
from kvsync.requests.turns import Turns
from kvsync.tokenize.service import TokenizerService
from tests.integration.gateway.harness import GOOD, MODEL, House, eventually, house, post

TINY = Path(__file__).parents[2] / "data" / "tiny-llama"
REQUESTS = 50
WORDS = 100_000
"""With two tokens each."""
HEALTH = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"
BOUND = 1.0
"""Seconds: ten times what is wanted, for machines that have much else to do."""


def prompt(number: int) -> bytes:
    """No two begin alike, so nothing is remembered."""
    return json.dumps({"model": MODEL, "prompt": f"{number} " + " fox" * WORDS}).encode()


@asynccontextmanager
async def tokenizer() -> AsyncIterator[TokenizerService]:
    settings = TokenizerSettings(local=LocalTokenizerSettings(threads=2, queue=64))
    service = TokenizerService(settings, [ModelSettings(name=MODEL, tokenizer=TINY)], lambda _: [])
    await service.start()
    yield service
    await service.close()


@asynccontextmanager
async def health(home: House) -> AsyncIterator[list[float]]:
    """Asks all the time; the seconds that each answer took."""
    loop = asyncio.get_running_loop()
    took: list[float] = []

    async def ask() -> None:
        client = await home.client()
        while True:
            started = loop.time()
            await client.send(HEALTH)
            assert (await client.answer()).status == 200
            took.append(loop.time() - started)
            await asyncio.sleep(0.002)

    asking = asyncio.create_task(ask())
    yield took
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


def p99(took: list[float]) -> float:
    return sorted(took)[int(len(took) * 0.99)]


async def test_fifty_prompts_of_200k_tokens_and_a_mass_disconnect_leave_health_quick() -> None:
    """(F2)"""
    async with tokenizer() as service, house(GOOD, tokenizing=service) as home, health(home) as took:
        clients = [await home.client() for _ in range(REQUESTS)]
        for number, client in enumerate(clients):
            client.writer.write(post(prompt(number)))
        await eventually(lambda: service.stats()["pool"]["pending"] > REQUESTS // 2)
        for client in clients:
            client.reset()
        await eventually(lambda: home.gateway.open_connections() == 1)
        # What no thread had begun never runs: only what two threads are busy with is left.
        await eventually(lambda: service.stats()["pool"]["pending"] <= 2)
        cut = home.counters.cuts["/v1/completions", "client_gone"]
        whole = home.counters.answers["/v1/completions", 200, "engine"]
        assert cut + whole == REQUESTS
        assert cut > REQUESTS // 2
        assert all(len(ticket.ends) == 1 for ticket in home.routing.tickets)
        assert p99(took) < BOUND, f"p99 {p99(took):.3f} s, longest {max(took):.3f} s"
        print(f"health p99 {p99(took) * 1e3:.1f} ms, longest {max(took) * 1e3:.1f} ms, {len(took)} answers")


async def test_fifty_prompts_of_200k_tokens_are_all_served() -> None:
    """(F2) With their tokens or, where that takes longer than its budget, by load."""
    async with tokenizer() as service, house(GOOD, tokenizing=service) as home, health(home) as took:
        clients = [await home.client() for _ in range(REQUESTS)]
        for number, client in enumerate(clients):
            client.writer.write(post(prompt(number)))
        for client in clients:
            assert (await client.answer()).body == b"good"
        reasons = {query.tokenized.reason for query in home.routing.queries}
        assert reasons <= {None, "tokenizer_timeout", "queue_full"}
        assert p99(took) < BOUND, f"p99 {p99(took):.3f} s, longest {max(took):.3f} s"
        print(f"health p99 {p99(took) * 1e3:.1f} ms, longest {max(took) * 1e3:.1f} ms, {len(took)} answers")


@pytest.mark.parametrize("item", [b"[]", b'""', b"{}"])
async def test_a_payload_bomb_is_refused_before_it_costs_much(item: bytes) -> None:
    """20 MB of the dearest JSON there is: decoded, it would be millions of objects."""
    async with house(GOOD) as home, health(home) as took:
        client = await home.client()
        answer = await client.ask(b'{"model":"m","prompt":[%b]}' % b",".join([item] * ((20 << 20) // 3)))
        assert answer.status == 413
        assert max(took) < BOUND, f"longest {max(took):.3f} s"


async def test_a_client_that_leaves_while_its_large_request_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """(P4)"""
    waiting: list[object] = []
    monkeypatch.setattr(Turns, "add", lambda self, work, before: waiting.append(work))
    async with house(GOOD) as home:
        client = await home.client()
        await client.send(post(b'{"model": "m"}'.ljust(300_000)))
        await eventually(lambda: len(waiting) == 1)
        client.reset()
        await eventually(lambda: home.gateway.open_connections() == 0)
        (work,) = waiting
        assert callable(work)
        work()
        assert home.routing.queries == []
        assert home.engine.connections == 0
        assert home.counters.cuts == {("/v1/completions", "client_gone"): 1}
        assert home.counters.answers == {}
