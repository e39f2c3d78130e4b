"""What is known of the workers for one request: the index's matches, choices just made, answers of late.

What must always hold: nothing here fails. An index that raises costs a choice its quality, never the request, and is
counted and logged. Credit is the index's alone; everything else is expected, a hint.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple, TypeVar

from kvsync.config import RoutingSettings
from kvsync.index.match import Index, Match, Matches, MatchTable, Tier, Trust
from kvsync.routing.board import Board
from kvsync.routing.decision import Decision, Query
from kvsync.routing.expected import Expectation, ExpectedTable, Hope, context_seed, prefix_keys
from kvsync.routing.lookup import holds_beginning, match_prompt, told_apart
from kvsync.routing.observed import ObservedTable
from kvsync.routing.pools import Pool
from kvsync.telemetry.logs import Throttle
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import TokenizedRequest

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

EXPECTED_PROMPTS = 8
"""Of a request with several prompts, so many leave an expectation."""

PLACES = 1_000
"""Addresses of workers that are gone, of which is remembered what they were told."""

_WORST_FIRST: tuple[Trust, ...] = ("none", "partial", "exact")


UNASKED: Final = MatchTable()
"""What an index says that is not asked, knows nobody, or failed."""


class Known(NamedTuple):
    """All that is known for one request."""

    matches: Matches
    """Empty where the index was not asked, knows nobody, or failed."""
    hopes: Mapping[str, Hope]
    """Of choices just made."""
    observed: Mapping[str, Hope]
    """Of answers; they count for workers without trust only."""
    keys: Sequence[Sequence[int]]
    """The prompts' prefixes."""

    def observed_tokens(self, worker: str, match: Match) -> int:
        """What answers let expect of the worker, where nothing better is known of it."""
        hope = self.observed.get(worker)
        return hope.tokens if hope is not None and match.trust == "none" else 0


