"""What goes wrong with an engine costs credit for a while, never truth: no request finds less than was credited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.faults.client import Answer, until
from tests.faults.fleet import SYNC, Listed, models, sim
from tests.faults.gateway import Decision, Gateway
from tests.faults.metrics import Scrape
from tests.faults.process import running
from tests.faults.words import tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELD = 96
"""Of a prompt of 100 tokens, in blocks of 16."""


@dataclass(frozen=True)
class Lone:
    """A model of one engine, so that it is plain who gets a request."""

    engine: Listed
    gateway: Gateway

    @property
    def name(self) -> str:
        return self.engine.name

    async def ask(self, prompt: Sequence[int]) -> tuple[Answer, Decision]:
        return await self.gateway.complete(self.name, prompt, max_tokens=1)

    async def credit(self, prompt: Sequence[int]) -> int:
        return await self.gateway.credit(self.name, model=self.name, tokens=prompt)

    async def credited(self, prompt: Sequence[int], figure: int = HELD) -> None:
        """Return once the prompt's credit is that figure."""

        async def look() -> bool:
            return await self.credit(prompt) == figure

        await until(look, f"credit of {figure} tokens")

    async def warm(self, prompt: Sequence[int]) -> None:
        """Have the engine hold a prompt, and the gateway know it."""
        await self.ask(prompt)
        await self.credited(prompt)

    async def row(self) -> dict[str, object]:
        return (await self.gateway.workers())[self.name]


@dataclass(frozen=True)
class Fleet:
    gateway: Gateway
    lone: dict[str, Lone]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engines = {}
        for name in ("restarted", "dropping", "forgotten", "dying"):
            engines[name] = Listed(name, await stack.enter_async_context(sim(name)))
        config = SYNC | models({name: [listed] for name, listed in engines.items()})
        gateway = await stack.enter_async_context(running(tmp_path_factory.mktemp("repair"), config))
        await gateway.live()
        yield Fleet(gateway, {name: Lone(listed, gateway) for name, listed in engines.items()})


async def test_a_restarted_engine_holds_nothing(fleet: Fleet) -> None:
    lone = fleet.lone["restarted"]
    kept, other = tokens(), tokens()
    await lone.warm(kept)
    await lone.engine.fault("restart")
    await lone.credited(kept, 0)
    await fleet.gateway.live(lone.name)
    answer, decision = await lone.ask(kept)
    assert (answer.cached, decision.credited) == (0, 0)
    # The new life begins at number 0 again, and is followed.
    await lone.credited(kept)
    await lone.warm(other)
    for prompt in (kept, other):
        answer, decision = await lone.ask(prompt)
        assert answer.cached == decision.credited == HELD
    row = await lone.row()
    assert (row["last_sequence"], row["trust"]) == (1, "exact")
    page = await fleet.gateway.metrics()
    assert page.total("aibrix_kvcache_zmq_disconnections_total", pod_key=lone.name) >= 1
    assert page.total("aibrix_kvcache_zmq_connection_status", pod_key=lone.name) == 1
    assert page.total("kvsync_stream_events_total", worker=lone.name, event="epochs") == 1


async def test_dropped_batches_are_replayed(fleet: Fleet) -> None:
    lone = fleet.lone["dropping"]
    prompts = [tokens() for _ in range(4)]
    await lone.warm(prompts[0])
    before = await fleet.gateway.metrics()
    await lone.engine.fault("drop_batches", count=2)
    for prompt in prompts[1:3]:
        _, decision = await lone.ask(prompt)
        assert decision.credited == 0
    assert await lone.credit(prompts[1]) == 0, "the batch was not dropped"
    await lone.ask(prompts[3])  # its batch shows the gap
    for prompt in prompts:
        await lone.credited(prompt)
    for prompt in prompts:
        answer, decision = await lone.ask(prompt)
        assert answer.cached == decision.credited == HELD
    assert (await lone.row())["trust"] == "exact"
    after = await fleet.gateway.metrics()

    def grown(name: str) -> float:
        return _zmq(after, name, lone) - _zmq(before, name, lone)

    assert grown("missed_events") == 2
    assert grown("replay_requests") == grown("replay_success") >= 1
    assert grown("replay_failures") == 0


async def test_a_gap_that_no_replay_fills_forgets_the_worker(fleet: Fleet) -> None:
    """The engine's replay breaks off, so what is missing may have been any removal."""
    lone = fleet.lone["forgotten"]
    known, missed, later = tokens(), tokens(), tokens()
    await lone.warm(known)
    await lone.engine.fault("cut_replays", after=0)
    await lone.engine.fault("drop_batches", count=1)
    await lone.ask(missed)
    await lone.ask(later)

    async def forgotten() -> bool:
        row = await lone.row()
        return (row["trust"], row["state"]) == ("partial", "live")

    await until(forgotten, "the worker forgotten")
    assert await lone.credit(known) == 0
    assert await lone.credit(missed) == 0
    # From there on what is told is believed again.
    await lone.credited(later)
    answer, decision = await lone.ask(later)
    assert answer.cached == decision.credited == HELD
    assert decision.record["mode"] == "partial"
    answer, decision = await lone.ask(known)
    assert (answer.cached, decision.credited) == (HELD, 0)
    page = await fleet.gateway.metrics()
    assert _zmq(page, "replay_failures", lone) >= 1
    assert page.total("kvsync_worker_trust", worker=lone.name, trust="partial") == 1
    assert page.total("kvsync_worker_trust", worker=lone.name, trust="exact") == 0


async def test_a_dead_engine_is_said_to_be_down(fleet: Fleet) -> None:
    lone = fleet.lone["dying"]
    prompt = tokens()
    await lone.warm(prompt)
    await lone.engine.engine.stop()

    async def down() -> bool:
        return (await lone.row())["state"] == "down"

    await until(down, "the stream down")
    answer = await fleet.gateway.post("/v1/completions", {"model": lone.name, "prompt": prompt, "max_tokens": 1})
    assert (answer.status, answer.error["code"]) == (502, "engine_unreachable")
    page = await fleet.gateway.metrics()
    assert page.total("kvsync_stream_state", worker=lone.name, state="down") == 1
    assert _zmq(page, "connection_status", lone) == 0


def _zmq(page: Scrape, name: str, lone: Lone) -> float:
    suffix = "" if name == "connection_status" else "_total"
    return page.total(f"aibrix_kvcache_zmq_{name}{suffix}", pod_key=lone.name)
