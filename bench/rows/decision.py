"""What a choice among workers costs when the prompt is long: hashing, lookup, policy, record."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from bench.environments import pinned
from bench.model import OURS, Figures, Row, Run, Sides, Target, Wrong
from bench.process import Subject, quiet_cpu, until
from bench.work import BLOCK, Chain

WORKERS: Final = (8, 64)
PROMPTS: Final = 32
BLOCKS: Final = 1024
SHARES: Final = 8
"""Worker w holds the first (1 + w mod 8) eighths of every prompt."""
DYNAMO: Final = f"dynamo SelectionService {pinned('dynamo', 'ai-dynamo-runtime')}"


def _held(workers: int) -> list[list[Chain]]:
    return [[(seed, BLOCKS * (1 + w % SHARES) // SHARES) for seed in range(PROMPTS)] for w in range(workers)]


def _figures(workers: int, choices: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Every choice must be a worker that holds all of the prompt."""
    for choice in choices:
        if choice[1] % SHARES != SHARES - 1:
            raise Wrong(f"worker {choice[1]} of {workers} was chosen, which holds less than others")
    taken = sorted(choice[0] for choice in choices)
    return {f"p50 {workers}": taken[len(taken) // 2], f"p99 {workers}": taken[len(taken) * 99 // 100]}


@contextmanager
def open_(run: Run) -> Iterator[Sides]:
    asked: dict[str, Any] = {"prompts": [(seed, BLOCKS) for seed in range(PROMPTS)]}
    times = run.pick(20, 3)
    python = run.environment("dynamo")
    ours: dict[int, Subject] = {}
    peers: dict[int, Subject] = {}
    with ExitStack() as stack:
        for workers in WORKERS:
            held = _held(workers)
            chooser = ours[workers] = stack.enter_context(Subject("chooser", python=sys.executable))
            if not chooser.ask("fill", held=held):
                raise Wrong("kvsync-core is not installed: this would measure the pure-Python index")
            quiet = {"DYN_LOG": "error"}  # a line per selection costs as much as the selection
            peer = peers[workers] = stack.enter_context(Subject("selection", python=python, environment=quiet))
            with Subject("publisher", python=sys.executable) as publisher:
                peer.ask("follow", streams=publisher.ask("open", streams=workers))
                until(lambda peer=peer, workers=workers: peer.ask("ready", workers=workers))
                until(lambda publisher=publisher: publisher.ask("subscribed"))
                scripts = [{"kind": "store", "wanted": wanted, "per_batch": 64} for wanted in held]
                publisher.ask("stream", scripts=scripts, rate=4000.0)
                quiet_cpu(peer.pid)
        for subject in (*ours.values(), *peers.values()):
            subject.ask("choose", times=1, **asked)

        def measure_ours() -> Figures:
            figures: dict[str, float] = {}
            for workers, subject in ours.items():
                choices = subject.ask("choose", times=times, **asked)
                whole = (BLOCKS * BLOCK - 1) // BLOCK * BLOCK  # an engine computes the last token anyway
                if any(choice[2] != whole for choice in choices):
                    raise Wrong(f"not every choice was credited with {whole} tokens")
                figures |= _figures(workers, choices)
            return figures

        def measure_peer() -> Figures:
            figures: dict[str, float] = {}
            for workers, subject in peers.items():
                figures |= _figures(workers, subject.ask("choose", times=times, **asked))
            return figures

        yield {OURS: measure_ours, DYNAMO: measure_peer}


ROWS: Final = (
    Row(
        "decision",
        f"a kv-aware decision for a prompt of {BLOCKS:,} blocks",
        f"{PROMPTS} prompts of {BLOCKS * BLOCK:,} tokens in turns; every worker holds the beginning of each, from an "
        "eighth of it to all. Ours is the router of `kvsync serve` in a process without sockets (hashing, lookup, "
        "policy, metrics, decision record, load counted) from packed token ids; the peer is `select` of its Python "
        "binding from a list of ids, which books no load. Both must choose a worker that holds all.",
        tuple(
            target
            for workers in WORKERS
            for target in (
                Target(f"decision, {workers} workers, p50", f"p50 {workers}", "ms", factor=1e3, at_most=0.2),
                Target(f"decision, {workers} workers, p99", f"p99 {workers}", "ms", factor=1e3),
            )
        ),
        open_,
    ),
)
