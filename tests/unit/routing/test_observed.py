"""Observed prefixes: affinity without events, from answers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvsync.discovery.model import Change
from kvsync.index.match import Match
from kvsync.routing.expected import ExpectedTable, Hope, prefix_keys
from kvsync.routing.observed import CONVINCING, ObservedTable
from kvsync.tokenize.types import TokenizedRequest
from tests.unit.routing.world import UNKNOWN, Clock, World, engine, tokenized, tokens

PROMPT = tokenized(range(1000), comparable=True)


def keys(*prompt: int) -> list[int]:
    return prefix_keys(tokens(*prompt), 0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> ObservedTable:
    return ObservedTable(120.0, clock)


def test_what_was_answered_is_there_for_its_lifetime(table: ObservedTable, clock: Clock) -> None:
    table.answered("w", keys(*range(1000)), observed=0, cached=None)
    assert table.lookup(keys(*range(700), 5)) == {"w": Hope(640, False)}
    assert table.knows("w")
    assert not table.knows("v")
    clock.now += 120.0
    assert not table.knows("w")
    assert table.lookup(keys(*range(1000))) == {}


def test_an_answer_that_had_nothing_cached_ends_what_was_expected(table: ObservedTable) -> None:
    table.answered("w", keys(*range(1000)), observed=0, cached=0)
    table.answered("w", keys(*range(1000)), observed=960, cached=0)
    assert table.lookup(keys(*range(1000))) == {}
    assert table.contradicted == 1
    table.answered("w", keys(*range(1000)), observed=0, cached=0)
    assert table.knows("w"), "the next one counts again"


@pytest.mark.parametrize(("observed", "cached"), [(64, 0), (CONVINCING - 1, 0), (960, 16), (960, None), (0, 0)])
def test_other_answers_confirm_it(table: ObservedTable, observed: int, cached: int | None) -> None:
    table.answered("w", keys(*range(1000)), observed=0, cached=None)
    table.answered("w", keys(*range(1000)), observed=observed, cached=cached)
    assert table.lookup(keys(*range(1000))) == {"w": Hope(960, False)}
    assert table.contradicted == 0


def test_prompts_without_a_whole_grid_point_are_not_kept(table: ObservedTable) -> None:
    table.answered("w", keys(*range(63)), observed=0, cached=None)
    assert len(table) == 0


def test_the_same_prompt_and_its_continuations_are_one_entry(clock: Clock) -> None:
    """Answers of one conversation, again and again: what a newer one says wholly is not kept twice."""
    table = ExpectedTable(120.0, clock)
    for turn in range(1, 3000):
        table.expect("w", keys(*range(min(turn, 40) * 64)))
        clock.now += 0.01
    assert len(table) == 1
    assert table.keys == len(keys(*range(40 * 64)))
    table.expect("v", keys(*range(640)))
    assert (len(table), table.of("w"), table.of("v")) == (2, 1, 1)


def test_memory_is_bounded_and_the_oldest_goes_first(clock: Clock) -> None:
    table = ExpectedTable(120.0, clock, capacity=100)
    for i in range(500):
        table.expect(f"w{i % 3}", keys(*range(i * 10**6, i * 10**6 + 640)))
    assert len(table) == 10
    assert table.keys == 100
    assert table.dropped == 490
    assert table.lookup(keys(*range(499 * 10**6, 499 * 10**6 + 640))) == {"w1": Hope(640, True)}
    assert table.lookup(keys(*range(489 * 10**6, 489 * 10**6 + 640))) == {}
    clock.now += 120.0
    table.lookup(keys(*range(640)))
    assert (len(table), table.keys, table.of("w1")) == (0, 0, 0)


def test_entries_that_ended_early_do_not_pile_up(clock: Clock) -> None:
    table = ExpectedTable(120.0, clock)
    table.expect("w", keys(*range(10**7, 10**7 + 64)))
    for i in range(20_000):
        table.expect("w", keys(*range(64 * (i % 50), 64 * (i % 50) + 64))).end()
    assert len(table) == 1
    assert len(table._queue) <= 1024 + 2


# ---- as the router uses it


def served(world: World, what: TokenizedRequest, cached: int | None = None, **fields: object) -> str:
    """Who answered."""
    decision, ticket = world.ask(what, **fields)
    ticket.first_byte()
    ticket.end("ok")
    world.router.answered(decision, what, cached)
    return decision.chosen.worker


@pytest.mark.parametrize("policy", ["kv-aware", "prefix-cache"])
@pytest.mark.parametrize("without_index", [False, True])
def test_affinity_without_kv_sync(policy: str, without_index: bool) -> None:
    world = World(*map(engine, "abcd"), policy=policy, without_index=without_index)
    first = [served(world, tokenized(range(i * 10**6, i * 10**6 + 800))) for i in range(8)]
    world.clock.now += 60.0
    again = [served(world, tokenized([*range(i * 10**6, i * 10**6 + 800), i])) for i in range(8)]
    assert again == first
    assert len(set(first)) > 1
    decision, _ = world.ask(tokenized(range(800)))
    assert (decision.mode, decision.observed, decision.chosen.expected) == ("observed", 768, 768)
    assert decision.chosen.match.credit == 0
    world.clock.now += 121.0
    assert world.ask(tokenized(range(800)))[0].mode == "load-only"


def test_a_worker_whose_events_are_trusted_is_not_judged_by_its_answers() -> None:
    world = World(engine("a"), engine("b"))
    world.index.answer = lambda _: {"a": Match(0), "b": Match(0, trust="none")}
    for name in ("a", "b"):
        served(world, PROMPT, exclude=frozenset({"a", "b"} - {name}))
    assert [world.router.observes(name) for name in ("a", "b")] == [False, True]
    decision, ticket = world.ask(PROMPT)
    ticket.end("ok")
    assert {each.worker: each.expected for each in decision.candidates} == {"a": 0, "b": 960}
    assert (decision.chosen.worker, decision.mode) == ("b", "observed")
    world.index.answer = lambda _: {"a": Match(0), "b": Match(0, trust="exact")}
    decision, _ = world.ask(PROMPT, exclude=frozenset({"a"}))
    assert (decision.mode, decision.observed, decision.chosen.expected) == ("exact", 0, 0)


def test_observed_tokens_never_become_credit_and_never_count_twice() -> None:
    world = World(engine("a"))
    world.index.answer = lambda _: {"a": Match(0, 512, trust="none")}
    served(world, PROMPT)
    decision, _ = world.ask(PROMPT)
    assert decision.chosen.match == Match(0, 512, trust="none")
    assert decision.chosen.expected == 960
    decision, _ = world.ask(PROMPT)
    assert decision.chosen.expected == 960, "and what was just sent there is the same prefix"


def test_a_wrong_hint_ends_with_the_answer_that_shows_it() -> None:
    world = World(engine("a"), engine("b"))
    worker = served(world, PROMPT, cached=0)
    assert served(world, PROMPT, cached=0) == worker
    assert [each.expected for each in world.ask(PROMPT)[0].candidates] == [0, 0]
    assert world.sample("kvsync_observed_contradicted_total") == 1


def test_adapters_and_salts_are_apart() -> None:
    world = World(engine("a", adapters=("x",)))
    served(world, tokenized(range(1000), cache_salt="s"))
    assert world.ask(tokenized(range(1000), cache_salt="t"))[0].observed == 0
    assert world.ask(PROMPT)[0].observed == 0
    assert world.ask(tokenized(range(1000), cache_salt="s"), adapter="x")[0].observed == 0
    assert world.ask(tokenized(range(1000), cache_salt="s"))[0].observed == 960


@pytest.mark.parametrize("what", [UNKNOWN, tokenized(()), tokenized(range(10))])
def test_prompts_that_teach_nothing(what: TokenizedRequest) -> None:
    world = World(engine("a"))
    served(world, what)
    assert not world.router.observes("a")


def test_a_worker_that_is_gone_takes_its_answers_with_it() -> None:
    """And what ends on it later brings nothing back (L2)."""
    old = engine("a", data_parallel_size=2)
    world = World(old)
    served(world, PROMPT)
    late, ticket = world.ask(PROMPT)
    assert world.router.observes(late.chosen.worker)
    world.router.apply(Change("gone", old))
    ticket.end("ok")
    world.router.answered(late, PROMPT, None)
    assert not world.router.observes(late.chosen.worker)
    world.router.apply(Change("added", old))
    assert not any(world.router.observes(worker) for worker in ("a#0", "a#1"))
    decision, _ = world.ask(PROMPT)
    assert (decision.mode, decision.observed) == ("load-only", 0)


def test_what_is_forgotten_by_order_is_not_expected() -> None:
    """An adapter was replaced under its name: its prefixes are not looked for where they were (I18)."""
    world = World(engine("a", adapters=("x",)))
    served(world, PROMPT, adapter="x")
    world.router.forget("a")
    assert not world.router.observes("a")


def test_an_index_that_fails_leaves_what_answers_tell() -> None:
    world = World(engine("a"), engine("b"))
    worker = served(world, PROMPT)

    def fail(_: Sequence[int]) -> Mapping[str, Match]:
        raise RuntimeError("broken")

    world.index.answer = fail
    decision, _ = world.ask(PROMPT)
    assert (decision.chosen.worker, decision.mode) == (worker, "observed")
