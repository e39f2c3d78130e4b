"""Engines that come, go, drain and change under traffic, as Kubernetes makes them: what discovery says holds at once.

(``tests/kube`` has the watcher that turns pods into these changes.)
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from .client import DEADLINE, events, until
from .engine import Engine
from .network import Proxy
from .serving import Serving, serving
from .words import tokens

pytestmark = pytest.mark.faults


async def answered_by(gateway: Serving, count: int = 6) -> set[str]:
    """The engines that answer prompts nobody has."""
    body = {"model": "tiny", "max_tokens": 1}
    answers = [
        await gateway.post("/v1/completions", {**body, "prompt": tokens()}, {"routing-strategy": "round-robin"})
        for _ in range(count)
    ]
    assert {answer.status for answer in answers} == {200}
    return {answer.engine for answer in answers}


async def test_an_engine_without_an_address_is_gone_from_lookups_and_its_stream_is_closed(tmp_path: Path) -> None:
    """(K2) An evicted pod loses its address: discovery says gone, and nothing of it is left behind."""
    prompt = tokens()
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(Engine(name)) for name in ("a", "b")]
        live = await stack.enter_async_context(Proxy(a.publisher.events))
        gateway = await stack.enter_async_context(serving(tmp_path, a.entry | {"events": live.endpoint}, b))
        await a.subscribed()
        a.store(prompt)
        await gateway.credited("a", prompt, 96)
        assert live.open == 1
        gateway.deliver("gone", gateway.discovered("a"))
        assert (await gateway.match(model="tiny", tokens=prompt))["workers"].keys() == {"b"}
        assert await answered_by(gateway) == {"b"}
        assert not a.served

        async def closed() -> bool:
            return live.open == 0

        await until(closed, "the subscription closed")
        page = await gateway.metrics()
        assert not page.about("a"), "series of an engine that is gone"
        assert set(await gateway.workers()) == {"b"}


async def test_a_draining_engine_gets_no_new_request_and_ends_what_it_has(tmp_path: Path) -> None:
    """(K3) With a deletion timestamp a pod is not ready, whatever its probes say; its open streams finish."""
    prompt = tokens()
    async with Engine("a") as a, Engine("b") as b, serving(tmp_path, a, b) as gateway:
        a.store(prompt)
        await gateway.credited("a", prompt, 96)
        a.open.clear()
        body = {"model": "tiny", "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.post(gateway.url + "/v1/completions", json=body))

            async def there() -> bool:
                return len(a.served) == 1

            await until(there, "the request at the engine")
            engine = gateway.discovered("a")
            gateway.deliver("changed", replace(engine, ready=False))
            # Even a prompt that it holds, and that nobody else does, goes elsewhere.
            answer, decision = await gateway.complete("tiny", prompt)
            assert (answer.engine, decision.worker) == ("b", "b")
            assert await answered_by(gateway) == {"b"}
            gateway.deliver("gone", engine)
            a.open.set()
            async with asyncio.timeout(DEADLINE):
                async with await asked as response:
                    pieces = events(await response.read())
        assert [piece["choices"][0]["text"] for piece in pieces if piece["choices"]] == ["o", " k"]
        assert len(a.served) == 1


async def test_events_switched_off_purge_and_on_again_bring_back(tmp_path: Path) -> None:
    """(K4) The label that says that a pod publishes is removed, then restored."""
    prompt = tokens()
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(Engine("a"))
        live = await stack.enter_async_context(Proxy(a.publisher.events))
        gateway = await stack.enter_async_context(serving(tmp_path, a.entry | {"events": live.endpoint}))
        await a.subscribed()
        a.store(prompt)
        await gateway.credited("a", prompt, 96)
        engine = gateway.discovered("a")
        gateway.deliver("changed", replace(engine, kv_events=False))

        async def purged() -> bool:
            row = (await gateway.workers())["a"]
            return live.open == 0 and row["state"] == "off" and row["blocks"] == 0

        await until(purged, "unsubscribed and purged")
        assert await gateway.credit("a", model="tiny", tokens=prompt) == 0
        assert await answered_by(gateway) == {"a"}
        gateway.deliver("changed", engine)
        await gateway.credited("a", prompt, 96)
        assert live.open == 1


async def test_a_storm_of_adds_and_deletes_on_one_key_ends_followed(tmp_path: Path) -> None:
    """(K5) An add that overlaps a delete under way is not dropped, under the same uid or another."""
    prompt = tokens()
    async with Engine("a") as a, Engine("b") as b, serving(tmp_path, a, b) as gateway:
        a.store(prompt)
        await gateway.credited("a", prompt, 96)
        engine = gateway.discovered("a")
        for turn in range(60):
            gateway.deliver("gone", engine)
            engine = replace(engine, uid=f"a-{turn // 3}")  # three times the same, then another
            gateway.deliver("added", engine)
            if turn % 7 == 0:
                assert (await gateway.post("/v1/completions", {"model": "tiny", "prompt": prompt})).status == 200
        await gateway.live(engine.uid, "b")
        await gateway.credited(engine.uid, prompt, 96)
        assert set(await gateway.workers()) == {engine.uid, "b"}
        # Nor does the index know any of the lives between.
        assert set((await gateway.match(model="tiny", tokens=prompt))["workers"]) == {engine.uid, "b"}
        answer, _ = await gateway.complete("tiny", prompt)
        assert (answer.engine, answer.cached) == ("a", 96)
