"""Conversations follow their cache, and what was credited is what the engine then reports as cached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.e2e.vllm.workload import Workload
from tests.faults.client import streamed
from tests.faults.fleet import SYNC, Batches, Listed, models, sim
from tests.faults.gateway import Gateway
from tests.faults.process import running
from tests.faults.words import asks, assistant, text, tokens, user

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAPTERS = ("tiny-sql", "tiny-poems")
WINDOW = 64


@dataclass(frozen=True)
class Fleet:
    gateway: Gateway
    engines: dict[str, list[Listed]]
    """By model."""
    batches: Batches

    async def applied(self, model: str) -> None:
        """Return once the gateway knows all that the model's engines have published."""
        await self.gateway.applied(self.batches.of(*self.engines[model]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(batches: Batches, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two plain engines with adapters, one of two ranks, two of a hybrid model with little room."""
    small = {"sliding_window": WINDOW, "blocks": 129, "max_model_len": 1024, "max_num_batched_tokens": 512}
    engines = {
        "tiny": [Listed(name, sim("tiny", adapters=ADAPTERS, seed=seed)) for seed, name in enumerate(("a", "b"))],
        "ranks": [Listed("ranked", sim("ranks", data_parallel_size=2))],
        "hybrid": [Listed(name, sim("hybrid", seed=seed, **small)) for seed, name in enumerate(("h1", "h2"))],
    }
    async with AsyncExitStack() as stack:
        for listed in (each for served in engines.values() for each in served):
            await stack.enter_async_context(listed.engine)
        folder = tmp_path_factory.mktemp("conversations")
        gateway = await stack.enter_async_context(running(folder, SYNC | models(engines)))
        await gateway.live()
        yield Fleet(gateway, engines, batches)


async def test_a_conversation_stays_with_its_cache(fleet: Fleet) -> None:
    for number in range(4):
        messages = [{"role": "system", "content": text(20)}]
        home, computed = None, 0
        for turn in range(4):
            messages.append(user(text(20)))
            fields = {"max_tokens": 20, "ignore_eos": True}
            answer, decision = await fleet.gateway.chat(
                "tiny", messages, **(streamed(fields) if (number + turn) % 2 else fields)
            )
            assert decision.credited == answer.cached
            assert decision.record["mode"] == "exact"
            assert decision.record["tokens"]["source"] == "remote"
            # The turn before, its answer included, is in the cache: all of its whole blocks.
            assert answer.cached >= computed // 16 * 16
            assert home in (None, answer.engine)
            home, computed = answer.engine, answer.prompt_tokens + 20 - 1
            messages.append(assistant(answer.text))
            await fleet.applied("tiny")


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_of_text_and_of_token_ids(fleet: Fleet, stream: bool) -> None:
    for prompt in (text(), tokens()):
        fields = {"max_tokens": 2}
        first, _ = await fleet.gateway.complete("tiny", prompt, **fields)
        await fleet.applied("tiny")
        again, decision = await fleet.gateway.complete("tiny", prompt, **(streamed(fields) if stream else fields))
        assert again.engine == first.engine
        assert again.cached == decision.credited == (again.prompt_tokens - 1) // 16 * 16 > 0


async def test_adapters_have_caches_of_their_own(fleet: Fleet) -> None:
    messages = asks(text())
    homes = {}
    for model in ("tiny", *ADAPTERS):
        answer, decision = await fleet.gateway.chat(model, messages, max_tokens=2)
        assert (answer.cached, decision.credited) == (0, 0), "another adapter's blocks"
        assert decision.record["adapter"] == (None if model == "tiny" else model)
        homes[model] = answer.engine
        await fleet.applied("tiny")
    for model, home in homes.items():
        answer, decision = await fleet.gateway.chat(model, messages, max_tokens=2)
        assert answer.engine == home
        assert answer.cached == decision.credited > 0
        assert {worker for worker, credit in decision.credit.items() if credit} == {home}


async def test_salts_have_caches_of_their_own(fleet: Fleet) -> None:
    prompt = tokens()
    homes = {}
    for salt in ("alpha", "beta", None):
        fields = {"cache_salt": salt} if salt else {}
        answer, decision = await fleet.gateway.complete("tiny", prompt, max_tokens=1, **fields)
        assert (answer.cached, decision.credited) == (0, 0), "another tenant's blocks"
        homes[salt] = answer.engine
        await fleet.applied("tiny")
    for salt, home in homes.items():
        fields = {"cache_salt": salt} if salt else {}
        answer, decision = await fleet.gateway.complete("tiny", prompt, max_tokens=1, **fields)
        assert (answer.engine, answer.cached, decision.credited) == (home, 96, 96)


async def test_each_rank_is_a_worker(fleet: Fleet) -> None:
    """The chosen rank serves: the engine's own figures say so."""
    (engine,) = fleet.engines["ranks"]
    seen = set()
    for _ in range(6):
        prompt = tokens()
        home = None
        for turn in range(2):
            before = await engine.metrics()
            # A client can't choose a rank: this one does not exist, and the engine would refuse it.
            headers = {"X-Data-Parallel-Rank": "7"}
            body = {"model": "ranks", "prompt": prompt, "max_tokens": 1}
            answer, decision = await fleet.gateway.ask("/v1/completions", body, headers)
            after = await engine.metrics()
            served = [
                rank
                for rank in ("0", "1")
                if after.total("vllm:prompt_tokens_total", engine=rank)
                > before.total("vllm:prompt_tokens_total", engine=rank)
            ]
            assert served == [decision.worker.removeprefix("ranked#")]
            assert answer.cached == decision.credited == (96 if turn else 0)
            home = home or decision.worker
            assert decision.worker == home
            await fleet.applied("ranks")
        seen.add(home)
    assert seen == {"ranked#0", "ranked#1"}, "one rank got everything"


async def test_a_sliding_window_model_is_credited_with_what_it_reports(fleet: Fleet) -> None:
    """Blocks outside of the window are gone while the full-attention ones live: what hits is the rule of both."""
    workload = Workload(7, "hybrid", open_conversations=5, max_model_len=1024)
    credited = []
    for _ in range(30):
        turn = workload.next_turn()
        answer, decision = await fleet.gateway.ask(turn.path, {**turn.body, "model": "hybrid"})
        assert decision.record["mode"] == "exact"
        assert decision.credited == answer.cached, decision.record
        credited.append(decision.credited)
        workload.answered(turn, answer.text, answer.token_ids, answer.prompt_tokens)
        await fleet.applied("hybrid")
    assert sum(credit > 0 for credit in credited) >= 12, credited
    rows = await fleet.gateway.workers()
    # Summed: one of the two may have had room for all that came to it, and what never happened has no count.
    removed = sum(rows[worker]["index"]["counts"].get("removed", 0) for worker in ("h1", "h2"))
    assert removed > 0, "nothing was evicted"
    # The gateway's own audit saw the same.
    page = await fleet.gateway.metrics()
    for verdict, answers in (("right", 30), ("over", 0), ("under", 0)):
        found = sum(page.total("kvsync_audit_answers_total", worker=name, verdict=verdict) for name in ("h1", "h2"))
        assert found == answers, verdict
