"""What the cache reuses and reports, where no capture shows it."""

from __future__ import annotations

import pytest

from kvsync.engine_sim.events import Cleared, Removed, Stored
from kvsync.engine_sim.groups import FullAttention, SlidingWindow
from kvsync.engine_sim.hashing import BlockHasher
from kvsync.engine_sim.request import Adapter, Request
from tests.unit.engine_sim.support import BLOCK, ask, drain, make_scheduler


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_is_always_computed(length: int, hit: int) -> None:
    scheduler = make_scheduler(32)
    drain(scheduler, ask(range(12)))
    again = ask(range(length))
    drain(scheduler, again)
    assert again.cached == hit


@pytest.mark.parametrize(("prompt", "output", "blocks"), [(3, 1, 0), (4, 1, 1), (3, 2, 1), (5, 4, 2), (5, 3, 1)])
def test_blocks_that_prompt_and_output_fill(prompt: int, output: int, blocks: int) -> None:
    scheduler = make_scheduler(32)
    request = ask(range(prompt), output)
    scheduler.add(request)
    stored = 0
    while not scheduler.idle:
        for event in scheduler.finish(scheduler.plan())[1]:
            assert isinstance(event, Stored)
            stored += len(event.hashes)
    assert stored == blocks == (prompt + output - 1) // BLOCK


def test_requests_admitted_in_one_step_share_blocks() -> None:
    scheduler = make_scheduler(32)
    first, second = ask(range(9)), ask(range(9))
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan()
    assert [tokens for _, tokens in plan.work] == [9, 1]
    _, events = scheduler.finish(plan)
    assert len(events) == 1
    assert (first.cached, second.cached) == (0, 8)


def test_salt_and_adapter_share_nothing_and_are_told_apart() -> None:
    scheduler = make_scheduler(64)
    kinds = [
        ask(range(9)),
        ask(range(9), salt="x"),
        ask(range(9), adapter=Adapter("x", 1)),
        ask(range(9), adapter=Adapter("x", 1), salt="x"),
        ask(range(9), adapter=Adapter("y", 2)),
    ]
    for request in kinds:
        drain(scheduler, request)
        assert request.cached == 0
    for request in kinds:
        again = ask(range(9), salt=request.salt, adapter=request.adapter)
        drain(scheduler, again)
        assert again.cached == 8
    hashes = {block_hash for request in kinds for block_hash in request.hashes}
    assert len(hashes) == 2 * len(kinds)
    assert kinds[3].extra_keys(0) == ("x", "x")
    assert kinds[3].extra_keys(1) == ("x",)
    assert kinds[0].extra_keys(0) is None


def test_an_adapter_is_known_by_its_name_not_its_number() -> None:
    scheduler = make_scheduler(32)
    drain(scheduler, ask(range(9), adapter=Adapter("x", 1)))
    renumbered = ask(range(9), adapter=Adapter("x", 7))
    drain(scheduler, renumbered)
    assert renumbered.cached == 8


def test_a_request_that_skips_the_cache_fills_it_with_second_copies() -> None:
    scheduler = make_scheduler(32)
    drain(scheduler, ask(range(9)))
    skipping = ask(range(9), skip_cache=True)
    drain(scheduler, skipping)
    assert skipping.cached == 0
    assert scheduler.cache.pool.copies(skipping.hashes[0], 0) == 2
    assert scheduler.counters.queries == 9


def test_report_full_announces_a_hit_and_copies_nothing() -> None:
    scheduler = make_scheduler(32)
    first = ask(range(9))
    drain(scheduler, first)
    again = ask(range(9), report_full=True, session_id="s")
    scheduler.add(again)
    [event] = scheduler.finish(scheduler.plan())[1]
    assert isinstance(event, Stored)
    assert event.hashes == tuple(first.hashes)
    assert event.parent is None
    assert event.tokens == tuple(range(8))
    assert event.session_id == "s"
    assert scheduler.cache.pool.copies(first.hashes[0], 0) == 1


def test_report_full_without_a_hit_announces_only_what_is_new() -> None:
    scheduler = make_scheduler(32)
    scheduler.add(ask(range(9), report_full=True))
    [event] = scheduler.finish(scheduler.plan())[1]
    assert isinstance(event, Stored)
    assert len(event.hashes) == 2


