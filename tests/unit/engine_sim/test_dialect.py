"""Each version's wire form against bytes that the real version wrote."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsync.engine_sim.dialect import Dialect, parse_version
from kvsync.engine_sim.events import CacheEvent, Cleared, Removed, Stored
from kvsync.engine_sim.hashing import BlockHasher, as_signed, as_unsigned

DATA = Path(__file__).parents[2] / "data" / "vllm"
HASHES = tuple(BlockHasher(seed).block(None, [1, 2], None) for seed in range(40))


def stored(**changes: Any) -> Stored:
    fields: dict[str, Any] = {
        "hashes": HASHES[:2],
        "parent": HASHES[2],
        "tokens": (5, 6, 7, 8),
        "block_size": 2,
        "lora_id": None,
        "lora_name": None,
        "extra_keys": (None, None),
        "group": 0,
        "kind": "full_attention",
        "window": None,
        "session_id": None,
    }
    return Stored(**(fields | changes))


def decoded(dialect: Dialect, *events: CacheEvent) -> list[Any]:
    batch: list[Any] = msgspec.msgpack.decode(dialect.encode_batch(1.5, events, 3))
    assert batch[0] == 1.5
    assert batch[2:] == [3]
    found: list[Any] = batch[1]
    return found


def real_events(version: str) -> list[Any]:
    """The events of a file written by that version's own classes."""
    events = []
    for line in (DATA / f"gen_{version}.jsonl").read_text().splitlines():
        if frames := json.loads(line).get("frames"):
            events += msgspec.msgpack.decode(base64.b64decode(frames[-1]))[1]
    return events


def shape(event: Any) -> Any:
    """An event with its values replaced by their types, lists by that of their first item."""
    if isinstance(event, dict):
        return {name: shape(value) for name, value in event.items()}
    if isinstance(event, list):
        return [shape(value) for value in event[:1]]
    return type(event)


@pytest.mark.parametrize("version", ["0.9.2", "0.11.2", "0.23.0", "0.24.0"])
def test_fields_are_those_of_the_real_version(version: str) -> None:
    real: dict[str, Any] = {}
    for event in real_events(version):
        tag = event["type"] if isinstance(event, dict) else event[0]
        parent = event["parent_block_hash"] if isinstance(event, dict) and tag == "BlockStored" else None
        if isinstance(event, list) and tag == "BlockStored":
            parent = event[2]
        if parent is None:
            real.setdefault(tag, event)
    assert set(real) == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    ours = decoded(Dialect.of(version), stored(parent=None), Removed(HASHES[0], 0), Cleared())
    for event in ours:
        theirs = real[event["type"] if isinstance(event, dict) else event[0]]
        if isinstance(event, dict):
            assert list(event) == list(theirs)
            assert shape(event) == shape(theirs)
        else:
            assert [shape(value) for value in event] == [shape(value) for value in theirs]


@pytest.mark.parametrize(
    ("version", "stored_length", "removed_length"),
    [("0.9.1", 6, 2), ("0.10.1", 6, 2), ("0.10.2", 7, 3), ("0.14.0", 8, 3), ("0.17.0", 9, 3), ("0.20.0", 10, 4),
     ("0.22.0", 12, 4), ("0.23.5", 12, 4)],
)  # fmt: skip
def test_array_lengths(version: str, stored_length: int, removed_length: int) -> None:
    first, second, third = decoded(Dialect.of(version), stored(), Removed(HASHES[0], 0), Cleared())
    assert len(first) == stored_length
    assert len(second) == removed_length
    assert third == ["AllBlocksCleared"]


def test_map_with_every_field() -> None:
    full = stored(
        lora_id=2,
        lora_name="lora1",
        extra_keys=(("lora1", "s"), ("lora1",)),
        group=1,
        kind="sliding_window",
        window=64,
        session_id="abc",
    )
    [event] = decoded(Dialect.of("0.32.0"), full)
    assert event == {
        "type": "BlockStored",
        "block_hashes": [as_unsigned(block_hash) for block_hash in HASHES[:2]],
        "parent_block_hash": as_unsigned(HASHES[2]),
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "lora_id": 2,
        "medium": "GPU",
        "lora_name": "lora1",
        "extra_keys": [["lora1", "s"], ["lora1"]],
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 64,
        "session_id": "abc",
    }
    [older] = decoded(Dialect.of("0.24"), full)
    assert "session_id" not in older


def test_empty_store_of_a_window_group_has_no_extra_keys() -> None:
    [event] = decoded(Dialect.of("0.32.0"), stored(hashes=(), extra_keys=(), parent=None))
    assert event["block_hashes"] == []
    assert event["parent_block_hash"] is None
    assert "extra_keys" not in event


def test_hash_forms() -> None:
    def hashes(dialect: Dialect) -> list[Any]:
        [event] = decoded(dialect, stored(hashes=HASHES, extra_keys=(None,) * len(HASHES)))
        found: list[Any] = event["block_hashes"] if isinstance(event, dict) else event[1]
        return found

    signed = hashes(Dialect.of("0.9.2"))
    assert signed == [as_signed(block_hash) for block_hash in HASHES]
    assert min(signed) < 0 < max(signed)
    unsigned = hashes(Dialect.of("0.11.2"))
    assert max(unsigned) >= 2**63
    assert [value % 2**64 for value in signed] == unsigned
    raw = hashes(Dialect.of("0.32.0", "bytes"))
    assert {len(value) for value in raw} == {32}
    assert len(set(raw)) == len(HASHES)


def test_replay_frames_before_and_from_0_26() -> None:
    old, new = Dialect.of("0.25.9"), Dialect.of("0.26.0")
    seq = (7).to_bytes(8, "big")
    assert old.replay_frames(b"t", 7, b"x") == [b"", seq, b"x"]
    assert new.replay_frames(b"t", 7, b"x") == [b"", b"t", seq, b"x"]
    assert old.replay_end() == [b"", b"\xff" * 8, b""]
    assert new.replay_end() == [b"", b"", b"\xff" * 8, b""]


@pytest.mark.parametrize(
    ("version", "full", "sources", "replay"),
    [("0.25.0", False, False, "default"), ("0.26.0", True, False, "default"), ("0.31.0", True, True, "default"),
     ("0.33.0", True, True, "buffer")],
)  # fmt: skip
def test_what_came_when(version: str, full: bool, sources: bool, replay: str) -> None:
    dialect = Dialect.of(version)
    assert (dialect.reports_full, dialect.has_event_sources, dialect.replay_high_water) == (full, sources, replay)


@pytest.mark.parametrize("text", ["", "32", "0.32.x", "0.32.0.1", "v0.32", "0.9.0", "0.8.5", "-1.2", "0.32\n"])
def test_versions_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"version|old"):
        parse_version(text)


def test_versions() -> None:
    assert parse_version("0.24") == (0, 24, 0)
    assert parse_version("1.2.3") == (1, 2, 3)
