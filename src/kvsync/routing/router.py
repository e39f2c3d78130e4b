"""A worker for every request, and the record that says why.

What must always hold: a choice never fails because of what is known, or of a fault in here. Whatever is wrong (an index
that raises, a policy that does), the request goes by load, and the record and the metrics say so. All calls are made on
the event loop: between looking at the load and counting the choice nothing else runs, so a burst can't pile up on a
worker that looked idle to all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from random import Random

from kvsync.config import RoutingSettings
from kvsync.discovery.model import Change
from kvsync.index.match import Index
from kvsync.routing.board import NOTHING, Scores
from kvsync.routing.breaker import Attempt, Breakers, BreakerState
from kvsync.routing.decision import Candidate, Decision, Load, Query
from kvsync.routing.errors import BadPolicy, NoTarget, RoutingError
from kvsync.routing.fleet import Fleet
from kvsync.routing.knowledge import UNASKED, Knowledge, Known
from kvsync.routing.load import LoadTable, Ticket
from kvsync.routing.modes import Mode
from kvsync.routing.policies import CACHE_AWARE, POLICIES, Choice
from kvsync.routing.pools import Pools, fitting
from kvsync.routing.records import Records
from kvsync.routing.retries import RetryBudget
from kvsync.telemetry.logs import Throttle
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import TokenizedRequest

_log = logging.getLogger(__name__)


class RoutedTicket:
    """The load of one choice, what it teaches of its worker's health, and the count of how it ended."""

    __slots__ = ("_attempt", "_metrics", "_open", "_ticket", "_worker")

    def __init__(self, ticket: Ticket, attempt: Attempt, worker: str, metrics: Metrics) -> None:
        self._ticket = ticket
        self._attempt = attempt
        self._worker = worker
        self._metrics = metrics
        self._open = True

    def first_byte(self) -> None:
        """The answer's first byte came."""
        self._ticket.first_byte()
        self._attempt.first_byte()

    def end(self, outcome: str) -> None:
        """The try ended in whatever way. Later calls change nothing."""
        if self._open:
            self._open = False
            self._ticket.end()
            self._attempt.end(outcome)
            self._metrics.tried(self._worker, outcome)


