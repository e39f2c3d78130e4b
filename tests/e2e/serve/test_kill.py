"""Engines and gateways killed with SIGKILL under load, and started again: no request fails that could have been served,
and credit is right again within seconds. Everything is a process of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

from tests.faults.client import DEADLINE, until
from tests.faults.fleet import SYNC
from tests.faults.gateway import Gateway
from tests.faults.process import running
from tests.faults.simulated import SimulatedEngine
from tests.faults.words import tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES: Final = ("a", "b", "c")
HELD: Final = 96
"""Of a prompt of 100 tokens, in blocks of 16."""
SETTINGS: Final[Mapping[str, Any]] = {
    **SYNC,
    "gateway": {"host": "127.0.0.1", "connect_timeout": 1},
    # Killed sockets are seen at once on loopback; these are for what the kernel does not tell.
    "events": {"enabled": True, "heartbeat_interval": 0.5, "heartbeat_timeout": 1.5},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[dict[str, SimulatedEngine]]:
    async with AsyncExitStack() as stack:
        options = ("--speed", "40", "--blocks", "2000", "--seed")
        made = [SimulatedEngine(name, *options, str(seed)) for seed, name in enumerate(NAMES)]
        await asyncio.gather(*(stack.enter_async_context(engine) for engine in made))
        yield {engine.name: engine for engine in made}


def config(engines: Mapping[str, SimulatedEngine]) -> dict[str, object]:
    return {**SETTINGS, "models": [{"name": "tiny", "engines": [engine.entry for engine in engines.values()]}]}


@dataclass
class Load:
    """Clients that ask without a pause, half of them for streams; what became of each request."""

    url: str
    prompts: Sequence[Sequence[int]]
    answered: Counter[str] = field(default_factory=Counter)
    """By engine, in full."""
    cut: int = 0
    """Streams that ended early after their bytes had begun."""
    failed: list[str] = field(default_factory=list)
    """Everything else."""

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], stream: bool) -> None:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 8, "ignore_eos": True, "stream": stream}
        begun = False
        try:
            async with session.post(self.url + "/v1/completions", json=body) as response:
                begun = True
                content = await response.read()
                whole = response.status == 200 and (not stream or content.endswith(b"data: [DONE]\n\n"))
                if whole:
                    self.answered[response.headers["target-pod"]] += 1
                elif response.status == 200:
                    self.cut += 1
                else:
                    self.failed.append(f"{response.status} {content[:200]!r}")
        except aiohttp.ClientError as error:
            if begun and stream:
                self.cut += 1
            else:
                self.failed.append(repr(error))

    @asynccontextmanager
    async def running(self, clients: int = 6) -> AsyncIterator[None]:
        enough = asyncio.Event()
        turns = itertools.count()

        async def keep_asking(session: aiohttp.ClientSession) -> None:
            while not enough.is_set():
                turn = next(turns)
                await self.ask(session, self.prompts[turn % len(self.prompts)], stream=turn % 2 == 0)
                if self.failed:
                    await asyncio.sleep(0.02)  # nobody hammers a port that refuses

        timeout = aiohttp.ClientTimeout(total=DEADLINE)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(keep_asking(session))
            try:
                yield
            finally:
                enough.set()

    async def more(self, count: int, *names: str) -> None:
        """Return once each of these engines (or all together, if none is named) answered so many more."""
        before = self.answered.copy()

        async def look() -> bool:
            if not names:
                return self.answered.total() >= before.total() + count
            return all(self.answered[name] >= before[name] + count for name in names)

        await until(look, f"{count} more answers of {names or 'anybody'}; failed: {self.failed[:3]}")


async def credit_is_true(gateway: Gateway, prompts: Sequence[Sequence[int]]) -> int:
    """Every prompt's answer reports what its engine was credited with; returns how many were credited."""
    credited = 0
    for prompt in prompts:
        answer, decision = await gateway.complete("tiny", prompt, max_tokens=1)
        assert answer.cached == decision.credited, decision.record
        credited += decision.credited == HELD
    return credited


async def over(gateway: Gateway) -> float:
    """Answers so far that showed less than was credited."""
    return (await gateway.metrics()).total("kvsync_audit_answers_total", verdict="over")


async def quiet(gateway: Gateway) -> None:
    """Return once nothing is under way, every stream is live and what the engines told is in the index."""
    await gateway.live()
    seen: list[object] = []

    async def look() -> bool:
        rows = await gateway.workers()
        seen.append([(row["running"], row["trust"], row["last_sequence"]) for row in rows.values()])
        idle = all(row["running"] == 0 and row["trust"] == "exact" for row in rows.values())
        return idle and len(seen) >= 20 and all(each == seen[-1] for each in seen[-20:])

    await until(look, "quiet")


