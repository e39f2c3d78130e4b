"""When several answers agree that something is wrong, and what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.routing.evidence import CONTRADICTIONS, PAUSE, SHORT_ROW, WINDOW, Evidence, Figures, Finding

RIGHT, OVER, UNDER, NOTHING = Figures(640, 640), Figures(640, 0), Figures(64, 640), Figures(0, 0)
SHORT = Figures(640, 624)
BLOCK = 16


def findings(evidence: Evidence, *answers: Figures, now: float = 0.0) -> list[Finding | None]:
    """What each answer brings; findings are seen to at once."""
    found = []
    for figures in answers:
        finding = evidence.take(figures, BLOCK, now)
        if finding:
            evidence.clear()
        found.append(finding)
    return found


def test_three_of_the_last_twenty() -> None:
    assert findings(Evidence(), OVER, OVER) == [None, None]
    assert findings(Evidence(), *[OVER] * CONTRADICTIONS)[-1] == "contradiction"
    spread = [OVER, *[RIGHT] * 9, OVER, *[RIGHT] * 8]
    assert findings(Evidence(), *spread, OVER)[-1] == "contradiction"
    assert findings(Evidence(), *spread, RIGHT, OVER) == [None] * (WINDOW + 1), "the first has left the window"


def test_answers_that_claim_nothing_do_not_dilute_it() -> None:
    assert findings(Evidence(), OVER, *[NOTHING] * 40, OVER, *[UNDER] * 40, OVER)[-1] == "contradiction"


def test_the_window_is_empty_after_it_and_a_minute_passes_before_the_next() -> None:
    evidence = Evidence()
    assert findings(evidence, OVER, OVER, OVER)[-1] == "contradiction"
    assert findings(evidence, *[OVER] * 30, now=PAUSE - 1) == [None] * 30
    assert findings(evidence, OVER, now=PAUSE) == ["contradiction"]
    assert findings(evidence, OVER, OVER, now=3 * PAUSE) == [None, None]


def test_short_answers_with_a_right_one_between_are_no_row() -> None:
    evidence = Evidence()
    findings(evidence, OVER, OVER, OVER)
    assert findings(evidence, *[SHORT] * 15, RIGHT, *[SHORT] * 5, now=1.0) == [None] * 21


def test_always_one_block_short_is_found_out_and_is_no_contradiction() -> None:
    assert findings(Evidence(), *[SHORT] * SHORT_ROW) == [None] * (SHORT_ROW - 1) + ["drops_last_block"]
    mixed = [figures for figures in [SHORT] * SHORT_ROW for figures in (figures, NOTHING, UNDER)]
    assert findings(Evidence(), *mixed).count("drops_last_block") == 1


@pytest.mark.parametrize("other", [RIGHT, OVER, Figures(640, 608), Figures(16, 16)])
def test_the_first_answer_that_does_not_fit_makes_short_ones_a_contradiction(other: Figures) -> None:
    assert findings(Evidence(), *[SHORT] * (SHORT_ROW - 1), other)[-1] == "contradiction"
    assert "contradiction" in findings(Evidence(), other, SHORT, SHORT, SHORT)


def test_of_an_unknown_block_size_nothing_is_one_block_short() -> None:
    evidence = Evidence()
    assert [evidence.take(Figures(16, 0), 0, 0.0) for _ in range(3)][-1] == "contradiction"


@given(st.lists(st.sampled_from([RIGHT, OVER, SHORT, UNDER, NOTHING]), max_size=120))
def test_wrong_credit_is_found_after_a_row_at_the_latest(answers: list[Figures]) -> None:
    evidence = Evidence()
    over = 0
    for number, figures in enumerate(answers):
        finding = evidence.take(figures, BLOCK, number * PAUSE)
        if finding:
            assert over + (figures.cached < figures.credit) >= CONTRADICTIONS
            evidence.clear()
        over = len(evidence.over)
        assert len(evidence.window) <= WINDOW
        if over >= CONTRADICTIONS:
            assert set(evidence.window) == {SHORT}, "not told although it is no row of short answers"
            assert over < SHORT_ROW
