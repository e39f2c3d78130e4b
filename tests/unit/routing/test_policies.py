"""The policies as pure functions of a board."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.config import RoutingSettings
from kvsync.index.match import Match
from kvsync.routing.board import NOTHING, Board, Scores
from kvsync.routing.fleet import Slot
from kvsync.routing.load import Columns
from kvsync.routing.policies import CACHE_AWARE, POLICIES, Choice, kv_aware, power_of_two, prefix_cache, saved_tokens
from tests.unit.routing.world import engine

SETTINGS = RoutingSettings()


def board(
    *rows: tuple[int, int],
    prompt: int = 1000,
    expected: dict[int, int] | None = None,
    shared: dict[int, int] | None = None,
    queued: dict[int, int] | None = None,
    turn: int = 0,
) -> Board:
    """Rows of (credit, running)."""
    return Board(
        [Slot(f"w{i}", engine(f"w{i}"), 0) for i in range(len(rows))],
        {i: Match(credit, 0, {"gpu": credit}) for i, (credit, _) in enumerate(rows) if credit},
        expected or {},
        shared or {},
        columns([running for _, running in rows], [(queued or {}).get(i, 0) for i in range(len(rows))]),
        prompt,
        turn,
    )


def columns(running: Sequence[int], queued: Sequence[int], decode_cost: float = SETTINGS.decode_cost) -> Columns:
    return Columns(running, queued, [q + decode_cost * r for q, r in zip(queued, running, strict=True)])


def chosen(policy: str, on: Board, draws: int = 40, **settings: Any) -> set[int]:
    """All rows that the policy takes, over many draws."""
    made = RoutingSettings(**settings)
    on = with_load(on, columns(on.running, on.queued, made.decode_cost))
    return {POLICIES[policy](on, made, Random(seed)).row for seed in range(draws)}


def with_load(on: Board, load: Columns) -> Board:
    return Board(on.slots, on.matches, on.expected, on.shared, load, on.prompt_tokens, on.turn)


@st.composite
def boards(draw: st.DrawFn) -> Board:
    size = draw(st.integers(1, 12))
    prompt = draw(st.integers(0, 5000))
    tokens = st.integers(0, prompt)

    def column(figures: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(figures, min_size=size, max_size=size))

    def some(figures: st.SearchStrategy[int]) -> dict[int, int]:
        """For some of the rows."""
        return draw(st.dictionaries(st.integers(0, size - 1), figures))

    matches = {}
    for row, credit in some(tokens).items():
        cpu = draw(st.integers(0, credit))
        matches[row] = Match(credit, 0, {"gpu": credit - cpu, "cpu": cpu})
    expected = {
        row: min(figure, prompt - (matches[row].credit if row in matches else 0))
        for row, figure in some(tokens).items()
    }
    few = draw(st.booleans())  # equals are what is easily missed
    return Board(
        [Slot(f"w{i}", engine(f"w{i}"), 0) for i in range(size)],
        matches,
        expected,
        {row: figure for row, figure in some(tokens).items() if row in expected},
        columns(
            column(st.integers(0, 1 if few else 40)),
            column(st.sampled_from([0, 64]) if few else st.integers(0, 20_000)),
        ),
        prompt,
        draw(st.integers(0, 10**6)),
    )


@given(boards(), st.sampled_from(sorted(POLICIES)), st.integers())
def test_every_policy_chooses_a_row_and_scores_every_row(on: Board, policy: str, seed: int) -> None:
    choice = POLICIES[policy](on, SETTINGS, Random(seed))
    assert 0 <= choice.row < len(on)
    assert len(choice.scores) == len(on)
    assert choice.why


@given(boards(), st.integers())
def test_kv_aware_takes_the_least_work_and_of_equals_the_less_loaded(on: Board, seed: int) -> None:
    choice = kv_aware(on, SETTINGS, Random(seed))
    best = min(choice.scores)
    assert choice.scores[choice.row] == best
    load = (on.running[choice.row], on.queued[choice.row])
    equals = [row for row in range(len(on)) if choice.scores[row] == best]
    assert load == min((on.running[row], on.queued[row]) for row in equals)


@given(boards(), st.data())
def test_kv_aware_work_falls_with_knowledge_and_rises_with_load(on: Board, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(on) - 1))
    before = kv_aware(on, SETTINGS, Random(0)).scores[row]

    def changed(**fields: Any) -> float:
        given = {name: getattr(on, name) for name in ("matches", "expected", "shared")} | fields
        load = given.pop("load", Columns(on.running, on.queued, on.busy))
        board = Board(on.slots, load=load, prompt_tokens=on.prompt_tokens, turn=on.turn, **given)
        return kv_aware(board, SETTINGS, Random(0)).scores[row]

    def more(column: Sequence[int]) -> list[int]:
        return [figure + (place == row) for place, figure in enumerate(column)]

    held = on.match(row)
    credit = data.draw(st.integers(held.credit, on.prompt_tokens))
    tiers = {"cpu": held.by_tier.get("cpu", 0)}
    tiers["gpu"] = credit - tiers["cpu"]
    assert changed(matches={**on.matches, row: Match(credit, 0, tiers)}) <= before  # type: ignore[arg-type]
    assert changed(matches={**on.matches, row: Match(held.credit, 0, {"gpu": held.credit})}) <= before
    assert changed(expected={**on.expected, row: on.expected.get(row, 0) + 1}) <= before
    if row in on.expected:
        assert changed(shared={**on.shared, row: on.shared.get(row, 0) + 1}) <= before
    assert changed(load=columns(more(on.running), on.queued)) > before
    assert changed(load=columns(on.running, more(on.queued))) >= before
    assert before >= 0


def test_kv_aware_weighs_credit_against_load() -> None:
    assert chosen("kv-aware", board((800, 0), (0, 0))) == {0}
    assert chosen("kv-aware", board((800, 12), (0, 0))) == {0}
    assert chosen("kv-aware", board((800, 13), (0, 0))) == {1}
    assert chosen("kv-aware", board((800, 0), (0, 0), queued={0: 801})) == {1}
    assert chosen("kv-aware", board((800, 13), (0, 0)), decode_cost=0) == {0}


def test_kv_aware_ties_are_broken_at_random() -> None:
    assert chosen("kv-aware", board((0, 1), (0, 1), (0, 2))) == {0, 1}
    # 64 tokens of credit are worth one running request: equal work, the less loaded is taken.
    assert chosen("kv-aware", board((64, 1), (0, 0))) == {1}


def test_a_sibling_s_queue_is_not_counted_as_one() -> None:
    expecting = board((0, 1), (0, 0), expected={0: 900}, shared={0: 900}, queued={0: 1000})
    assert kv_aware(expecting, SETTINGS, Random(0)).scores == pytest.approx([100 + 90 + 100 + 64, 1000])
    computed = board((0, 1), (0, 0), expected={0: 900}, queued={0: 1000})
    assert kv_aware(computed, SETTINGS, Random(0)).scores == pytest.approx([190 + 1000 + 64, 1000])


def test_slower_tiers_spare_less() -> None:
    match = Match(600, 0, {"gpu": 100, "cpu": 200, "storage": 300})
    assert saved_tokens(match, SETTINGS) == pytest.approx(100 + 0.8 * 200 + 0.5 * 300)
    assert saved_tokens(match, RoutingSettings(cpu_discount=0, storage_discount=1)) == 400
    assert saved_tokens(Match(600), SETTINGS) == 600


def test_unknown_tokens_leave_the_load() -> None:
    on = board((0, 2), (0, 1), (0, 1), prompt=0, queued={1: 5})
    assert chosen("kv-aware", on) == {2}
    assert "unknown" in kv_aware(on, SETTINGS, Random(0)).why


def aibrix(on: Board, settings: RoutingSettings) -> tuple[set[int], str]:
    """The rule, written down once more in the order of its text."""
    running = on.running
    rows = set(range(len(on)))
    looked_at = rows
    if max(running) - min(running) > settings.imbalance_abs_count:
        looked_at = {row for row in rows if running[row] == min(running)}
    held = {row: candidate.match.credit + candidate.expected for row, candidate in enumerate(on)}
    percent = {row: 100 * held[row] // on.prompt_tokens for row in looked_at if held[row]}
    limit = fmean(running) + settings.standard_deviation_factor * (stdev(running) if len(running) > 1 else 0)
    fit = {row for row in percent if running[row] <= limit}
    if fit:
        most = max(percent[row] for row in fit)
        fit = {row for row in fit if percent[row] == most}
        return {row for row in fit if running[row] == min(running[r] for r in fit)}, "prefix_match"
    least = {row for row in rows if running[row] == min(running)}
    return least, "prefix_match_skipped" if percent else "least_request_fallback"


@given(boards(), st.integers(), st.integers(1, 20), st.floats(0.1, 3))
def test_prefix_cache_is_aibrix_s_rule(on: Board, seed: int, gap: int, factor: float) -> None:
    settings = RoutingSettings(imbalance_abs_count=gap, standard_deviation_factor=factor)
    choice = prefix_cache(on, settings, Random(seed))
    rows, selection = aibrix(on, settings)
    assert choice.row in rows
    assert choice.selection == selection


def test_prefix_cache_thresholds() -> None:
    assert chosen("prefix-cache", board((500, 3), (0, 0), (0, 0), (0, 0))) == {1, 2, 3}  # mean + σ is 2.25
    assert chosen("prefix-cache", board((500, 2), (0, 0), (0, 0), (0, 0)), standard_deviation_factor=2) == {0}
    assert chosen("prefix-cache", board((500, 8), (400, 0)), standard_deviation_factor=5) == {0}
    assert chosen("prefix-cache", board((500, 9), (400, 0)), standard_deviation_factor=5) == {1}
    assert chosen("prefix-cache", board((500, 1), (509, 0))) == {1}  # both 50 %: the less busy
    assert chosen("prefix-cache", board((0, 0), expected={0: 10})) == {0}


def test_prefix_cache_says_that_the_load_was_uneven() -> None:
    assert prefix_cache(board((500, 9), (0, 0)), SETTINGS, Random(0)).imbalanced
    assert not prefix_cache(board((500, 8), (0, 0)), SETTINGS, Random(0)).imbalanced


def test_least_request() -> None:
    assert chosen("least-request", board((900, 2), (0, 1), (0, 1), (0, 1), queued={1: 9})) == {2, 3}


def test_power_of_two() -> None:
    on = board((0, 3), (0, 2), (0, 1), (0, 0))
    picks = Counter(power_of_two(on, SETTINGS, Random(seed)).row for seed in range(600))
    assert picks[0] == 0  # never the busier of any pair
    assert picks[3] > picks[2] > picks[1] > 0
    assert power_of_two(board((0, 3)), SETTINGS, Random(0)).row == 0


def test_random_and_round_robin_reach_everyone() -> None:
    assert chosen("random", board((0, 9), (0, 0), (0, 5))) == {0, 1, 2}
    rows = [
        POLICIES["round-robin"](board((0, 9), (0, 0), (0, 5), turn=turn), SETTINGS, Random(0)).row for turn in range(6)
    ]
    assert rows == [0, 1, 2, 0, 1, 2]


def test_every_policy_of_the_settings_exists() -> None:
    for policy in POLICIES:
        assert RoutingSettings(policy=policy).policy == policy  # type: ignore[arg-type]
    assert set(POLICIES) > CACHE_AWARE


def test_a_board_is_the_sequence_of_its_candidates() -> None:
    on = board((500, 2), (0, 1), queued={0: 7}, expected={1: 3})
    first, second = on
    assert (first.worker, first.match.credit, first.load.running, first.load.queued_prefill_tokens) == ("w0", 500, 2, 7)
    assert second.expected == 3
    assert on[-1] == second
    assert on[0:1] == (first,)
    assert first in on
    with pytest.raises(IndexError):
        on[2]


def test_scores_by_worker() -> None:
    scores = Scores(board((0, 0), (0, 0)).slots, [1.5, 2.5])
    assert dict(scores) == {"w0": 1.5, "w1": 2.5}
    assert len(scores) == 2
    with pytest.raises(KeyError):
        scores["w2"]


def test_what_the_index_does_not_know_is_nothing() -> None:
    assert (NOTHING.credit, NOTHING.expected, NOTHING.trust) == (0, 0, "none")
    assert isinstance(kv_aware(board((0, 0)), SETTINGS, Random(0)), Choice)
