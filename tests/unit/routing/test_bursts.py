"""What happened to others when many requests came at once, replayed in simulated time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import pytest

from kvsync.discovery.model import Change
from tests.unit.routing.simulation import Simulation
from tests.unit.routing.world import UNKNOWN, World, engine, tokenized

PREFIX = [7 * i % 1000 for i in range(2000)]


def suffixes(length: int = 32) -> Iterator[list[int]]:
    fresh = count(1_000_000)
    while True:
        yield [next(fresh) for _ in range(length)]


def fleet(size: int, seed: int = 1, **settings: Any) -> World:
    return World(*[engine(f"e{i}") for i in range(size)], seed=seed, **settings)


@pytest.mark.parametrize(("policy", "most"), [("kv-aware", 2), ("prefix-cache", 4)])
@pytest.mark.parametrize("seed", range(3))
def test_siblings_of_a_burst_do_not_scatter(policy: str, most: int, seed: int) -> None:
    """16 requests with one prefix within 5 ms, long before any store event, on 8 cold engines (R2)."""
    world = fleet(8, seed, policy=policy)
    simulation, more = Simulation(world), suffixes()
    for i in range(16):
        simulation.request(1000 + i * 0.0003, tokenized(PREFIX + next(more)))
    simulation.run()
    assert len(simulation.chosen) <= most
    assert simulation.hits / simulation.asked > 0.7


@pytest.mark.parametrize("seed", range(3))
def test_siblings_do_not_pile_up_either(seed: int) -> None:
    """The same with suffixes as long as the prefix: now a second prefill of the prefix is the smaller evil."""
    world = fleet(4, seed)
    simulation, more = Simulation(world), suffixes(2000)
    for i in range(16):
        simulation.request(1000 + i * 0.0003, tokenized(PREFIX + next(more)))
    simulation.run()
    assert len(simulation.chosen) == 4
    assert max(simulation.chosen.values()) <= 6


def test_a_burst_of_different_prompts_spreads_evenly() -> None:
    world = fleet(4)
    simulation, more = Simulation(world), suffixes(1000)
    for i in range(16):
        simulation.request(1000 + i * 0.0003, tokenized(next(more)))
    simulation.run()
    assert sorted(simulation.chosen.values()) == [4, 4, 4, 4]


@pytest.mark.parametrize("policy", ["kv-aware", "prefix-cache", "least-request", "power-of-two", "round-robin"])
def test_a_burst_of_unknown_prompts_does_not_pile_up(policy: str) -> None:
    """The load counts from the choice on, not from the first answer."""
    world = fleet(4, policy=policy)
    held = [world.ask(UNKNOWN) for _ in range(40)]
    running = [load.running for load in world.loads.snapshot().values()]
    assert sum(running) == 40
    assert max(running) - min(running) <= (6 if policy == "power-of-two" else 1)
    for _, ticket in held:
        ticket.end("ok")
    assert all(load.running == 0 for load in world.loads.snapshot().values())


def test_a_guess_that_is_never_confirmed_ends_by_itself() -> None:
    """After its lifetime it attracts nobody any more (R2)."""
    world = fleet(8, expected_lifetime=2.0)
    first, _ = world.ask(tokenized(PREFIX))
    assert world.ask(tokenized([*PREFIX, 1]))[0].chosen.worker == first.chosen.worker
    world.clock.now += 2.0
    later, _ = world.ask(tokenized([*PREFIX, 2]))
    assert all(candidate.expected == 0 for candidate in later.candidates)
    assert later.chosen.worker != first.chosen.worker


@pytest.mark.parametrize("policy", ["kv-aware", "prefix-cache"])
def test_a_hot_prefix_spills_before_its_owner_drowns(policy: str) -> None:
    """90 % of the traffic shares one prefix that one of 4 engines holds; alone it could serve half of that (R4)."""
    world = fleet(4, policy=policy)
    simulation, more, rng = Simulation(world, decode=2.0), suffixes(200), Random(5)
    simulation.warm("e0", tokenized(PREFIX))
    for i in range(700):
        prompt = PREFIX + next(more) if rng.random() < 0.9 else next(more) * 5
        simulation.request(1000 + i * 0.01, tokenized(prompt))
    simulation.run()
    waits = sorted(wait for each in simulation.waits.values() for wait in each)
    assert len(waits) == 700
    assert len(simulation.chosen) == 4
    assert waits[int(len(waits) * 0.99)] < 2.0
    assert simulation.hits / simulation.asked > 0.7


@pytest.mark.parametrize("policy", ["kv-aware", "prefix-cache"])
def test_new_engines_get_their_share_under_sticky_load(policy: str) -> None:
    """From 2 engines to 4 while all sessions stick to the old two: within 10 s each new one serves a fair part (R5)."""
    world = fleet(2, policy=policy)
    simulation, rng = Simulation(world, prefill=4000, decode=2.0), Random(3)
    sessions = [[1000 * s + i for i in range(600)] for s in range(40)]
    late: dict[str, int] = {}

    def grow() -> None:
        for name in ("n0", "n1"):
            world.router.apply(Change("added", engine(name)))

    simulation.at(1010.0, grow)
    simulation.at(1020.0, lambda: simulation.chosen.clear())
    for i in range(1000):
        session = rng.choice(sessions)
        session.extend(rng.randrange(10**6) for _ in range(60))
        simulation.request(1000 + i * 0.025, tokenized(session[:3000]))
    simulation.run()
    late = dict(simulation.chosen)
    total = sum(late.values())
    assert late.get("n0", 0) > total / 12
    assert late.get("n1", 0) > total / 12


def test_a_gateway_that_follows_the_same_engines_sends_known_prefixes_to_the_same_ones() -> None:
    """Nothing is shared between two gateways but what the engines tell both: when one is killed, the other sends at
    least 95 % of known prefixes where they went before (M2)."""
    first, second = fleet(4, seed=1), fleet(4, seed=99)
    one, other = Simulation(first), Simulation(second)
    sessions = [[1000 * s + i for i in range(600)] for s in range(200)]
    went = {}
    for s, session in enumerate(sessions):
        decision, ticket = first.ask(tokenized(session))
        went[s] = decision.chosen.worker
        ticket.end("ok")
        one.warm(went[s], tokenized(session))
        other.warm(went[s], tokenized(session))
    assert len(set(went.values())) == 4
    held = 0
    for s, session in enumerate(sessions):
        decision, ticket = second.ask(tokenized([*session, 7, 7]))
        held += decision.chosen.worker == went[s]
        ticket.end("ok")
    assert held >= 0.95 * len(sessions)
