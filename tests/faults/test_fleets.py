"""Fleets in which nothing is alike: other hash seeds, other versions, other gateways that know nothing of this one."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvsync.discovery.model import Change
from kvsync.requests.ports import Ticket
from tests import wire
from tests.unit.routing.world import World, engine

from .client import until
from .engine import BLOCK, Engine
from .serving import serving
from .words import tokens

pytestmark = pytest.mark.faults


async def test_one_prompt_matches_engines_of_every_seed_hash_and_version(tmp_path: Path) -> None:
    """(O2) Mid-rollout: another seed, another hash algorithm (raw bytes), and every wire form there was."""
    prompt = tokens(100)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine("map-1", hashes="1")),
            await stack.enter_async_context(Engine("map-2", hashes="2")),
            *[
                await stack.enter_async_context(Engine(f"array-{version}", hashes=version, version=version))
                for version in wire.ARRAY_LENGTHS
            ],
        ]
        raw = await stack.enter_async_context(Engine("bytes", hashes="3"))
        gateway = await stack.enter_async_context(serving(tmp_path, *engines, raw))
        for each in engines:
            each.store(prompt)
        names = [bytes([n]) * 32 for n in range(1, 7)]
        raw.tell(wire.stored(names, prompt[: 6 * BLOCK], block_size=BLOCK))
        for each in (*engines, raw):
            await gateway.credited(each.name, prompt, 96)
        # What one of them drops is gone there, and there only.
        raw.tell(*(wire.removed([name]) for name in reversed(names[2:])))
        engines[1].evict(prompt, keep=64)
        await gateway.credited("bytes", prompt, 32)
        await gateway.credited("map-2", prompt, 64)
        found = (await gateway.match(model="tiny", tokens=prompt))["workers"]
        assert Counter(match["credit"] for match in found.values()) == {96: len(engines) - 1, 64: 1, 32: 1}


async def test_what_one_engine_says_wrong_costs_that_engine_only(tmp_path: Path) -> None:
    """(W2) A batch that can't be read, between two good ones: one connection throughout, and it is counted."""
    prompt, other, later = tokens(100), tokens(100), tokens(100)
    async with Engine("a") as a, Engine("b") as b, serving(tmp_path, a, b) as gateway:
        for each in (a, b):
            each.store(prompt)
            await gateway.credited(each.name, prompt, 96)
        a.publisher.send(b"\xc1 no msgpack at all")
        a.store(other)
        await gateway.credited("a", other, 96)
        # What could not be read may have been any removal, so what was known before is not credited any more.
        assert await gateway.credit("a", model="tiny", tokens=prompt) == 0
        await gateway.trusted("a", "partial")
        a.store(later)
        await gateway.credited("a", later, 96)
        assert await gateway.credit("b", model="tiny", tokens=prompt) == 96
        page = await gateway.metrics()
        assert page.total("aibrix_kvcache_zmq_connections_total", pod_key="a") == 1
        assert page.total("aibrix_kvcache_zmq_disconnections_total", pod_key="a") == 0
        counts = (await gateway.workers())["a"]["index"]["counts"]
        assert [n for reason, n in counts.items() if reason.startswith("undecodable_")] == [1]


async def test_a_batch_of_every_wire_form_at_once(tmp_path: Path) -> None:
    """(W1) Arrays of every historic length beside a map with its keys in any order and some that nobody knows."""
    prompts = {version: tokens(3 * BLOCK + 1) for version in (*wire.ARRAY_LENGTHS, "map")}
    events: list[Any] = []
    for n, (version, prompt) in enumerate(prompts.items()):
        event = wire.stored([n * 3 + 1, n * 3 + 2, n * 3 + 3], prompt[: 3 * BLOCK], block_size=BLOCK)
        if version == "map":
            shuffled = list((event | {"coming": ["next", {"year": 1}]}).items())
            Random(1).shuffle(shuffled)
            events.append(dict(shuffled))
        else:
            events.append(wire.as_array(event, version))
    async with Engine("a") as a, serving(tmp_path, a) as gateway:
        a.publisher.send(wire.batch(*events))
        for prompt in prompts.values():
            await gateway.credited("a", prompt, 3 * BLOCK)
        counts = (await gateway.workers())["a"]["index"]["counts"]
        assert not [reason for reason in counts if reason.startswith(("skipped", "undecodable"))]


def test_eight_gateways_that_know_nothing_of_each_other_do_not_herd() -> None:
    """(M1) One engine is newly idle, and eight gateways see only their own load.

    Each evens out what it has sent itself, so all together they put at most one request per gateway more on the new
    engine than the others have: what bounds the overshoot is the number of gateways. (Without sharing it can't be less;
    shared load is for the store that replicas will have.)
    """
    gateways, old = 8, 4
    worlds = [World(*(engine(f"old-{n}") for n in range(old)), seed=seed) for seed in range(gateways)]
    running: Counter[str] = Counter()
    tickets: list[tuple[str, Ticket]] = []
    source = Random(7)

    def ask() -> None:
        decision, ticket = source.choice(worlds).ask()
        running[decision.chosen.worker] += 1
        tickets.append((decision.chosen.worker, ticket))

    for _ in range(40 * gateways):
        ask()
    for world in worlds:
        world.router.apply(Change("added", engine("new")))
    most = 0
    for _ in range(40 * gateways):
        ask()
        most = max(most, running["new"] - max(count for name, count in running.items() if name != "new"))
        # One request ends for each that comes.
        worker, ticket = tickets.pop(source.randrange(len(tickets)))
        ticket.end("ok")
        running[worker] -= 1
    assert running["new"] > 0
    assert most <= gateways
    assert max(running.values()) - min(running.values()) <= 3 * gateways


async def test_one_prefix_on_two_gateways_goes_to_one_engine(tmp_path: Path) -> None:
    """(M2) Two gateways that share nothing send a prefix to the same engine: both follow every engine. (Whole
    processes, one of them killed: tests/e2e/serve/test_kill.py.)"""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(name)) for name in ("a", "b", "c")]
        for each in engines:
            each.caches = True
        one = await stack.enter_async_context(serving(tmp_path / "first", *engines))
        two = await stack.enter_async_context(serving(tmp_path / "second", *engines))
        for _ in range(12):
            prompt = tokens(100)
            answer, _ = await one.complete("tiny", prompt)
            home = answer.engine
            await two.credited(home, prompt, 96)
            again, decision = await two.complete("tiny", prompt)
            assert (again.engine, again.cached, decision.credited) == (home, 96, 96)

        async def silent() -> bool:
            return all(len(each.publisher.requests) >= 2 for each in engines)

        await until(silent, "each gateway asked each engine for its history")
