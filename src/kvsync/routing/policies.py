"""How a worker is chosen among candidates: one small pure function per policy.

A policy sees a board, the settings and a source of randomness, and nothing else: no clock, no index, no state. It
returns which row it chose and why. The board has at least one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple, TypeAlias

from kvsync.config import RoutingSettings
from kvsync.index.match import Match
from kvsync.routing.board import Board


class Choice(NamedTuple):
    row: int
    scores: Sequence[float]
    """Per row, the figure compared."""
    why: str
    selection: str | None = None
    """``prefix-cache``: AIBrix's name for the way it went (``prefix_match``, ``prefix_match_skipped``,
    ``least_request_fallback``)."""
    imbalanced: bool = False
    """``prefix-cache``: the load was too uneven for affinity."""


Policy: TypeAlias = Callable[[Board, RoutingSettings, Random], Choice]


def saved_tokens(match: Match, settings: RoutingSettings) -> float:
    """What the credit spares, in tokens of prefill: a slower tier spares less."""
    credit, tiers = match.credit, match.by_tier
    cpu, storage = tiers.get("cpu", 0), tiers.get("storage", 0)
    if not cpu and not storage:
        return credit
    return credit - cpu * (1 - settings.cpu_discount) - storage * (1 - settings.storage_discount)


def kv_aware(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """Least work until the first token, in tokens of prefill.

    Work is what is left to compute of this prompt, plus what is queued before it, plus ``decode_cost`` for every
    request that runs there. Queued tokens that are this very prefix (a sibling was just sent there) are not counted as
    a queue as well: this request would have had to compute them anywhere. So siblings gather while that is less work
    than a second prefill elsewhere, and no longer.
    """
    prompt, decode, hope = board.prompt_tokens, settings.decode_cost, settings.expected_discount
    work = []
    for match, expected, queued, shared, running in zip(
        board.matches, board.expected, board.queued, board.shared, board.running, strict=True
    ):
        saved = saved_tokens(match, settings) if match.credit else 0
        left = prompt - saved - hope * expected
        before = queued - shared
        # Conditions, not max(): this is the loop that every request pays for every worker.
        work.append((left if left > 0 else 0.0) + (before if before > 0 else 0) + decode * running)
    row = _least(board, work, rng)
    match = board.matches[row]
    if not prompt:
        why = "the prompt's tokens are unknown: least load"
    elif match.credit or board.expected[row]:
        why = f"least work: of {prompt} prompt tokens {match.credit} credited, {board.expected[row]} expected"
    else:
        why = "least work: nothing of the prompt is cached where the work would be less"
    return Choice(row, work, why)


def prefix_cache(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """AIBrix's rule (its ``prefix-cache``, with its thresholds).

    When the numbers of running requests differ by more than ``imbalance_abs_count``, only the least busy are looked at.
    Of those that match, the longest match (in whole percent), then the least busy, is taken if it runs at most mean +
    factor × sample standard deviation over all candidates; else the next. When none is left: any of the least busy.
    """
    running, rows = board.running, range(len(board))
    low = min(running)
    imbalanced = max(running) - low > settings.imbalance_abs_count
    held = [match.credit + expected for match, expected in zip(board.matches, board.expected, strict=True)]
    percent = [100 * tokens // board.prompt_tokens if board.prompt_tokens else 0 for tokens in held]
    matched = [row for row in rows if held[row] and (not imbalanced or running[row] == low)]
    rng.shuffle(matched)
    matched.sort(key=lambda row: (-percent[row], running[row]))
    limit = fmean(running) + settings.standard_deviation_factor * (stdev(running) if len(board) > 1 else 0.0)
    for row in matched:
        if running[row] <= limit:
            why = f"{percent[row]} % of the prompt matches, {running[row]} running (limit {limit:.1f})"
            return Choice(row, percent, why, "prefix_match", imbalanced)
    row = rng.choice([row for row in rows if running[row] == low])
    if matched:
        return Choice(row, percent, "all that match are too busy: least busy", "prefix_match_skipped", imbalanced)
    why = "the load is uneven: least busy" if imbalanced else "nothing matches: least busy"
    return Choice(row, percent, why, "least_request_fallback", imbalanced)


def least_request(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """Fewest running requests, then fewest queued prefill tokens."""
    return Choice(_least(board, board.running, rng), board.running, "fewest running requests")


def power_of_two(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """The less busy of two picked at random."""
    if len(board) == 1:
        return Choice(0, board.running, "the only candidate")
    pair = rng.sample(range(len(board)), 2)
    row = min(pair, key=lambda row: (board.running[row], board.queued[row]))
    names = " and ".join(board.slots[place].worker for place in sorted(pair))
    return Choice(row, board.running, f"fewer running requests of {names}")


def random(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """Any."""
    return Choice(rng.randrange(len(board)), [0.0] * len(board), "random")


def round_robin(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """One after the other."""
    return Choice(board.turn % len(board), [0.0] * len(board), "its turn")


def _least(board: Board, figures: Sequence[float], rng: Random) -> int:
    """The row of the least figure; of equals the less loaded, then any."""
    best = min(figures)
    rows = [row for row, figure in enumerate(figures) if figure == best]
    if len(rows) == 1:
        return rows[0]
    load = min((board.running[row], board.queued[row]) for row in rows)
    return rng.choice([row for row in rows if (board.running[row], board.queued[row]) == load])


POLICIES: Mapping[str, Policy] = {
    "kv-aware": kv_aware,
    "prefix-cache": prefix_cache,
    "least-request": least_request,
    "power-of-two": power_of_two,
    "random": random,
    "round-robin": round_robin,
}
"""By the name that settings and the ``routing-strategy`` header use."""
CACHE_AWARE = frozenset({"kv-aware", "prefix-cache"})

__all__ = ["CACHE_AWARE", "POLICIES", "Choice", "Policy", "saved_tokens"]
