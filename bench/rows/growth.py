"""What must not grow: memory while blocks come and go and the number of live ones stays the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from bench.followers import DYNAMO, Dynamo, Follower, Kvsync, following
from bench.model import OURS, Figures, Row, Run, Sides, Target, Wrong
from bench.process import Subject, all_of, quiet_cpu, until
from bench.rows.index import RADIX, begin, ours, radix
from bench.rows.memory import feed
from bench.work import Chain

WORKERS = 4
LENGTH = 1000
"""Blocks of a prompt."""
LIVE = 25
"""Prompts that each worker holds: 100,000 blocks in all."""
PER_BATCH = 16
EVICTIONS = 3_000_000
WARM_UP = 300_000
"""Evictions before the first look: buffers and tables have their size then."""
ROUNDS = 10
WARM_UP_ROUNDS = 2
PART = 2
"""Prompts of each worker that are published at a time: what waits in the subject's memory would be taken for growth."""
LOOKS = 3
"""Parts in which the evictions are told, with a look at the memory after each."""

Script: TypeAlias = Mapping[str, Any]
Tell: TypeAlias = Callable[[Sequence[Script]], None]
"""Have a subject learn all that scripts tell, one for each worker."""
Memory: TypeAlias = Callable[[], int]
Held: TypeAlias = Callable[[Sequence[Chain]], list[dict[str, int]]]
Life: TypeAlias = Callable[[Tell, Memory, Held, Run], dict[str, float]]
"""What a fleet goes through, and what that does to a subject's memory."""


def _base(worker: int) -> int:
    return 1 + LIVE + worker * 1_000_000


def _fill() -> list[Script]:
    return [
        {
            "kind": "store",
            "wanted": [(_base(worker) - LIVE + n, LENGTH) for n in range(LIVE)],
            "per_batch": PER_BATCH,
        }
        for worker in range(WORKERS)
    ]


def _churn(done: int, evictions: int) -> list[Script]:
    """Evictions after the first ``done`` ones, counted over all workers."""
    before, count = done // WORKERS // LENGTH, evictions // WORKERS // LENGTH
    return [
        {
            "kind": "churn",
            "first": _base(worker) + before,
            "count": count,
            "length": LENGTH,
            "per_batch": PER_BATCH,
            "live": LIVE * LENGTH,
        }
        for worker in range(WORKERS)
    ]


