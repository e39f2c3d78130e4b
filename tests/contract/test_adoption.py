"""Orphans that continue what an engine said it had: their parent gets a name, and what hangs on it is expected.

The prompt of most tests is ``A`` then ``Q`` then more; ``A`` is a block that no event told of, known to the engine as
``hA``. ``B`` is another one, which ``Q`` follows as well: that its store comes must never give credit behind ``A``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvsync.events.types import Image
from kvsync.index.match import Index, Match
from tests.contract.face import ELSEWHERE, LATER, M, W, counts, credit, look, states, tell
from tests.wire import batch, cleared, removed, stored

Lost = Callable[..., Index]
A, B, Q, C, Z = (list(range(start, start + 4)) for start in (0, 100, 200, 300, 400))
END = [9]


def go(index: Index, *events: Any) -> None:
    index.apply(W, batch(*events))


def had_a(index: Index, since: Match | None = None, until: float = LATER) -> None:
    """A request with A, Q and C, of which the engine had A alone."""
    assert tell(index, [*A, *Q, *C, *END], 4, since, until) == "steady"


def found(index: Index, tokens: list[int]) -> tuple[int, int]:
    match = look(index, tokens)
    return match.credit, match.expected


Q_OF_A: Any = stored(["qA"], Q, "hA")
"""What that request stored."""
Q_OF_B: Any = stored(["qB"], Q, "hB")


@pytest.mark.parametrize("first", ["the store", "the answer"])
def test_a_store_that_continues_a_run_names_its_last_block(lost: Lost, first: str) -> None:
    index = lost(stored(["zA"], Z, "hA"), stored(["cA"], C, "qA"))
    before = look(index, A)
    if first == "the store":
        go(index, Q_OF_A)
    had_a(index, before)
    if first == "the answer":
        assert found(index, [*A, *Q, *C, *END]) == (4, 0)
        go(index, Q_OF_A)
    assert look(index, [*A, *Q, *C, *END]) == Match(4, 8, {"gpu": 4}, "partial")
    assert found(index, [*A, *Z, *END]) == (4, 4), "all that waited for it is placed"
    go(index, stored(["more"], C, "zA"), stored(["other"], C, "hA"))
    assert found(index, [*A, *Z, *C, *END]) == (4, 8)
    assert found(index, [*A, *C, *END]) == (4, 4), "what comes later too"
    assert counts(index)["adopted"] == 1
    assert {k: states(index)[k] for k in ("blocks", "copies", "placed", "guessed", "parked")} == {
        "blocks": 5, "copies": 5, "placed": 5, "guessed": 5, "parked": 0,
    }, "a name is no copy"  # fmt: skip


def test_what_hangs_on_a_name_is_credited_once_it_was_observed_itself(lost: Lost) -> None:
    index = lost(Q_OF_A)
    had_a(index)
    assert tell(index, [*A, *Q, *END], 8) == "steady"
    assert found(index, [*A, *Q, *END]) == (8, 0)


def test_the_chain_behind_a_name_is_expected_only_while_its_beginning_is(lost: Lost) -> None:
    index = lost(Q_OF_A)
    had_a(index, until=50)
    index.expire(50)
    assert found(index, [*A, *Q, *END]) == (0, 0)
    tell(index, [*A, *END], 4)
    assert found(index, [*A, *Q, *END]) == (4, 4)
    index.expire(LATER)
    go(index, stored(["hA"], A))
    assert found(index, [*A, *Q, *END]) == (4, 4), "its beginning was told"
    go(index, stored(["cA"], C, "hA"))
    assert found(index, [*A, *C, *END]) == (8, 0), "its parent is known for certain now"


@pytest.mark.parametrize(
    "orphan",
    [
        stored(["q"], [*Q[:3], 7], "hA"),
        stored(["q"], Q, "hA", lora_name="x", lora_id=1, extra_keys=[["x"]]),
        stored(["q"], Q, "hA", extra_keys=[[["image", 0]]]),
        stored(["q"], [*Q, *Q], "hA", 8),
        stored(["q"], Q, "hA", medium="CPU", extra_keys=...),
        stored(["q"], [*Q, 7], "hA"),
        stored([], Q, "hA"),
    ],
    ids=["tokens", "adapter", "image", "block size", "hidden keys", "sparse", "no hash"],
)
def test_what_does_not_continue_the_run_names_nothing(lost: Lost, orphan: Any) -> None:
    index = lost(orphan)
    had_a(index)
    go(index, orphan)
    assert found(index, [*A, *Q, *END]) == (4, 0)
    assert "adopted" not in counts(index)


@pytest.mark.parametrize(
    "prompt", [[*A, *Q[:3]], [*A, *END]], ids=["the next block is not whole", "another next block"]
)  # fmt: skip
def test_a_prompt_that_ends_before_names_nothing(lost: Lost, prompt: list[int]) -> None:
    index = lost(Q_OF_A)
    assert tell(index, prompt, 4) == "steady"
    assert found(index, [*A, *Q, *END]) == (4, 0)


def test_a_whole_last_block_is_computed_and_stored_again(lost: Lost) -> None:
    index = lost(Q_OF_A)
    assert tell(index, [*A, *Q], 8) == "steady", "it says so, but its last token is always computed"
    assert found(index, [*A, *Q, *END]) == (4, 4)


def test_an_image_behind_the_run_names_nothing(lost: Lost) -> None:
    index = lost(Q_OF_A)
    assert tell(index, [*A, *Q, *END], 4, block_keys=[None, [Image("i", 0)]]) == "steady"
    assert "adopted" not in counts(index)


def test_an_adapters_run_is_continued_by_its_own_store(lost: Lost) -> None:
    index = lost(stored(["q"], Q, "hX", lora_name="x", lora_id=3, extra_keys=[["x"]]))
    assert tell(index, [*A, *Q, *END], 4, adapter="x", cache_salt="s") == "steady"
    assert look(index, [*A, *Q, *END], adapter="x", cache_salt="s") == Match(4, 4, {"gpu": 4}, "partial")
    assert look(index, [*A, *Q, *END], adapter="x") == Match(0, 0, {}, "partial")


def test_a_store_that_begins_with_a_known_block_names_nothing(lost: Lost) -> None:
    index = lost(stored(["q"], Q))
    had_a(index)
    go(index, stored(["q", "c"], [*Q, *C], "hA"))
    assert "adopted" not in counts(index)
    assert credit(index, [*Q, *C, *END]) == 8


def test_a_run_that_was_cut_short_names_nothing(lost: Lost) -> None:
    """What followed the hit in the prompt does not follow the run."""
    index = lost(stored(["hA", "hB"], [*A, *B]), removed(["hA"]))
    before = look(index, A)
    go(index, removed(["hB"]))
    assert tell(index, [*A, *B, *Q, *END], 8, before) == "steady"
    assert found(index, [*A, *B, *END]) == (4, 0)
    go(index, Q_OF_A)
    assert "adopted" not in counts(index)


# -- it is a guess


@pytest.mark.parametrize("events", [(Q_OF_B, Q_OF_A), (Q_OF_A, Q_OF_B), (Q_OF_B,)])
@pytest.mark.parametrize("first", ["the stores", "the answer"])
def test_another_prompt_with_the_same_continuation_gives_no_credit(
    lost: Lost, events: tuple[Any, ...], first: str
) -> None:
    """Which of both parents is A? What hangs on either is another's, perhaps."""
    index = lost(stored(["cB"], C, "qB"), stored(["zB"], Z, "hB"))
    before = look(index, A)
    if first == "the stores":
        go(index, *events)
    had_a(index, before)
    if first == "the answer":
        go(index, *events)
    for behind in (Q, [*Q, *C], Z):
        assert credit(index, [*A, *behind, *END]) == 4
    go(index, stored(["hA"], A), stored(["zzB"], C, "zB"))
    index.expire(LATER)
    assert credit(index, [*A, *Z, *C, *END]) == 4