class Router:
    """Chooses workers.

    Args:
        index: what caches hold, or ``None`` without KV sync.
        fleet: who serves what; kept up to date by :meth:`apply`.
        loads: what workers are busy with.
        settings: thresholds and the default policy.
        metrics: where choices are counted.
        asleep: the workers whose engines are known to sleep now.
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
        asleep: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._fleet = fleet
        self._loads = loads
        self._settings = settings
        self._metrics = metrics
        self._rng = rng if rng is not None else Random()
        self._wall = wall
        self._knowledge = Knowledge(index, settings, metrics, clock)
        self._breakers = Breakers(settings.breaker_failures, clock)
        self._retries = RetryBudget(clock)
        self._records = Records(settings.decisions)
        self._pools = Pools(fleet, loads, self._breakers, asleep)
        self._workers: set[str] = set()
        self._turns: dict[str, int] = {}
        self._throttle = Throttle(_log, clock=clock)
        self.held = self._knowledge.held
        self.introduced = self._knowledge.introduced
        metrics.at_scrape(self._show)

    def apply(self, change: Change) -> None:
        """The fleet changed. What was known of a worker that is gone goes with it."""
        self._fleet.apply(change)
        engine = change.engine
        gone = change.kind == "gone"
        for rank in engine.ranks:
            worker, address = engine.worker(rank), f"{engine.url} {rank}"
            if gone:
                self._workers.discard(worker)
                self._loads.drop(worker)
                self._knowledge.gone(worker, address)
                self._metrics.drop_worker(worker)
            else:
                self._workers.add(worker)
                self._knowledge.came(worker, address)
                self._metrics.add_worker(worker)
        if gone:
            self._breakers.drop(engine)

    def get(self, request_id: str) -> Decision | None:
        """The last decision for a request, while it is kept."""
        return self._records.get(request_id)

    def breakers(self) -> Mapping[str, BreakerState]:
        """Whether workers rest after failures; those that are absent never failed."""
        return self._breakers.states()

    def observes(self, worker: str) -> bool:
        """Whether answers of late tell something of the worker's cache."""
        return self._knowledge.observed.knows(worker)

    def forget(self, worker: str) -> None:
        """The worker's cache is not what it was."""
        self._knowledge.drop(worker)

    def answered(self, decision: Decision, tokenized: TokenizedRequest, cached: int | None) -> None:
        """The chosen worker computed the request; ``cached``: the tokens that it said it had, if that can be known."""
        if decision.chosen.worker in self._workers:
            self._knowledge.answered(decision, tokenized, cached)

    def may_retry(self) -> bool:
        """Whether the budget allows one more retry; ``True`` counts it (:mod:`kvsync.routing.retries`)."""
        return self._retries.take(self._loads.total())

    def choose(self, query: Query) -> tuple[Decision, RoutedTicket]:
        """Pick a worker and count its load from this moment on.

        A second try is a new choice, with the workers already tried in ``query.exclude``.

        Raises:
            RoutingError: nobody can serve the request, or its headers make no sense.
        """
        if not query.exclude:
            self._retries.request()
        try:
            try:
                return self._choose(query)
            except RoutingError:
                raise
            except Exception as error:
                self._failed("choosing a worker failed, the request goes by load", error)
                return self._choose_plainly(query)
        except RoutingError as error:
            self._metrics.refused(error.reason)
            raise

    def _choose(self, query: Query) -> tuple[Decision, RoutedTicket]:
        """Whatever may fail comes before the load is counted: what raises leaves nothing behind."""
        begun = time.perf_counter()
        policy = self._policy(query)
        pool, extra = self._pools.of(query)
        known = self._knowledge.of(query)
        turn = self._turns[query.model] = self._turns.get(query.model, -1) + 1
        board = self._knowledge.board(query, known, pool, turn)
        choice = POLICIES[policy](board, self._settings, self._rng)
        worker = pool.slots[choice.row].worker
        # What the index said of it, and not only what was weighed: the audit wants to know as of when.
        chosen = board.candidate(choice.row, known.matches.get(worker, NOTHING))
        if query.exclude:
            extra["excluded"] = sorted(query.exclude)
        decision = Decision(
            request_id=query.request_id,
            model=query.model,
            adapter=query.adapter,
            policy=policy,
            chosen=chosen,
            candidates=board,
            scores=Scores(pool.slots, choice.scores),
            why=choice.why,
            prompt_tokens=board.prompt_tokens,
            mode=self._mode(query, policy, chosen),
            tokenized=_without_prompts(query.tokenized),
            time=self._wall(),
            observed=known.observed_tokens(worker, chosen.match),
            extra=extra,
        )
        self._note(decision, choice, time.perf_counter() - begun)
        return decision, self._reserve(decision, query, known)

    def _choose_plainly(self, query: Query) -> tuple[Decision, RoutedTicket]:
        """The fewest running requests, by as little of this module as can be."""
        begun = time.perf_counter()
        slots = self._fleet.slots(query.model, query.adapter)
        rows = fitting(query, slots)
        if not rows:
            raise NoTarget(query.adapter or query.model)
        loads = self._loads.snapshot()
        load, slot = min(
            ((loads.get(slots[row].worker, Load()), slots[row]) for row in rows),
            key=lambda pair: (pair[0].running, pair[0].queued_prefill_tokens),
        )
        chosen = Candidate(slot.worker, slot.engine, slot.rank, NOTHING, 0, load)
        decision = Decision(
            request_id=query.request_id,
            model=query.model,
            adapter=query.adapter,
            policy="least-request",
            chosen=chosen,
            candidates=(chosen,),
            scores={slot.worker: load.running},
            why="choosing failed (the log says why): fewest running requests",
            prompt_tokens=sum(prompt.length for prompt in query.tokenized.prompts),
            mode="load-only",
            tokenized=_without_prompts(query.tokenized),
            time=self._wall(),
        )
        self._note(decision, None, time.perf_counter() - begun)
        return decision, self._reserve(decision, query, Known(UNASKED, {}, {}, ()))

    def _reserve(self, decision: Decision, query: Query, known: Known) -> RoutedTicket:
        chosen = decision.chosen
        worker = chosen.worker
        self._knowledge.tell(query.model, worker, query.tokenized)
        uncached = max(0, decision.prompt_tokens - chosen.match.credit - chosen.expected)
        attempt = Attempt(self._breakers.guard(chosen.engine, worker))
        ticket = self._loads.reserve(worker, uncached, self._knowledge.expect(worker, known))
        return RoutedTicket(ticket, attempt, worker, self._metrics)

    # -- who can be chosen -------------------------------------------------------------------------------------------

    def _policy(self, query: Query) -> str:
        own, locked = self._fleet.policy(query.model)
        if query.policy is None or locked:
            return own or self._settings.policy
        if query.policy not in POLICIES:
            raise BadPolicy(query.policy)
        return query.policy

    def _mode(self, query: Query, policy: str, chosen: Candidate) -> Mode:
        tokenized = query.tokenized
        if policy not in CACHE_AWARE or not tokenized.prompts or not tokenized.reads_cache:
            return "load-only"
        trust = chosen.match.trust
        if trust != "none":
            return trust
        return "observed" if self._knowledge.observed.knows(chosen.worker) else "load-only"

    # -- what is said of it ------------------------------------------------------------------------------------------

    def _note(self, decision: Decision, choice: Choice | None, seconds: float) -> None:
        """Record and count it. A fault in that is no reason to choose again."""
        model, mode = decision.model, decision.mode
        try:
            self._records.add(decision)
            credit = decision.chosen.match.credit
            self._metrics.decided(model, decision.policy, mode, seconds, decision.prompt_tokens, credit)
            if choice is not None and choice.selection is not None:
                self._metrics.selected(model, choice.selection, mode, choice.imbalanced)
        except Exception as error:
            self._failed("a choice could not be recorded", error)

    def _failed(self, what: str, error: Exception) -> None:
        self._metrics.routing_failed()
        self._throttle.warning("fault", what + ": %r", error, exc_info=error)

    def _show(self) -> None:
        running = 0
        elsewhere = self._loads.elsewhere()
        for worker, load in self._loads.own().items():
            others = elsewhere.get(worker, Load())
            self._metrics.load(worker, load.running, load.queued_prefill_tokens)
            self._metrics.load_elsewhere(worker, others.running, others.queued_prefill_tokens)
            running += load.running
        self._metrics.in_flight(running)
        for worker, state in self._breakers.states().items():
            self._metrics.breaker(worker, state)
        knowledge = self._knowledge
        self._metrics.hints(
            dropped={"expected": knowledge.expected.dropped, "observed": knowledge.observed.dropped},
            contradicted=knowledge.observed.contradicted,
        )


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


__all__ = ["RoutedTicket", "Router"]
