"""A fleet at a steady rate: how late events are visible, what lookups and the event loop feel, what an engine costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bench.followers import DYNAMO, Dynamo, Follower, Kvsync, following, verify
from bench.model import OURS, Figures, Row, Run, Sides, Target, Wrong
from bench.process import Subject, all_of, until
from bench.work import Chain

STREAMS = 64
PROCESSES = 2
PER_BATCH = 16
RATE = 50_000
"""Blocks per second, the whole fleet."""
PROBE_EVERY = 62
"""Batches of a stream: 61 tell of a long prompt, then one of a short one, which is waited for."""
SECONDS = 20
LOOKED_UP: Sequence[Chain] = tuple((5_000_000 + stream, 512) for stream in range(STREAMS))
PATIENCE = 10.0


def _chains(stream: int, batches: int) -> list[Chain]:
    """Long and short prompts of a stream in turns; the first long one differs by stream, so that the short ones come
    one after the other."""
    found: list[Chain] = []
    left = batches
    length = 1 + stream * (PROBE_EVERY - 1) // STREAMS
    while left > 0:
        for blocks in (length * PER_BATCH, PER_BATCH):
            found.append((10_000_000 + stream * 10_000 + len(found), blocks))
        left -= length + 1
        length = PROBE_EVERY - 1
    return found


def _lag(publishers: Sequence[Subject], plan: Sequence[Sequence[Chain]], follower: Kvsync) -> Figures:
    each = STREAMS // PROCESSES
    rate = RATE / PER_BATCH / PROCESSES
    with follower, following(follower, publishers, each):
        for at, publisher in enumerate(publishers):
            mine = LOOKED_UP[at * each : (at + 1) * each]
            publisher.ask("stream", scripts=[{"kind": "store", "wanted": [c], "per_batch": PER_BATCH} for c in mine])
        before = [{f"w{stream}": blocks} for stream, (_, blocks) in enumerate(LOOKED_UP)]
        until(lambda: follower.held(LOOKED_UP) == before, 30)
        start = time.monotonic() + 2.0
        probes = []
        places = []
        for stream, chains in enumerate(plan):
            batch = 0
            for number, (seed, blocks) in enumerate(chains):
                if number % 2:
                    message = batch * each + stream % each
                    probes.append((start + message / rate, f"w{stream}", seed, blocks))
                    places.append((stream // each, message))
                batch += blocks // PER_BATCH
        order = sorted(range(len(probes)), key=lambda n: probes[n][0])
        end = max(probe[0] for probe in probes) + PATIENCE
        follower.tell("watch", probes=[probes[n] for n in order], looked_up=LOOKED_UP, until=end)
        cpu = follower.cpu()
        for publisher in publishers:
            publisher.tell("publish", rate=rate, at=start, times=True)
        sent = [publisher.answer() for publisher in publishers]
        cpu = follower.cpu() - cpu
        watched = follower.answer()
        for stream, chains in enumerate(plan):
            verify(follower, chains, [f"w{stream}"] * len(chains))
    lags = [seen - sent[places[n][0]]["times"][places[n][1]] for n, seen in zip(order, watched["seen"], strict=True)]
    if max(lags) == float("inf"):
        raise Wrong(f"{lags.count(float('inf'))} of {len(lags)} prompts were not visible within {PATIENCE:g} s")
    seconds = max(one["seconds"] for one in sent)
    reached = sum(one["messages"] for one in sent) * PER_BATCH / seconds
    if reached < 0.95 * RATE:
        raise Wrong(f"the publishers reached {reached:,.0f} blocks/s only: the machine is too busy")
    found = {"blocks_per_second": reached, "cpu_share": cpu / seconds, "probes": len(lags)}
    for name, values in (("lag", lags), ("match", watched["match"]), ("late", watched["late"])):
        found |= {f"{name}_p50": _percentile(values, 50), f"{name}_p99": _percentile(values, 99)}
    return found


def _percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


@contextmanager
def _open_lag(run: Run) -> Iterator[Sides]:
    batches = int(run.pick(SECONDS, 3) * RATE / PER_BATCH / STREAMS)
    # Streams take turns, so all of them need the same number of batches: what is more than that is cut off.
    plan = [_cut(_chains(stream, batches), batches) for stream in range(STREAMS)]
    publishers = [Subject("publisher", python=sys.executable) for _ in range(PROCESSES)]
    each = STREAMS // PROCESSES
    with all_of(publishers):
        for at, publisher in enumerate(publishers):
            part = plan[at * each : (at + 1) * each]
            publisher.tell("load", scripts=[{"kind": "store", "wanted": p, "per_batch": PER_BATCH} for p in part])
        for publisher in publishers:
            publisher.answer()
        yield {OURS: lambda: _lag(publishers, plan, Kvsync())}


def _cut(chains: Sequence[Chain], batches: int) -> list[Chain]:
    found = []
    for seed, blocks in chains:
        blocks = min(blocks, batches * PER_BATCH)
        if blocks:
            found.append((seed, blocks))
        batches -= blocks // PER_BATCH
    return found


ONE_RATE = 1_250
"""Blocks per second: 20,000 prefill tokens per second."""
LIVE = 20
"""Prompts of 1,000 blocks that the engine's cache holds."""


