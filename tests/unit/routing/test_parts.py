"""Label selectors, the fleet, the load table, expected prefixes, records."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvsync.discovery.model import Change, Engine
from kvsync.routing import filters
from kvsync.routing.decision import Load
from kvsync.routing.errors import BadFilter
from kvsync.routing.expected import GRID, Expectation, ExpectedTable, Hope, context_seed, prefix_keys
from kvsync.routing.fleet import LEFT, Fleet
from kvsync.routing.load import LoadTable, Ticket
from tests.unit.routing.world import Clock, engine, tokens

LABELS = {"tier": "gold", "app.kubernetes.io/name": "vllm", "empty": ""}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("  ", True),
        ("tier", True),
        ("nope", False),
        ("!nope", True),
        ("! tier", False),
        ("tier=gold", True),
        ("tier == gold", True),
        ("tier=silver", False),
        ("tier!=silver", True),
        ("nope!=silver", True),
        ("tier != gold", False),
        ("tier in (silver, gold)", True),
        ("tier in(silver)", False),
        ("tier notin (silver,bronze)", True),
        ("nope notin (x)", True),
        ("nope in (x)", False),
        ("empty=", True),
        ("empty in (,a)", True),
        ("tier=,app.kubernetes.io/name=vllm", False),
        ("app.kubernetes.io/name=vllm,tier in (gold),!nope", True),
        ("tier=gold,nope", False),
        ("in in (in)", False),
    ],
)
def test_selectors(text: str, holds: bool) -> None:
    assert filters.matches(filters.parse(text), LABELS) is holds


@pytest.mark.parametrize(
    "text",
    [
        ",", "tier,", ",tier", "=gold", "!", "!!tier", "tier gold", "tier=gold silver", "tier=a=b", "tier in gold",
        "tier in (gold", "tier in", "tier in gold)", "tier in ((gold))", "tier > 1", "-tier", "tier-", "a/b/c", "/a",
        "a/", "A.b/c", "tier=-x", "tier=x/y", "tier=" + "x" * 64, "x" * 64, "a" * 254 + "/x", "tier=ö", "tier;x",
        "t=" + "x," * 4096, "tier in (a b)",
    ],
)  # fmt: skip
def test_what_is_no_selector(text: str) -> None:
    with pytest.raises(BadFilter) as caught:
        filters.parse(text)
    assert str(caught.value).startswith("incorrect external filter: ")


@given(st.text(alphabet="ab=!,() in", max_size=30))
def test_any_text_is_a_selector_or_a_bad_filter(text: str) -> None:
    try:
        selector = filters.parse(text)
    except BadFilter:
        return
    assert filters.matches(selector, {}) in (True, False)


A, B = engine("a", adapters=("x",)), engine("b", data_parallel_size=2)


def fleet(*engines: Engine) -> Fleet:
    made = Fleet()
    for each in engines:
        made.apply(Change("added", each))
    return made


def test_names_resolve_to_models_and_adapters() -> None:
    made = fleet(A, B, engine("c", model="n"))
    assert made.resolve("m") == ("m", None)
    assert made.resolve("x") == ("m", "x")
    assert made.resolve("zzz") is None
    assert made.models() == (("m", None), ("n", None), ("x", "m"))


def test_slots_are_all_ranks_of_ready_engines() -> None:
    made = fleet(A, B, engine("c", ready=False))
    assert [slot.worker for slot in made.slots("m")] == ["a", "b#0", "b#1"]
    assert [slot.rank for slot in made.slots("m")] == [0, 0, 1]
    assert [slot.worker for slot in made.slots("m", "x")] == ["a"]
    assert made.slots("m") is made.slots("m")
    assert {each.uid for each in made} == {"a", "b", "c"}


def test_a_changed_engine_is_the_new_description() -> None:
    made = fleet(A)
    made.slots("m", "x")
    version = made.version
    made.apply(Change("changed", replace(A, adapters=("y",), ready=False)))
    assert made.version > version
    assert made.slots("m", "x") == ()
    assert made.resolve("x") is None
    assert made.resolve("y") == ("m", "y")


def test_a_model_whose_last_engine_went_is_known_and_has_nobody() -> None:
    made = fleet(A)
    made.apply(Change("gone", A))
    made.apply(Change("gone", A))
    assert made.slots("m") == ()
    assert made.resolve("m") == ("m", None)
    assert made.resolve("x") is None


def test_a_model_can_be_known_before_it_has_engines() -> None:
    assert Fleet(["m"]).resolve("m") == ("m", None)


def test_an_adapter_claimed_twice_means_the_first_model_by_name() -> None:
    one, two = engine("a", model="z", adapters=("x",)), engine("b", model="k", adapters=("x",))
    assert fleet(one, two).resolve("x") == fleet(two, one).resolve("x") == ("k", "x")


def test_a_model_that_nobody_serves_keeps_nobody_from_an_adapter_of_its_name() -> None:
    """As after a label that held the adapter's name for a moment."""
    wrong, right = engine("a", model="x"), engine("b", model="m", adapters=("x",))
    made = fleet(wrong, right)
    assert (made.resolve("x"), made.models()) == (("x", None), (("m", None), ("x", None)))
    made.apply(Change("changed", replace(wrong, model="m")))
    assert (made.resolve("x"), made.models()) == (("m", "x"), (("m", None), ("x", "m")))
    made.apply(Change("gone", right))
    assert (made.resolve("x"), made.models()) == (("x", None), (("m", None), ("x", None)))


