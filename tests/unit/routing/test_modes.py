"""Modes: what is told, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.discovery.model import Change
from kvsync.routing.modes import BETTER_AFTER, MODES, WORSE_AFTER, Mode, ModeChange, Modes, Moment, of_model
from tests.unit.routing.world import Clock, engine


class Told:
    """One worker, looked at ten times a second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.modes = Modes(self.clock)
        self.changes: list[ModeChange] = []

    def be(self, mode: Mode, seconds: float) -> Mode:
        """It is like this for so long; returns what is told at the end."""
        for _ in range(round(seconds * 10)):
            self.changes += self.modes.look({"w": Moment("m", mode, "so", True)})
            self.clock.now += 0.1
        self.clock.now = round(self.clock.now, 1)
        return self.modes.workers["w"]


@pytest.fixture
def told() -> Told:
    return Told()


def test_the_first_step_up_is_told_at_once(told: Told) -> None:
    assert told.be("load-only", 3) == "load-only"
    assert told.be("exact", 0.1) == "exact"
    assert [str(change) for change in told.changes] == [
        "worker w is served by exact knowledge (before: load-only): so",
        "model m is served by exact knowledge (before: load-only): 1 of 1 workers exact",
    ]
    assert not any(change.worse for change in told.changes)


def test_a_moment_s_trouble_is_not_told(told: Told) -> None:
    told.be("exact", 1)
    told.changes.clear()
    for _ in range(20):
        told.be("load-only", WORSE_AFTER - 0.2)
        told.be("exact", 0.1)
    assert told.changes == []


def test_trouble_that_lasts_is_told_and_so_is_its_end_a_while_later(told: Told) -> None:
    told.be("exact", 1)
    told.changes.clear()
    assert told.be("partial", WORSE_AFTER) == "exact"
    assert told.be("partial", 0.1) == "partial"
    assert told.be("exact", BETTER_AFTER) == "partial"
    assert told.be("exact", 0.1) == "exact"
    assert [(change.kind, change.after, change.worse) for change in told.changes] == [
        ("worker", "partial", True),
        ("model", "partial", True),
        ("worker", "exact", False),
        ("model", "exact", False),
    ]


def test_what_wavers_while_it_gets_better_is_told_as_the_worst_of_it(told: Told) -> None:
    told.be("exact", 1)
    told.be("load-only", 2)
    told.be("exact", BETTER_AFTER - 1)
    told.be("observed", 0.5)
    assert told.be("exact", 0.6) == "observed"
    assert told.be("exact", BETTER_AFTER) == "observed"
    assert told.be("exact", 0.1) == "exact"


def test_what_gets_worse_and_worse_is_told_as_it_is(told: Told) -> None:
    told.be("exact", 1)
    told.be("partial", WORSE_AFTER - 0.1)
    assert told.be("load-only", 0.2) == "load-only"


@given(st.lists(st.tuples(st.sampled_from(MODES), st.floats(0.1, 6)), min_size=1, max_size=12))
def test_changes_are_rare_and_what_lasts_is_told(steps: list[tuple[Mode, float]]) -> None:
    told = Told()
    told.be("load-only", 0.1)
    told.be("exact", 0.1)
    told.changes.clear()
    begun = told.clock.now
    for mode, seconds in steps:
        told.be(mode, seconds)
    ups = [change for change in told.changes if change.kind == "worker" and not change.worse]
    assert len(ups) <= (told.clock.now - begun) / BETTER_AFTER
    last = steps[-1][0]
    assert told.be(last, 2 * BETTER_AFTER + 0.2) == last


@pytest.mark.parametrize(
    ("modes", "model"),
    [
        (["exact", "exact"], "exact"),
        (["partial", "partial"], "partial"),
        (["exact", "partial"], "partial"),
        (["exact", "load-only"], "partial"),
        (["observed", "partial"], "partial"),
        (["observed", "load-only"], "observed"),
        (["observed"], "observed"),
        (["load-only", "load-only"], "load-only"),
    ],
)
def test_a_model_is_exact_only_when_all_of_its_workers_are(modes: list[Mode], model: Mode) -> None:
    assert of_model(modes) == model


def test_models_are_told_of_ready_workers_only() -> None:
    clock = Clock()
    modes = Modes(clock)
    modes.look({"a": Moment("m", "exact", "", True), "b": Moment("m", "load-only", "", False)})
    assert (dict(modes.models), dict(modes.workers)) == ({"m": "exact"}, {"a": "exact", "b": "load-only"})
    modes.look({"a": Moment("m", "exact", "", False)})
    assert (dict(modes.models), dict(modes.workers)) == ({}, {"a": "exact"})


def test_who_is_gone_is_forgotten_at_once_and_begins_anew(told: Told) -> None:
    told.be("exact", 1)
    told.modes.apply(Change("changed", engine("w")))
    assert "w" in told.modes.workers
    told.modes.apply(Change("gone", engine("w")))
    assert dict(told.modes.workers) == {}
    assert told.be("load-only", 0.1) == "load-only"


def test_churn_leaves_nothing() -> None:
    modes = Modes(Clock())
    for i in range(1000):
        modes.look({f"w{i}": Moment(f"m{i % 7}", "exact", "", True)})
    assert (len(modes.workers), len(modes.models)) == (1, 1)
