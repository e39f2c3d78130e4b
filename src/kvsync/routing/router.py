"""A worker for every request, and the record that says why.

What must always hold: a choice never fails because of the index. Whatever is wrong with it (absent, empty, raising),
the request goes by load, and the record and the metrics say so. All calls are made on the event loop: between looking
at the load and counting the choice nothing else runs, so a burst can't pile up on a worker that looked idle to all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from random import Random
from typing import NamedTuple, TypeVar

from kvsync.config import RoutingSettings
from kvsync.discovery.model import Change
from kvsync.index.match import Index, Match, Tier, Trust
from kvsync.routing import filters
from kvsync.routing.board import NOTHING, Board, Scores
from kvsync.routing.decision import Decision, Query
from kvsync.routing.errors import BadPolicy, NoReadyEngine, NoSuchModel, NoTarget, RoutingError
from kvsync.routing.expected import ExpectedTable, Hope, context_seed, prefix_keys
from kvsync.routing.fleet import Fleet, Slot
from kvsync.routing.load import Cell, LoadTable, Ticket
from kvsync.routing.lookup import holds_beginning, match_prompt, told_apart
from kvsync.routing.policies import CACHE_AWARE, POLICIES, Choice
from kvsync.routing.records import Records
from kvsync.routing.retries import RetryBudget
from kvsync.telemetry.logs import Throttle
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import TokenizedRequest

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

LOAD_ONLY = "load-only"
EXPECTED_PROMPTS = 8
"""Of a request with several prompts, so many leave an expectation."""

_WORST_FIRST: tuple[Trust, ...] = ("none", "partial", "exact")


class _Pool(NamedTuple):
    """The workers of one model and adapter, as of one version of the fleet."""

    version: int
    slots: tuple[Slot, ...]
    cells: tuple[Cell, ...]


class RoutedTicket:
    """The load of one choice, and the count of how it ended."""

    __slots__ = ("_metrics", "_open", "_ticket", "_worker")

    def __init__(self, ticket: Ticket, worker: str, metrics: Metrics) -> None:
        self._ticket = ticket
        self._worker = worker
        self._metrics = metrics
        self._open = True

    def first_byte(self) -> None:
        """The answer's first byte came."""
        self._ticket.first_byte()

    def end(self, outcome: str) -> None:
        """The try ended in whatever way. Later calls change nothing."""
        if self._open:
            self._open = False
            self._ticket.end(outcome)
            self._metrics.tried(self._worker, outcome)