def test_models_that_come_and_go_do_not_fill_the_memory() -> None:
    """(L2) A label that holds another name each time."""
    made = Fleet(["listed"])
    stays = engine("b", model="stays")
    made.apply(Change("added", stays))
    for turn in range(3 * LEFT):
        flaps = engine("a", model=f"m{turn}")
        made.apply(Change("added", flaps))
        if turn % 2:
            made.apply(Change("changed", replace(flaps, model="stays")))
            made.apply(Change("gone", replace(flaps, model="stays")))
        else:
            made.apply(Change("gone", flaps))
    known = {name for name, _ in made.models()}
    assert known == {"listed", "stays", *(f"m{turn}" for turn in range(2 * LEFT, 3 * LEFT))}
    made.apply(Change("added", engine("a", model=f"m{2 * LEFT}")))  # it is served again, and left last of all
    made.apply(Change("gone", engine("a", model=f"m{2 * LEFT}")))
    made.apply(Change("added", engine("a", model="one more")))
    made.apply(Change("gone", engine("a", model="one more")))
    assert made.resolve(f"m{2 * LEFT}") is not None
    assert made.resolve(f"m{2 * LEFT + 1}") is None


def test_a_model_s_name_beats_an_adapter_s() -> None:
    made = fleet(engine("a", adapters=("n",)), engine("b", model="n"))
    assert made.resolve("n") == ("n", None)
    assert made.models() == (("m", None), ("n", None))


def figures(table: LoadTable, worker: str = "w") -> tuple[int, int]:
    load = table.snapshot()[worker]
    return load.running, load.queued_prefill_tokens


def test_load_counts_from_the_choice_to_the_end() -> None:
    table = LoadTable(64.0)
    ticket, other = table.reserve("w", 100), table.reserve("w", 50)
    assert figures(table) == (2, 150)
    ticket.first_byte()
    ticket.first_byte()
    assert figures(table) == (2, 50)
    ticket.end()
    ticket.end()
    ticket.first_byte()
    assert figures(table) == (1, 50)
    other.end()
    assert figures(table) == (0, 0)


def test_a_dropped_worker_s_tickets_do_not_touch_its_next_life() -> None:
    table = LoadTable(64.0)
    old = table.reserve("w", 10)
    table.drop("w")
    table.drop("w")
    assert table.snapshot() == {}
    new = table.reserve("w", 20)
    old.first_byte()
    old.end()
    assert figures(table) == (1, 20)
    new.end()
    assert figures(table) == (0, 0)


def test_a_seat_is_given_away_only_when_the_last_ticket_of_the_one_before_ended() -> None:
    table = LoadTable(64.0)
    for _ in range(50):
        tickets = [table.reserve("w", 10), table.reserve("w", 20)]
        table.drop("w")
        other = table.reserve("v", 5)
        tickets[0].end()
        assert table.snapshot() == {"v": Load(1, 5)}
        assert table.total() == 1
        tickets[1].end()
        other.end()
        table.drop("v")
    assert len(table.running) == 2  # nor are seats lost


def test_columns_are_in_the_order_asked_for_and_stay_as_they_were_read() -> None:
    table = LoadTable(64.0)
    table.reserve("a", 7)
    table.reserve("b", 5)
    two, one = table.view(["b", "a"]), table.view(["a"])
    before = two.read()
    table.reserve("b", 3)
    assert before == ((1, 1), (5, 7), (69.0, 71.0))
    assert two.read() == ((2, 1), (8, 7), (136.0, 71.0))
    assert tuple(map(tuple, one.read())) == ((1,), (7,), (71.0,))


class LoadMachine(RuleBasedStateMachine):
    """Whatever happens to tickets in whatever order, the table's figures are those of the open ones."""

    tickets: Bundle[list[Any]] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.table = LoadTable(64.0)
        self.open: dict[int, tuple[str, int]] = {}

    @rule(target=tickets, worker=st.sampled_from("ab"), size=st.integers(0, 99))
    def choose(self, worker: str, size: int) -> list[Any]:
        ticket: Ticket = self.table.reserve(worker, size)
        self.open[id(ticket)] = (worker, size)
        return [ticket]

    @rule(held=tickets)
    def first_byte(self, held: list[Any]) -> None:
        held[0].first_byte()
        if id(held[0]) in self.open:
            self.open[id(held[0])] = (self.open[id(held[0])][0], 0)

    @rule(held=tickets)
    def end(self, held: list[Any]) -> None:
        held[0].end()
        self.open.pop(id(held[0]), None)

    @invariant()
    def figures_are_those_of_the_open_tickets(self) -> None:
        for worker, load in self.table.snapshot().items():
            mine = [size for name, size in self.open.values() if name == worker]
            assert (load.running, load.queued_prefill_tokens) == (len(mine), sum(mine))
            assert self.table.view([worker]).read().busy[0] == sum(mine) + 64 * len(mine)