def test_a_clear_leaves_with_the_next_steps_events_and_before_them() -> None:
    scheduler = make_scheduler(32)
    drain(scheduler, ask(range(9)))
    assert scheduler.reset_cache(preempt=False)
    again = ask(range(9))
    scheduler.add(again)
    _, events = scheduler.finish(scheduler.plan())
    assert [type(event) for event in events] == [Cleared, Stored]
    assert again.cached == 0


def test_a_clear_is_refused_while_a_request_runs_unless_it_may_preempt() -> None:
    scheduler = make_scheduler(32)
    request = ask(range(9), 3)
    scheduler.add(request)
    scheduler.finish(scheduler.plan())
    assert not scheduler.reset_cache(preempt=False)
    assert scheduler.reset_cache(preempt=True)
    assert request.preemptions == 1
    _, events = scheduler.finish(scheduler.plan())
    assert [type(event) for event in events] == [Cleared, Stored]
    drain(scheduler)
    assert request.produced == 3
    assert request.cached == 0


def test_evictions_come_before_the_store_that_needs_the_room() -> None:
    scheduler = make_scheduler(4)
    first = ask(range(9))
    drain(scheduler, first)
    scheduler.add(ask(range(100, 109)))
    _, events = scheduler.finish(scheduler.plan())
    # The first request's third block was never full: it goes first, and nothing is said of it.
    assert events[:2] == [Removed(first.hashes[1], 0), Removed(first.hashes[0], 0)]
    assert isinstance(events[2], Stored)
    assert len(events) == 3


def test_hybrids_of_three_groups_need_all_of_them() -> None:
    """Two windows of different size: the larger one decides."""
    groups = (SlidingWindow(5), SlidingWindow(9), FullAttention())
    scheduler = make_scheduler(128, groups)
    drain(scheduler, ask(range(33)))
    same = ask(range(33))
    drain(scheduler, same)
    assert same.cached == 32
    shorter = ask([*range(32), 99, 99, 99, 99, 99])
    drain(scheduler, shorter)
    assert shorter.cached == 32
    # Windows keep only the tail at the end of the prompt, so a prompt that ends inside finds nothing …
    inside = ask([*range(20), 99])
    drain(scheduler, inside)
    assert inside.cached == 0
    # … but leaves a tail at the junction, for whoever comes next.
    drain(scheduler, ask([*range(20), 98, 98, 98, 98]))
    following = ask([*range(20), 97])
    drain(scheduler, following)
    assert following.cached == 20


def test_groups_of_one_kind_are_found_together() -> None:
    scheduler = make_scheduler(64, (FullAttention(), FullAttention()))
    first = ask(range(9))
    scheduler.add(first)
    _, events = scheduler.finish(scheduler.plan())
    assert [event.group for event in events if isinstance(event, Stored)] == [0, 1]
    again = ask(range(9))
    drain(scheduler, again)
    assert again.cached == 8


def test_a_window_gives_blocks_back_while_it_moves() -> None:
    scheduler = make_scheduler(64, (SlidingWindow(5), FullAttention()), max_tokens=8)
    request = ask(range(32), 2)
    scheduler.add(request)
    held = []
    while not scheduler.idle:
        scheduler.finish(scheduler.plan())
        if request.tables:
            held.append(sum(not block.is_null for block in request.tables[0]))
    # A chunk of 8 tokens is two blocks, and the window before it one more.
    assert max(held) == 3
    assert len(held) == 4


@pytest.mark.parametrize("size", [-3, 0, 1])
def test_a_window_that_sees_nothing(size: int) -> None:
    with pytest.raises(ValueError, match="sees nothing"):
        SlidingWindow(size)


def test_hashes_chain_and_depend_on_seed_tokens_parent_and_keys() -> None:
    hasher = BlockHasher(1)
    base = hasher.block(None, [1, 2], None)
    assert base == BlockHasher(1).block(None, [1, 2], None)
    others = [
        BlockHasher(2).block(None, [1, 2], None),
        hasher.block(None, [2, 1], None),
        hasher.block(base, [1, 2], None),
        hasher.block(None, [1, 2], ("a",)),
        hasher.block(None, [1, 2], ("a", "b")),
        hasher.block(None, [1, 2], ("ab",)),
    ]
    assert len({base, *others}) == 7
    assert {len(block_hash) for block_hash in others} == {16}


@pytest.mark.parametrize(("prompt", "outputs"), [((), (1,)), ((1,), ())])
def test_requests_without_tokens(prompt: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Request(prompt, outputs)