def test_a_prompt_that_repeats_itself(lost: Lost) -> None:
    """The wrong parent gets the name, and the right one hangs on it."""
    index = lost(stored(["q"], Q, "hA"), stored(["qq"], Q, "q"))
    assert tell(index, [*A, *Q, *Q, *END], 8) == "steady"
    assert credit(index, [*A, *Q, *Q, *Q, *END]) == 8
    go(index, stored(["qqq"], Q, "qq"))
    assert credit(index, [*A, *Q, *Q, *Q, *Q, *END]) == 8


def test_the_newest_run_that_goes_on_so_gives_the_name(lost: Lost) -> None:
    index = lost()
    had_a(index)
    assert tell(index, [*B, *Q, *END], 4) == "steady"
    go(index, Q_OF_B)
    assert (found(index, [*A, *Q, *END]), found(index, [*B, *Q, *END])) == ((4, 0), (4, 4))
    had_a(index)
    go(index, stored(["q3"], Q, "h3"))
    assert (found(index, [*A, *Q, *END]), found(index, [*B, *Q, *END])) == ((4, 4), (4, 4))


def test_a_guess_takes_no_key_from_a_block_that_is_certain(lost: Lost) -> None:
    index = lost(stored(["hA", "qA"], [*A, *Q]), stored(["cA"], C, "qA"))
    go(index, removed(["hA"]))
    assert found(index, [*A, *Q, *C, *END]) == (0, 0)
    go(index, stored(["cB"], C, "qB"))
    had_a(index)
    go(index, Q_OF_B)
    assert counts(index)["adopted"] == 1
    assert found(index, [*A, *Q, *C, *END]) == (12, 0)
    assert (states(index)["placed"], states(index)["guessed"], states(index)["parked"]) == (2, 0, 1)
    go(index, removed(["qB"]))
    assert look(index, [*A, *Q, *C, *END]).credit == 0, "it had no key: it may be any block"