async def test_engines_killed_and_started_again_under_load(
    engines: Mapping[str, SimulatedEngine], tmp_path: Path
) -> None:
    """Requests that a dead engine had not begun to answer are answered by others."""
    async with running(tmp_path, config(engines)) as gateway:
        await gateway.live()
        load = Load(gateway.url, [tokens(100) for _ in range(24)])
        async with load.running():
            await load.more(30)
            for name in ("a", "b"):
                engines[name].kill()
                await load.more(60)
            await asyncio.gather(*(engines[name].start() for name in ("a", "b")))
            await load.more(5, *NAMES)
        assert load.failed == []
        # Only what was under way at the moment of a kill may have been cut: six clients, two kills.
        assert load.cut <= 12
        await quiet(gateway)
        before = await over(gateway)
        assert await credit_is_true(gateway, load.prompts) >= len(load.prompts) // 2
        assert await over(gateway) == before
        rows = await gateway.workers()
        assert {row["trust"] for row in rows.values()} == {"exact"}
        page = await gateway.metrics()
        for name in ("a", "b"):
            assert page.total("kvsync_stream_events_total", worker=name, event="epochs") == 1


async def test_all_engines_killed_at_once_are_errors_that_say_so_and_then_a_fleet_again(
    engines: Mapping[str, SimulatedEngine], tmp_path: Path
) -> None:
    """What could not have been served is refused in OpenAI's form, and soon."""
    async with running(tmp_path, config(engines)) as gateway:
        await gateway.live()
        prompts = [tokens(100) for _ in range(6)]
        for prompt in prompts:
            await gateway.complete("tiny", prompt, max_tokens=1)
        for engine in engines.values():
            engine.kill()
        for prompt in prompts:
            answer = await gateway.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1})
            assert answer.status in (502, 503)
            assert set(answer.error) == {"message", "type", "code", "param"}
        await asyncio.gather(*(engine.start() for engine in engines.values()))

        async def serves() -> bool:
            answer = await gateway.post("/v1/completions", {"model": "tiny", "prompt": prompts[0], "max_tokens": 1})
            return answer.status == 200

        await until(serves, "the fleet serves again", 40)
        await quiet(gateway)
        # Nothing of before is held by anybody now, and nothing of it is credited.
        before = await over(gateway)
        await credit_is_true(gateway, prompts[1:])
        assert await over(gateway) == before


async def test_a_gateway_killed_under_load_knows_everything_again(
    engines: Mapping[str, SimulatedEngine], tmp_path: Path
) -> None:
    """Started again at its ports, it is told by replay what the engines hold."""
    prompts = [tokens(100) for _ in range(24)]
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(tmp_path, config(engines)))
        await first.live()
        load = Load(first.url, prompts)
        async with load.running():
            await load.more(60)
            assert load.failed == []
            ports = await first.process.ports()
            first.process.kill()
            (tmp_path / "again").mkdir()
            second = await stack.enter_async_context(running(tmp_path / "again", config(engines), ports=ports))
            # The clients go on as soon as somebody listens, which may be before this line.
            await load.more(60)
            failures = len(load.failed)
            await load.more(60)
            assert len(load.failed) == failures, "requests fail though the gateway is there again"
        await quiet(second)
        before = await over(second)
        assert await credit_is_true(second, prompts) == len(prompts)
        assert await over(second) == before


@pytest.mark.faults
async def test_the_other_gateway_sends_known_prefixes_to_the_same_engines(
    engines: Mapping[str, SimulatedEngine], tmp_path: Path
) -> None:
    """(M2) A is killed; B, which followed the engines all the time, keeps at least 95 % of the prefixes in place."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    prompts = [tokens(100) for _ in range(60)]
    async with (
        running(tmp_path / "one", config(engines)) as one,
        running(tmp_path / "two", config(engines)) as two,
    ):
        await one.live()
        await two.live()
        homes = [(await one.complete("tiny", prompt, max_tokens=1))[0].engine for prompt in prompts]
        assert set(homes) == set(NAMES)
        await quiet(two)
        one.process.kill()
        found = [(await two.complete("tiny", prompt, max_tokens=1))[0] for prompt in prompts]
        same = sum(answer.engine == home for answer, home in zip(found, homes, strict=True))
        assert same >= 0.95 * len(prompts)
        assert sum(answer.cached == HELD for answer in found) == same
