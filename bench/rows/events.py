"""Events through real ZMQ sockets into an index: CPU of the subject per block, everything that its process spends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bench.followers import DYNAMO, Dynamo, Follower, Kvsync, following, verify
from bench.model import OURS, Figures, Row, Run, Sides, Target
from bench.process import Subject, all_of, quiet_cpu, until
from bench.work import Chain

STREAMS = 8
PROCESSES = 2
CHAIN = 1000
"""Blocks of one prompt."""
MARK = 4
"""Batches of the last chain of each stream: when it is visible, all before it is."""


def _plan(blocks: int, per_batch: int) -> tuple[list[list[Chain]], list[Chain]]:
    """The chains of each stream, and its last one."""
    per_stream = max(1, blocks // STREAMS // CHAIN)
    plans = [[(1 + s * 100_000 + n, CHAIN) for n in range(per_stream)] for s in range(STREAMS)]
    marks = [(1_000_000 + s, MARK * per_batch) for s in range(STREAMS)]
    return [[*plan, mark] for plan, mark in zip(plans, marks, strict=True)], marks


def _measure(publishers: Sequence[Subject], plan: list[list[Chain]], marks: list[Chain], follower: Follower) -> Figures:
    names = [f"w{at}" for at in range(STREAMS)]
    each = STREAMS // PROCESSES
    blocks = sum(count for chains in plan for _, count in chains)
    with follower, following(follower, publishers, each):
        before = follower.cpu()
        began = time.monotonic()
        for publisher in publishers:
            publisher.tell("publish")
        done = [publisher.answer() for publisher in publishers]
        seen = [{name: count} for name, (_, count) in zip(names, marks, strict=True)]
        until(lambda: follower.held(marks) == seen)
        took = time.monotonic() - began
        cpu = quiet_cpu(follower.pid) - before
        for name, chains in zip(names, plan, strict=True):
            verify(follower, chains, [name] * len(chains))
        messages = sum(one["messages"] for one in done)
        follower.check([messages // STREAMS] * STREAMS)
    return {
        "cpu_per_block": cpu / blocks,
        "cpu_per_message": cpu / messages,
        "cpu": cpu,
        "blocks": blocks,
        "messages": messages,
        "seconds": took,
        "blocks_per_second": blocks / took,
        "publishers_cpu": sum(one["cpu"] for one in done),
    }


def _row(per_batch: int, blocks: int, quick: int, ratio: float) -> Row:
    @contextmanager
    def open_(run: Run) -> Iterator[Sides]:
        plan, marks = _plan(run.pick(blocks, quick), per_batch)
        python = run.environment("dynamo")
        publishers = [Subject("publisher", python=sys.executable) for _ in range(PROCESSES)]
        with all_of(publishers):
            each = STREAMS // PROCESSES
            for at, publisher in enumerate(publishers):
                part = plan[at * each : (at + 1) * each]
                publisher.tell("load", scripts=[{"kind": "store", "wanted": p, "per_batch": per_batch} for p in part])
            for publisher in publishers:
                publisher.answer()

            def side(make: Callable[[], Follower]) -> Callable[[], Figures]:
                return lambda: _measure(publishers, plan, marks, make())

            yield {OURS: side(Kvsync), DYNAMO: side(lambda: Dynamo(python))}

    batch = f"{per_batch} block{'s' if per_batch > 1 else ''} a batch"
    return Row(
        name=f"events-{per_batch}",
        title=f"events through real ZMQ, {batch}",
        method=(
            f"{STREAMS} event streams of {PROCESSES} publisher processes send prebuilt batches as fast as they can; "
            "the subject is one fresh process that follows all of them. CPU is all that its process spends, ZMQ's "
            "threads included, until everything is visible and it is quiet again. Every prompt is looked up afterwards."
        ),
        targets=(
            Target(
                f"events through real ZMQ, {batch}: CPU per block",
                "cpu_per_block",
                "µs",
                factor=1e6,
                ratio=ratio,
            ),
            Target("the same: blocks through in a second of wall time", "blocks_per_second", "k/s", "higher", 1e-3),
        ),
        open=open_,
    )


ROWS = (_row(16, 480_000, 48_000, 3.0), _row(1, 120_000, 16_000, 2.0))
