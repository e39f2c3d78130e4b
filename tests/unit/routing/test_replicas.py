"""Several gateways over one fleet: what sharing their load changes, and what it must not."""

from __future__ import annotations

from statistics import fmean

import pytest

from kvsync.routing.decision import Load
from kvsync.routing.load import LoadTable
from tests.unit.routing.replicas import Replicas
from tests.unit.routing.world import World, engine

SHARED = 0.05
"""Seconds: ``redis.load.interval``."""


def waits(interval: float | None, seed: int) -> list[float]:
    """Eight gateways and eight engines, each of which is busy for half of its time with prompts of one second."""
    replicas = Replicas(8, 8, interval, prefill=10_000, seed=seed)
    replicas.traffic([0.5] * 8, 40, prompt=10_000, decode=0.1)
    replicas.run(100)
    return sorted(replicas.waits)


@pytest.mark.faults
def test_gateways_that_share_their_load_do_not_queue_behind_each_other() -> None:
    """Each knows what the others sent (M1)."""
    alone = [wait for seed in range(4) for wait in waits(None, seed)]
    shared = [wait for seed in range(4) for wait in waits(SHARED, seed)]
    assert len(alone) == len(shared)
    assert fmean(shared) < 0.9 * fmean(alone)
    # 1 s is what prefill takes: without sharing, one request of ten waits as long again for another gateway's.
    assert sorted(alone)[9 * len(alone) // 10] > 1.5
    assert sorted(shared)[8 * len(shared) // 10] < 1.2


@pytest.mark.faults
@pytest.mark.parametrize("rates", [[8.0] * 8, [32.0, 16.0, 8.0, 2.0, 2.0, 2.0, 1.0, 1.0]])
def test_a_newly_idle_worker_is_not_overrun(rates: list[float]) -> None:
    """Eight gateways, and one worker that none of them has sent anything to (M1)."""
    replicas = Replicas(8, 8, SHARED, prefill=1e6)
    replicas.traffic(rates, 20, prompt=100, decode=2.5)
    replicas.run(10)
    replicas.add_worker("new")
    level = sum(replicas.running.values()) / 9
    assert level > 15
    replicas.run(30)
    assert 0.8 * level < replicas.peaks["new"] < 1.5 * level


def test_what_is_told_goes_as_a_whole_and_leaves_our_own_counts_as_they_are() -> None:
    table = LoadTable(64.0)
    mine = table.reserve("a", 100)
    view = table.view(["a", "b"])
    table.others({"a": Load(3, 500), "b": Load(1, 0), "stranger": Load(9, 9)})
    assert view.read() == ((4, 1), (600, 0), (600 + 4 * 64, 64))
    assert table.total() == 1
    assert table.own() == {"a": Load(1, 100), "b": Load()}
    assert table.elsewhere() == {"a": Load(3, 500), "b": Load(1, 0), "stranger": Load(9, 9)}
    assert table.view(["stranger"]).read() == ([9], [9], [9 + 9 * 64])  # known before it was ever looked at
    assert table.snapshot() == {"a": Load(4, 600), "b": Load(1, 0), "stranger": Load(9, 9)}
    mine.first_byte()
    table.others({"b": Load(2, 7)})
    assert view.read() == ((1, 2), (0, 7), (64, 135))
    mine.end()
    table.others({})
    assert view.read() == ((0, 0), (0, 0), (0, 0))


def test_a_worker_that_is_gone_takes_what_was_told_of_it_along() -> None:
    table = LoadTable(64.0)
    late = table.reserve("a", 100)
    table.others({"a": Load(3, 500)})
    table.drop("a")
    assert table.total() == 0
    table.others({"a": Load(3, 500)})
    again = table.reserve("a", 10)  # not the seat that is still taken
    assert table.own() == {"a": Load(1, 10)}
    assert table.snapshot() == {"a": Load(4, 510)}
    late.end()
    again.end()
    assert table.reserve("b", 1)
    assert table.own() == {"a": Load(), "b": Load(1, 1)}


def test_choices_see_it_and_the_budget_of_retries_and_the_metrics_tell_it_apart() -> None:
    world = World(engine("a"), engine("b"), policy="least-request")
    world.ask()  # so that both have a seat
    world.loads.others({"a": Load(5, 1000)})
    for _ in range(3):
        assert world.ask()[0].chosen.worker == "b"
    assert world.loads.total() == 4
    assert world.sample("kvsync_worker_running_elsewhere", worker="a") == 5
    assert world.sample("kvsync_worker_queued_prefill_tokens_elsewhere", worker="a") == 1000
    running = [world.sample("kvsync_worker_running", worker=worker) or 0 for worker in "ab"]
    assert sum(running) == 4
    assert world.sample("aibrix_gateway_in_flight_requests") == 4
