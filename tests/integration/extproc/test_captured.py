"""Real vLLM's requests, by way of Envoy: every one of them is decided as the built-in gateway decides it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.serve.captured import HIDE_SALTS, Ask, dialects, question
from tests.faults.client import Client, streamed
from tests.faults.engine import Engine
from tests.faults.gateway import Decision
from tests.faults.serving import serving
from tests.integration.extproc.envoy import envoy

DIALECTS = {dialect.version: dialect for dialect in dialects()}


def credited(decision: Decision) -> dict[str, object]:
    """What one gateway's decision says of a request; which of two workers without credit is taken is chance."""
    record = decision.record
    said = {name: record[name] for name in ("policy", "mode", "prompt_tokens", "tokens")}
    return {"credit": decision.credit, "credited": decision.credited, **said}


@pytest.mark.parametrize("version", DIALECTS)
async def test_both_doors_decide_captured_requests_alike(tmp_path: Path, version: str) -> None:
    """Two gateways follow the same two engines; one serves itself, the other is asked by Envoy. Each gets every
    request of the capture, between the same batches of its stream."""
    dialect = DIALECTS[version]
    asks = [step for step in dialect.steps if isinstance(step, Ask)]
    tokens_of = {question(ask.body): ask.tokens for ask in asks}
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                Engine(
                    name,
                    blocks=dialect.blocks,
                    topic_frame=dialect.replay_topic,
                    tokenizes=lambda body: tokens_of.get(question(body), []),
                )
            )
            for name in ("a", "b")
        ]
        entries = [engine.entry | {"adapters": dialect.adapters} for engine in engines]
        extproc = {"enabled": True, "host": "127.0.0.1", "port": 0, "drain_delay": 0}
        folders = [tmp_path / name for name in ("own", "asked", "envoy")]
        for folder in folders:
            folder.mkdir()
        own = await stack.enter_async_context(serving(folders[0], *entries))
        asked = await stack.enter_async_context(serving(folders[1], *entries, extproc=extproc))
        assert asked.app.extproc is not None
        made = await stack.enter_async_context(envoy(folders[2], asked.app.extproc.port))
        await made.healthy(processors=1)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        by_envoy = Client(session, f"http://127.0.0.1:{made.port}")
        held = 0
        for number, step in enumerate(dialect.steps):
            if not isinstance(step, Ask):
                engines[0].publisher.send(step.payload)
                continue
            if version in HIDE_SALTS and "cache_salt" in step.body:
                continue  # from then on nothing is credited to the worker that had it, and which one that is is chance
            for gateway in (own, asked):
                await gateway.applied({"a": engines[0].publisher.published})
            engines[0].cached, engines[1].cached = step.cached, 0
            body = streamed(step.body) if number % 2 else step.body
            _, decision = await own.ask(step.path, body)
            answer = await by_envoy.post(step.path, body)
            assert answer.status == 200, (step.label, answer.pieces)
            other = await asked.decision(answer.request_id)
            assert credited(other) == credited(decision), step.label
            if decision.credited:
                held += 1
                assert answer.engine == other.worker == decision.worker == "a", step.label
        assert held >= (10 if version == "0.32" else 3 - (version in HIDE_SALTS))
