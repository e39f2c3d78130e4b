"""Failure memory: alone, and as the router uses it."""

from __future__ import annotations

import logging
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsync.discovery.model import Change
from kvsync.requests.ports import Outcome
from kvsync.routing.breaker import ANSWERING, LONGEST_REST, REACHING, Attempt, Breakers, Guard
from tests.unit.routing.simulation import Simulation
from tests.unit.routing.world import Clock, World, engine, tokenized

PREFIX = [7 * i % 1000 for i in range(2000)]
A, RANKS = engine("a"), engine("r", data_parallel_size=2)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock: Clock) -> Breakers:
    return Breakers(3, clock)


def fails(guard: Guard, *outcomes: str) -> None:
    for outcome in outcomes:
        Attempt(guard).end(outcome)


def answers(guard: Guard, outcome: str = "ok") -> None:
    attempt = Attempt(guard)
    attempt.first_byte()
    attempt.end(outcome)


def state(guard: Guard) -> str:
    return guard.state


def test_every_outcome_of_the_gateway_is_weighed_or_says_nothing() -> None:
    assert set(get_args(Outcome)) - set(REACHING) - set(ANSWERING) == {"client_gone", "shutdown", "no_resources"}


@pytest.mark.parametrize(
    "outcome", ["connect_refused", "connect_timeout", "connect_failed", "tls_failed", "send_timeout", "reset"]
)
def test_one_connection_that_fails_is_enough_and_rests_double(breakers: Breakers, clock: Clock, outcome: str) -> None:
    guard = breakers.guard(A, "a")
    rests = []
    for _ in range(7):
        fails(guard, outcome)
        assert state(guard) == "open"
        begun = clock.now
        while not guard.permits:
            clock.now += 0.5
        rests.append(clock.now - begun)
    assert rests == [1, 2, 4, 8, 16, LONGEST_REST, LONGEST_REST]


@pytest.mark.parametrize(
    "outcome", ["engine_error", "first_byte_timeout", "bad_answer", "upstream_died", "idle_timeout"]
)
def test_answers_that_fail_open_it_after_three_in_a_row(breakers: Breakers, outcome: str) -> None:
    guard = breakers.guard(A, "a")
    fails(guard, outcome, outcome)
    answers(guard)
    fails(guard, outcome, outcome)
    assert state(guard) == "closed"
    fails(guard, outcome)
    assert state(guard) == "open"
    assert not guard.permits


def test_4xx_is_neither_success_nor_failure(breakers: Breakers) -> None:
    """100 oversized prompts leave it closed; 400s between 500s don't keep it from opening (R7)."""
    guard = breakers.guard(A, "a")
    for _ in range(100):
        answers(guard, "request_error")
    assert state(guard) == "closed"
    for _ in range(3):
        answers(guard, "engine_error")
        answers(guard, "request_error")
    assert state(guard) == "open"


@pytest.mark.parametrize("outcome", ["client_gone", "shutdown", "no_resources", "request_error"])
def test_what_says_nothing_opens_nothing(breakers: Breakers, outcome: str) -> None:
    guard = breakers.guard(A, "a")
    fails(guard, *[outcome] * 50)
    assert state(guard) == "closed"
    assert not breakers.resting


def test_half_open_lets_one_try_and_two_successes_close_it(breakers: Breakers, clock: Clock) -> None:
    guard = breakers.guard(A, "a")
    fails(guard, *["engine_error"] * 3)
    clock.now += 1.0
    assert (state(guard), guard.permits) == ("half-open", True)
    first = Attempt(guard)
    assert not guard.permits
    clock.now += 60.0
    assert not guard.permits, "however long it takes"
    first.first_byte()
    assert guard.permits, "it answers: the next may try"
    second = Attempt(guard)
    assert not guard.permits
    second.first_byte()
    first.end("ok")
    assert state(guard) == "half-open"
    second.end("ok")
    assert state(guard) == "closed"
    assert not breakers.resting
    fails(guard, "engine_error", "engine_error")
    assert state(guard) == "closed", "nothing of before is left"


def test_a_trial_that_fails_opens_it_again_for_twice_as_long(breakers: Breakers, clock: Clock) -> None:
    guard = breakers.guard(A, "a")
    fails(guard, *["engine_error"] * 3)
    clock.now += 1.0
    answers(guard)
    fails(guard, "upstream_died")
    clock.now += 1.5
    assert state(guard) == "open"
    clock.now += 0.5
    assert state(guard) == "half-open"


