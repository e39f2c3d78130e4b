"""KV sync turned on for a fleet that serves, and off again, as docs/migrate.md says: everything a process of its own,
and no request lost. The commands and settings are those that the page prints."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.faults.client import DEADLINE, streamed, until
from tests.faults.network import Proxy
from tests.faults.process import Running, running, write
from tests.faults.simulated import SimulatedEngine
from tests.faults.traffic import traffic
from tests.faults.words import tokens

from .page import exports, run, section

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS: Final = ("--prefill-rate", "40000", "--decode-rate", "100", "--blocks", "2000", "--seed")
NO_EVENTS: Final = "--no-events"
BY_FILE: Final = "**By the file, without a restart.**"
BY_ENVIRONMENT: Final = "**By the environment, with a second gateway.**"
DELAY: Final = {"KVSYNC_GATEWAY_DRAIN_DELAY": "2"}
LONG: Final = 300
"""Tokens of an answer that takes longer than that: three seconds."""
SWITCH: Final = "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[dict[str, SimulatedEngine]]:
    """Two of them, as a fleet is before: they publish nothing."""
    async with AsyncExitStack() as stack:
        made = [SimulatedEngine(name, *OPTIONS, str(seed), NO_EVENTS) for seed, name in enumerate("ab")]
        await asyncio.gather(*(stack.enter_async_context(engine) for engine in made))
        yield {engine.name: engine for engine in made}


def listing(*entries: Mapping[str, object]) -> dict[str, Any]:
    return {"gateway": {"host": "127.0.0.1"}, "models": [{"name": "tiny", "engines": list(entries)}]}


def variables(engine: SimulatedEngine) -> dict[str, str]:
    streams = {"EVENTS": engine.events or "", "REPLAY": engine.replay or ""}
    return {"MODEL": "tiny", "TOKENIZER": engine.url, "ENGINE": engine.url, **streams}


async def has(gateway: Running, *names: str) -> None:
    """Return once the gateway has exactly these engines."""

    async def look() -> bool:
        return sorted(row["engine"] for row in (await gateway.workers()).values()) == sorted(names)

    await until(look, f"the fleet {names}")


async def synced(gateway: Running, state: str, *streams: str) -> None:
    """Return once KV sync is in that state, and each worker's stream in one of those."""

    async def look() -> bool:
        states = {row["state"] for row in (await gateway.workers()).values()}
        return (await gateway.ready())["kv_sync"]["state"] == state and states <= set(streams)

    await until(look, f"KV sync {state}, streams {streams}")


async def restarted(gateway: Running, engine: SimulatedEngine, other: SimulatedEngine, *, events: bool) -> None:
    """Step 2: out of the file, idle, restarted with events or without, back in the file."""
    file, before = gateway.process.file, section(BY_FILE)
    write(file, before | listing(other.entry))
    await has(gateway, other.name)
    await run("**Wait until it has nothing to do:**", variables(engine))
    await begun_anew(engine, events=events)
    write(file, before | listing(other.entry, engine.entry))
    await has(gateway, engine.name, other.name)


async def begun_anew(engine: SimulatedEngine, *, events: bool) -> None:
    engine.kill()
    engine.options = (*OPTIONS, engine.options[len(OPTIONS)], *(() if events else (NO_EVENTS,)))
    await engine.start()


