"""One workload through the gateway, turn by turn, and the figures that come of it.

Turns are sequential. Before each, the gateway has applied every event that the engines published for the turns before
(:func:`streams.catch_up` says what there is, the admin port says what was applied), so what the gateway then credits
and what the engine then reports can be compared, token for token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .client import Answer
from .oracle import Cache
from .streams import Stream, catch_up
from .workload import Turn, Workload


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gateway's decision record says of one request."""

    worker: str
    credit: int
    trust: str
    """How far the index was trusted for that worker: ``exact``, ``partial`` or ``none``."""
    source: str
    """Where the prompt's tokens came from: ``ids``, ``remote``, ``local``, ``cache``."""


class Target(Protocol):
    """The gateway, as far as a run needs it."""

    def send(self, turn: Turn, policy: str) -> tuple[Answer, Decision]: ...

    def wait_applied(self, last: Mapping[str, int]) -> None:
        """Return when the gateway has applied every worker's events up to that sequence number."""


@dataclass(slots=True)
class Figures:
    """What one run showed. All counts are of requests unless they say tokens."""

    scenario: str
    policy: str
    requests: int = 0
    streamed: int = 0
    hits: int = 0
    """Answers with cached tokens."""
    credit_equal: int = 0
    """The credit was exactly what the engine then reported. Every request of the workload can be compared."""
    events_equal: int = 0
    """What the engine reported was exactly what its own events say (:mod:`oracle`)."""
    followable: int = 0
    """Some worker held a prefix of the prompt."""
    followed: int = 0
    """… and the request went to one that held the longest."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    longest_tokens: int = 0
    """Cached tokens, had each request gone to the worker that held the longest prefix."""
    by_worker: Counter[str] = field(default_factory=Counter)
    trusts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    """Blocks that left a cache: how hard the caches were pressed."""
    differences: list[str] = field(default_factory=list)
    """A line for each answer that was not as predicted."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def run(
    scenario: str,
    policy: str,
    workload: Workload,
    requests: int,
    target: Target,
    streams: Mapping[str, Stream],
    caches: Mapping[str, Cache],
) -> Figures:
    """Send ``requests`` turns of ``workload`` by ``policy``. ``caches`` live on from run to run, like the engines'."""
    figures = Figures(scenario, policy)
    settle(target, streams, caches, figures)
    for number in range(1, requests + 1):
        turn = workload.next_turn()
        answer, decision = target.send(turn, policy)
        held = {worker: cache.cached(answer.prompt_ids, turn.salt) for worker, cache in caches.items()}
        judge(figures, number, turn, answer, decision, held)
        moved = settle(target, streams, caches, figures)
        assert moved <= {decision.worker}, f"turn {number} was said to go to {decision.worker}, but {moved} had events"
        workload.answered(turn, answer.text, list(answer.token_ids), answer.prompt_tokens)
    return figures


def settle(target: Target, streams: Mapping[str, Stream], caches: Mapping[str, Cache], figures: Figures) -> set[str]:
    """Wait until gateway and oracle have applied all events there are; the workers that had new ones."""
    news = catch_up(streams)
    for worker, batches in news.items():
        caches[worker].apply(batches)
        figures.evicted += sum(event["type"] == "BlockRemoved" for batch in batches for event in batch)
    target.wait_applied({worker: stream.last for worker, stream in streams.items()})
    return {worker for worker, batches in news.items() if batches}


def judge(
    figures: Figures, number: int, turn: Turn, answer: Answer, decision: Decision, held: Mapping[str, int]
) -> None:
    """Count one answer. ``held`` is what each worker held of the prompt before the request."""
    longest = max(held.values())
    figures.requests += 1
    figures.streamed += bool(turn.body.get("stream"))
    figures.hits += answer.cached_tokens > 0
    figures.credit_equal += decision.credit == answer.cached_tokens
    figures.events_equal += held[decision.worker] == answer.cached_tokens
    figures.followable += longest > 0
    figures.followed += longest > 0 and held[decision.worker] == longest
    figures.prompt_tokens += answer.prompt_tokens
    figures.cached_tokens += answer.cached_tokens
    figures.longest_tokens += longest
    figures.by_worker[decision.worker] += 1
    figures.trusts[decision.trust] += 1
    figures.sources[decision.source] += 1
    if not decision.credit == held[decision.worker] == answer.cached_tokens:
        figures.differences.append(
            f"turn {number} {turn.path} to {decision.worker}: {answer.cached_tokens} of {answer.prompt_tokens} tokens "
            f"cached, credited {decision.credit}, held by its events {held[decision.worker]}"
        )


def table(runs: Sequence[Figures]) -> list[str]:
    """The figures as lines of text, one run each under a heading."""
    heading = ["scenario", "policy", "requests", "streamed", "hits>0", "credit=reported", "events=reported", "followed"]
    rows = [[*heading, "hit-rate", "best", "evicted", "tokens-from"]]
    for run in runs:
        exact = [f"{equal}/{run.requests}" for equal in (run.credit_equal, run.events_equal)]
        rates = [f"{tokens / run.prompt_tokens:.1%}" for tokens in (run.cached_tokens, run.longest_tokens)]
        counts = [str(count) for count in (run.requests, run.streamed, run.hits)]
        followed = f"{run.followed}/{run.followable}"
        sources = ",".join(f"{source}:{count}" for source, count in run.sources.most_common())
        rows.append([run.scenario, run.policy, *counts, *exact, followed, *rates, str(run.evicted), sources])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