class Knowledge:
    """Asks all who know something.

    Args:
        index: what caches hold, or ``None`` without KV sync.
        clock: monotonic seconds.
    """

    def __init__(
        self, index: Index | None, settings: RoutingSettings, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._index = index
        self._metrics = metrics
        self._throttle = Throttle(_log, clock=clock)
        self._reannouncing: set[str] = set()
        self._hiding: set[str] = set()
        """Workers that got a request which makes their events say less. The index has its own marks of that; these are
        for when it has the worker anew, as after KV sync was off."""
        self._left: OrderedDict[str, tuple[bool, bool]] = OrderedDict()
        """Of workers that are gone, by address: both of these. One that is taken out of the list and put in again,
        with another setting perhaps, is the process that it was. To keep a note of a process that is gone costs credit;
        to lose one of a process that is there would give too much."""
        self.expected = ExpectedTable(settings.expected_lifetime, clock)
        self.observed = ObservedTable(settings.observed_lifetime, clock)

    def of(self, query: Query) -> Known:
        """All that is known for the request."""
        tokenized = query.tokenized
        if not tokenized.prompts:
            return Known(UNASKED, {}, {}, ())
        keys = _keys(query.model, query.adapter, tokenized)
        # An engine that computes every token whatever it holds gains nothing from any worker.
        if not tokenized.reads_cache:
            return Known(UNASKED, {}, {}, keys)
        return Known(self._match(query), _summed(self.expected.lookup, keys), _summed(self.observed.lookup, keys), keys)

    def board(self, query: Query, known: Known, pool: Pool, turn: int) -> Board:
        """The candidates as a policy sees them."""
        told, rows = known.matches, pool.rows
        expected: dict[int, int] = {}
        shared: dict[int, int] = {}
        found = {row: match for worker, match in told.hits() if (row := rows.get(worker)) is not None}
        for row, match in found.items():
            if doubtful := match.expected:
                expected[row] = doubtful
        doubts, unknown = told.doubts(), pool.unknown(tuple(told))
        trusts = {**unknown, **doubts} if doubts else unknown
        for worker, hope in known.observed.items():
            if (row := rows.get(worker)) is not None and trusts.get(worker) == "none":
                expected[row] = max(expected.get(row, 0), hope.tokens)
        for worker, hope in known.hopes.items():
            if (row := rows.get(worker)) is not None:
                beyond = hope.tokens - (found[row].credit if row in found else 0)
                if beyond > 0:
                    expected[row] = max(expected.get(row, 0), beyond)
                    if hope.pending:
                        shared[row] = beyond
        return Board(
            pool.slots,
            found,
            expected,
            shared,
            pool.load.read(),
            sum([prompt.length for prompt in query.tokenized.prompts]),
            turn,
            trusts,
        )

    def expect(self, worker: str, known: Known) -> list[Expectation]:
        """The worker was chosen: what others may expect of it from now on."""
        return [self.expected.expect(worker, keys) for keys in known.keys if keys]

    def tell(self, model: str, worker: str, tokenized: TokenizedRequest) -> None:
        """Tell the index what this request will do to the worker's events, and no event says."""
        index = self._index
        if index is None:
            return
        if tokenized.reannounces:
            self._reannouncing.add(worker)
            self._ask(model, lambda: index.mark_reannouncing(worker))
        if tokenized.hides_keys:
            self._hiding.add(worker)
            self._ask(model, lambda: index.mark_hidden_keys(worker))

    def introduced(self, worker: str) -> None:
        """The index has the worker anew, and no batch of it yet: tell it what it was told before. Any thread may."""
        if self._index is None:
            return
        if worker in self._reannouncing:
            self._index.mark_reannouncing(worker)
        if worker in self._hiding:
            self._index.mark_hidden_keys(worker)

    def answered(self, decision: Decision, tokenized: TokenizedRequest, cached: int | None) -> None:
        """The worker computed the request.

        Args:
            cached: tokens that the engine said it had, where that can be compared.
        """
        chosen = decision.chosen
        if chosen.match.trust != "none":
            return
        for keys in _keys(decision.model, decision.adapter, tokenized):
            self.observed.answered(chosen.worker, keys, observed=decision.observed, cached=cached)

    def held(self, worker: str, model: str, adapter: str | None, cache_salt: str | None, tokens: bytes) -> bool | None:
        """See :func:`~kvsync.routing.lookup.holds_beginning`; ``None`` without an index."""
        index = self._index
        if index is None:
            return None
        return self._ask(model, lambda: holds_beginning(index, worker, model, adapter, cache_salt, tokens))

    def drop(self, worker: str) -> None:
        """What the worker had cached is gone."""
        self.expected.drop(worker)
        self.observed.drop(worker)

    def came(self, worker: str, address: str) -> None:
        """The worker is new, and may be the process of one that was at this address before."""
        reannouncing, hiding = self._left.pop(address, (False, False))
        if reannouncing:
            self._reannouncing.add(worker)
        if hiding:
            self._hiding.add(worker)

    def gone(self, worker: str, address: str) -> None:
        """The worker itself is gone from the list."""
        self.drop(worker)
        told = worker in self._reannouncing, worker in self._hiding
        if any(told):
            self._left[address] = told
            if len(self._left) > PLACES:
                self._left.popitem(last=False)
        self._reannouncing.discard(worker)
        self._hiding.discard(worker)

    def _match(self, query: Query) -> Matches:
        index = self._index
        if index is None:
            return UNASKED
        salt = query.tokenized.cache_salt
        found = self._ask(
            query.model,
            lambda: [
                match_prompt(index, prompt, query.model, adapter=query.adapter, cache_salt=salt)
                for prompt in query.tokenized.prompts
            ],
        )
        if found is None:
            return UNASKED
        if len(found) == 1:
            return found[0]
        return MatchTable((worker, _sum(found, worker)) for worker in dict.fromkeys(chain.from_iterable(found)))

    def _ask(self, model: str, question: Callable[[], _Answer]) -> _Answer | None:
        """The index's answer; ``None`` when it raised."""
        try:
            return question()
        except Exception as error:
            self._metrics.index_failed(model)
            self._throttle.warning(
                "index", "the index failed, requests for %s go by load: %r", model, error, exc_info=error
            )
            return None


def _keys(model: str, adapter: str | None, tokenized: TokenizedRequest) -> list[list[int]]:
    seed = context_seed(model, adapter, tokenized.cache_salt)
    return [prefix_keys(told_apart(prompt), seed) for prompt in tokenized.prompts[:EXPECTED_PROMPTS]]


def _summed(lookup: Callable[[Sequence[int]], Mapping[str, Hope]], keys: Sequence[Sequence[int]]) -> Mapping[str, Hope]:
    """Summed over the prompts, as the credit is."""
    if len(keys) == 1:
        return lookup(keys[0])
    total: dict[str, Hope] = {}
    for prompt_keys in keys:
        for worker, hope in lookup(prompt_keys).items():
            before = total.get(worker, Hope(0, False))
            total[worker] = Hope(before.tokens + hope.tokens, before.pending or hope.pending)
    return total


def _sum(found: Sequence[Matches], worker: str) -> Match:
    """One worker's matches of several prompts, as one: as far to be trusted as the worst of them."""
    matches = [match[worker] for match in found if worker in match]
    tiers: dict[Tier, int] = {}
    for match in matches:
        for tier, tokens in match.by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + tokens
    trust = min((match.trust for match in matches), key=_WORST_FIRST.index)
    return Match(sum(match.credit for match in matches), sum(match.expected for match in matches), tiers, trust)


__all__ = ["EXPECTED_PROMPTS", "UNASKED", "Knowledge", "Known"]
