"""Memory: per block and holder, and what must not grow. All of it is anonymous memory of a fresh process (RssAnon)."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.model import OURS, Figures, Row, Run, Sides, Target, simple
from bench.process import Subject
from bench.rows.index import RADIX, begin, ours, radix, verify
from bench.work import Chain

CHAIN = 1000
WORKERS = 8
SIZES = (300_000, 1_000_000, 2_000_000, 3_000_000)
PER_BATCH = 16
Script = Mapping[str, Any]


def feed(subject: Subject, scripts: Sequence[Script], form: str) -> None:
    """Have a subject apply scripts that another process makes."""
    order = json.dumps({"scripts": scripts, "form": form})
    subject.ask("feed", 600, command=[sys.executable, "-m", "bench.traffic", order])


def stores(chains: Sequence[Sequence[Chain]], salts: Sequence[int] | None = None) -> list[Script]:
    salts = salts or [0] * len(chains)
    return [
        {"kind": "store", "wanted": wanted, "per_batch": PER_BATCH, "salt": salt}
        for wanted, salt in zip(chains, salts, strict=True)
    ]


def _sides(measure: Callable[[Subject, str, Run], Figures]) -> Callable[[Run], Sides]:
    """kvsync's index and Dynamo's tree, each in a fresh process per repeat."""

    def sides(run: Run) -> Sides:
        python = run.environment("dynamo")

        def side(make: Callable[[], Subject], form: str) -> Callable[[], Figures]:
            def one() -> Figures:
                with make() as subject:
                    return measure(subject, form, run)

            return one

        return {OURS: side(ours, "vllm"), RADIX: side(lambda: radix(python), "ready")}

    return sides


def _begun(subject: Subject, form: str, workers: int) -> int:
    """Start with a few blocks at each worker, so that what is made once is there. → memory"""
    begin(subject, workers)
    feed(subject, stores([[(900_000_000 + worker, PER_BATCH)] for worker in range(workers)]), form)
    return subject.memory()


def _distinct(subject: Subject, form: str, run: Run) -> Figures:
    before = _begun(subject, form, WORKERS)
    found: dict[str, float] = {}
    expected: dict[Chain, Mapping[str, int]] = {}
    done = 0
    for size in SIZES[:1] if run.quick else SIZES:
        numbers = range(done // CHAIN, size // CHAIN)
        chains = [[(1 + n, CHAIN) for n in numbers if n % WORKERS == worker] for worker in range(WORKERS)]
        expected |= {chain: {f"w{worker}": CHAIN} for worker, some in enumerate(chains) for chain in some}
        feed(subject, stores(chains), form)
        done = size
        found[f"at_{size}"] = (subject.memory() - before) / size
    found["worst"] = max(found.values())
    verify(subject, expected)
    return found


def _further(subject: Subject, form: str, run: Run) -> Figures:
    """The same blocks at one worker, then at others."""
    count = run.pick(200, 40)
    chains = [(1 + n, CHAIN) for n in range(count)]
    before = _begun(subject, form, WORKERS)
    feed(subject, stores([chains]), form)
    first = subject.memory()
    feed(subject, stores([[], *[chains] * (WORKERS - 1)]), form)
    after = subject.memory()
    verify(subject, {chain: _everywhere() for chain in chains})
    blocks = count * CHAIN
    return {"first": (first - before) / blocks, "further": (after - first) / (blocks * (WORKERS - 1))}


def _own(subject: Subject, form: str, run: Run) -> Figures:
    """The same with hashes of each engine's own."""
    count = run.pick(200, 40)
    chains = [(1 + n, CHAIN) for n in range(count)]
    before = _begun(subject, form, WORKERS)
    feed(subject, stores([chains]), form)
    first = subject.memory()
    feed(subject, stores([[], *[chains] * (WORKERS - 1)], list(range(WORKERS))), form)
    after = subject.memory()
    verify(subject, {chain: _everywhere() for chain in chains})
    blocks = count * CHAIN
    return {"first": (first - before) / blocks, "further": (after - first) / (blocks * (WORKERS - 1))}


def _everywhere() -> dict[str, int]:
    return {f"w{worker}": CHAIN for worker in range(WORKERS)}


def _parts(subject: Subject, form: str, run: Run) -> Figures:
    """32 workers, each with a beginning of every prompt, as long as chance makes it: all sets of holders differ."""
    count, workers = run.pick(50, 10), 32
    rng = random.Random(5)
    chains = [(1 + n, CHAIN) for n in range(count)]
    lengths = [[rng.randrange(1, CHAIN + 1) for _ in chains] for _ in range(workers - 1)]
    before = _begun(subject, form, workers)
    feed(subject, stores([chains]), form)
    first = subject.memory()
    wanted = [[(seed, length) for (seed, _), length in zip(chains, some, strict=True)] for some in lengths]
    feed(subject, stores([[], *wanted]), form)
    after = subject.memory()
    expected = {
        chain: {"w0": CHAIN} | {f"w{worker}": some[n] for worker, some in enumerate(lengths, 1)}
        for n, chain in enumerate(chains)
    }
    verify(subject, expected)
    return {"first": (first - before) / (count * CHAIN), "further": (after - first) / sum(map(sum, lengths))}


METHOD = (
    "Growth of the anonymous memory of a fresh process that has nothing but the index; payloads come from another "
    "process, 16 blocks a batch. kvsync gets vLLM's payloads, RadixTree decoded events. Every prompt is looked up "
    "afterwards."
)


def _holders(name: str, title: str, measure: Callable[[Subject, str, Run], Figures], at_most: float) -> Row:
    return Row(
        name=name,
        title=title,
        method=METHOD,
        targets=(Target(title, "further", "B", at_most=at_most),),
        open=simple(_sides(measure)),
        repeats=2,
    )


ROWS: Sequence[Row] = (
    Row(
        name="memory-block",
        title="memory of a distinct block with one holder",
        method=f"{METHOD} Eight workers; measured in one process as it grows, so that no size of a table flatters.",
        targets=(
            Target("memory of a distinct block with one holder, worst size", "worst", "B", at_most=40.0),
            *(Target(f"at {size / 1e6:g} M blocks", f"at_{size}", "B", aside=True) for size in SIZES),
        ),
        open=simple(_sides(_distinct)),
        repeats=2,
    ),
    _holders("memory-holder", "memory of each further holder, equal hashes", _further, 8.0),
    _holders(
        "memory-holder-parts", "memory of each further holder, each with another part of every prompt", _parts, 8.0
    ),
    _holders("memory-holder-own", "memory of each further holder, hashes of each engine's own", _own, 24.0),
)