async def test_on_and_off_by_the_file(engines: Mapping[str, SimulatedEngine], tmp_path: Path) -> None:
    a, b = engines.values()
    config = section(BY_FILE) | listing(a.entry, b.entry)
    async with running(tmp_path, config) as gateway, traffic(gateway.url) as asked:
        await asked.more("a", "b")
        assert (await gateway.ready())["models"]["tiny"]["mode"] in ("load-only", "observed")

        said = await run("### 1. The tokenizer counts as the engines do", variables(a))
        counts = re.findall(r'"(?:count|prompt_tokens)": *(\d+)', said)
        assert len(counts) == 2
        assert counts[0] == counts[1]

        for engine, other in ((a, b), (b, a)):
            await restarted(gateway, engine, other, events=True)
            assert "stored" in await run("**See that it publishes:**", variables(engine))
            await asked.more("a", "b")
        assert (await gateway.ready())["kv_sync"]["state"] == "off"

        config = section(BY_FILE) | listing(a.entry, b.entry)
        write(gateway.process.file, config | section("Then, while it runs, add:"))
        await synced(gateway, "running", "live", "silent")
        before = (asked.cached, asked.prompted)
        await asked.more("a", "b", count=10)
        assert asked.cached > before[0]
        rows = await gateway.workers()
        assert all((row["trust"], row["blocks"] > 0) == ("exact", True) for row in rows.values())
        page = await gateway.metrics()
        assert page.total("kvsync_credited_tokens_total") > 0
        assert page.total("kvsync_audit_answers_total", verdict="right") > 0
        assert page.total("kvsync_audit_answers_total", verdict="over") == 0

        silenced = listing(a.entry, {**b.entry, "kv_events": False})
        write(gateway.process.file, section(BY_FILE) | section("Then, while it runs, add:") | silenced)

        async def off() -> bool:
            states = {row["engine"]: row["state"] for row in (await gateway.workers()).values()}
            return states["a"] in ("live", "silent") and states["b"] == "off"

        await until(off, "b not followed")
        await asked.more("a", "b")

        body = {"model": "tiny", "prompt": tokens(), "max_tokens": 1}
        _, decision = await gateway.ask("/v1/completions", body, {"routing-strategy": "least-request"})
        assert decision.record["policy"] == "least-request"

        write(gateway.process.file, config | {"events": {"enabled": False}})
        await synced(gateway, "off", "off")
        await asked.more("a", "b")
        assert "Traceback" not in gateway.process.log


async def test_on_and_off_by_the_environment(engines: Mapping[str, SimulatedEngine], tmp_path: Path) -> None:
    """Each gateway is another process, and clients move from one to the next behind one address."""
    for engine in engines.values():
        if engine.events is None:
            await begun_anew(engine, events=True)
    config = listing(*(engine.entry for engine in engines.values()))
    on = exports(BY_ENVIRONMENT, variables(engines["a"])) | DELAY
    assert on[SWITCH] == "true"
    folders = [tmp_path / name for name in ("before", "on", "off")]
    for folder in folders:
        folder.mkdir()

    async def replace(old: Running, new: Running) -> None:
        """Step 3: new connections go to the new gateway, and the old one ends, with its open answers."""
        body = streamed({"model": "tiny", "prompt": tokens(), "max_tokens": LONG, "ignore_eos": True})
        async with asyncio.TaskGroup() as group:
            long = group.create_task(old.post("/v1/completions", body, {"request-id": "long"}))

            async def begun() -> bool:
                return (await old.admin.get("/v1/decisions/long"))[0] == 200

            await until(begun, "an answer that is open at the old gateway")
            door.towards(new.url)
            old.process.signal(signal.SIGTERM)
            assert await old.process.ended(DEADLINE) == 0
        assert len(long.result().pieces) == LONG + 1, "with the one of usage"
        assert "Traceback" not in old.process.log

    async with AsyncExitStack() as stack:
        before = await stack.enter_async_context(running(folders[0], config, DELAY))
        door = await stack.enter_async_context(Proxy(before.url))
        async with traffic(door.endpoint) as asked:
            await asked.more("a", "b")
            await synced(before, "off", "off")

            follower = await stack.enter_async_context(running(folders[1], config, on))
            await synced(follower, "running", "live", "silent")

            async def exact() -> bool:
                return bool((await follower.ready())["models"]["tiny"]["mode"] == "exact")

            await until(exact, "mode exact")
            await replace(before, follower)
            await asked.more("a", "b", count=5)
            assert (await follower.metrics()).total("kvsync_credited_tokens_total") > 0

            after = await stack.enter_async_context(running(folders[2], config, on | {SWITCH: "false"}))
            await replace(follower, after)
            await synced(after, "off", "off")
            await asked.more("a", "b")
            assert (await after.metrics()).total("kvsync_credited_tokens_total") == 0
            # With nobody to follow them, engines lose their events.
            a, b = engines.values()
            await restarted(after, b, a, events=False)
            await asked.more("a", "b")