def _evict(tell: Tell, memory: Memory, held: Held, run: Run) -> dict[str, float]:
    evictions = run.pick(EVICTIONS, 60_000)
    warm_up = run.pick(WARM_UP, 60_000)
    empty = memory()
    tell(_fill())
    tell(_churn(0, warm_up))
    start = now = memory()
    found = {"empty": float(empty), "start": float(start)}
    for look in range(LOOKS):
        tell(_churn(warm_up + look * evictions // LOOKS, evictions // LOOKS))
        now = memory()
        found[f"look_{look + 1}"] = now
    for worker in range(WORKERS):
        last = _base(worker) + (warm_up + evictions) // WORKERS // LENGTH
        _verify(held, worker, range(last - LIVE, last), gone=range(_base(worker), _base(worker) + 3))
    return found | {
        "per_eviction": (now - start) / evictions,
        "of_process": (now - start) / start,
        "of_index": (now - start) / (start - empty),
    }


def _clear(tell: Tell, memory: Memory, held: Held, run: Run) -> dict[str, float]:
    """Cleared and filled again, each time with other blocks."""
    empty = start = now = memory()
    tell(_fill())
    found = {"empty": float(empty), "filled": float(memory())}
    rounds = run.pick(ROUNDS, 2)
    for number in range(1, WARM_UP_ROUNDS + rounds + 1):
        fresh = [[(_base(worker) + number * LIVE + n, LENGTH) for n in range(LIVE)] for worker in range(WORKERS)]
        tell([{"kind": "clears", "wanted": wanted, "per_batch": PER_BATCH} for wanted in fresh])
        now = memory()
        if number == WARM_UP_ROUNDS:
            start = now
        found[f"round_{number}"] = now
    for worker in range(WORKERS):
        first = _base(worker) + (WARM_UP_ROUNDS + rounds) * LIVE
        _verify(held, worker, range(first, first + LIVE), gone=range(first - LIVE, first - LIVE + 3))
    return found | {
        "per_cleared": (now - start) / (rounds * WORKERS * LIVE * LENGTH),
        "of_process": (now - start) / start,
        "of_index": (now - start) / (start - empty),
    }


def _verify(held: Held, worker: int, live: Sequence[int], gone: Sequence[int]) -> None:
    answers = held([(number, LENGTH) for number in (*live, *gone)])
    expected = [*({f"w{worker}": LENGTH} for _ in live), *({} for _ in gone)]
    if answers != expected:
        raise Wrong(f"worker {worker}: of what it holds and does not hold {answers[:3]} … {answers[-3:]} is known")


def _in_process(life: Life) -> Callable[[Run], Any]:
    @contextmanager
    def open_(run: Run) -> Iterator[Sides]:
        python = run.environment("dynamo")

        def side(make: Callable[[], Subject], form: str) -> Callable[[], Figures]:
            def one() -> Figures:
                with make() as subject:
                    begin(subject, WORKERS)
                    return life(
                        lambda scripts: feed(subject, scripts, form),
                        subject.memory,
                        lambda chains: subject.ask("held", chains=chains),
                        run,
                    )

            return one

        yield {OURS: side(ours, "vllm"), RADIX: side(lambda: radix(python), "ready")}

    return open_


def _through_zmq(life: Life) -> Callable[[Run], Any]:
    @contextmanager
    def open_(run: Run) -> Iterator[Sides]:
        python = run.environment("dynamo")
        publisher = Subject("publisher", python=sys.executable)

        def side(make: Callable[[], Follower]) -> Callable[[], Figures]:
            def one() -> Figures:
                sent = 0
                with make() as follower, following(follower, [publisher], WORKERS):

                    def tell(scripts: Sequence[Script]) -> None:
                        for part in zip(*(_parts(one) for one in scripts), strict=True):
                            publish(part)
                        quiet_cpu(follower.pid)

                    def publish(scripts: Sequence[Script]) -> None:
                        nonlocal sent
                        sent += publisher.ask("stream", scripts=scripts)["messages"]
                        marks = [_last(one) for one in scripts]
                        until(lambda: follower.held(marks) == [{f"w{w}": LENGTH} for w in range(WORKERS)])

                    found = life(tell, follower.memory, follower.held, run)
                    follower.check([sent // WORKERS] * WORKERS)
                    return found

            return one

        with all_of([publisher]):
            yield {OURS: side(Kvsync), DYNAMO: side(lambda: Dynamo(python))}

    return open_


def _parts(script: Script) -> Iterator[Script]:
    """The same in several scripts, one after the other."""
    if script["kind"] == "churn":
        for at in range(0, script["count"], PART):
            yield {**script, "first": script["first"] + at, "count": min(PART, script["count"] - at)}
    else:
        for at in range(0, len(script["wanted"]), PART):
            kind = script["kind"] if at == 0 else "store"  # a clear comes first
            yield {**script, "kind": kind, "wanted": script["wanted"][at : at + PART]}


def _last(script: Mapping[str, Any]) -> Chain:
    """The last prompt that a script stores."""
    if script["kind"] == "churn":
        return script["first"] + script["count"] - 1, LENGTH
    last: Chain = script["wanted"][-1]
    return last


EVICT = (
    f"{WORKERS} workers with {LIVE * LENGTH:,} blocks each store new prompts, and evict in the same batches what is "
    f"oldest, block by block. Memory (anonymous, of the process) after {WARM_UP:,} evictions and after {EVICTIONS:,} "
    "more. At the end everything live is looked up, and some of what was evicted."
)
CLEAR = (
    f"{WORKERS} workers with {LIVE * LENGTH:,} blocks each clear their caches (AllBlocksCleared) and store other "
    f"prompts. Memory after {WARM_UP_ROUNDS} times and after {ROUNDS} more. At the end everything live is looked up, "
    "and some of what was cleared."
)
IN_PROCESS = "The index alone, fed by another process; the share is of what the index itself has."
ZMQ = (
    "Through real ZMQ into the process that follows, in parts that are drained each (so that nothing waits in memory); "
    "dynamo.indexer with its default of 4 threads. The share is of the whole process's memory."
)


def _row(name: str, title: str, method: str, per: str, of: str, open_: Callable[[Run], Any], figure: str) -> Row:
    return Row(
        name=name,
        title=title,
        method=method,
        targets=(
            Target(f"{title}: growth of the {of}", f"of_{of}", "%", factor=100, at_most=5.0, ratios=False),
            Target(f"growth per {per} block", figure, "B", ratios=False, aside=True),
        ),
        open=open_,
        repeats=1 if of == "index" else 2,  # in process it is the same each time
    )


ROWS: Sequence[Row] = (
    _row(
        "evictions",
        "memory after 3 M evictions, index alone",
        f"{EVICT} {IN_PROCESS}",
        "evicted",
        "index",
        _in_process(_evict),
        "per_eviction",
    ),
    _row(
        "evictions-zmq",
        "memory after 3 M evictions, through ZMQ",
        f"{EVICT} {ZMQ}",
        "evicted",
        "process",
        _through_zmq(_evict),
        "per_eviction",
    ),
    _row(
        "clears",
        "memory after ten clears of 100,000 blocks, index alone",
        f"{CLEAR} {IN_PROCESS}",
        "cleared",
        "index",
        _in_process(_clear),
        "per_cleared",
    ),
    _row(
        "clears-zmq",
        "memory after ten clears of 100,000 blocks, through ZMQ",
        f"{CLEAR} {ZMQ}",
        "cleared",
        "process",
        _through_zmq(_clear),
        "per_cleared",
    ),
)
