"""What ``make instructions`` says of counts that changed."""

from __future__ import annotations

from bench.micro.instructions import FILE, Case, Counts, compare


def counts(built_by: str = "rustc 1, x86_64", **cases: float) -> Counts:
    return Counts(built_by, {name: Case("block", value) for name, value in cases.items()})


def test_the_same_is_no_change() -> None:
    found = compare(counts(apply=1000.0), counts(apply=1000.0))
    assert not found.worse
    assert not found.changed
    assert "+0.0%" in found.lines[0]


def test_what_moves_within_the_tolerance_is_shown_and_nothing_else() -> None:
    found = compare(counts(apply=1000.0, lookup=500.0), counts(apply=1019.0, lookup=491.0))
    assert not found.worse
    assert not found.changed
    assert ["+1.9%" in found.lines[0], "-1.8%" in found.lines[1]] == [True, True]


def test_more_than_the_tolerance_is_named() -> None:
    found = compare(counts(apply=1000.0, lookup=500.0), counts(apply=1021.0, lookup=500.0))
    assert found.worse == ("apply",)
    assert found.changed
    assert found.lines[0].endswith("+2.1%  worse")


def test_fewer_are_worth_keeping_and_no_failure() -> None:
    found = compare(counts(apply=1000.0), counts(apply=700.0))
    assert not found.worse
    assert found.changed
    assert found.lines[0].endswith("-30.0%  better")


def test_a_case_that_is_not_counted_any_more_is_not_passed_over() -> None:
    found = compare(counts(apply=1000.0, lookup=500.0), counts(apply=1000.0))
    assert found.worse == ("lookup",)
    assert found.lines[1].endswith("gone")


def test_a_new_case_and_another_unit_are_compared_with_nothing() -> None:
    found = compare(counts(apply=1000.0), Counts("rustc 1, x86_64", {"apply": Case("event", 1.0), "new": Case("a", 1)}))
    assert not found.worse
    assert found.changed
    assert [line.split()[-1] for line in found.lines] == ["new", "new"]


def test_another_compiler_is_not_judged() -> None:
    found = compare(counts(apply=1000.0), counts("rustc 2, x86_64", apply=2000.0))
    assert not found.worse
    assert found.changed
    assert "rustc 2" in found.lines[-1]


def test_without_counts_to_compare_with_all_is_new() -> None:
    found = compare(None, counts(apply=1000.0))
    assert (found.worse, found.changed) == ((), True)


def test_counts_are_kept_as_they_are() -> None:
    kept = FILE.read_text(encoding="utf-8")
    assert Counts.load(kept).dump() == kept
    assert Counts.load(counts(apply=1.5).dump()) == counts(apply=1.5)
