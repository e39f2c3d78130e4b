"""Was the credit true? What was predicted for an answer beside what its engine reported, and what follows.

Only answers that can be compared are: one prompt, one sample, an engine that reads its cache and reports
``cached_tokens``, credited blocks that stayed where they were meanwhile. All others are counted by reason.

An answer that shows less than was credited waits for :data:`SETTLED_AFTER` before it is judged: the event that a
credited block went travels another way than the answer, and may come after it.

What must always hold: a comparison teaches the index (an observed hit, an observed miss) and, when several agree, makes
it more careful; it never changes a decision, never raises what is credited by itself, and no fault in it costs an
answer. Everything kept of a worker goes with it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvsync.discovery.model import Change, Engine
from kvsync.index import NATIVE, Index
from kvsync.index.match import Match, Observation
from kvsync.routing.decision import Decision
from kvsync.routing.evidence import Evidence, Figures
from kvsync.routing.lookup import block_keys
from kvsync.telemetry.logs import Throttle
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import Prompt, TokenizedRequest

_log = logging.getLogger(__name__)

_DEFAULT_BLOCK: Final = 16
"""Tokens; vLLM's own default where nothing else is said."""
_LARGE_BLOCK: Final = 4096
"""Tokens that fill any block."""
LONGEST_FOR_REFERENCE: Final = 32_768
"""Tokens of a prompt that the pure-Python index is asked about: its hashing holds up the event loop."""

SETTLED_AFTER: Final = 1.0
"""Seconds after which all events are here that were published before an answer."""
MOST_WAITING: Final = 64
"""Answers that wait; above, the oldest is judged early. Each holds its prompt."""

AGAIN: Final = 600.0
"""Seconds within which a second contradiction shows that learning anew did not help."""

_MISSED: Final[Mapping[Observation, str]] = {"evicted": "evicted_meanwhile", "unknown": "unknown_worker"}


class _Waiting(NamedTuple):
    """An answer with less than was credited."""

    until: float
    decision: Decision
    tokenized: TokenizedRequest
    cached: int


@dataclass(slots=True)
class _Hits:
    """An engine's own count of its cache beside what this gateway sent there and credited, in tokens."""

    queries: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    credited: int = 0


@dataclass(slots=True)
class _Worker:
    evidence: Evidence = field(default_factory=Evidence)
    verdicts: Counter[str] = field(default_factory=Counter)
    contradictions: int = 0
    contradicted_at: float = -math.inf
    proposal: str | None = None
    hits: _Hits = field(default_factory=_Hits)


