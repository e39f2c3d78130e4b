"""Stores that wait are bounded in bytes, whatever their bytes are: an engine decides how long a name or a key is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvsync.index.match import Index
from tests.wire import batch, removed, stored

LONG = 1 << 20


def orphan(number: int, **fields: Any) -> dict[str, Any]:
    return stored([number], range(4), f"unknown {number}", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": [["i" * LONG]]},
        {"extra_keys": [[["i" * LONG, 0]]]},
        {"extra_keys": [[b"e" * LONG]]},
        {"extra_keys": [[["o" * LONG]]]},
        {"extra_keys": [[["i", 0]] * (LONG // 64)]},
        {"lora_name": "a" * LONG},
        {"lora_name": "é" * (LONG // 2)},
    ],
    ids=["image", "image with offset", "embeds", "unknown", "many", "adapter", "utf-8"],
)
def test_what_an_engine_makes_long_counts(make_index: Callable[[], Index], fields: dict[str, Any]) -> None:
    index = make_index()
    index.add_worker("w", "m")
    for number in range(20):
        index.apply("w", batch(orphan(number, **fields)))
    state: Any = index.stats()["workers"]
    assert state["w"]["parked"] == 15
    assert state["w"]["counts"]["parked_dropped"] == 5


def test_long_hashes_count(make_index: Callable[[], Index]) -> None:
    index = make_index()
    index.add_worker("w", "m")
    blocks = 60_000
    for number in range(4):
        hashes = [f"{number}-{i}".ljust(256, "h") for i in range(blocks)]
        index.apply("w", batch(stored(hashes, range(blocks), f"unknown {number}", 1, extra_keys=None)))
    state: Any = index.stats()["workers"]
    assert state["w"]["parked"] == 1


def test_what_placing_does_not_need_is_not_kept(make_index: Callable[[], Index]) -> None:
    """Of no length at all: more of it than fits into the limit waits."""
    index = make_index()
    index.add_worker("w", "m")
    for number in range(20):
        index.apply("w", batch(orphan(number, session_id="s" * LONG, kv_cache_spec_kind="k" * LONG)))
    index.apply("w", batch(removed([0])))
    state: Any = index.stats()["workers"]
    assert state["w"]["parked"] == 20
    assert state["w"]["trust"] == "none"
