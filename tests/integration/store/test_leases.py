"""Turns at replaying an engine, taken in a real Redis by several replicas."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvsync.config.warm import ReplayTurnSettings
from kvsync.events.contracts import Turn
from kvsync.store import leases
from kvsync.store.connection import Store
from kvsync.store.leases import ReplayTurns
from tests.integration.store.conftest import store, until
from tests.valkey import Valkey


class Telemetry:
    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.longest = 0.0

    def replay_turn(self, result: str, seconds: float) -> None:
        self.results[result] += 1
        self.longest = max(self.longest, seconds)


class Replica:
    def __init__(self, shared: Store, spread: float = 0.0, **settings: Any) -> None:
        self.telemetry = Telemetry()
        self.turns = ReplayTurns(
            shared, ReplayTurnSettings.model_validate(settings), spread, self.telemetry, random=Random(1)
        )
        self.granted: list[str] = []

    def ask(self, engine: str = "a") -> Turn:
        return self.turns.ask(engine, lambda: self.granted.append(engine))


@asynccontextmanager
async def replicas(valkey: Valkey, count: int, **settings: Any) -> AsyncIterator[list[Replica]]:
    async with store(valkey.url) as shared:
        made = [Replica(shared, **settings) for _ in range(count)]
        yield made
        for each in made:
            await each.turns.close()


async def places(valkey: Valkey) -> int:
    async with valkey.client() as client:
        return len(await client.keys("kvsync:replay:*"))


async def test_two_of_an_engine_at_a_time_over_all_replicas(valkey: Valkey) -> None:
    """(S10) Whole fleets of gateways that start at once hold up an engine's live events no longer than two do."""
    async with replicas(valkey, 5) as five:
        asked = {each: each.ask() for each in five}
        others = five[0].ask("b")
        await until(lambda: "b" in five[0].granted, "another engine's turn is its own")

        def in_turn() -> list[Replica]:
            return [each for each in asked if "a" in each.granted]

        while asked:
            most = min(2, len(asked))
            await until(lambda most=most: len(in_turn()) >= most, "as many as may have their turn")  # type: ignore[misc]
            assert len(in_turn()) == most
            assert await places(valkey) == most + 1
            done = in_turn()[0]
            turn = asked.pop(done)
            turn.end()
            turn.end()
        others.end()
        await until_places(valkey, 0)
        assert all(each.telemetry.results == {"granted": 1 + (each is five[0])} for each in five)


async def until_places(valkey: Valkey, count: int) -> None:
    deadline = time.monotonic() + 20.0
    while await places(valkey) != count:
        assert time.monotonic() < deadline, await places(valkey)
        await asyncio.sleep(0.01)


async def test_a_replica_that_died_in_its_turn_holds_up_nobody_for_ever(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LONGEST", 0.3)
    async with replicas(valkey, 1, at_once=1) as (dead,):
        dead.ask()
        await until(lambda: dead.granted, "its turn")
        async with replicas(valkey, 1, at_once=1) as (other,):
            turn = other.ask()
            await until(lambda: other.granted, "the place is free again")
            turn.end()
    assert other.telemetry.results == {"granted": 1}


async def test_what_a_late_one_gives_back_is_not_anothers(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LONGEST", 0.2)
    async with replicas(valkey, 2, at_once=1) as (late, other):
        lasting = late.ask()
        await until(lambda: late.granted, "its turn")
        monkeypatch.setattr(leases, "LONGEST", 60.0)
        other.ask()
        await until(lambda: other.granted, "the place is free again")
        lasting.end()
        await late.turns.close()
        assert await places(valkey) == 1


async def test_patience_ends(valkey: Valkey) -> None:
    async with replicas(valkey, 2, at_once=1, patience=0.3) as (one, other):
        one.ask()
        await until(lambda: one.granted, "its turn")
        other.ask()
        await until(lambda: other.granted, "it goes on without")
        assert other.telemetry.results == {"expired": 1}
        assert await places(valkey) == 1


async def test_who_wants_it_no_more_gets_none(valkey: Valkey) -> None:
    async with replicas(valkey, 2, at_once=1) as (one, other):
        first = one.ask()
        await until(lambda: one.granted, "its turn")
        other.ask().end()
        await other.turns.close()
        assert not other.granted
        first.end()
        await until_places(valkey, 0)


async def test_ending_gives_all_places_back(valkey: Valkey) -> None:
    async with replicas(valkey, 1) as (one,):
        for engine in "abc":
            one.ask(engine)
        await until(lambda: len(one.granted) == 3, "all turns")
        assert await places(valkey) == 3
        await one.turns.close()
        assert await places(valkey) == 0
        one.ask("d")
        await asyncio.sleep(0)
        assert "d" not in one.granted


async def test_without_redis_a_random_pause_within_bounds() -> None:
    async with store(None, up=False) as shared:
        at_once = Replica(shared)
        at_once.ask()
        await until(lambda: at_once.granted, "without a spread nobody waits")
        assert at_once.telemetry.longest < 0.2
        spread = Replica(shared, spread=0.4)
        turns = [spread.ask(str(n)) for n in range(20)]
        await until(lambda: len(spread.granted) == 20, "all turns")
        assert spread.telemetry.results == {"alone": 20}
        assert 0.1 < spread.telemetry.longest < 5.0
        assert spread.granted != sorted(spread.granted, key=int), "each waits as long as chance will have it"
        for turn in turns:
            turn.end()
        for each in (at_once, spread):
            await each.turns.close()


async def test_a_server_that_is_away_costs_a_pause_not_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "ALONE", 0.1)
    async with store("redis://127.0.0.1:1", up=False, timeout=0.5) as shared:
        alone = Replica(shared)
        alone.ask()
        await until(lambda: alone.granted, "it goes on alone")
        assert alone.telemetry.results == {"alone": 1}
        await alone.turns.close()