TestLoadMachine = LoadMachine.TestCase
TestLoadMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def keys(*prompt: int, seed: int = 0) -> list[int]:
    return prefix_keys(tokens(*prompt), seed)


def test_the_grid_is_fine_at_first_and_then_eight_points_a_doubling() -> None:
    assert GRID[:16] == tuple(range(64, 1025, 64))
    assert len([point for point in GRID if 1024 < point <= 2048]) == 8
    assert len([point for point in GRID if 65_536 < point <= 131_072]) == 8
    assert len([point for point in GRID if point <= 131_072]) == 72


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_prompts_share_exactly_the_keys_of_their_common_prefix(common: int, one: int, other: int) -> None:
    first = keys(*range(common), *range(10**6, 10**6 + one))
    second = keys(*range(common), *range(2 * 10**6, 2 * 10**6 + other))
    shared = sum(point <= common for point in GRID)
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])
    if common >= 64:
        assert common - GRID[shared - 1] <= max(64, common / 8)


def test_keys_of_buffers_that_are_no_whole_tokens_are_those_of_the_whole_ones() -> None:
    raw = tokens(*range(130))
    assert prefix_keys(raw + b"\x01\x02", 0) == prefix_keys(raw, 0) == keys(*range(130))
    assert prefix_keys(b"", 0) == []
    assert prefix_keys(array("I", range(63)).tobytes(), 0) == []


def test_contexts_do_not_meet() -> None:
    seeds = {
        context_seed(*parts) for parts in [("m", None, None), ("m", "a", None), ("m", None, "a"), ("ma", None, None)]
    }
    assert len(seeds) == 4
    assert not set(keys(*range(200), seed=1)) & set(keys(*range(200), seed=2))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> ExpectedTable:
    return ExpectedTable(2.0, clock)


def test_what_was_just_sent_is_expected_of_its_worker(table: ExpectedTable) -> None:
    table.expect("w", keys(*range(1000)))
    table.expect("v", keys(*range(300)))
    assert table.lookup(keys(*range(500), 7, 7)) == {"w": Hope(448, True), "v": Hope(256, True)}
    assert table.lookup(keys(*range(1, 500))) == {}
    assert table.lookup([]) == {}


def test_once_computed_it_no_longer_waits_in_the_queue(table: ExpectedTable) -> None:
    table.expect("w", keys(*range(100))).computed()
    assert table.lookup(keys(*range(100))) == {"w": Hope(64, False)}


def test_an_answer_or_failure_ends_it(table: ExpectedTable) -> None:
    expectation = table.expect("w", keys(*range(100)))
    expectation.end()
    expectation.end()
    assert table.lookup(keys(*range(100))) == {}


def test_the_newest_choice_speaks_for_the_prefix(table: ExpectedTable) -> None:
    old, new = table.expect("w", keys(*range(100))), table.expect("w", keys(*range(100)))
    old.end()
    assert table.lookup(keys(*range(100))) == {"w": Hope(64, True)}
    new.end()
    assert table.lookup(keys(*range(100))) == {}


def test_it_ends_by_itself(table: ExpectedTable, clock: Clock) -> None:
    table.expect("w", keys(*range(100)))
    clock.now += 1.0
    table.expect("v", keys(*range(100)))
    clock.now += 1.0
    assert table.lookup(keys(*range(100))) == {"v": Hope(64, True)}
    clock.now += 1.0
    assert table.lookup(keys(*range(100))) == {}


def test_a_worker_that_is_gone_is_forgotten(table: ExpectedTable) -> None:
    table.expect("w", keys(*range(100)))
    table.expect("v", keys(*range(100)))
    table.drop("w")
    assert table.lookup(keys(*range(100))) == {"v": Hope(64, True)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400), st.booleans()), max_size=30))
def test_nothing_stays_when_all_have_ended(steps: list[tuple[str, int, bool]]) -> None:
    clock = Clock()
    table = ExpectedTable(2.0, clock)
    held: list[Expectation] = []
    for worker, length, end in steps:
        held.append(table.expect(worker, keys(*range(length))))
        clock.now += 0.3
        if end:
            held.pop(0).end()
    assert len(table) <= 7  # what is younger than the lifetime
    clock.now += 2.0
    assert table.lookup(keys(*range(500))) == {}
    assert len(table) == 0
    assert table.keys == 0
