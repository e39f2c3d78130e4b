"""The work is what it says: the same for every side, in vLLM's own format, and right for a right index."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from bench.rows import growth, steady
from bench.subjects import feeding
from bench.traffic import frames, in_turns, payload, rest
from bench.work import BLOCK, VOCABULARY, Clear, Prompt, Remove, Store, churn, ready, script, store, tokens

from kvsync.events.decode import decode_batch
from kvsync.events.types import BlockRemovedEvent, BlockStoredEvent
from kvsync.index.reference import ReferenceIndex


def test_a_shorter_prompt_is_the_beginning_of_a_longer_one() -> None:
    long, short = tokens(5, 100), tokens(5, 7)
    assert long[: 7 * BLOCK] == short
    assert tokens(6, 7) != short
    assert 0 <= min(long) <= max(long) < VOCABULARY
    assert max(long) > VOCABULARY // 2


def test_names_differ_by_salt_and_prompt_only() -> None:
    assert Prompt((1, 10)).names == Prompt((1, 20)).names[:10]
    every = {name for seed in range(4) for salt in range(4) for name in Prompt((seed, 50), salt).names}
    assert len(every) == 4 * 4 * 50
    assert Prompt((1, 10), 1).ready == Prompt((1, 10), 2).ready


def test_payloads_are_vllms() -> None:
    first, second = store([(3, 20)], 16)
    decoded = decode_batch(payload(12.5, rest(second)))
    assert decoded.skipped == ()
    (event,) = decoded.events
    assert isinstance(event, BlockStoredEvent)
    assert len(event.block_hashes) == 4
    assert decode_batch(payload(12.5, rest(first))).events[0].block_hashes[-1] == event.parent_block_hash  # type: ignore[union-attr]
    (gone,) = decode_batch(payload(1.0, rest([Remove(7)]))).events
    assert isinstance(gone, BlockRemovedEvent)
    assert decode_batch(payload(1.0, rest([Clear()]))).skipped == ()


def test_a_life_told_in_parts_is_the_same_life() -> None:
    def told(first: int, count: int) -> list[bytes]:
        return [rest(events) for events in churn(first, count, length=20, per_batch=8, live=60)]

    assert told(10, 4) == told(10, 1) + told(11, 3)


def test_a_full_cache_stays_full() -> None:
    live: set[int] = set()
    for events in (*store([(n, 20) for n in range(7, 10)], 8), *churn(10, 5, length=20, per_batch=8, live=60)):
        for event in events:
            match event:
                case Remove(name):
                    live.remove(name)
                case Store(prompt):
                    assert event.parent is None or event.parent in live
                    live.update(prompt.names[event.span])
                case Clear():
                    live.clear()
    assert live == {name for n in range(12, 15) for name in Prompt((n, 20)).names}


def test_scripts_take_turns_and_a_right_index_knows_what_they_tell() -> None:
    scripts = [
        {"kind": "store", "wanted": [(1, 40)], "per_batch": 16},
        {"kind": "clears", "wanted": [(2, 10)], "per_batch": 4},
    ]
    assert [worker for worker, _ in in_turns(scripts)] == [0, 1, 0, 1, 0, 1, 1]
    index = ReferenceIndex()
    for worker in range(2):
        index.add_worker(f"w{worker}", "m")
    for worker, data in frames(scripts, "vllm"):
        index.apply(f"w{worker}", data)
    assert {w: m.credit for w, m in index.match([*tokens(1, 40), 0], "m").items()} == {"w0": 640, "w1": 0}
    assert {w: m.credit for w, m in index.match([*tokens(2, 10), 0], "m").items()} == {"w0": 0, "w1": 160}


def test_ready_events_have_the_same_names() -> None:
    (first, second) = store([(1, 20)], 16)
    told = json.loads(ready(second[0], 4))
    assert told["event_id"] == 4
    stored = told["data"]["stored"]
    assert stored["parent_hash"] == Prompt((1, 20)).names[15]
    assert [block["block_hash"] for block in stored["blocks"]] == Prompt((1, 20)).names[16:]
    assert isinstance(first[0], Store)


def test_frames_come_through_a_pipe_unchanged() -> None:
    scripts = [{"kind": "store", "wanted": [(1, 20)], "per_batch": 16}] * 2
    for form in ("vllm", "ready"):
        command = [sys.executable, "-m", "bench.traffic", json.dumps({"scripts": scripts, "form": form})]
        assert list(feeding(command)) == list(frames(scripts, form))
    with pytest.raises(RuntimeError, match="status"):
        list(feeding([sys.executable, "-c", "raise SystemExit(3)"]))


@pytest.mark.parametrize("kind", ["store", "churn", "clears"])
def test_parts_of_a_script_are_the_script(kind: str) -> None:
    whole: dict[str, Any]
    if kind == "churn":
        whole = {"kind": kind, "first": 30, "count": 12, "length": 4, "per_batch": 4, "live": 8}
    else:
        whole = {"kind": kind, "wanted": [(n, 4) for n in range(12)], "per_batch": 4}
    parts = list(growth._parts(whole))
    assert len(parts) == -(-12 // growth.PART)
    assert [rest(b) for part in parts for b in script(**part)] == [rest(b) for b in script(**whole)]
    assert growth._last(parts[-1]) == growth._last(whole)


def test_every_stream_of_a_fleet_has_as_many_batches() -> None:
    for batches in (100, 976):
        plans = [steady._cut(steady._chains(stream, batches), batches) for stream in range(steady.STREAMS)]
        counts = {sum(blocks for _, blocks in plan) for plan in plans}
        assert counts == {batches * steady.PER_BATCH}
        assert all(blocks == steady.PER_BATCH for plan in plans for _, blocks in plan[1::2])
