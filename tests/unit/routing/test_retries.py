"""The budget of retries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsync.routing.retries import SHARE, SPARE, WINDOW, RetryBudget
from tests.unit.routing.world import Clock, World, engine


def taken(budget: RetryBudget, tries: int, in_flight: int = 0) -> int:
    return sum(budget.take(in_flight) for _ in range(tries))


def test_a_gateway_without_traffic_may_retry_too() -> None:
    assert taken(RetryBudget(Clock()), 100) == SPARE


def test_retries_are_a_share_of_the_requests_of_the_window() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    for _ in range(1000):
        budget.request()
    assert taken(budget, 1000) == SPARE + 200
    clock.now += WINDOW
    assert taken(budget, 1000) == SPARE, "all of that is over"


def test_the_oldest_second_leaves_first() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    for _ in range(WINDOW):
        for _ in range(10):
            budget.request()
        clock.now += 1.0
    assert taken(budget, 100) == SPARE + int(SHARE * 10 * (WINDOW - 1))
    assert taken(budget, 100) == 0
    clock.now += WINDOW - 1
    assert taken(budget, 100) == 0, "what was taken last is in the window still"
    clock.now += 1.0
    assert taken(budget, 100) == SPARE


def test_requests_in_flight_count_where_they_are_more() -> None:
    """An engine that is killed resets requests that were sent long ago."""
    assert taken(RetryBudget(Clock()), 1000, in_flight=500) == SPARE + 100


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 15)), max_size=120))
def test_never_more_than_the_budget_in_any_window(steps: list[tuple[bool, float]]) -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    requests: list[int] = []
    retries: list[int] = []
    for retry, pause in steps:
        clock.now += pause
        now = int(clock.now)
        if not retry:
            budget.request()
            requests.append(now)
        elif budget.take(0):
            retries.append(now)
        recent = [second for second in retries if second > now - WINDOW]
        assert len(recent) <= SPARE + SHARE * len([second for second in requests if second > now - WINDOW])


def test_the_router_counts_first_tries_as_requests_and_asks_the_budget() -> None:
    world = World(engine("a"), engine("b"))
    for _ in range(50):
        world.worker()
        world.worker(exclude=frozenset({"a"}))
    assert sum(world.router.may_retry() for _ in range(100)) == SPARE + 10
