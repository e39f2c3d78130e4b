"""Answers beside their credit, and answers that can't be held against it."""

from __future__ import annotations

from typing import Any

import pytest

from kvsync.discovery.model import Engine
from kvsync.index.match import Match
from kvsync.routing.audit import Audit
from kvsync.routing.decision import Candidate, Decision, Load
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import TokenizedRequest

ENGINE = Engine(uid="w", name="w", url="http://127.0.0.1:1", model="m")


def decision(credit: int, *, prompt_tokens: int = 100, comparable: bool = True) -> Decision:
    chosen = Candidate("w", ENGINE, 0, Match(credit), 0, Load())
    return Decision(
        request_id="r",
        model="m",
        adapter=None,
        policy="kv-aware",
        chosen=chosen,
        candidates=(chosen,),
        scores={},
        why="",
        prompt_tokens=prompt_tokens,
        mode="exact",
        tokenized=TokenizedRequest((), "ids", comparable=comparable),
        time=0.0,
    )


def usage(cached: Any) -> dict[str, object]:
    return {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": cached}}


@pytest.mark.parametrize(
    ("cached", "verdict"), [(64, "right"), (48, "over"), (0, "over"), (80, "under"), (100, "under")]
)
def test_credit_beside_what_the_engine_had(cached: int, verdict: str) -> None:
    audit = Audit()
    audit.observe(decision(64), 200, usage(cached))
    assert dict(audit.verdicts) == {verdict: 1}
    assert (audit.credited_tokens, audit.right_tokens, audit.reported_tokens) == (64, min(64, cached), cached)


NO_FIGURES: list[Any] = [None, True, "5", 1.5, [], {}, -1, 101, 2**63, 10**400]
"""The last ones are more than the prompt has: an engine's nonsense must not spoil the totals, whatever its size."""


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (None, "no_usage"),
        ({}, "no_cached_tokens"),
        ({"prompt_tokens_details": None}, "no_cached_tokens"),
        ({"prompt_tokens_details": []}, "no_cached_tokens"),
        *((usage(figure), "no_cached_tokens") for figure in NO_FIGURES),
    ],
)
def test_usage_that_says_nothing_is_counted_and_left_out(answer: dict[str, object] | None, verdict: str) -> None:
    audit = Audit(Metrics().audited)
    audit.observe(decision(64), 200, answer)
    assert dict(audit.verdicts) == {verdict: 1}
    assert (audit.credited_tokens, audit.reported_tokens, audit.share_right) == (0, 0, None)


def test_answers_that_can_not_be_compared() -> None:
    audit = Audit()
    audit.observe(decision(64), 500, usage(64))
    audit.observe(decision(64, comparable=False), 200, usage(64))
    audit.observe(decision(64, prompt_tokens=0), 200, usage(64))
    assert dict(audit.verdicts) == {"not_ok": 1, "not_comparable": 2}
    assert audit.share_right is None
