"""Requests that run at the same moment: order, chunks, preemption, and invariants under random load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kvsync.engine_sim.cache import KVCache
from kvsync.engine_sim.events import CacheEvent, Cleared, Removed, Stored
from kvsync.engine_sim.groups import FullAttention, GroupSpec, SlidingWindow
from kvsync.engine_sim.hashing import BlockHash
from kvsync.engine_sim.request import Request
from kvsync.engine_sim.scheduler import Scheduler
from tests.unit.engine_sim.support import ask, drain, make_scheduler


def steps(scheduler: Scheduler) -> list[list[int]]:
    """The token numbers of each step until all is done."""
    found = []
    while not scheduler.idle:
        plan = scheduler.plan()
        found.append([tokens for _, tokens in plan.work])
        scheduler.finish(plan)
    return found


def test_a_long_prompt_is_prefilled_in_chunks_beside_running_ones() -> None:
    scheduler = make_scheduler(64, max_tokens=10)
    first = ask(range(4), 4)
    scheduler.add(first)
    scheduler.finish(scheduler.plan())
    scheduler.add(ask(range(100, 125)))
    # Running sequences take their token first; what is left of the ten goes to the prompt.
    assert steps(scheduler) == [[1, 9], [1, 9], [1, 7]]


def test_no_more_run_than_allowed() -> None:
    scheduler = make_scheduler(64, max_running=2)
    for start in range(3):
        scheduler.add(ask(range(start * 10, start * 10 + 5), 2))
    assert steps(scheduler) == [[5, 5], [1, 1], [5], [1]]


def test_the_first_that_does_not_fit_holds_back_the_others() -> None:
    scheduler = make_scheduler(6)
    scheduler.add(ask(range(12), 2))
    scheduler.add(ask(range(100, 112)))
    scheduler.add(ask([7]))
    assert steps(scheduler)[0] == [12]


def test_the_last_admitted_gives_way_and_starts_over() -> None:
    scheduler = make_scheduler(5)
    first, second = ask(range(7), 4), ask(range(100, 107), 4)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan()
    assert [request for request, _ in plan.work] == [first, second]
    finished = []
    while not scheduler.idle:
        tokens, _ = scheduler.finish(plan)
        finished += [token.request for token in tokens if token.finish]
        plan = scheduler.plan()
    assert finished == [first, second]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert scheduler.counters.preemptions == 1
    assert second.tokens[7:] == list(second.outputs)
    # What usage reports is the first admission's hit, not what it found of its own after preemption.
    assert second.cached == 0
    assert scheduler.counters.prompt_tokens == 14


def test_abort_while_waiting_running_mid_step_and_afterwards() -> None:
    scheduler = make_scheduler(64, max_running=2)
    running, mid_step, waiting = ask(range(5), 9), ask(range(10, 15), 9), ask(range(20, 25))
    for request in (running, mid_step, waiting):
        scheduler.add(request)
    scheduler.finish(scheduler.plan())
    scheduler.abort(waiting)
    scheduler.abort(running)
    plan = scheduler.plan()
    scheduler.abort(mid_step)
    assert scheduler.idle
    assert scheduler.cache.pool.usage == 0
    tokens, _ = scheduler.finish(plan)
    assert tokens == []
    scheduler.abort(mid_step)
    assert scheduler.counters.finished == {"stop": 0, "length": 0, "abort": 3}


def test_finish_reasons_are_counted() -> None:
    scheduler = make_scheduler(64)
    drain(scheduler, ask([1, 2]), ask([3, 4], 2, finish="stop"))
    assert scheduler.counters.finished == {"stop": 1, "length": 1, "abort": 0}
    assert scheduler.counters.generation_tokens == 3


class Follower:
    """What a subscriber can know: copies per block, from events alone."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[BlockHash, int]] = Counter()

    def apply(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    self.copies.update((block_hash, event.group) for block_hash in event.hashes)
                case Removed():
                    self.copies[event.block_hash, event.group] -= 1
                    assert self.copies[event.block_hash, event.group] >= 0
                case Cleared():
                    self.copies.clear()

    def agrees_with(self, cache: KVCache) -> None:
        held = {key: count for key, count in self.copies.items() if count}
        assert {key: cache.pool.copies(*key) for key in held} == held
        assert sum(held.values()) <= cache.pool.size - 1


def random_request(source: random.Random) -> Request:
    head = source.choice([range(0, 12), range(30, 38), range(60, 61)])
    prompt = [*head, *(source.randrange(100, 103) for _ in range(source.randrange(12)))]
    return ask(
        prompt,
        source.randrange(1, 9),
        salt=source.choice([None, None, "s"]),
        skip_cache=source.random() < 0.1,
    )


@pytest.mark.parametrize("groups", [(FullAttention(),), (SlidingWindow(6), FullAttention())], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", range(12))
def test_random_load_keeps_the_invariants(groups: tuple[GroupSpec, ...], seed: int) -> None:
    """Arrivals, aborts and resets at any moment; the events alone always tell what is cached, every request ends with
    all its tokens, and nothing stays allocated."""
    source = random.Random(seed)
    scheduler = make_scheduler(10 * len(groups) + 4, groups, max_running=4, max_tokens=16)
    follower = Follower()
    requests: list[Request] = []
    aborted: set[Request] = set()
    ended: list[Request] = []
    for step in range(400):
        if step < 300 and source.random() < 0.4:
            requests.append(random_request(source))
            scheduler.add(requests[-1])
        plan = scheduler.plan()
        assert plan.tokens <= 16
        assert plan.work or not scheduler.running
        running = [request for request in requests if request.admitted]
        if running and source.random() < 0.03:
            aborted.add(running[0])
            scheduler.abort(running[0])
        if source.random() < 0.02:
            assert scheduler.reset_cache(preempt=True)
        tokens, events = scheduler.finish(plan)
        ended += [token.request for token in tokens if token.finish]
        follower.apply(events)
        follower.agrees_with(scheduler.cache)
    assert scheduler.idle
    assert scheduler.cache.pool.usage == 0
    assert len(set(ended)) == len(ended)
    assert set(ended) | aborted == set(requests)
    assert all(request.tokens[len(request.prompt) :] == list(request.outputs) for request in ended)
    assert all(request.cached <= (len(request.prompt) - 1) // 4 * 4 for request in ended)
    assert scheduler.counters.hits > 0
    assert scheduler.counters.preemptions > 0
