"""What follows from a run's samples: medians, ratios, and whether a target is met."""

from __future__ import annotations

from typing import Any

import pytest
from bench.judge import Figure, number, verdict, wanted
from bench.model import Target

from tests.unit.bench.documents import row


def judged(target: Target, **sides: list[float]) -> Any:
    made = row(target, **{side: [{"f": value} for value in values] for side, values in sides.items()})
    return verdict(made, made["targets"][0])


def test_figures_are_medians_in_the_targets_unit() -> None:
    found = judged(Target("t", "f", "µs", factor=1e6), ours=[3e-6, 1e-6, 2e-6])
    assert found.ours == pytest.approx(Figure(2.0, 1.0, 3.0, 3))
    assert found.met is None


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.01, False)])
def test_a_ratio_is_to_the_best_peer_and_lower_is_better(ours: float, met: bool) -> None:
    found = judged(Target("t", "f", "s", ratio=3.0), ours=[ours], slow=[9.0], fast=[3.0])
    assert (found.best, found.met) == ("fast", met)
    assert found.ratio == pytest.approx(3.0 / ours)


@pytest.mark.parametrize(("ours", "met"), [(15.0, True), (14.9, False)])
def test_a_ratio_where_higher_is_better(ours: float, met: bool) -> None:
    found = judged(Target("t", "f", "/s", "higher", ratio=1.5), ours=[ours], slow=[9.0], fast=[10.0])
    assert (found.best, found.met) == ("fast", met)


def test_only_the_named_peers_count() -> None:
    found = judged(Target("t", "f", "s", ratio=2.0, peers=("slow",)), ours=[1.0], slow=[2.0], fast=[1.0])
    assert (found.best, found.ratio, found.met) == ("slow", 2.0, True)


@pytest.mark.parametrize(("ours", "met"), [(5.0, True), (5.1, False)])
def test_a_bound(ours: float, met: bool) -> None:
    assert judged(Target("t", "f", "ms", at_most=5.0), ours=[ours]).met is met
    assert judged(Target("t", "f", "ms", at_least=5.1), ours=[ours]).met is not met


def test_without_a_figure_of_ours_or_of_a_peer_nothing_is_met() -> None:
    assert judged(Target("t", "f", "ms", at_most=5.0), peer=[1.0]).met is False
    assert judged(Target("t", "f", "ms", at_least=0.0), peer=[1.0]).met is False
    assert judged(Target("t", "f", "ms", ratio=0.1), ours=[1.0]).met is False


def test_a_ratio_to_nothing_is_none() -> None:
    assert judged(Target("t", "f", "ms", at_most=5.0), ours=[0.0], peer=[1.0]).ratio is None
    assert judged(Target("t", "f", "ms", at_most=5.0, ratios=False), ours=[1.0], peer=[1.0]).ratio is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (1.2345, "1.23"),
        (9.999, "10.0"),
        (12.345, "12.3"),
        (123.45, "123"),
        (1964.0, "1,964"),
        (12345.6, "12,300"),
        (-0.5, "-0.500"),
    ],
)
def test_numbers_have_three_digits_that_matter(value: float, text: str) -> None:
    assert number(value) == text


def test_targets_as_text() -> None:
    made = row(Target("t", "f", "ms", ratio=1.25, at_most=5.0))
    assert wanted(made["targets"][0]) == "≥ 1.25×, ≤ 5 ms"
