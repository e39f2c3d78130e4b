"""Reads the captures of real vLLM and replays their requests on the simulated scheduler."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvsync.engine_sim.cache import KVCache
from kvsync.engine_sim.events import CacheEvent, Cleared, Removed
from kvsync.engine_sim.groups import FullAttention, GroupSpec
from kvsync.engine_sim.hashing import BlockHasher
from kvsync.engine_sim.request import Adapter, Request
from kvsync.engine_sim.scheduler import Scheduler

DATA = Path(__file__).parents[2] / "data" / "vllm"


@dataclass
class Exchange:
    """One request of a capture: what was sent, what came back, and the batches published because of it."""

    number: int
    body: dict[str, Any]
    headers: dict[str, str]
    note: str
    prompt: tuple[int, ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    cached: int = 0
    batches: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """(source, events) in order."""
    reset: bool = False
    """The cache was cleared just before."""


def records(name: str) -> Iterator[dict[str, Any]]:
    path = DATA / name
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            yield json.loads(line)


def exchanges(name: str) -> list[Exchange]:
    """The exchanges of a capture in which requests ran one after another."""
    found: list[Exchange] = []
    reset = False
    for record in records(name):
        match record["kind"]:
            case "http":
                reset = True
            case "req":
                found.append(
                    Exchange(
                        record["id"], record["body"], record.get("headers") or {}, record.get("note") or "", reset=reset
                    )
                )
                reset = False
            case "sub":
                batch = msgspec.msgpack.decode(base64.b64decode(record["frames"][-1]))
                found[-1].batches.append((record["src"], batch[1]))
            case "resp":
                exchange = next(e for e in found if e.number == record["id"])
                exchange.prompt = tuple(record["prompt_token_ids"])
                exchange.outputs = tuple(tuple(choice) for choice in record["output_token_ids"])
                exchange.cached = record["cached_tokens"]
    return found


def scheduler(blocks: int, *groups: GroupSpec, block_size: int = 32, longest: int = 1024) -> Scheduler:
    cache = KVCache(
        blocks=blocks,
        block_size=block_size,
        groups=groups or (FullAttention(),),
        hasher=BlockHasher(seed=0),
        longest=longest,
        in_flight=2048,
    )
    return Scheduler(cache, max_running=128, max_tokens=2048)


def requests_of(exchange: Exchange, adapters: dict[str, Adapter]) -> list[Request]:
    """The sequences that this exchange becomes: one per sample."""
    body = exchange.body
    return [
        Request(
            prompt=exchange.prompt,
            outputs=outputs,
            salt=body.get("cache_salt"),
            adapter=adapters.get(body["model"]),
            session_id=body.get("session_id") or exchange.headers.get("X-Session-ID"),
            skip_cache=body.get("prompt_logprobs") is not None,
            report_full=(body.get("vllm_xargs") or {}).get("kv_cache_report_mode") == "full",
        )
        for outputs in exchange.outputs
    ]


def run(engine: Scheduler, requests: list[Request]) -> list[list[CacheEvent]]:
    """Run requests that arrive together to their end; the batches that were not empty."""
    for request in requests:
        engine.add(request)
    batches = []
    while not engine.idle:
        plan = engine.plan()
        assert plan.work, "the scheduler is stuck"
        _, events = engine.finish(plan)
        if events:
            batches.append(events)
    return batches


class Renaming:
    """A one-to-one map between the hashes of an engine and those of another."""

    def __init__(self) -> None:
        self._there: dict[Any, Any] = {}
        self._back: dict[Any, Any] = {}

    def same(self, ours: bytes | None, theirs: object) -> bool:
        if ours is None or theirs is None:
            return ours is None and theirs is None
        return bool(self._there.setdefault(ours, theirs) == theirs and self._back.setdefault(theirs, ours) == ours)


def assert_same_event(ours: CacheEvent, theirs: dict[str, Any], names: Renaming) -> None:
    """Every field of an event of vLLM 0.32, hashes up to renaming."""
    if isinstance(ours, Cleared):
        assert theirs == {"type": "AllBlocksCleared"}
        return
    if isinstance(ours, Removed):
        assert theirs["type"] == "BlockRemoved"
        assert len(theirs["block_hashes"]) == 1
        assert names.same(ours.block_hash, theirs["block_hashes"][0])
        assert theirs["group_idx"] == ours.group
        return
    assert theirs["type"] == "BlockStored"
    assert len(ours.hashes) == len(theirs["block_hashes"])
    assert all(names.same(a, b) for a, b in zip(ours.hashes, theirs["block_hashes"], strict=True))
    assert names.same(ours.parent, theirs["parent_block_hash"])
    assert list(ours.tokens) == theirs["token_ids"]
    assert ours.block_size == theirs["block_size"]
    assert (ours.lora_id, ours.lora_name) == (theirs["lora_id"], theirs["lora_name"])
    keys = [None if extra is None else list(extra) for extra in ours.extra_keys]
    assert (keys or None) == theirs.get("extra_keys")
    assert ours.group == theirs["group_idx"]
    assert ours.kind == theirs["kv_cache_spec_kind"]
    assert ours.window == theirs.get("kv_cache_spec_sliding_window")
    assert ours.session_id == theirs.get("session_id")


def assert_same_batches(ours: list[list[CacheEvent]], theirs: list[list[dict[str, Any]]], names: Renaming) -> None:
    assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        for our_event, their_event in zip(our_batch, their_batch, strict=True):
            assert_same_event(our_event, their_event, names)
