"""How a worker is chosen among candidates: one small pure function per policy.

A policy sees a board, the settings and a source of randomness, and nothing else: no clock, no index, no state. It
returns which row it chose and why. The board has at least one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple, TypeAlias, overload

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


class Work(Sequence[float]):
    """Per row, the work until the first token, in tokens of prefill: what is left to compute of this prompt, plus what
    is queued before it, plus ``decode_cost`` for every request that runs there.

    Queued tokens that are this very prefix (a sibling was just sent there) are not counted as a queue as well: this
    request would have had to compute them anywhere. So siblings gather while that is less work than a second prefill
    elsewhere, and no longer.

    Figured out when somebody asks: of most rows nobody ever does.
    """

    __slots__ = ("_board", "_settings")

    def __init__(self, board: Board, settings: RoutingSettings) -> None:
        self._board = board
        self._settings = settings

    def __len__(self) -> int:
        return len(self._board)

    @overload
    def __getitem__(self, place: int) -> float: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[float]: ...

    def __getitem__(self, place: int | slice) -> float | Sequence[float]:
        if isinstance(place, slice):
            return [self[row] for row in range(*place.indices(len(self)))]
        return _work(self._board, self._settings, (range(len(self))[place],))[0]


def _work(board: Board, settings: RoutingSettings, rows: Iterable[int]) -> list[float]:
    prompt, hope, decode = board.prompt_tokens, settings.expected_discount, settings.decode_cost
    matches, expected, shared, busy = board.matches, board.expected, board.shared, board.busy
    work = []
    for row in rows:
        left: float = prompt
        match = matches.get(row)
        if match is not None and (saved := match.credit):
            tiers = match.by_tier
            left -= saved if len(tiers) == 1 and "gpu" in tiers else saved_tokens(match, settings)
        if row in expected:
            left -= hope * expected[row]
        before = busy[row]
        if row in shared:
            before = max(0, board.queued[row] - shared[row]) + decode * board.running[row]
        # A condition, not max(): where all workers hold the prompt, every request pays this for every worker.
        work.append((left if left > 0 else 0) + before)
    return work


def kv_aware(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """Least :class:`work <Work>` until the first token."""
    prompt, busy = board.prompt_tokens, board.busy
    # Where nothing is known of the prompt it is all to be computed, so the least of those rows is the least busy one.
    # A row of which something is known never needs more than that: so it does no harm that all rows are looked at.
    known = dict(zip(board.told, _work(board, settings, board.told), strict=True))
    least_busy = min(busy)
    best = min(prompt + least_busy, *known.values()) if known else prompt + least_busy
    rows = [row for row, figure in known.items() if figure == best]
    if prompt + least_busy == best:
        rows += [row for row, figure in enumerate(busy) if figure == least_busy and row not in known]
    row = _less_loaded(board, rows, rng)
    match, expected = board.matches.get(row), board.expected.get(row, 0)
    if not prompt:
        why = "the prompt's tokens are unknown: least load"
    elif match is not None or expected:
        credit = 0 if match is None else match.credit
        why = f"least work: of {prompt} prompt tokens {credit} credited, {expected} expected"
    else:
        why = "least work: nothing of the prompt is cached where the work would be less"
    return Choice(row, Work(board, settings), why)


def prefix_cache(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """AIBrix's rule (its ``prefix-cache``, with its thresholds).

    When the numbers of running requests differ by more than ``imbalance_abs_count``, only the least busy are looked at.
    Of those that match, the longest match (in whole percent), then the least busy, is taken if it runs at most mean +
    factor × sample standard deviation over all candidates; else the next. When none is left: any of the least busy.
    """
    running = board.running
    low = min(running)
    imbalanced = max(running) - low > settings.imbalance_abs_count
    held = {row: board.match(row).credit + board.expected.get(row, 0) for row in board.told}
    percent = [0] * len(board)
    if board.prompt_tokens:
        for row, tokens in held.items():
            percent[row] = 100 * tokens // board.prompt_tokens
    matched = [row for row, tokens in held.items() if tokens and (not imbalanced or running[row] == low)]
    rng.shuffle(matched)
    matched.sort(key=lambda row: (-percent[row], running[row]))
    limit = fmean(running) + settings.standard_deviation_factor * (stdev(running) if len(board) > 1 else 0.0)
    for row in matched:
        if running[row] <= limit:
            why = f"{percent[row]} % of the prompt matches, {running[row]} running (limit {limit:.1f})"
            return Choice(row, percent, why, "prefix_match", imbalanced)
    row = rng.choice([row for row, figure in enumerate(running) if figure == low])
    if matched:
        return Choice(row, percent, "all that match are too busy: least busy", "prefix_match_skipped", imbalanced)
    why = "the load is uneven: least busy" if imbalanced else "nothing matches: least busy"
    return Choice(row, percent, why, "least_request_fallback", imbalanced)


def least_request(board: Board, settings: RoutingSettings, rng: Random) -> Choice:
    """Fewest running requests, then fewest queued prefill tokens."""
    low = min(board.running)
    rows = [row for row, figure in enumerate(board.running) if figure == low]
    return Choice(_less_loaded(board, rows, rng), board.running, "fewest running requests")


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


def _less_loaded(board: Board, rows: Sequence[int], rng: Random) -> int:
    """Of equal rows the one with the fewest running requests, then with the least queued, then any."""
    for column in (board.running, board.queued):
        if len(rows) == 1:
            break
        low = min([column[row] for row in rows])
        rows = [row for row in rows if column[row] == low]
    return rows[0] if len(rows) == 1 else rng.choice(rows)


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

__all__ = ["CACHE_AWARE", "POLICIES", "Choice", "Policy", "Work", "saved_tokens"]
