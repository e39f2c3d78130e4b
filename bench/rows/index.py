"""The index in process: applying events, and looking prompts up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.environments import pinned
from bench.model import OURS, Figures, Row, Run, Sides, Target, Wrong
from bench.process import Subject, all_of
from bench.work import BLOCK, Chain

RADIX = f"dynamo RadixTree {pinned('dynamo', 'ai-dynamo-runtime')}"
PURE = "kvsync without its core"
"""The pure-Python index, for who has no core: shown, not judged."""
PEERS = (RADIX,)
WORKERS = 64
CHAIN = 1000


def ours() -> Subject:
    return Subject("applier", python=sys.executable)


def radix(python: Path) -> Subject:
    return Subject("radix", python=python)


def begin(subject: Subject, workers: int, **more: Any) -> None:
    """
    Raises:
        Wrong: it is not the native core.
    """
    if not subject.ask("begin", workers=workers, **more):
        raise Wrong("kvsync-core is not installed: this would measure the pure-Python index")


WAYS: Mapping[str, Mapping[str, bool]] = {OURS: {}, RADIX: {}, PURE: {"pure": True}}
"""How each side is begun."""


def verify(subject: Subject, expected: Mapping[Chain, Mapping[str, int]]) -> None:
    """
    Raises:
        Wrong: blocks are missing, or credited where they are not.
    """
    chains = list(expected)
    for chain, found in zip(chains, subject.ask("held", chains=chains), strict=True):
        if found != expected[chain]:
            raise Wrong(f"prompt {chain}: found {_few(found)}, not {_few(expected[chain])}")


def _few(found: Mapping[str, int]) -> str:
    return str(dict(list(found.items())[:4])) + (" …" if len(found) > 4 else "")


def _apply(per_batch: int, blocks: int, quick: int, ratio: float | None) -> Row:
    @contextmanager
    def open_(run: Run) -> Iterator[Sides]:
        python = run.environment("dynamo")
        each = max(1, run.pick(blocks, quick) // WORKERS // CHAIN)
        plan = {f"w{w}": [(1 + w * 1000 + n, CHAIN) for n in range(each)] for w in range(WORKERS)}
        scripts = [{"kind": "store", "wanted": chains, "per_batch": per_batch} for chains in plan.values()]
        expected = {chain: {worker: CHAIN} for worker, chains in plan.items() for chain in chains}
        subjects = {OURS: ours(), RADIX: radix(python), PURE: ours()}

        def measure(name: str) -> Figures:
            subject = subjects[name]
            begin(subject, WORKERS, **WAYS[name])
            took = subject.ask("apply")
            verify(subject, expected)
            count = each * CHAIN * WORKERS
            return {"cpu_per_block": took["cpu"] / count, "blocks_per_second": count / took["seconds"], **took}

        with all_of(tuple(subjects.values())):
            for subject in subjects.values():
                subject.tell("load", scripts=scripts)
            for subject in subjects.values():
                subject.answer()
            yield {name: partial(measure, name) for name in subjects}

    batch = f"{per_batch} block{'s' if per_batch > 1 else ''} a batch"
    return Row(
        name=f"apply-{per_batch}",
        title=f"payload → index in process, {batch}",
        method=(
            f"Batches of {WORKERS} workers, all in memory, into a new index. kvsync gets msgpack payloads, and decodes "
            "and hashes them in the measured time; RadixTree gets events that are decoded and hashed already (JSON "
            "with the hashes in it: it takes nothing else), and only its apply_event is measured. Every prompt is "
            "looked up afterwards."
        ),
        targets=(
            Target(
                f"payload → index in process, {batch}: CPU per block",
                "cpu_per_block",
                "µs",
                factor=1e6,
                ratio=ratio,
                peers=PEERS,
            ),
            Target("the same: blocks per second", "blocks_per_second", "M/s", "higher", 1e-6, peers=PEERS, aside=True),
        ),
        open=open_,
        notes={"cpu_per_block": WHY_NOT},
    )


WHY_NOT = (
    "The peer's figure is without decoding and hashing, which are a good third of ours; and a new index grows "
    "from nothing here: by instructions two fifths of the work are tables that grow by less than a fifth at a "
    "time, which is what keeps a block below 40 bytes. In a cache that is full, the state that engines are in, "
    "nothing grows. Tried and kept: one pass over the payload (a third of the instructions of before), one probe "
    "where two were, sets of holders remembered from the block before, tags of twelve slots in two words. Tried: "
    "growing by half (faster by a tenth, 42 bytes a block) and by an eighth (slower by a sixth); tags from which a "
    "table that grows learns the new place without a look at the key (a fill faster by a sixth, a full cache slower by "
    "more)."
)


def _lookup(name: str, title: str, length: int, workers: int, part: Callable[[int], float], ratio: float | None) -> Row:
    @contextmanager
    def open_(run: Run) -> Iterator[Sides]:
        python = run.environment("dynamo")
        blocks = length // BLOCK
        chain = (7, blocks)
        held = {f"w{worker}": int(blocks * part(worker)) for worker in range(workers)}
        scripts = [{"kind": "store", "wanted": [(7, max(1, count))], "per_batch": 256} for count in held.values()]
        expected = {worker: max(1, count) for worker, count in held.items()}
        if not any(held.values()):  # all of another prompt
            scripts = [{"kind": "store", "wanted": [(8, blocks)], "per_batch": 256}] * workers
            expected = {}
        subjects = {OURS: ours(), RADIX: radix(python), PURE: ours()}

        def measure(name: str) -> Figures:
            took = subjects[name].ask("match", chains=[chain], times=3 if name == PURE else run.pick(30, 5))
            return {name: median(times) for name, times in took.items()}

        with all_of(tuple(subjects.values())):
            for name, subject in subjects.items():
                begin(subject, workers, **WAYS[name], **({"hashed": True} if name == RADIX else {}))
                subject.ask("load", scripts=scripts)
                subject.ask("apply")
                verify(subject, {chain: expected})
            yield {name: partial(measure, name) for name in subjects}

    return Row(
        name=name,
        title=title,
        method=(
            "One prompt, looked up again and again (median of 30, answers checked before): kvsync from a "
            "buffer of token ids to the credit of every worker; Dynamo from a list or an array of token ids, whichever "
            "is faster, by compute_block_hash_for_seq and RadixTree.find_matches."
        ),
        targets=(
            Target(f"{title}: CPU", "cpu", "ms", factor=1e3, ratio=ratio, peers=PEERS),
            Target("by the clock", "seconds", "ms", factor=1e3, peers=PEERS, aside=True),
        ),
        open=open_,
        notes={"cpu": "Beside the bound, from run to run on either side of it."},
    )


def _many(ratio: float | None) -> Row:
    """Other prompts each time, out of many: what a look-up touches is not in the processor's caches."""

    @contextmanager
    def open_(run: Run) -> Iterator[Sides]:
        python = run.environment("dynamo")
        blocks = LONG // BLOCK
        chains = [(7 + n, blocks) for n in range(run.pick(128, 16))]
        plan = {f"w{w}": [chain for n, chain in enumerate(chains) if w in (n % 64, (n + 1) % 64)] for w in range(64)}
        expected = {chain: {w: blocks for w, held in plan.items() if chain in held} for chain in chains}
        scripts = [{"kind": "store", "wanted": held, "per_batch": 16} for held in plan.values()]
        subjects = {OURS: ours(), RADIX: radix(python)}

        def measure(name: str) -> Figures:
            took = subjects[name].ask("match", chains=chains, times=len(chains))
            return {name: median(times) for name, times in took.items()}

        with all_of(tuple(subjects.values())):
            for name, subject in subjects.items():
                begin(subject, 64, **({"hashed": True} if name == RADIX else {}))
                subject.ask("load", 600, scripts=scripts)
                subject.ask("apply")
                verify(subject, expected)
            yield {name: partial(measure, name) for name in subjects}

    title = f"{LONG:,} tokens → match, another prompt each time"
    return Row(
        name="match-many",
        title=title,
        method=(
            "As the row before, but every look-up is of another one of 128 prompts, each held by two of 64 workers and "
            "stored 16 blocks a batch, all workers in turns: memory is touched that no cache of the processor has."
        ),
        targets=(
            Target(f"{title}: CPU", "cpu", "ms", factor=1e3, ratio=ratio, peers=PEERS),
            Target("by the clock", "seconds", "ms", factor=1e3, peers=PEERS, aside=True),
        ),
        open=open_,
        repeats=3,
    )


def _a_part(worker: int) -> float:
    return worker / WORKERS


LONG, SHORT = 131_072, 32_768
ROWS: Sequence[Row] = (
    _apply(16, 256_000, 64_000, 3.0),
    _apply(1, 64_000, 64_000, None),
    _lookup("match-all", f"{LONG:,} tokens → match, 64 workers hold all", LONG, 64, lambda _: 1.0, 10.0),
    _lookup("match-parts", f"{LONG:,} tokens → match, 64 workers hold a part each", LONG, 64, _a_part, 10.0),
    _lookup("match-none", f"{LONG:,} tokens → match, 64 workers hold nothing of it", LONG, 64, lambda _: 0.0, 10.0),
    _lookup("match-32k", f"{SHORT:,} tokens → match, 100 workers hold all", SHORT, 100, lambda _: 1.0, 10.0),
    _many(None),
)
