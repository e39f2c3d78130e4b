"""How ``kvsync watch`` writes an event."""

from __future__ import annotations

import json
import math

import pytest

from kvsync.cli.watch import json_line, text_line
from kvsync.events.types import (
    AllBlocksClearedEvent,
    BlockRemovedEvent,
    BlockStoredEvent,
    Embeds,
    EventBatch,
    Image,
    KVEvent,
    Opaque,
    Salt,
    SkippedEvent,
    pack_tokens,
)

FULL = BlockStoredEvent(
    block_hashes=(-1, 2**64 - 2, b"\xab" * 32, "text", 5, 6),
    parent_block_hash=7,
    raw_token_ids=pack_tokens(range(96)),
    block_size=16,
    lora_id=3,
    lora_name="sql",
    medium="GPU",
    extra_keys=((Salt("s"),), (Image("img", -2), Image("old")), (Embeds(b"\x01\x02"), Opaque(b"\x03")), (), (), ()),
    group_idx=1,
    kv_cache_spec_kind="full_attention",
)


def text(event: KVEvent | SkippedEvent, ts: float = 0.0, rank: int | None = None) -> str:
    return text_line(17, EventBatch(ts, (event,), rank), event)


def test_a_stored_event_says_all() -> None:
    line = text(FULL, rank=2)
    assert line.lstrip().startswith("17  ")
    assert "6 blocks ffffffff ffffffff abababab 'text' +2" in line
    for part in (
        "rank 2",
        "stored",
        "parent 00000000",
        "96 tokens",
        "gpu",
        "group 1",
        "full_attention",
        "adapter 'sql'",
        "salt 's'",
        "image 'img' at -2",
        "image 'old'",
        "embeds 0102",
        "unknown 03",
    ):
        assert part in line


def test_the_first_block_of_a_prompt() -> None:
    line = text(BlockStoredEvent((1,), None, b"", 0))
    assert line.endswith("stored   1 blocks 00000000  parent -  0 tokens")


def test_an_adapter_known_by_number_only() -> None:
    assert "adapter #4" in text(BlockStoredEvent((1,), None, b"", 0, lora_id=4))


@pytest.mark.parametrize(
    ("event", "end"),
    [
        (BlockRemovedEvent((1, 2), medium="CPU", group_idx=0), "removed  2 blocks 00000000 00000000  cpu  group 0"),
        (AllBlocksClearedEvent(), "cleared"),
        (SkippedEvent("NewThing", "unknown_tag", False), "skipped  'NewThing' unknown_tag"),
    ],
)
def test_other_events(event: KVEvent | SkippedEvent, end: str) -> None:
    assert text(event).rstrip().endswith(end)


@pytest.mark.parametrize("ts", [math.nan, math.inf, -math.inf, 1e300, -1e18])
def test_times_that_are_none(ts: float) -> None:
    assert repr(ts) in text(AllBlocksClearedEvent(), ts=ts)


def test_strings_from_the_wire_can_not_steer_a_terminal() -> None:
    evil = "\x1b[2J\n"
    event = BlockStoredEvent(
        (evil,),
        evil,
        b"",
        0,
        lora_name=evil,
        medium=evil,
        kv_cache_spec_kind=evil,
        extra_keys=((Salt(evil), Image(evil)),),
    )
    for line in (text(event), text(SkippedEvent(evil, "unknown_tag", True)), json_line(1, EventBatch(0.0, ()), event)):
        assert "\x1b" not in line
        assert "\n" not in line


def test_json_has_whole_hashes() -> None:
    line = json.loads(json_line(17, EventBatch(5.5, (FULL,), 1), FULL))
    assert line == {
        "seq": 17,
        "ts": 5.5,
        "rank": 1,
        "type": "stored",
        "block_hashes": [-1, 2**64 - 2, "ab" * 32, "text", 5, 6],
        "parent": 7,
        "tokens": 96,
        "block_size": 16,
        "medium": "GPU",
        "group": 1,
        "kind": "full_attention",
        "adapter": "sql",
        "lora_id": 3,
        "extra_keys": [["salt 's'"], ["image 'img' at -2", "image 'old'"], ["embeds 0102", "unknown 03"], [], [], []],
    }
    removed = BlockRemovedEvent((9,), medium="GPU")
    assert json.loads(json_line(1, EventBatch(0.0, ()), removed)) == {
        "seq": 1,
        "ts": 0.0,
        "type": "removed",
        "block_hashes": [9],
        "medium": "GPU",
    }
