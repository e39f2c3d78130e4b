"""Calls of the index from Python, and what a batch costs above it; against the clock: ``make bench-micro``."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from bench.micro.held import MODEL, credited, empty, holding, names, prompt, wire
from bench.work import churn, store
from kvsync.config import EventsSettings
from kvsync.events.contracts import Target
from kvsync.events.feed import Feed
from kvsync.events.followed import Followed
from kvsync.events.sockets import WorkerSockets
from kvsync.events.stream import Apply, Budget, State, Stream
from kvsync.index.match import Index

FORMS: dict[str, Callable[[array[int]], Any]] = {"bytes": array.tobytes, "array": lambda a: a, "list": array.tolist}
DRAIN = 64
"""Batches of one call."""


@pytest.mark.parametrize("workers", [8, 64])
@pytest.mark.parametrize("tokens", [2_048, 131_072])
@pytest.mark.parametrize("form", FORMS)
def test_match(benchmark: Any, form: str, tokens: int, workers: int) -> None:
    asked = prompt(tokens // 16)
    index = holding(workers, tokens // 16)
    assert credited(index, asked, names(workers))
    given = FORMS[form](asked)
    benchmark(lambda: index.match(given, MODEL))


@pytest.mark.parametrize("workers", [8, 64, 1_000])
def test_match_of_a_prompt_that_nobody_holds(benchmark: Any, workers: int) -> None:
    index = holding(workers, 128)
    given = array("I", range(2_049)).tobytes()
    assert not any(match.credit for match in index.match(given, MODEL).values())
    benchmark(lambda: index.match(given, MODEL))


def test_observe(benchmark: Any) -> None:
    index, given = holding(64, 1_024), prompt(1_024).tobytes()
    match = index.match(given, MODEL)["worker-7"]
    said = benchmark(
        lambda: index.observe("worker-7", given, MODEL, match.credit, match.credit, match.as_of, until=120.0)
    )
    assert said == "steady"


@pytest.mark.parametrize("per_batch", [1, 16])
def test_apply_many(benchmark: Any, per_batch: int) -> None:
    """A drain of 64 batches, of as many workers."""
    work = [wire(worker, store([(n, per_batch)], per_batch))[0] for n, worker in enumerate(names(DRAIN))]

    def check(index: Index) -> None:
        index.apply_many(work)
        assert _blocks(index) == DRAIN * per_batch

    check(empty(DRAIN))
    benchmark.pedantic(_apply, setup=lambda: ((empty(DRAIN), work), {}), rounds=200)


def test_apply_many_of_full_caches(benchmark: Any) -> None:
    """A drain of 64 batches of one worker that evicts a block for each that it stores."""
    live = wire("worker-0", store([(n, 128) for n in range(64)], 16))
    work = wire("worker-0", churn(64, 8, 128, 16, 64 * 128))
    assert len(work) == DRAIN

    def full() -> tuple[tuple[Index, list[tuple[str, bytes]]], dict[str, Any]]:
        index = empty(1)
        index.apply_many(live)
        return (index, work), {}

    (index, _), _ = full()
    index.apply_many(work)
    assert _blocks(index) == 64 * 128
    benchmark.pedantic(_apply, setup=full, rounds=50)


def test_reading_a_drain(benchmark: Any) -> None:
    """What the reader does in Python for 64 batches of one stream, sockets apart: the stream decides, the feed hands
    over, the index applies."""
    live = wire("worker-0", store([(n, 16) for n in range(DRAIN)], 16))
    context: zmq.Context[Any] = zmq.Context.instance()
    target = Target("worker-0", "engine-0", "engine-0", MODEL, 0, "tcp://127.0.0.1:1", None)

    def connected() -> tuple[tuple[Feed, Followed, Index], dict[str, Any]]:
        index = empty(1)
        stream = Stream(
            can_replay=False, budget=Budget(1 << 20), replay_timeout=1.0, replay_round_timeout=30.0, start=0
        )
        stream.connected(0.0)
        sockets = WorkerSockets(context, target.events, None, EventsSettings())
        return (Feed(index, None), Followed(target, stream, sockets, 0.0), index), {}

    def drain(feed: Feed, followed: Followed, index: Index) -> Index:
        for seq, (_, body) in enumerate(live):
            for action in followed.stream.live(seq, body, 1.0):
                if isinstance(action, Apply):
                    feed.add(followed, action.seq, action.payload)
        feed.hand_over()
        assert followed.stream.state is State.LIVE
        return index

    (feed, followed, index), _ = connected()
    assert _blocks(drain(feed, followed, index)) == DRAIN * 16
    benchmark.pedantic(drain, setup=connected, rounds=200)


def _apply(index: Index, work: list[tuple[str, bytes]]) -> None:
    index.apply_many(work)


def _blocks(index: Index) -> int:
    workers: Any = index.stats()["workers"]
    return sum(worker["placed"] for worker in workers.values())