def _one(publisher: Subject, follower: Follower, seconds: int) -> Figures:
    count = ONE_RATE * seconds // 1000
    rate = ONE_RATE / PER_BATCH
    found: dict[str, float] = {}
    with follower, following(follower, [publisher], 1):
        full = {"kind": "store", "wanted": [(1 + n, 1000) for n in range(LIVE)], "per_batch": PER_BATCH}
        publisher.ask("stream", scripts=[full])
        churn = {"kind": "churn", "first": 1 + LIVE, "length": 1000, "per_batch": PER_BATCH, "live": LIVE * 1000}
        fresh = [(1000 + n, 1000) for n in range(count)]
        ways = {
            "": {"kind": "store", "wanted": fresh, "per_batch": PER_BATCH},
            "_evicting": churn | {"count": count},
        }
        for name, script in ways.items():
            last = fresh[-1] if script["kind"] == "store" else (LIVE + count, 1000)
            publisher.ask("load", scripts=[script])
            before = follower.cpu()
            sent = publisher.ask("publish", rate=rate)
            cpu = follower.cpu() - before
            until(lambda last=last: follower.held([last]) == [{"w0": 1000}], 10)
            found |= {
                f"share{name}": cpu / sent["seconds"],
                f"bytes_per_second{name}": sent["bytes"] / sent["seconds"],
            }
        verify(follower, fresh, ["w0"] * count)
    return found


@contextmanager
def _open_one(run: Run) -> Iterator[Sides]:
    python = run.environment("dynamo")
    publisher = Subject("publisher", python=sys.executable)
    seconds = run.pick(8, 2)

    def side(make: Callable[[], Follower]) -> Callable[[], Figures]:
        return lambda: _one(publisher, make(), seconds)

    with all_of([publisher]):
        yield {OURS: side(Kvsync), DYNAMO: side(lambda: Dynamo(python))}


ROWS: Sequence[Row] = (
    Row(
        name="lag",
        title="event published → visible to routing at 50,000 blocks/s",
        method=(
            f"{STREAMS} engines in {PROCESSES} processes publish {RATE:,} blocks/s together, {PER_BATCH} a batch, for "
            f"{SECONDS} s, into one process that follows them and meanwhile looks up prompts of 8,192 tokens, 500 a "
            "second, on its event loop. About 50 prompts a second are awaited: each is looked up every millisecond "
            "from just before it is sent until a lookup finds the whole of it, so up to a millisecond of what is shown "
            "is the waiting's own. The tick is how late a timer of 5 ms is. All are looked up again at the end."
        ),
        targets=(
            Target(
                "event published → visible to routing at 50,000 blocks/s, p99",
                "lag_p99",
                "ms",
                "lower",
                1e3,
                at_most=5.0,
            ),
            Target(
                "match while these arrive (8,192 tokens, 64 workers), p99", "match_p99", "ms", "lower", 1e3, at_most=5.0
            ),
            Target("event-loop tick meanwhile, p99", "late_p99", "ms", "lower", 1e3, at_most=5.0),
            Target("published → visible, p50", "lag_p50", "ms", factor=1e3, aside=True),
            Target("match, p50", "match_p50", "ms", factor=1e3, aside=True),
            Target("tick, p50", "late_p50", "ms", factor=1e3, aside=True),
            Target("blocks published per second", "blocks_per_second", "k", "higher", 1e-3, aside=True),
            Target("CPU of the process", "cpu_share", "% of a core", factor=100, aside=True),
        ),
        open=_open_lag,
        repeats=3,
    ),
    Row(
        name="one-engine",
        title="one engine at 1,250 blocks/s",
        method=(
            "One stream tells of 1,250 new blocks a second (20,000 prefill tokens), 16 a batch; CPU of the process "
            "that follows it, all threads, as a share of one core. The same again with a full cache, which evicts as "
            "much. Bytes are counted at the publisher, ZMTP's framing included, TCP's not."
        ),
        targets=(
            Target("one engine at 1,250 blocks/s: CPU", "share", "% of a core", factor=100, at_most=1.0),
            Target(
                "one engine at 1,250 blocks/s: bytes on the wire", "bytes_per_second", "MB/s", factor=1e-6, at_most=1.0
            ),
            Target("CPU, evictions included", "share_evicting", "% of a core", factor=100, aside=True),
            Target(
                "bytes on the wire, evictions included", "bytes_per_second_evicting", "MB/s", factor=1e-6, aside=True
            ),
        ),
        open=_open_one,
        repeats=3,
    ),
)