class Router:
    """Chooses workers.

    Args:
        index: what caches hold, or ``None`` without KV sync.
        fleet: who serves what; kept up to date by :meth:`apply`.
        loads: what workers are busy with.
        settings: thresholds and the default policy.
        metrics: where choices are counted.
        clock: monotonic seconds.
        rng: decides ties.
        wall: seconds since the epoch, for the records.
    """

    def __init__(
        self,
        index: Index | None,
        fleet: Fleet,
        loads: LoadTable,
        settings: RoutingSettings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._index = index
        self._fleet = fleet
        self._loads = loads
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._rng = rng if rng is not None else Random()
        self._wall = wall
        self._expected = ExpectedTable(settings.expected_lifetime, clock)
        self._records = Records(settings.decisions)
        self._retries = RetryBudget(clock)
        self._pools: dict[tuple[str, str | None], _Pool] = {}
        self._turns: dict[str, int] = {}
        self._throttle = Throttle(_log, clock=clock)
        metrics.at_scrape(self._show_load)

    def apply(self, change: Change) -> None:
        """The fleet changed. What was known of a worker that is gone goes with it."""
        self._fleet.apply(change)
        self._pools.clear()
        for worker in map(change.engine.worker, change.engine.ranks):
            if change.kind == "gone":
                self._loads.drop(worker)
                self._expected.drop(worker)
                self._metrics.drop_worker(worker)
            else:
                self._metrics.add_worker(worker)

    def get(self, request_id: str) -> Decision | None:
        """The last decision for a request, while it is kept."""
        return self._records.get(request_id)

    def held(self, worker: str, model: str, adapter: str | None, cache_salt: str | None, tokens: bytes) -> bool | None:
        """See :func:`~kvsync.routing.lookup.holds_beginning`; ``None`` without an index."""
        index = self._index
        if index is None:
            return None
        return self._ask(model, lambda: holds_beginning(index, worker, model, adapter, cache_salt, tokens))

    def may_retry(self) -> bool:
        """Whether the budget allows one more retry; ``True`` counts it (:mod:`kvsync.routing.retries`)."""
        return self._retries.take()

    def choose(self, query: Query) -> tuple[Decision, RoutedTicket]:
        """Pick a worker and count its load from this moment on.

        A second try is a new choice, with the workers already tried in ``query.exclude``.

        Raises:
            RoutingError: nobody can serve the request, or its headers make no sense.
        """
        begun = time.perf_counter()
        if not query.exclude:
            self._retries.request()
        try:
            policy = self._policy(query)
            slots, cells, resting = self._candidates(query)
        except RoutingError as error:
            self._metrics.refused(error.reason)
            raise
        tokenized = query.tokenized
        matches, hopes, keys = self._knowledge(query)
        board = self._board(query, slots, cells, matches or {}, hopes)
        choice = POLICIES[policy](board, self._settings, self._rng)
        chosen = board[choice.row]
        worker = chosen.worker
        uncached = max(0, board.prompt_tokens - chosen.match.credit - chosen.expected)
        expecting = [self._expected.expect(worker, prompt_keys) for prompt_keys in keys if prompt_keys]
        ticket = RoutedTicket(self._loads.reserve(worker, uncached, expecting), worker, self._metrics)
        self._tell_index(worker, tokenized)
        mode = chosen.match.trust if matches and policy in CACHE_AWARE else LOAD_ONLY
        extra: dict[str, object] = {}
        if query.exclude:
            extra["excluded"] = sorted(query.exclude)
        if resting:
            extra["resting"] = resting
        decision = Decision(
            request_id=query.request_id,
            model=query.model,
            adapter=query.adapter,
            policy=policy,
            chosen=chosen,
            candidates=board,
            scores=Scores(slots, choice.scores),
            why=choice.why,
            prompt_tokens=board.prompt_tokens,
            mode=mode,
            tokenized=_without_prompts(tokenized),
            time=self._wall(),
            extra=extra,
        )
        self._records.add(decision)
        self._count(decision, choice, time.perf_counter() - begun)
        return decision, ticket

    # -- who can be chosen -------------------------------------------------------------------------------------------

    def _policy(self, query: Query) -> str:
        if query.policy is None:
            return self._settings.policy
        if query.policy not in POLICIES:
            raise BadPolicy(query.policy)
        return query.policy

    def _candidates(self, query: Query) -> tuple[Sequence[Slot], Sequence[Cell], list[str]]:
        """The slots and their load, and the workers passed over because they could not be reached lately."""
        pool = self._pool(query.model, query.adapter)
        if not pool.slots:
            known = self._fleet.resolve(query.model) is not None
            raise NoReadyEngine(query.adapter or query.model) if known else NoSuchModel(query.adapter or query.model)
        slots: Sequence[Slot] = pool.slots
        cells: Sequence[Cell] = pool.cells
        if query.exclude or query.label_filter:
            selector = filters.parse(query.label_filter) if query.label_filter else ()
            rows = [
                row
                for row, slot in enumerate(slots)
                if slot.worker not in query.exclude and filters.matches(selector, slot.engine.labels)
            ]
            if not rows:
                raise NoTarget(query.adapter or query.model)
            slots, cells = _rows(slots, rows), _rows(cells, rows)
        now = self._clock()
        rows = [row for row, cell in enumerate(cells) if cell.rests_until <= now]
        # When all of them rest, resting helps nobody: any may have come back.
        if not rows or len(rows) == len(cells):
            return slots, cells, []
        awake = set(rows)
        resting = [slot.worker for row, slot in enumerate(slots) if row not in awake]
        return _rows(slots, rows), _rows(cells, rows), resting

    def _pool(self, model: str, adapter: str | None) -> _Pool:
        key = (model, adapter)
        pool = self._pools.get(key)
        if pool is None or pool.version != self._fleet.version:
            slots = self._fleet.slots(model, adapter)
            pool = _Pool(self._fleet.version, slots, tuple(self._loads.cell(slot.worker) for slot in slots))
            if slots:  # names that nobody serves come from clients and would fill the memory
                self._pools[key] = pool
        return pool

    # -- what is known of them ---------------------------------------------------------------------------------------

    def _knowledge(
        self, query: Query
    ) -> tuple[Mapping[str, Match] | None, Mapping[str, Hope], Sequence[Sequence[int]]]:
        """The index's matches (``None``: none were had), what choices just made let expect, and the prompts' keys."""
        tokenized = query.tokenized
        prompts = tokenized.prompts
        if not prompts:
            return None, {}, ()
        seed = context_seed(query.model, query.adapter, tokenized.cache_salt)
        keys = [prefix_keys(told_apart(prompt), seed) for prompt in prompts[:EXPECTED_PROMPTS]]
        # An engine that computes every token whatever it holds gains nothing from any worker.
        if not tokenized.reads_cache:
            return None, {}, keys
        return self._match(query), self._hopes(keys), keys

    def _hopes(self, keys: Sequence[Sequence[int]]) -> Mapping[str, Hope]:
        """Summed over the prompts, as the credit is."""
        if len(keys) == 1:
            return self._expected.lookup(keys[0])
        total: dict[str, Hope] = {}
        for prompt_keys in keys:
            for worker, hope in self._expected.lookup(prompt_keys).items():
                before = total.get(worker, Hope(0, False))
                total[worker] = Hope(before.tokens + hope.tokens, before.pending or hope.pending)
        return total

    def _match(self, query: Query) -> Mapping[str, Match] | None:
        index = self._index
        if index is None:
            return None
        salt = query.tokenized.cache_salt
        found = self._ask(
            query.model,
            lambda: [
                match_prompt(index, prompt, query.model, adapter=query.adapter, cache_salt=salt)
                for prompt in query.tokenized.prompts
            ],
        )
        if found is None or len(found) == 1:
            return None if found is None else found[0]
        return {worker: _sum(found, worker) for worker in dict.fromkeys(chain.from_iterable(found))}

    def _ask(self, model: str, question: Callable[[], _Answer]) -> _Answer | None:
        """The index's answer. An index that raises costs the answer's quality, never the request."""
        try:
            return question()
        except Exception as error:
            self._metrics.index_failed(model)
            self._throttle.warning(
                "index", "the index failed, requests for %s go by load: %r", model, error, exc_info=error
            )
            return None

    def _tell_index(self, worker: str, tokenized: TokenizedRequest) -> None:
        """What this request will do to the worker's events, and no event says."""
        index = self._index
        if index is None:
            return
        if tokenized.reannounces:
            self._ask(worker, lambda: index.mark_reannouncing(worker))
        if tokenized.hides_keys:
            self._ask(worker, lambda: index.mark_hidden_keys(worker))

    def _board(
        self,
        query: Query,
        slots: Sequence[Slot],
        cells: Sequence[Cell],
        matches: Mapping[str, Match],
        hopes: Mapping[str, Hope],
    ) -> Board:
        found = [matches.get(slot.worker, NOTHING) for slot in slots] if matches else [NOTHING] * len(slots)
        expected = [match.expected for match in found]
        shared = [0] * len(slots)
        if hopes:
            for row, slot in enumerate(slots):
                if hope := hopes.get(slot.worker):
                    beyond = max(0, hope.tokens - found[row].credit)
                    expected[row] = max(expected[row], beyond)
                    shared[row] = beyond if hope.pending else 0
        turn = self._turns[query.model] = self._turns.get(query.model, -1) + 1
        return Board(
            slots,
            found,
            expected,
            shared,
            [cell.running for cell in cells],
            [cell.queued for cell in cells],
            sum(prompt.length for prompt in query.tokenized.prompts),
            turn,
        )

    # -- what is said of it ------------------------------------------------------------------------------------------

    def _count(self, decision: Decision, choice: Choice, seconds: float) -> None:
        model, mode = decision.model, decision.mode
        credit = decision.chosen.match.credit
        self._metrics.decided(model, decision.policy, mode, seconds, decision.prompt_tokens, credit)
        if choice.selection is not None:
            self._metrics.selected(model, choice.selection, mode, choice.imbalanced)

    def _show_load(self) -> None:
        running = 0
        for worker, load in self._loads.snapshot().items():
            self._metrics.load(worker, load.running, load.queued_prefill_tokens)
            running += load.running
        self._metrics.in_flight(running)


_Item = TypeVar("_Item")


def _rows(column: Sequence[_Item], rows: Sequence[int]) -> list[_Item]:
    return [column[row] for row in rows]


def _sum(found: Sequence[Mapping[str, Match]], worker: str) -> Match:
    """One worker's matches of several prompts, as one: as far to be trusted as the worst of them."""
    matches = [match[worker] for match in found if worker in match]
    tiers: dict[Tier, int] = {}
    for match in matches:
        for tier, tokens in match.by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + tokens
    trust = min((match.trust for match in matches), key=_WORST_FIRST.index)
    return Match(sum(match.credit for match in matches), sum(match.expected for match in matches), tiers, trust)


def _without_prompts(tokenized: TokenizedRequest) -> TokenizedRequest:
    return TokenizedRequest(
        prompts=(),
        source=tokenized.source,
        reason=tokenized.reason,
        cache_salt=None,
        reads_cache=tokenized.reads_cache,
        hides_keys=tokenized.hides_keys,
        reannounces=tokenized.reannounces,
        comparable=tokenized.comparable,
        sample=tokenized.sample,
    )


__all__ = ["LOAD_ONLY", "RoutedTicket", "Router"]
