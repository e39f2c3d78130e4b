"""Answers beside their credit, answers that can't be held against it, and what follows."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from kvsync.discovery.model import Change, Engine
from kvsync.index.match import Match, Observation
from kvsync.index.reference import ReferenceIndex
from kvsync.routing.audit import AGAIN, MOST_WAITING, SETTLED_AFTER, Audit
from kvsync.routing.decision import Candidate, Decision, Load
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import ImageSpan, Prompt, TokenizedRequest
from tests.unit.routing.world import Clock, Index
from tests.wire import batch, removed, stored

ENGINE = Engine(uid="w", name="w", url="http://127.0.0.1:1", model="m", data_parallel_size=1)
IDS = range(100)


class Place:
    """An audit, and all that it speaks to."""

    def __init__(self, *engines: Engine, longest: int | None = None) -> None:
        self.index = Index()
        self.index.sizes = {"w": 16}
        self.clock = Clock()
        self.metrics = Metrics()
        self.resynced: list[str] = []
        self.audit = Audit(self.index, self.resynced.append, 120.0, self.metrics, self.clock, longest)
        for engine in engines or (ENGINE,):
            self.audit.apply(Change("added", engine))
            for worker in map(engine.worker, engine.ranks):
                self.metrics.add_worker(worker)

    def answer(self, credit: int, cached: Any, **fields: Any) -> int | None:
        """One answer, and the time that it takes until it is judged."""
        said = self.audit.observe(decision(credit, **fields), request(), 200, usage(cached))
        self.clock.now += SETTLED_AFTER
        self.audit.settle()
        return said

    def verdicts(self) -> dict[str, int]:
        return {word: count for word, count in self.audit.verdicts.items() if count}


def decision(
    credit: int,
    *,
    prompt_tokens: int = 100,
    comparable: bool = True,
    trust: Any = "exact",
    expected: int = 0,
    engine: Engine = ENGINE,
    rank: int = 0,
    adapter: str | None = None,
) -> Decision:
    match = Match(credit, expected, {"gpu": credit} if credit else {}, trust, 7)
    chosen = Candidate(engine.worker(rank), engine, rank, match, expected, Load())
    return Decision(
        request_id="r",
        model="m",
        adapter=adapter,
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


def request(ids: Sequence[int] = IDS, **fields: Any) -> TokenizedRequest:
    prompt = Prompt(array("I", ids).tobytes(), len(ids), fields.pop("images", ()))
    return TokenizedRequest((prompt,), "ids", comparable=True, **fields)


def usage(cached: Any) -> dict[str, object]:
    return {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": cached}}


@pytest.mark.parametrize(
    ("cached", "verdict"), [(64, "right"), (48, "over"), (0, "over"), (80, "under"), (100, "under")]
)
def test_credit_beside_what_the_engine_had(cached: int, verdict: str) -> None:
    place = Place()
    assert place.answer(64, cached) == cached
    assert place.verdicts() == {verdict: 1}
    audit = place.audit
    assert (audit.credited_tokens, audit.right_tokens, audit.reported_tokens) == (64, min(64, cached), cached)
    assert audit.share_right == min(64, cached) / 64
    assert place.metrics.registry.get_sample_value(
        "kvsync_audit_answers_total", {"worker": "w", "verdict": verdict}
    ) == 1  # fmt: skip


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
    place = Place()
    assert place.audit.observe(decision(64), request(), 200, answer) is None
    assert place.verdicts() == {verdict: 1}
    assert (place.audit.credited_tokens, place.audit.reported_tokens, place.audit.share_right) == (0, 0, None)
    assert place.index.observed == []


def test_answers_that_can_not_be_compared() -> None:
    place = Place()
    audit = place.audit
    audit.observe(decision(64), request(), 500, usage(64))
    audit.observe(decision(64, comparable=False), request(), 200, usage(64))
    audit.observe(decision(64, prompt_tokens=0), request(), 200, usage(64))
    assert place.answer(0, 64, trust="none") == 64
    assert place.verdicts() == {"not_ok": 1, "not_comparable": 2, "no_credit_given": 1}
    assert audit.share_right is None
    assert place.index.observed == []


@pytest.mark.parametrize(
    ("fields", "cached", "asked"),
    [
        ({}, 64, False),
        ({"trust": "partial"}, 64, True),
        ({"expected": 16}, 64, True),
        ({}, 48, True),
        ({}, 80, True),
        ({"trust": "none"}, 0, False),
    ],
)
def test_the_index_is_asked_only_where_that_teaches_something(fields: dict[str, Any], cached: int, asked: bool) -> None:
    """Asking hashes the whole prompt: right answers of a worker without doubts do without (F1)."""
    place = Place()
    for _ in range(10):
        place.answer(64, cached, **fields)
    assert len(place.index.observed) == (10 if asked else 0)


def test_the_index_gets_what_was_asked_and_answered() -> None:
    place = Place()
    asked = request(cache_salt="s", images=(ImageSpan("cat", 20, 10),))
    place.audit.observe(decision(64, adapter="x"), asked, 200, usage(80))
    (said,) = place.index.observed
    keys = said.pop("block_keys")
    assert said == {
        "worker": "w",
        "tokens": array("I", IDS).tobytes(),
        "model": "m",
        "cached": 80,
        "credit": 64,
        "as_of": 7,
        "until": place.clock.now + 120.0,
        "adapter": "x",
        "cache_salt": "s",
    }
    assert [key is not None for key in keys] == [False, True]


def test_of_a_prompt_that_is_cut_only_the_known_tokens_are_observed() -> None:
    place = Place()
    place.audit.observe(decision(32), request(range(40)), 200, usage(96))
    assert place.index.observed[0]["cached"] == 40
    assert place.verdicts() == {"under": 1}


@pytest.mark.parametrize(
    ("observation", "verdict"),
    [
        ("steady", "over"),
        ("evicted", "evicted_meanwhile"),
        ("unknown", "unknown_worker"),
        (ValueError(), "index_failed"),
    ],
)
def test_only_credit_that_stayed_where_it_was_is_compared(
    observation: Observation | Exception, verdict: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place()
    place.index.observation = observation
    for _ in range(5):
        assert place.answer(64, 0) == 0
    assert place.verdicts() == ({"over": 5} if verdict == "over" else {verdict: 5})
    assert place.resynced == (["w"] if verdict == "over" else [])


def test_long_prompts_are_too_long_for_an_index_in_python() -> None:
    place = Place(longest=99)
    place.answer(64, 64)
    place.answer(64, 0)
    assert place.verdicts() == {"right": 1, "too_long": 1}
    assert place.index.observed == []


def test_three_contradictions_make_the_worker_re_announcing_and_have_it_followed_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place()
    with caplog.at_level(logging.WARNING, "kvsync.routing"):
        for cached in (64, 0, 32, 16):
            place.answer(64, cached)
    assert place.resynced == ["w"]
    assert place.index.told == [("reannouncing", "w")]
    (record,) = caplog.records
    assert "3 of its last 4 answers" in record.getMessage()
    assert "64 and 0, 64 and 32, 64 and 16" in record.getMessage()
    described = place.audit.describe("w")
    assert described is not None
    assert (described["contradictions"], described["verdicts"]) == (1, {"right": 1, "over": 3})
    assert place.metrics.registry.get_sample_value("kvsync_audit_contradictions_total", {"worker": "w"}) == 1


def test_once_a_minute_at_most_and_forgotten_where_learning_anew_did_not_help() -> None:
    """Of an adapter that was replaced under its name the same events say the same again (I18)."""
    place = Place()
    for _ in range(200):
        place.answer(64, 0)
    marked = ("reannouncing", "w")
    assert place.resynced == ["w"]
    assert place.index.told == [marked, *[marked, ("forget", "w")] * 3]
    described = place.audit.describe("w")
    assert described is not None
    assert described["contradictions"] == 4
    place.clock.now += AGAIN
    for _ in range(3):
        place.answer(64, 0)
    assert place.resynced == ["w", "w"], "after a good while it is worth a try again"


def test_an_engine_that_drops_the_last_block_is_found_out_and_proposed(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(uid="e", name="e", url="http://127.0.0.1:1", model="m", data_parallel_size=2)
    place = Place(engine)
    place.index.sizes = {"e#0": 16, "e#1": 16}
    with caplog.at_level(logging.WARNING, "kvsync.routing"):
        for _ in range(20):
            place.answer(64, 48, engine=engine)
            place.answer(0, 0, engine=engine)
    assert place.index.told == [("drops_last_block", "e#0"), ("drops_last_block", "e#1")]
    assert place.resynced == []
    (record,) = caplog.records
    assert "one block (16 tokens) short" in record.getMessage()
    assert "set spec_decode: eagle for engine e" in record.getMessage()
    for worker in ("e#0", "e#1"):
        described = place.audit.describe(worker)
        assert described is not None
        assert described["proposal"] == "set spec_decode: eagle for engine e"


def test_once_found_out_a_block_short_is_one_too_many_again() -> None:
    """What a short row excuses, it excuses once: else wrong credit of one block would be excused for ever."""
    place = Place()
    for _ in range(20):
        place.answer(64, 48)
    place.index.told.clear()
    place.answer(48, 32)
    assert place.index.told == [("drops_last_block", "w")], "it may have been registered anew"
    place.answer(48, 32)
    place.answer(48, 32)
    assert place.resynced == ["w"]


def test_an_index_that_has_a_worker_anew_is_told_what_answers_showed() -> None:
    """As after KV sync was off for a while."""
    place = Place()
    place.audit.introduced("w")
    place.audit.introduced("nobody")
    assert place.index.told == []
    for _ in range(3):
        place.answer(64, 0)
    place.index.told.clear()
    place.audit.introduced("w")
    assert place.index.told == [("reannouncing", "w")]
    eagle = Place()
    for _ in range(20):
        eagle.answer(64, 48)
    eagle.index.told.clear()
    eagle.audit.introduced("w")
    assert eagle.index.told == [("drops_last_block", "w")]


def test_one_block_short_now_and_then_is_a_contradiction() -> None:
    place = Place()
    for cached in (64, 48, 48, 48):
        place.answer(64, cached)
    assert place.resynced == ["w"]


@pytest.mark.parametrize(
    ("prompt_tokens", "answer", "status", "may"),
    [
        (15, None, 200, False),
        (16, None, 200, True),
        (0, None, 200, True),  # nobody knows
        (6, {"prompt_tokens": 6, "completion_tokens": 9}, 200, False),
        (6, {"prompt_tokens": 6, "completion_tokens": 10}, 200, True),
        (6, {"prompt_tokens": None, "completion_tokens": "many"}, 200, False),
        (0, {"prompt_tokens": 7}, 200, False),
        (100, None, 400, False),
    ],
)
def test_an_answer_that_fills_no_block_is_none_that_an_engine_would_tell_of(
    prompt_tokens: int, answer: dict[str, object] | None, status: int, may: bool
) -> None:
    place = Place()
    assert place.audit.may_publish(decision(0, prompt_tokens=prompt_tokens), status, answer) is may


def test_before_an_engine_published_others_of_its_model_tell_how_large_a_block_is() -> None:
    place = Place()
    place.index.sizes = {"x": 64, "y": 32}
    assert not place.audit.may_publish(decision(0, prompt_tokens=31), 200, None)
    assert place.audit.may_publish(decision(0, prompt_tokens=32), 200, None)
    place.index.sizes = {}
    assert not place.audit.may_publish(decision(0, prompt_tokens=15), 200, None)
    assert place.audit.may_publish(decision(0, prompt_tokens=16), 200, None)

    def fail(model: str) -> dict[str, int]:
        raise RuntimeError("broken")

    place.index.block_sizes = fail  # type: ignore[method-assign]
    assert place.audit.may_publish(decision(0, prompt_tokens=15), 200, None)


def test_an_index_that_fails_while_acting_costs_no_answer() -> None:
    place = Place()

    def fail(worker: str) -> None:
        raise RuntimeError("broken")

    place.index.mark_reannouncing = fail  # type: ignore[method-assign]
    for _ in range(3):
        assert place.answer(64, 0) == 0
    assert place.verdicts() == {"over": 2, "index_failed": 1}


def test_a_worker_that_is_gone_takes_everything_with_it() -> None:
    """Answers that end after it bring nothing back (L2)."""
    place = Place()
    place.answer(64, 0)
    place.answer(64, 0)
    place.audit.apply(Change("gone", ENGINE))
    assert place.audit.describe("w") is None
    for _ in range(5):
        place.answer(64, 0)
    place.audit.on_hits("w", 10, 5)
    assert (place.audit.describe("w"), place.resynced) == (None, [])
    place.audit.apply(Change("added", ENGINE))
    place.audit.apply(Change("changed", ENGINE))
    place.answer(64, 0)
    assert place.resynced == [], "the next life begins with an empty window"


def test_engine_wide_hits_are_shown_as_rough_and_never_held_against_anybody() -> None:
    place = Place()
    described = place.audit.describe("w")
    assert described is not None
    assert described["metrics_hits"] is None
    place.audit.observe(decision(64), request(), 200, None)
    for _ in range(50):
        place.audit.on_hits("w", 1000, 0)
    described = place.audit.describe("w")
    assert described is not None
    assert described["metrics_hits"] == {
        "rough": "engine-wide, other gateways' requests included",
        "engine": {"queries": 50_000, "hits": 0},
        "here": {"prompt_tokens": 100, "credited": 64},
    }
    assert (place.resynced, place.index.told) == ([], [])


# ---- with a real index


def real() -> tuple[Audit, ReferenceIndex, list[str], Clock]:
    index = ReferenceIndex()
    index.add_worker("w", "m")
    index.apply("w", batch(stored(range(1, 7), range(96), None, 16)))
    resynced: list[str] = []
    clock = Clock()
    audit = Audit(index, resynced.append, 120.0, Metrics(), clock)
    audit.apply(Change("added", ENGINE))
    return audit, index, resynced, clock


def ask(index: ReferenceIndex, ids: Sequence[int] = IDS) -> Decision:
    match = index.match(array("I", ids), "m")["w"]
    decided = decision(match.credit, prompt_tokens=len(ids), trust=match.trust, expected=match.expected)
    chosen = Candidate("w", ENGINE, 0, match, match.expected, Load())
    return structs.replace(decided, chosen=chosen)


@pytest.mark.parametrize("late", [False, True])
def test_blocks_that_were_evicted_meanwhile_are_nobody_s_fault(late: bool) -> None:
    """Whether the event comes before the answer or a moment after it."""
    audit, index, resynced, clock = real()
    for _ in range(5):
        decided = ask(index)
        assert decided.chosen.match.credit == 96
        if late:
            audit.observe(decided, request(), 200, usage(80))
        index.apply("w", batch(removed([6])))
        if not late:
            audit.observe(decided, request(), 200, usage(80))
        clock.now += SETTLED_AFTER
        audit.settle()
        index.apply("w", batch(stored([6], range(80, 96), 5, 16)))
    assert audit.verdicts == {"evicted_meanwhile": 5}
    assert resynced == []


def test_an_observed_miss_ends_doubt_and_an_observed_hit_makes_it_held() -> None:
    audit, index, _, _ = real()
    index.mark_reannouncing("w")
    index.apply("w", batch(stored(range(1, 7), range(96), None, 16)))
    index.apply("w", batch(removed([5, 6])))
    decided = ask(index)
    assert (decided.chosen.match.credit, decided.chosen.match.expected) == (64, 32)
    audit.observe(decided, request(), 200, usage(80))
    assert (ask(index).chosen.match.credit, ask(index).chosen.match.expected) == (80, 0)


def test_after_a_loss_what_the_engine_said_it_had_is_credit_for_a_while() -> None:
    audit, index, _, clock = real()
    index.forget("w")
    decided = ask(index)
    assert (decided.chosen.match.credit, decided.chosen.match.trust) == (0, "partial")
    audit.observe(decided, request(), 200, usage(96))
    assert audit.verdicts == {"under": 1}
    assert ask(index).chosen.match.credit == 96
    index.expire(clock.now + 120.0)
    assert ask(index).chosen.match.credit == 0


def test_an_engine_with_eagle_is_credited_rightly_once_found_out() -> None:
    audit, index, resynced, clock = real()
    for _ in range(20):
        decided = ask(index)
        assert decided.chosen.match.credit == 96
        audit.observe(decided, request(), 200, usage(80))
    clock.now += SETTLED_AFTER
    audit.settle()
    assert ask(index).chosen.match.credit == 80
    audit.observe(ask(index), request(), 200, usage(80))
    assert audit.verdicts == {"over": 20, "right": 1}
    assert resynced == []


def test_answers_that_wait_are_bounded_and_the_oldest_is_judged_early() -> None:
    place = Place()
    for _ in range(MOST_WAITING + 7):
        place.audit.observe(decision(64), request(), 200, usage(64 - 16))
    assert place.verdicts() == {"over": 7}
    place.clock.now += SETTLED_AFTER - 0.01
    place.audit.settle()
    assert place.verdicts() == {"over": 7}
    place.clock.now += 0.01
    place.audit.settle()
    assert place.verdicts() == {"over": MOST_WAITING + 7}