@pytest.mark.parametrize("outcome", ["client_gone", "shutdown", "no_resources", "request_error"])
def test_a_trial_that_says_nothing_makes_room_for_the_next(breakers: Breakers, clock: Clock, outcome: str) -> None:
    guard = breakers.guard(A, "a")
    fails(guard, *["engine_error"] * 3)
    clock.now += 1.0
    attempt = Attempt(guard)
    attempt.end(outcome)
    attempt.end("engine_error")
    attempt.first_byte()
    assert (state(guard), guard.permits) == ("half-open", True)


def test_requests_that_fail_together_are_one_failure(breakers: Breakers, clock: Clock) -> None:
    guard = breakers.guard(A, "a")
    together = [Attempt(guard) for _ in range(20)]
    for attempt in together:
        attempt.end("connect_refused")
    clock.now += 1.0
    assert state(guard) == "half-open", "the first rest, not the twentieth"


def test_what_began_before_it_opened_neither_ends_the_rest_nor_lengthens_it(breakers: Breakers, clock: Clock) -> None:
    guard = breakers.guard(A, "a")
    slow = [Attempt(guard) for _ in range(4)]
    fails(guard, *["engine_error"] * 3)
    slow[0].first_byte()
    slow[0].end("ok")
    slow[1].end("upstream_died")
    clock.now += 1.0
    assert state(guard) == "half-open"
    trial = Attempt(guard)
    slow[2].end("engine_error")
    slow[3].end("ok")
    assert state(guard) == "half-open"
    assert not guard.permits, "the trial is still out"
    trial.end("engine_error")
    assert state(guard) == "open"


def test_where_nobody_is_permitted_a_try_that_succeeds_ends_the_rest(breakers: Breakers, clock: Clock) -> None:
    guard = breakers.guard(A, "a")
    fails(guard, *["connect_refused"] * 50)
    assert state(guard) == "open"
    clock.now += 1.0
    assert state(guard) == "half-open", "who fails meanwhile does not lengthen it"
    fails(guard, "connect_refused")
    assert state(guard) == "open"
    answers(guard)
    assert state(guard) == "half-open"
    answers(guard)
    assert state(guard) == "closed"


def test_ranks_share_what_reaches_their_engine_and_not_how_each_answers(breakers: Breakers) -> None:
    """The answers of a healthy rank don't clear the memory of a broken one (R7)."""
    first, second = breakers.guard(RANKS, "r#0"), breakers.guard(RANKS, "r#1")
    for _ in range(3):
        answers(first)
        answers(second, "engine_error")
    assert (state(first), state(second)) == ("closed", "open")
    fails(first, "connect_refused")
    assert breakers.states() == {"r#0": "open", "r#1": "open"}


def test_an_engine_that_is_gone_takes_its_memory_with_it(breakers: Breakers, clock: Clock) -> None:
    for _ in range(200):
        guard = breakers.guard(RANKS, "r#0")
        late = [Attempt(guard) for _ in range(4)]
        fails(guard, "connect_refused", *["engine_error"] * 3)
        breakers.drop(RANKS)
        for attempt in late:
            attempt.end("engine_error")
        fails(guard, "reset")
    assert breakers.states() == {}
    assert not breakers.resting
    assert breakers.guard(RANKS, "r#0").state == "closed"
    breakers.drop(engine("never there"))