class Audit:
    """See the module.

    Args:
        resync: has a worker's stream followed anew, from the beginning.
        lifetime: seconds for which what an answer teaches counts.
        clock: monotonic seconds, the same that ``index.expire`` is called with.
        longest: tokens of a prompt that the index is asked about; ``None``: any.
    """

    def __init__(
        self,
        index: Index,
        resync: Callable[[str], None],
        lifetime: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        longest: int | None = None if NATIVE else LONGEST_FOR_REFERENCE,
    ) -> None:
        self._index = index
        self._resync = resync
        self._lifetime = lifetime
        self._metrics = metrics
        self._clock = clock
        self._longest = longest
        self._throttle = Throttle(_log, clock=clock)
        self._workers: dict[str, _Worker] = {}
        self._waiting: deque[_Waiting] = deque()
        self.verdicts: Counter[str] = Counter()
        self.credited_tokens = 0
        self.right_tokens = 0
        """Of ``credited_tokens``, those that the engine said it had."""
        self.reported_tokens = 0

    @property
    def share_right(self) -> float | None:
        """The share of audited credit that proved right; ``None`` before any credit was audited."""
        return self.right_tokens / self.credited_tokens if self.credited_tokens else None

    def apply(self, change: Change) -> None:
        """The fleet changed."""
        for worker in map(change.engine.worker, change.engine.ranks):
            if change.kind == "gone":
                self._workers.pop(worker, None)
            else:
                self._workers.setdefault(worker, _Worker())

    def introduced(self, worker: str) -> None:
        """The index has the worker anew, and no batch of it yet: tell it what answers showed before. Any thread may."""
        known = self._workers.get(worker)
        if known is None:
            return
        if known.contradictions:
            self._index.mark_reannouncing(worker)
        if known.proposal is not None:
            self._index.drops_last_block(worker)

    def describe(self, worker: str) -> Mapping[str, object] | None:
        """What is known of a worker's answers, for people; ``None`` for a worker that is not there."""
        known = self._workers.get(worker)
        if known is None:
            return None
        hits = known.hits
        return {
            "verdicts": dict(known.verdicts),
            "contradictions": known.contradictions,
            "proposal": known.proposal,
            "metrics_hits": {
                "rough": "engine-wide, other gateways' requests included",
                "engine": {"queries": hits.queries, "hits": hits.hits},
                "here": {"prompt_tokens": hits.prompt_tokens, "credited": hits.credited},
            }
            if hits.queries
            else None,
        }

    def on_hits(self, worker: str, queries: int, hits: int) -> None:
        """What an engine's own metrics count since the last look, in tokens. Only shown: a rough comparison proves
        nothing about one answer, so it never lowers trust."""
        self._metrics.engine_hits(worker, queries, hits)
        if known := self._workers.get(worker):
            known.hits.queries += queries
            known.hits.hits += hits

    def observe(
        self, decision: Decision, tokenized: TokenizedRequest, status: int, usage: Mapping[str, object] | None
    ) -> int | None:
        """Take one whole answer.

        Returns:
            the tokens of the prompt that the engine said it had; ``None`` where it did not say, or it can't be told.
        """
        chosen = decision.chosen
        known = self._workers.get(chosen.worker)
        if known is not None and status == 200:
            known.hits.prompt_tokens += decision.prompt_tokens
            known.hits.credited += chosen.match.credit
        why_not, cached = _reported(decision, status, usage)
        if why_not is not None:
            self._count(known, chosen.worker, why_not)
            return None
        if cached < chosen.match.credit:
            self._waiting.append(_Waiting(self._clock() + SETTLED_AFTER, decision, tokenized, cached))
            if len(self._waiting) > MOST_WAITING:
                self._judge(*self._waiting.popleft()[1:])
        else:
            self._judge(decision, tokenized, cached)
        return cached

    def settle(self) -> None:
        """Judge the answers that have waited long enough."""
        now = self._clock()
        while self._waiting and self._waiting[0].until <= now:
            self._judge(*self._waiting.popleft()[1:])

    def _judge(self, decision: Decision, tokenized: TokenizedRequest, cached: int) -> None:
        chosen = decision.chosen
        credit = chosen.match.credit
        known = self._workers.get(chosen.worker)
        try:
            verdict = self._verdict(decision, tokenized, cached)
            compared = verdict in ("right", "over", "under")
            if compared and known is not None:
                self._weigh(known, decision, Figures(credit, cached))
        except Exception as error:
            verdict, compared = "index_failed", False
            self._metrics.index_failed(decision.model)
            self._throttle.warning("index", "the index failed in the audit: %r", error, exc_info=error)
        if not compared:
            self._count(known, chosen.worker, verdict)
            return
        self._count(known, chosen.worker, verdict, credit, cached)
        self.credited_tokens += credit
        self.right_tokens += min(credit, cached)
        self.reported_tokens += cached

    def _verdict(self, decision: Decision, tokenized: TokenizedRequest, cached: int) -> str:
        match = decision.chosen.match
        if match.trust == "none":
            return "no_credit_given"
        verdict = "right" if match.credit == cached else "over" if match.credit > cached else "under"
        # A right answer of a worker without doubts teaches nothing, and asking costs a hash of the whole prompt.
        if verdict == "right" and match.trust == "exact" and not match.expected:
            return verdict
        prompt = tokenized.prompts[0]
        if self._longest is not None and len(prompt.tokens) // 4 > self._longest:
            return "too_long"
        return _MISSED.get(self._teach(decision, tokenized.cache_salt, prompt, match, cached), verdict)

    def _teach(
        self, decision: Decision, cache_salt: str | None, prompt: Prompt, match: Match, cached: int
    ) -> Observation:
        worker, model = decision.chosen.worker, decision.model
        size = self._block_size(worker, model)
        return self._index.observe(
            worker,
            prompt.tokens,
            model,
            min(cached, len(prompt.tokens) // 4),  # what stands behind an image nobody told of is not in the tokens
            match.credit,
            match.as_of,
            self._clock() + self._lifetime,
            adapter=decision.adapter,
            cache_salt=cache_salt,
            block_keys=block_keys(prompt.images, size) if size and prompt.images else None,
        )

    def _weigh(self, known: _Worker, decision: Decision, figures: Figures) -> None:
        """Act, when the worker's answers agree that something is wrong."""
        engine, worker = decision.chosen.engine, decision.chosen.worker
        size = self._block_size(worker, decision.model) if figures.cached < figures.credit else 0
        if known.proposal is not None:
            # Found out already: a block short is now one too many again, unless it was registered anew since (facts of
            # it were learnt later).
            if size and figures.short_by(size):
                self._index.drops_last_block(worker)
            size = 0
        finding = known.evidence.take(figures, size, self._clock())
        if finding == "drops_last_block":
            self._found_eagle(engine, size, known.evidence)
        elif finding == "contradiction":
            self._contradicted(known, worker)

    def _contradicted(self, known: _Worker, worker: str) -> None:
        over, window, now = known.evidence.over, len(known.evidence.window), self._clock()
        again = now - known.contradicted_at < AGAIN
        known.evidence.clear()
        known.contradictions += 1
        known.contradicted_at = now
        self._metrics.contradicted(worker)
        _log.warning(
            "worker %s: %d of its last %d answers with credit had less than was credited (tokens credited and had: "
            "%s); its counts are not relied on from now on, and %s",
            worker,
            len(over),
            window,
            ", ".join(f"{figures.credit} and {figures.cached}" for figures in over),
            "since that helped for a moment only, what its events said so far is forgotten"
            if again
            else "its events are followed anew",
        )
        self._index.mark_reannouncing(worker)
        if again:  # the same events would say the same: of an adapter replaced under its name, for one
            self._index.forget(worker)
        else:
            self._resync(worker)

    def _found_eagle(self, engine: Engine, block_size: int, evidence: Evidence) -> None:
        """All ranks run with the same configuration."""
        proposal = f"set spec_decode: eagle for engine {engine.name}"
        _log.warning(
            "engine %s: its last %d answers with credit were each exactly one block (%d tokens) short, as with EAGLE "
            "or MTP speculative decoding: the last block is left out from now on. %s: then it need not be found out",
            engine.name,
            len(evidence.window),
            block_size,
            proposal,
        )
        for worker in map(engine.worker, engine.ranks):
            self._index.drops_last_block(worker)
            if known := self._workers.get(worker):
                known.proposal = proposal
                known.evidence.clear()

    def may_publish(self, decision: Decision, status: int, usage: Mapping[str, object] | None) -> bool:
        """Whether the engine may have blocks to tell of by this answer. It has none where prompt and answer, as far as
        their lengths are known, fill no block: what its own size is, before it published anything, others of its model
        tell."""
        if status != 200:
            return False
        told = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if usage else []
        tokens = sum(count for count in told if isinstance(count, int)) or decision.prompt_tokens
        if not tokens or tokens >= _LARGE_BLOCK:
            return True
        try:
            sizes = self._index.block_sizes(decision.model)
        except Exception:
            self._metrics.index_failed(decision.model)
            return True
        return tokens >= (sizes.get(decision.chosen.worker) or min(sizes.values(), default=_DEFAULT_BLOCK))

    def _block_size(self, worker: str, model: str) -> int:
        return self._index.block_sizes(model).get(worker, 0)

    def _count(self, known: _Worker | None, worker: str, verdict: str, credit: int = 0, cached: int = 0) -> None:
        self.verdicts[verdict] += 1
        if known is not None:
            known.verdicts[verdict] += 1
        self._metrics.audited(worker, verdict, credit, cached)


def _reported(decision: Decision, status: int, usage: Mapping[str, object] | None) -> tuple[str | None, int]:
    """Why an answer can't be compared (or ``None``), and the engine's ``cached_tokens``."""
    if status != 200:
        return "not_ok", 0
    if not decision.tokenized.comparable or not decision.prompt_tokens:
        return "not_comparable", 0
    if usage is None:
        return "no_usage", 0
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    # More cached than asked is no figure to count with.
    if not isinstance(cached, int) or isinstance(cached, bool) or not 0 <= cached <= decision.prompt_tokens:
        return "no_cached_tokens", 0
    return None, cached


__all__ = ["LONGEST_FOR_REFERENCE", "Audit"]