def test_what_is_certain_takes_its_key_from_a_guess(lost: Lost) -> None:
    index = lost(stored(["cB"], C, "qB"))
    had_a(index)
    go(index, Q_OF_B)
    assert states(index)["guessed"] == 2
    go(index, stored(["hA", "qA"], [*A, *Q]))
    assert found(index, [*A, *Q, *C, *END]) == (8, 4)
    assert (states(index)["placed"], states(index)["guessed"]) == (3, 1)
    go(index, stored(["q2"], Q, "hA"))
    assert credit(index, [*A, *Q, *END]) == 4, "two that are certain are twins"


def test_a_guess_in_the_middle_of_a_store_makes_what_follows_one(lost: Lost) -> None:
    index = lost()
    had_a(index)
    go(index, Q_OF_B)
    go(index, stored(["hA", "qB", "c"], [*A, *Q, *C]))
    assert found(index, [*A, *Q, *C, *END]) == (4, 8)
    assert states(index)["guessed"] == 2


def test_the_own_store_of_a_named_block(lost: Lost) -> None:
    index = lost()
    had_a(index)
    go(index, Q_OF_B, stored(["hB"], B), stored(["zB"], Z, "hB"))
    assert found(index, [*B, *Z, *END]) == (8, 0)
    assert found(index, [*A, *Z, *END]) == (4, 0)
    assert found(index, [*A, *Q, *END]) == (4, 4), "a known block keeps its key"
    go(index, removed(["hB"]))
    assert credit(index, [*A, *END]) == 4, "it is known which block that was"


def test_what_is_guessed_is_placed_for_other_tiers_too(lost: Lost) -> None:
    index = lost(Q_OF_A)
    had_a(index)
    go(index, stored(["qA"], Q, "hA", medium="CPU", extra_keys=...), removed(["qA"]))
    tell(index, [*A, *END], 4)
    assert found(index, [*A, *Q, *END]) == (4, 4)


# -- removals, misses, endings


@pytest.mark.parametrize("gone", ["hA", "qA", "cA"])
def test_a_removal_that_names_a_guess_may_be_one_of_any_block(lost: Lost, gone: str) -> None:
    index = lost(Q_OF_A, stored(["cA"], C, "qA"))
    had_a(index)
    tell(index, [*B, *Z, *END], 8)
    leant = look(index, [*B, *Z, *END])
    go(index, removed([gone]))
    assert found(index, [*B, *Z, *END]) == (0, 8)
    assert tell(index, [*B, *Z, *END], 8, leant) == "evicted"
    assert counts(index).get("removed_unknown", 0) == (gone == "hA"), "a name is no copy"


def test_a_miss_drops_guesses(lost: Lost) -> None:
    index = lost(Q_OF_A, stored(["cA"], C, "qA"))
    had_a(index)
    go(index, stored(["qA"], Q, "hA", medium="CPU", extra_keys=...))
    assert tell(index, [*A, *Q, *C, *END], 4) == "steady"
    assert found(index, [*A, *Q, *C, *END]) == (4, 0)
    assert (counts(index)["doubtful_missed"], states(index)["blocks"], states(index)["guessed"]) == (3, 0, 0)


def test_guesses_are_expected_while_suspended(lost: Lost) -> None:
    index = lost(Q_OF_A)
    had_a(index)
    index.suspend(W)
    assert look(index, [*A, *Q, *END]) == Match(0, 8, {}, "none")


@pytest.mark.parametrize("end", ["forget", "clear", "new_epoch", "relearn"])
def test_names_end_when_all_is_forgotten(lost: Lost, end: str) -> None:
    index = lost(Q_OF_A)
    had_a(index)
    assert counts(index)["adopted"] == 1
    if end == "clear":
        go(index, cleared())
    else:
        getattr(index, end)(W)
    go(index, ELSEWHERE, stored(["zA"], Z, "hA"))
    assert (states(index)["parked"], states(index)["guessed"]) == (1, 0)


def test_names_are_bounded_oldest_out(lost: Lost) -> None:
    index = lost()
    for i in range(4097):
        go(index, stored([f"q{i}"], [i, 2, 2, 2], f"h{i}"))
        assert tell(index, [i, 1, 1, 1, i, 2, 2, 2, *END], 4) == "steady"
    assert counts(index)["adopted"] == 4097
    assert found(index, [0, 1, 1, 1, 0, 2, 2, 2, *END]) == (4, 4), "what was placed stays"
    go(index, *(stored([f"z{i}"], Z, f"h{i}") for i in (0, 1, 4096)))
    assert [found(index, [i, 1, 1, 1, *Z, *END]) for i in (0, 1, 4096)] == [(4, 0), (4, 4), (4, 4)]


def test_another_worker_has_no_part_in_it(lost: Lost) -> None:
    index = lost()
    had_a(index)
    index.add_worker("v", M)
    index.apply("v", batch(ELSEWHERE))
    index.forget("v")
    index.apply("v", batch(Q_OF_A))
    assert index.match([*A, *Q, *END], M)["v"] == Match(0, 0, {}, "partial")
    assert found(index, [*A, *Q, *END]) == (4, 0)