def test_opening_and_closing_are_logged_once_each(
    breakers: Breakers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsync.routing")
    guard = breakers.guard(RANKS, "r#0")
    fails(guard, *["connect_timeout"] * 5)
    clock.now += 100.0
    answers(guard)
    answers(guard)
    assert [record.getMessage() for record in caplog.records] == [
        "engine r (every rank) rests for 1 s: connect_timeout",
        "engine r (every rank) serves again",
    ]


class Life(RuleBasedStateMachine):
    """Whatever happens, the set of those that rest is the truth, and nobody stays away for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breakers = Breakers(3, self.clock)
        self.guard = self.breakers.guard(A, "a")
        self.out: list[Attempt] = []

    @rule()
    def begin(self) -> None:
        self.out.append(Attempt(self.guard))

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(place=st.integers(0, 5))
    def first_byte(self, place: int) -> None:
        if self.out:
            self.out[place % len(self.out)].first_byte()

    @rule(place=st.integers(0, 5), outcome=st.sampled_from(get_args(Outcome)))
    def end(self, place: int, outcome: str) -> None:
        if self.out:
            self.out.pop(place % len(self.out)).end(outcome)

    @invariant()
    def resting_is_the_truth(self) -> None:
        both = {self.guard.reaching, self.guard.answering}
        assert self.breakers.resting == {breaker for breaker in both if breaker.state != "closed"}

    def teardown(self) -> None:
        for attempt in self.out:
            attempt.end("client_gone")
        self.clock.now += LONGEST_REST
        assert self.guard.permits, "nothing is out, and it still stays away"
        answers(self.guard)
        answers(self.guard)
        assert state(self.guard) == "closed"


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- as the router uses it


def test_the_best_prefix_on_an_engine_that_always_fails_is_avoided() -> None:
    """Whatever speaks for it: three answers of 500 and then it is tried once in a while only (R7)."""
    world = World(engine("e0"), engine("e1"), engine("e2"))
    simulation = Simulation(world)
    simulation.warm("e1", tokenized(PREFIX))
    tries = 0
    for i in range(600):  # a minute
        decision, ticket = world.ask(tokenized([*PREFIX, i]))
        if decision.chosen.worker == "e1":
            tries += 1
            ticket.first_byte()
            ticket.end("engine_error")
        else:
            ticket.first_byte()
            ticket.end("ok")
        world.clock.now += 0.1
    assert 3 + 4 <= tries <= 3 + 6, "three, then after 1, 2, 4, 8, 16 and 30 s"


def test_an_engine_that_refuses_is_not_picked_again_and_again() -> None:
    """The best prefix is on an engine that is down: the first try finds out, the others go round it (R7)."""
    world = World(engine("e0"), engine("e1"), engine("e2"))
    simulation = Simulation(world)
    simulation.warm("e1", tokenized(PREFIX))
    decision, ticket = world.ask(tokenized([*PREFIX, 1]))
    assert decision.chosen.worker == "e1"
    ticket.end("connect_refused")
    workers = set()
    for i in range(20):
        decision, ticket = world.ask(tokenized([*PREFIX, 2 + i]))
        workers.add(decision.chosen.worker)
        assert decision.extra["resting"] == ["e1"]
        ticket.end("ok")
    assert "e1" not in workers
    assert world.sample("kvsync_worker_breaker", worker="e1", state="open") == 1
    assert world.sample("kvsync_worker_breaker", worker="e0", state="closed") == 1
    world.clock.now += 1.0
    decision, ticket = world.ask(tokenized([*PREFIX, 99]))
    assert decision.chosen.worker == "e1"
    assert world.ask(tokenized([*PREFIX, 99]))[0].chosen.worker != "e1", "one tries, the others stay away"
    ticket.end("connect_refused")
    world.clock.now += 1.5  # the second rest is twice as long
    assert world.worker(tokenized([*PREFIX, 100])) != "e1"
    world.clock.now += 0.5
    assert world.worker(tokenized([*PREFIX, 101])) == "e1"


def test_client_errors_do_not_take_an_engine_out() -> None:
    """A client that sends 100 prompts too long for the model gets its 400s, and the engine stays (R7)."""
    world = World(engine("e0"), engine("e1"))
    simulation = Simulation(world)
    simulation.warm("e1", tokenized(PREFIX))
    for i in range(100):
        decision, ticket = world.ask(tokenized([*PREFIX, i]))
        assert decision.chosen.worker == "e1"
        ticket.first_byte()
        ticket.end("request_error")


def test_when_everyone_rests_everyone_is_tried() -> None:
    world = World(engine("e0"), engine("e1"))
    for worker in ("e0", "e1"):
        world.ask(exclude=frozenset({"e0", "e1"} - {worker}))[1].end("connect_refused")
    decision, _ = world.ask()
    assert {candidate.worker for candidate in decision.candidates} == {"e0", "e1"}


@pytest.mark.parametrize(("failures", "open_after"), [(1, 1), (5, 5)])
def test_the_number_of_failures_is_a_setting(failures: int, open_after: int) -> None:
    world = World(engine("a"), engine("b"), breaker_failures=failures)

    def fail() -> None:
        world.ask(exclude=frozenset({"b"}))[1].end("first_byte_timeout")

    for _ in range(open_after - 1):
        fail()
    assert world.router.breakers().get("a", "closed") == "closed"
    fail()
    assert world.router.breakers()["a"] == "open"


def test_a_worker_that_comes_back_starts_from_nothing() -> None:
    old: Any = engine("a")
    world = World(old, engine("b"))
    _, ticket = world.ask(exclude=frozenset({"b"}))
    world.ask(exclude=frozenset({"b"}))[1].end("connect_refused")
    world.router.apply(Change("gone", old))
    assert "a" not in world.router.breakers()
    world.router.apply(Change("added", old))
    ticket.end("connect_refused")
    decision, _ = world.ask()
    assert "resting" not in decision.extra
