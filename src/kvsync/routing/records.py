"""Decisions that can be asked for later, and their form in JSON."""

from __future__ import annotations

from collections import OrderedDict

from kvsync.routing.decision import Candidate, Decision


class Records:
    """The last decisions, by request id; the oldest goes first.

    A request that was tried twice has one record, that of its last try.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision) -> None:
        if not self._capacity:
            return
        kept = self._kept
        if decision.request_id in kept:
            kept.move_to_end(decision.request_id)
        elif len(kept) >= self._capacity:
            kept.popitem(last=False)
        kept[decision.request_id] = decision

    def get(self, request_id: str) -> Decision | None:
        return self._kept.get(request_id)


def as_json(decision: Decision) -> dict[str, object]:
    """The record as the admin API shows it: everything that was weighed, nothing of what was asked."""
    tokenized = decision.tokenized
    return {
        "request_id": decision.request_id,
        "time": decision.time,
        "model": decision.model,
        "adapter": decision.adapter,
        "policy": decision.policy,
        "mode": decision.mode,
        "worker": decision.chosen.worker,
        "why": decision.why,
        "prompt_tokens": decision.prompt_tokens,
        "observed": decision.observed,
        "tokens": {
            "source": tokenized.source,
            "reason": tokenized.reason,
            "reads_cache": tokenized.reads_cache,
            "comparable": tokenized.comparable,
        },
        "candidates": [
            {**_candidate(candidate), "score": decision.scores[candidate.worker]} for candidate in decision.candidates
        ],
        **decision.extra,
    }


def _candidate(candidate: Candidate) -> dict[str, object]:
    match, load = candidate.match, candidate.load
    return {
        "worker": candidate.worker,
        "engine": candidate.engine.name,
        "rank": candidate.rank,
        "credit": match.credit,
        "by_tier": dict(match.by_tier),
        "expected": candidate.expected,
        "trust": match.trust,
        "running": load.running,
        "queued_prefill_tokens": load.queued_prefill_tokens,
    }


__all__ = ["Records", "as_json"]
