"""Settings that make no engine are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from kvsync.engine_sim.config import SimConfig
from kvsync.engine_sim.groups import FullAttention, SlidingWindow


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 1}, "usable"),
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"block_size": 0}, "block_size must be at least 1"),
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
