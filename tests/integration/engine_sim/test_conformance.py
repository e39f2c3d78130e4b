"""The simulated cache and scheduler against captures of real vLLM 0.32: the same hits and events, in the same order.

The engine gets the captured prompts and output tokens; its answers must be vLLM's, hashes up to renaming. Where
requests ran at the same moment the captures show one interleaving of many: there only the invariants are checked
(``tests/unit/engine_sim/test_scheduler.py``).
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from kvsync.engine_sim.events import Removed
from kvsync.engine_sim.groups import FullAttention, SlidingWindow
from kvsync.engine_sim.request import Adapter
from kvsync.engine_sim.scheduler import Scheduler
from tests.integration.engine_sim.captures import (
    Exchange,
    Renaming,
    assert_same_batches,
    exchanges,
    requests_of,
    run,
    scheduler,
)

ADAPTERS = {"lora1": Adapter("lora1", 1), "lora2": Adapter("lora2", 2)}


def replay(engine: Scheduler, all_of_them: list[Exchange], names: Renaming) -> int:
    """Run exchanges one after another and compare everything; how many had hits."""
    hits = 0
    for exchange in all_of_them:
        if exchange.reset:
            assert engine.reset_cache(preempt=False)
        requests = requests_of(exchange, ADAPTERS)
        batches = run(engine, requests)
        # Of several samples vLLM reports what the last one found.
        assert requests[-1].cached == exchange.cached, f"request {exchange.number}: {exchange.note}"
        assert_same_batches(batches, [events for _, events in exchange.batches], names)
        hits += exchange.cached > 0
    return hits


def test_long() -> None:
    found = exchanges("v0.32_long.jsonl.gz")
    assert replay(scheduler(200), found, Renaming()) == 391
    assert len(found) == 414


def test_basic_then_evict() -> None:
    engine, names = scheduler(64), Renaming()
    basic = exchanges("v0.32_basic.jsonl")
    assert len(basic) == 25
    replay(engine, basic, names)
    evict = [exchange for exchange in exchanges("v0.32_evict.jsonl") if exchange.number <= 9]
    assert len(evict) == 9
    replay(engine, evict, names)


def test_second_copies_and_announcements() -> None:
    found = exchanges("v0.32_dup.jsonl.gz")
    assert sum(exchange.reset for exchange in found) == 2
    assert replay(scheduler(64), found, Renaming()) == 80


@pytest.mark.parametrize(
    ("name", "blocks", "window", "count", "hits"),
    [
        ("v0.32_hybrid_long.jsonl.gz", 160, 128, 230, 196),
        ("v0.32_hybrid_full.jsonl.gz", 160, 128, 110, 98),
        # Its last request follows a reset that the capture does not record.
        ("v0.32_hybrid_swa.jsonl", 96, 64, 10, 1),
    ],
)
def test_sliding_window_hybrids(name: str, blocks: int, window: int, count: int, hits: int) -> None:
    found = exchanges(name)[:count]
    assert len(found) == count
    assert replay(scheduler(blocks, SlidingWindow(window), FullAttention()), found, Renaming()) == hits


def test_adapters() -> None:
    """The capture starts from a full pool whose content is not known here: removals are left out."""
    engine, names = scheduler(64), Renaming()
    for exchange in exchanges("v0.32_lora.jsonl"):
        requests = requests_of(exchange, ADAPTERS)
        batches = [events for events in run(engine, requests) if events]
        assert not any(isinstance(event, Removed) for events in batches for event in events)
        assert requests[0].cached == exchange.cached
        stored = [[event for event in events if event["type"] != "BlockRemoved"] for _, events in exchange.batches]
        assert_same_batches(batches, [events for events in stored if events], names)


def rank_of(exchange: Exchange, engines: list[Scheduler]) -> int:
    """Where real vLLM ran it: the header, the source of its events, or else the rank whose cache explains the hit."""
    if header := exchange.headers.get("X-data-parallel-rank"):
        return int(header)
    if noted := re.search(r"engine chose rank (\d)", exchange.note):
        return int(noted[1])
    if exchange.batches:
        return exchange.batches[0][0]
    able = []
    for rank, engine in enumerate(engines):
        [request] = requests_of(exchange, ADAPTERS)
        able += [rank] * (engine.cache.lookup(request).tokens == exchange.cached)
    assert len(able) == 1, f"request {exchange.number} could have run on ranks {able}"
    return able[0]


@pytest.mark.parametrize(
    ("name", "blocks", "hits"), [("v0.32_dp2.jsonl", 64, 0), ("v0.32_dp2_long.jsonl.gz", 110, 216)]
)
def test_data_parallel_ranks(name: str, blocks: int, hits: int) -> None:
    engines = [scheduler(blocks), scheduler(blocks)]
    names = [Renaming(), Renaming()]
    found = 0
    for exchange in exchanges(name):
        rank = rank_of(exchange, engines)
        assert {source for source, _ in exchange.batches} <= {rank}
        found += replay(engines[rank], [exchange], names[rank])
    assert found == hits


def test_a_comparison_that_differs_is_seen() -> None:
    """The judge itself: one token, one hash or one order changed must not pass."""
    exchange = exchanges("v0.32_long.jsonl.gz")[0]
    theirs = [events for _, events in exchange.batches]
    ours = run(scheduler(200), requests_of(exchange, ADAPTERS))
    assert_same_batches(ours, theirs, Renaming())
    assert len(theirs) == 2
    with pytest.raises(AssertionError):
        assert_same_batches(ours, theirs[::-1], Renaming())
    event = theirs[0][0]
    hashes = event["block_hashes"]
    assert all(a != b for a, b in pairwise(hashes))
    for changed in (
        {"token_ids": [*event["token_ids"][:-1], event["token_ids"][-1] + 1]},
        {"block_hashes": [hashes[0], *hashes[:-1]]},
        {"parent_block_hash": hashes[0]},
        {"kv_cache_spec_kind": "mamba"},
    ):
        with pytest.raises(AssertionError):
            assert_same_batches(ours, [[{**event, **changed}], theirs[1]], Renaming())
