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
STEADY = 3_000
"""Messages per second of all streams together, where they are paced."""
LOOK = 0.01
"""Seconds between two looks whether a stream's last batch is visible: looking costs the subject CPU, too."""


def _plan(blocks: int, per_batch: int) -> tuple[list[list[Chain]], list[Chain]]:
    """The chains of each stream, and its last one, of one batch: when it is visible, all before it is."""
    per_stream = max(1, blocks // STREAMS // CHAIN)
    plans = [[(1 + s * 100_000 + n, CHAIN) for n in range(per_stream)] for s in range(STREAMS)]
    marks = [(1_000_000 + s, per_batch) for s in range(STREAMS)]
    return [[*plan, mark] for plan, mark in zip(plans, marks, strict=True)], marks


def _measure(
    publishers: Sequence[Subject],
    plan: Sequence[Sequence[Chain]],
    marks: Sequence[Chain],
    rate: float | None,
    follower: Follower,
) -> Figures:
    names = [f"w{at}" for at in range(STREAMS)]
    each = STREAMS // PROCESSES
    blocks = sum(count for chains in plan for _, count in chains)
    with follower, following(follower, publishers, each):
        before = follower.cpu()
        began = time.monotonic()
        for publisher in publishers:
            publisher.tell("publish", rate=rate and rate / PROCESSES)
        done = [publisher.answer() for publisher in publishers]
        for name, mark in zip(names, marks, strict=True):
            _await(follower, mark, name)
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


def _await(follower: Follower, chain: Chain, worker: str) -> None:
    until(lambda: follower.held([chain]) == [{worker: chain[1]}], every=LOOK)


def _row(per_batch: int, blocks: int, quick: int, ratio: float | None, rate: float | None = None) -> Row:
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
                return lambda: _measure(publishers, plan, marks, rate, make())

            yield {OURS: side(Kvsync), DYNAMO: side(lambda: Dynamo(python))}

    batch = f"{per_batch} block{'s' if per_batch > 1 else ''} a batch"
    pace = "as fast as they can" if rate is None else f"{rate:,.0f} a second"
    if rate is not None:
        batch += f", {pace}"
    return Row(
        name=f"events-{per_batch}{'' if rate is None else '-steady'}",
        title=f"events through real ZMQ, {batch}",
        method=(
            f"{STREAMS} event streams of {PROCESSES} publisher processes send prebuilt batches, {pace}; "
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
            Target("blocks through in a second of wall time", "blocks_per_second", "k/s", "higher", 1e-3, aside=True),
            Target("CPU per message", "cpu_per_message", "µs", factor=1e6, aside=True),
        ),
        open=open_,
        notes={"cpu_per_block": WHY_NOT},
    )


WHY_NOT = (
    "About two thirds are the index's work, which the row on payloads in process shows; the rest is ZMQ's own, its I/O "
    "thread and the frames that it allocates. Tried: the receive loop in the core, on the sockets of pyzmq's libzmq "
    "(it costs a few hundredths of what is measured), all that came read before anything is applied, a pause "
    "of a millisecond between rounds so that messages come by the dozen, allocator settings. ZMQ_IN_BATCH_SIZE is "
    "refused by the wheel's libzmq. What would help is a faster fill of the index."
)

ROWS = (
    _row(16, 480_000, 48_000, 3.0),
    _row(1, 120_000, 16_000, 2.0),
    _row(16, 144_000, 48_000, None, STEADY),
)
