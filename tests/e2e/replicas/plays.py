"""What is asked of replicas, whatever is before them: ``test_balancer.py`` and ``test_envoy.py``."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Sequence

from tests.faults.client import Answer, until
from tests.faults.process import START
from tests.faults.traffic import Traffic, traffic
from tests.faults.words import tokens

from .stage import ENGINES, LIFETIME, Replica, Stage

CREDIT = 96
"""Of a prompt of 100 tokens, in blocks of 16."""
WAVES = 6


async def herding(stage: Stage) -> None:
    """Without sharing replicas pile up. Sharing is switched on by a rolling restart, under traffic of which nothing is
    lost; then nothing piles up any more."""
    alone = await waves(stage)
    prompts = [tokens(100) for _ in range(8)]
    homes = [(await stage.ask(prompt)).engine for prompt in prompts]
    async with traffic(stage.front.url) as asked:
        await asked.more(*ENGINES)
        await stage.snapshots()
        stage.shared = True
        for replica in stage.replicas:
            await leave(stage, replica, asked)
            await come(stage, replica)
            credits = [
                await replica.door.credit(home, model="tiny", tokens=prompt)
                for prompt, home in zip(prompts, homes, strict=True)
            ]
            assert set(credits) == {CREDIT}, "it would not send what it is asked first to where it is cached"
        await asked.more(*ENGINES)
    await stage.held(0)
    together = await waves(stage)
    print(f"overshoot per wave of {len(ENGINES)} requests: alone {alone}, together {together}")
    assert sum(alone) > 0
    assert set(together) == {0}


async def waves(stage: Stage) -> Sequence[int]:
    """Of each wave, how many requests the busiest engine had above its share: there come as many requests as engines
    are, one after the other, each when those before it were heard of, and none ends before the last one came."""
    overshoots = []
    for _ in range(WAVES):
        stage.freeze()
        asked: list[asyncio.Task[Answer]] = []
        for _ in ENGINES:
            asked.append(asyncio.create_task(stage.ask(tokens(100))))
            found = await stage.held(len(asked))
        overshoots.append(max(found.values()) - 1)
        stage.thaw()
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        await stage.held(0)
    return overshoots


async def leave(stage: Stage, replica: Replica, asked: Traffic) -> None:
    """It is told to end. It goes on as long as it is asked (and would for much longer), and what is before it stops
    asking."""
    replica.process.signal(signal.SIGTERM)
    await stage.front.left(replica, asked)
    replica.process.signal(signal.SIGTERM)  # the second one: it need not wait any more
    assert await replica.process.ended() == 0
    assert "Traceback" not in replica.process.log


async def come(stage: Stage, replica: Replica, *, warm: bool = True) -> None:
    """Its next life, ``warm`` by what others told."""
    await replica.start(stage.config())

    async def look() -> dict[str, int] | None:
        status, page = await replica.door.admin.get("/readyz")
        start: dict[str, int] = json.loads(page).get("start", {})
        return start if status == 200 else None

    start = await until(look, "ready", START)
    if warm:
        assert (start["warm"], start["cold"], start["behind"]) == (len(ENGINES), 0, 0), replica.process.log
    await stage.front.uses(*stage.replicas)


async def death(stage: Stage) -> None:
    """One replica is killed with requests under way. What it had sent stops counting, the others send known prefixes
    where they are, and its next life is warm."""
    if not stage.shared:  # this test alone was chosen
        stage.shared = True
        for replica in stage.replicas:
            replica.process.kill()
            await come(stage, replica, warm=False)
    prompts = [tokens(100) for _ in range(60)]
    homes = [(await stage.ask(prompt)).engine for prompt in prompts]
    assert set(homes) == set(ENGINES)
    await stage.known()
    await stage.snapshots()

    stage.freeze()
    asked = [asyncio.create_task(stage.ask(tokens(100))) for _ in range(2 * len(stage.replicas))]
    await stage.held(len(asked))
    dead, *others = stage.replicas
    lost = (await dead.running()).total()
    assert 0 < lost < len(asked)
    dead.process.kill()
    killed = time.monotonic()

    await stage.counting(len(asked) - lost, *others)
    print(f"the load of a dead replica counted for {time.monotonic() - killed:.1f} s (lifetime {LIFETIME:g} s)")
    stage.thaw()
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(each, Answer) and each.status == 200 for each in ended) == len(asked) - lost

    await stage.front.uses(*others)
    await stage.counting(0, *others)
    found = [await stage.ask(prompt) for prompt in prompts]
    assert {answer.status for answer in found} == {200}
    same = sum(answer.engine == home for answer, home in zip(found, homes, strict=True))
    print(f"{same} of {len(prompts)} prefixes stayed where they were")
    assert same >= 0.95 * len(prompts)
    assert sum(answer.cached == CREDIT for answer in found) >= same
    await come(stage, dead)
    for prompt in prompts:
        await stage.held(0)  # late news of the request before would be a reason to go elsewhere
        assert (await stage.ask(prompt)).cached == CREDIT
    await stage.held(0)
