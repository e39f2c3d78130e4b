"""Settings that make no engine are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from kvsync.engine_sim.cache import KVCache
from kvsync.engine_sim.config import SimConfig
from kvsync.engine_sim.groups import FullAttention, SlidingWindow
from kvsync.engine_sim.hashing import BlockHasher
from kvsync.engine_sim.request import Request
from kvsync.engine_sim.scheduler import Scheduler
from tests.unit.engine_sim.support import drain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 1}, "usable"),
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"blocks": 1 << 40}, "blocks must be at most 4194304"),
        ({"data_parallel_size": 100_000}, "data_parallel_size must be at most 1024"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"answer_tokens": 0}, "answer_tokens"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens must be at least 64"),
        ({"port": -1}, "port"),
        ({"events_port": 65_536}, "events_port"),
        ({"model": ""}, "names"),
        ({"adapters": ("a", "a")}, "names that differ"),
        ({"model": "a", "adapters": ("a",)}, "names that differ"),
        ({"events_port": 5557, "replay_port": 5558, "data_parallel_size": 2}, "at least that far apart"),
        ({"blocks": 10, "block_size": 16, "max_model_len": 160}, "needs 10 blocks of 16, but only 9 of 10"),
        ({"version": "0.8.5"}, "too old"),
        ({"version": "new"}, "not a vLLM version"),
        ({"sliding_window": 1}, "sees nothing"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimConfig(**changes)


def test_the_smallest_pool_that_holds_the_longest_request() -> None:
    assert SimConfig(blocks=11, block_size=16, max_model_len=160).most_blocks == 10
    assert SimConfig(events_port=5557, replay_port=5558).data_parallel_size == 1


def test_a_window_makes_a_hybrid() -> None:
    config = SimConfig(sliding_window=64, blocks=512)
    assert config.groups == (SlidingWindow(64), FullAttention())
    # The window group never holds more than its window and one step's tokens.
    assert config.most_blocks == 256 + -(-(63 + 2048) // 16) + 1
    assert SimConfig().groups == (FullAttention(),)


@pytest.mark.parametrize("window", [None, 2, 17, 64])
@pytest.mark.parametrize("prompt", [1, 100, 159])
def test_the_longest_request_runs_in_the_smallest_pool(window: int | None, prompt: int) -> None:
    shape: dict[str, Any] = {"sliding_window": window, "max_model_len": 160, "max_num_batched_tokens": 64}
    smallest = SimConfig(blocks=1_000, **shape).most_blocks + 1
    config = SimConfig(blocks=smallest, **shape)
    with pytest.raises(ValueError, match="usable"):
        SimConfig(blocks=smallest - 1, **shape)
    cache = KVCache(
        blocks=smallest,
        block_size=config.block_size,
        groups=config.groups,
        hasher=BlockHasher(0),
        longest=config.max_model_len,
        in_flight=config.max_num_batched_tokens,
    )
    scheduler = Scheduler(cache, max_running=config.max_num_seqs, max_tokens=config.max_num_batched_tokens)
    request = Request(tuple(range(prompt)), tuple(range(160 - prompt)))
    drain(scheduler, request)
    assert request.produced == 160 - prompt
    assert scheduler.counters.preemptions == 0
