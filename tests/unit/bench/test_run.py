"""Sides take turns; what goes wrong is told, and costs no other row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bench.model import OURS, Figures, Row, Run, Sides, Target, Unavailable, Wrong, simple
from bench.process import Failed
from bench.run import run, run_row


def make(sides: Callable[[Run], Sides], repeats: int = 3) -> Row:
    target = Target("t", "f", "s")
    return Row("row", "A row", "By hand.", (target,), simple(sides), repeats=repeats)


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], Figures]:
        def measure() -> Figures:
            order.append(name)
            return {"f": float(len(order))}

        return measure

    result = run_row(make(lambda _: {OURS: side("o"), "peer": side("p")}), quick=False)
    assert order == ["o", "p"] * 3
    assert [sample["figures"]["f"] for sample in result["samples"]["peer"]] == [2.0, 4.0, 6.0]
    order.clear()
    run_row(make(lambda _: {OURS: side("o"), "peer": side("p")}), quick=True)
    assert order == ["o", "p"]


@pytest.mark.parametrize("error", [Wrong("lost a block"), Failed("some trace\nlost a block")])
def test_a_side_that_was_wrong_once_has_no_figures_and_is_left_alone(error: Exception) -> None:
    calls = 0

    def wrong() -> Figures:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error
        return {"f": 1.0}

    result = run_row(make(lambda _: {OURS: lambda: {"f": 2.0}, "peer": wrong}), quick=False)
    assert calls == 2
    assert result["wrong"] == {"peer": "lost a block"}
    assert list(result["samples"]) == [OURS]
    assert len(result["samples"][OURS]) == 3


def test_a_row_that_can_not_run_says_why_and_the_next_one_runs() -> None:
    def unavailable(_: Run) -> Sides:
        raise Unavailable("no network")

    def broken(_: Run) -> Sides:
        raise ZeroDivisionError("a mistake")

    fine = make(lambda _: {OURS: lambda: {"f": 1.0}})
    document = run([make(unavailable), make(broken), fine], quick=False)
    assert [row["failed"] for row in document["rows"]] == ["no network", "ZeroDivisionError: a mistake", None]
    assert document["rows"][2]["samples"][OURS]


def test_a_row_has_a_folder_while_it_runs() -> None:
    folders = []

    def sides(run: Run) -> Sides:
        (run.folder / "file").write_text("x")
        folders.append(run.folder)
        return {OURS: lambda: {"f": float(run.pick(10, 1))}}

    assert run_row(make(sides), quick=True)["samples"][OURS][0]["figures"] == {"f": 1.0}
    assert not folders[0].exists()
