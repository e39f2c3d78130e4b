"""Orphans that continue what an engine said it had: when a parent gets a name, and what refutes it.

The prompt of most tests is ``A`` then ``Q`` then more; ``A`` is a block that no event told of, known to the engine as
``hA``. ``B`` is another one, which ``Q`` follows as well: that its store comes must never make ``A`` longer than it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
        assert credit(index, [*A, *Q, *C, *END]) == 4
        go(index, Q_OF_A)
    assert look(index, [*A, *Q, *C, *END]) == Match(12, 0, {"gpu": 12}, "partial")
    assert credit(index, [*A, *Z, *END]) == 8, "all that waited for it is placed"
    go(index, stored(["more"], C, "zA"), stored(["other"], C, "hA"))
    assert credit(index, [*A, *Z, *C, *END]) == 12
    assert credit(index, [*A, *C, *END]) == 8, "what comes later too"
    assert counts(index)["adopted"] == 1
    assert {k: states(index)[k] for k in ("blocks", "copies", "placed", "parked")} == {
        "blocks": 5, "copies": 5, "placed": 5, "parked": 0,
    }, "a name is no copy"  # fmt: skip


def test_the_chain_behind_a_name_counts_only_while_its_beginning_does(lost: Lost) -> None:
    index = lost(Q_OF_A)
    had_a(index, until=50)
    index.expire(50)
    assert credit(index, [*A, *Q, *END]) == 0
    tell(index, [*A, *END], 4)
    assert credit(index, [*A, *Q, *END]) == 8
    index.expire(LATER)
    go(index, stored(["hA"], A))
    assert credit(index, [*A, *Q, *END]) == 8, "its beginning was told"
    go(index, removed(["never seen"]))
    assert credit(index, [*A, *Q, *END]) == 8
    assert "adoption_disputed" not in counts(index)


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
    assert credit(index, [*A, *Q, *END]) == 4
    assert "adopted" not in counts(index)


@pytest.mark.parametrize(
    "prompt", [[*A, *Q[:3]], [*A, *END]], ids=["the next block is not whole", "another next block"]
)  # fmt: skip
def test_a_prompt_that_ends_before_names_nothing(lost: Lost, prompt: list[int]) -> None:
    index = lost(Q_OF_A)
    assert tell(index, prompt, 4) == "steady"
    assert credit(index, [*A, *Q, *END]) == 4


def test_a_whole_last_block_is_computed_and_stored_again(lost: Lost) -> None:
    index = lost(Q_OF_A)
    assert tell(index, [*A, *Q], 8) == "steady", "it says so, but its last token is always computed"
    assert credit(index, [*A, *Q, *END]) == 8


def test_an_image_behind_the_run_names_nothing(lost: Lost) -> None:
    from kvsync.events.types import Image

    index = lost(Q_OF_A)
    assert tell(index, [*A, *Q, *END], 4, block_keys=[None, [Image("i", 0)]]) == "steady"
    assert "adopted" not in counts(index)


def test_an_adapters_run_is_continued_by_its_own_store(lost: Lost) -> None:
    index = lost(stored(["q"], Q, "hX", lora_name="x", lora_id=3, extra_keys=[["x"]]))
    assert tell(index, [*A, *Q, *END], 4, adapter="x", cache_salt="s") == "steady"
    assert credit(index, [*A, *Q, *END], adapter="x", cache_salt="s") == 8
    assert credit(index, [*A, *Q, *END], adapter="x") == 0


# -- what refutes a name


def test_another_prompt_with_the_same_continuation(lost: Lost) -> None:
    """Which of both parents is A? Neither gets the name, then or later."""
    index = lost(Q_OF_B, stored(["cB"], C, "qB"), Q_OF_A)
    had_a(index)
    assert credit(index, [*A, *Q, *C, *END]) == 4
    go(index, stored(["again"], Q, "hB"))
    go(index, stored(["qC"], Q, "hC"))
    assert credit(index, [*A, *Q, *C, *END]) == 4
    go(index, stored(["cA"], C, "qA"))
    assert tell(index, [*A, *Q, *C, *END], 8) == "steady"
    assert credit(index, [*A, *Q, *C, *END]) == 8
    assert "adopted" not in counts(index)


def test_a_wrong_name_is_refuted_by_the_requests_own_store(lost: Lost) -> None:
    """Both stores come after the answer: the other one first. What hung on the wrong name does not count any more."""
    index = lost(stored(["zzB"], C, "zB"))
    had_a(index)
    go(index, Q_OF_B, stored(["zB"], Z, "hB"))
    assert credit(index, [*A, *Z, *C, *END]) == 12, "until all that was sent has come"
    go(index, Q_OF_A)
    assert credit(index, [*A, *Z, *C, *END]) == 4
    assert credit(index, [*A, *Q, *END]) == 4
    go(index, stored(["yB"], C, "hB"), stored(["yyB"], Q, "yB"))
    assert credit(index, [*A, *C, *Q, *END]) == 4
    go(index, stored(["hA"], A))
    assert credit(index, [*A, *Z, *END]) == 4
    assert (counts(index)["adopted"], counts(index)["adoption_disputed"]) == (1, 1)
    assert (states(index)["blocks"], states(index)["placed"], credit(index, [*A, *Q, *END])) == (7, 2, 8)


def test_a_prompt_that_repeats_itself(lost: Lost) -> None:
    """The wrong name makes the request's own parent one of its descendants."""
    index = lost()
    assert tell(index, [*A, *Q, *Q, *END], 8) == "steady"
    go(index, stored(["q"], Q, "hA"))
    go(index, stored(["qq"], Q, "q"))
    assert credit(index, [*A, *Q, *Q, *Q, *END]) == 8
    index.expire(LATER)
    go(index, stored(["qqq"], Q, "qq"))
    assert tell(index, [*A, *Q, *Q, *Q, *END], 12) == "steady"
    assert credit(index, [*A, *Q, *Q, *Q, *Q, *END]) == 12


def test_what_waits_for_a_prompt_that_repeats_itself(lost: Lost) -> None:
    index = lost(stored(["q"], Q, "hA"), stored(["qq"], Q, "q"))
    assert tell(index, [*A, *Q, *Q, *END], 8) == "steady"
    assert credit(index, [*A, *Q, *Q, *Q, *END]) == 8


def test_one_contradiction_gives_up_all_names(lost: Lost) -> None:
    """They build on each other."""
    index = lost(stored(["c"], C, "hZ"), Q_OF_B)
    assert tell(index, [*Z, *C, *END], 4) == "steady"
    had_a(index)
    assert (credit(index, [*Z, *C, *END]), credit(index, [*A, *Q, *END])) == (8, 8)
    go(index, Q_OF_A)
    assert (credit(index, [*Z, *C, *END]), credit(index, [*A, *Q, *END])) == (4, 4)
    go(index, stored(["more"], B, "c"))
    assert states(index)["placed"] == 0
    assert tell(index, [*Z, *C, *B, *END], 8) == "steady"
    assert credit(index, [*Z, *C, *B, *END]) == 12, "what is seen and told from then on can be named again"


def test_what_was_matched_before_names_nothing_any_more(lost: Lost) -> None:
    """Its own store may have been placed by a name, and was given up with it: only another's is there to be taken."""
    index = lost()
    had_a(index)
    before = look(index, [*Z, *END])
    go(index, Q_OF_B, stored(["cB"], C, "qB"))
    go(index, Q_OF_A)
    go(index, stored(["other"], C, "hX"))
    assert tell(index, [*Z, *C, *END], 4, before) == "steady"
    assert credit(index, [*Z, *C, *END]) == 4
    assert counts(index)["adopted"] == 1


def test_a_removal_by_a_wrong_name_was_one_of_any_block(lost: Lost) -> None:
    index = lost()
    assert tell(index, [*B, *Q, *C, *END], 12) == "steady"
    had_a(index)
    leant = look(index, [*B, *Q, *END])
    go(index, Q_OF_B, removed(["qB"]))
    assert credit(index, [*B, *Q, *END]) == 8, "its name said that it was another block"
    go(index, Q_OF_A)
    assert look(index, [*B, *Q, *END]) == Match(0, 8, {}, "partial")
    assert tell(index, [*B, *Q, *END], 8, leant) == "evicted"


def test_a_run_that_was_seen_after_such_a_removal_stays(lost: Lost) -> None:
    index = lost()
    had_a(index)
    go(index, Q_OF_B, removed(["qB"]))
    before = look(index, [*Z, *END])
    assert tell(index, [*Z, *C, *END], 8, before) == "steady"
    go(index, Q_OF_A)
    assert credit(index, [*Z, *C, *END]) == 8
    assert credit(index, [*A, *END]) == 0


def test_two_runs_that_go_on_alike_name_nothing(lost: Lost) -> None:
    index = lost()
    had_a(index)
    assert tell(index, [*B, *Q, *END], 4) == "steady"
    go(index, Q_OF_A)
    assert (credit(index, [*A, *Q, *END]), credit(index, [*B, *Q, *END])) == (4, 4)
    assert "adopted" not in counts(index)


@pytest.mark.parametrize("first", ["the true store", "the name"])
def test_a_true_store_of_the_runs_last_block_refutes_another_name(lost: Lost, first: str) -> None:
    index = lost()
    had_a(index)
    if first == "the true store":
        go(index, stored(["hA"], A), Q_OF_B)
        assert "adopted" not in counts(index)
    else:
        go(index, Q_OF_B, stored(["hA"], A))
    go(index, stored(["zB"], Z, "hB"))
    assert credit(index, [*A, *Q, *END]) == 4
    assert credit(index, [*A, *Z, *END]) == 4


def test_a_true_store_of_the_named_block_refutes_its_name(lost: Lost) -> None:
    index = lost()
    had_a(index)
    go(index, Q_OF_B)
    assert credit(index, [*A, *Q, *END]) == 8, "until all that was sent has come"
    go(index, stored(["hB"], B))
    assert credit(index, [*A, *Q, *END]) == 4


def test_another_name_for_the_same_block_refutes_both(lost: Lost) -> None:
    index = lost(Q_OF_A)
    had_a(index)
    assert tell(index, [*A, *Z, *END], 4) == "steady"
    go(index, stored(["zB"], Z, "hB"))
    assert credit(index, [*A, *Z, *END]) == 4
    assert credit(index, [*A, *Q, *END]) == 4


def test_a_known_parent_refutes_nothing(lost: Lost) -> None:
    """The same question behind a block that is known for another."""
    index = lost(Q_OF_A, stored(["hB"], B))
    had_a(index)
    go(index, Q_OF_B)
    assert (credit(index, [*A, *Q, *END]), credit(index, [*B, *Q, *END])) == (8, 8)


def test_what_was_parked_and_dropped_may_have_been_the_requests_own_store(lost: Lost) -> None:
    """Then B's alone is there to be taken for it."""
    index = lost()
    before = look(index, A)
    go(index, Q_OF_A)
    for first in range(0, 4096, 512):
        go(index, *(stored([f"orphan {i}"], [1, 1, 1, i], f"nobody {i}") for i in range(first, first + 512)))
    assert counts(index)["parked_dropped"] == 1
    go(index, Q_OF_B)
    had_a(index, before)
    go(index, Q_OF_B)
    assert credit(index, [*A, *Q, *END]) == 4


def test_what_was_dropped_had_come_before_the_match(lost: Lost) -> None:
    index = lost()
    for first in range(0, 5120, 512):
        go(index, *(stored([f"orphan {i}"], [1, 1, 1, i], f"nobody {i}") for i in range(first, first + 512)))
    assert counts(index)["parked_dropped"] == 1024
    before = look(index, A)
    go(index, Q_OF_A)
    had_a(index, before)
    assert credit(index, [*A, *Q, *END]) == 8
    assert counts(index)["parked_dropped"] == 1025


def test_an_own_store_that_left_again_is_a_keyless_removal(lost: Lost) -> None:
    index = lost()
    before = look(index, A)
    go(index, Q_OF_A, removed(["qA"]), Q_OF_B)
    had_a(index, before)
    assert credit(index, [*A, *Q, *END]) == 0


# -- removals and endings


def test_a_removal_that_names_an_adopted_parent_ends_its_runs_only(lost: Lost) -> None:
    index = lost(Q_OF_A)
    had_a(index)
    tell(index, [*B, *Z, *END], 8)
    go(index, removed(["hA"]))
    assert counts(index)["removed_unknown"] == 1, "nothing was resident"
    assert look(index, [*A, *Q, *END]) == Match(0, 0, {}, "partial")
    assert credit(index, [*B, *Z, *END]) == 8


def test_a_removal_of_what_hangs_on_a_name_is_a_removal_of_that_block(lost: Lost) -> None:
    index = lost(Q_OF_A, stored(["cA"], C, "qA"))
    had_a(index)
    before = look(index, [*A, *Q, *C, *END])
    go(index, removed(["cA"]))
    assert credit(index, [*A, *Q, *C, *END]) == 8, "runs are not doubted"
    assert tell(index, [*A, *Q, *C, *END], 12, before) == "evicted"


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
    assert states(index)["parked"] == 1
    index.forget(W)
    go(index, Q_OF_B)
    had_a(index)
    assert "adoption_disputed" not in counts(index)


def test_names_are_bounded_oldest_out(lost: Lost) -> None:
    index = lost()
    for i in range(4097):
        go(index, stored([f"q{i}"], [i, 2, 2, 2], f"h{i}"))
        assert tell(index, [i, 1, 1, 1, i, 2, 2, 2, *END], 4) == "steady"
    assert counts(index)["adopted"] == 4097
    assert credit(index, [0, 1, 1, 1, 0, 2, 2, 2, *END]) == 8, "what was placed stays"
    go(index, *(stored([f"z{i}"], Z, f"h{i}") for i in (0, 1, 4096)))
    assert [credit(index, [i, 1, 1, 1, *Z, *END]) for i in (0, 1, 4096)] == [4, 8, 8]


def test_another_worker_and_model_have_no_part_in_it(lost: Lost) -> None:
    index = lost()
    had_a(index)
    index.add_worker("v", M)
    index.apply("v", batch(ELSEWHERE))
    index.forget("v")
    index.apply("v", batch(Q_OF_A))
    assert index.match([*A, *Q, *END], M)["v"].credit == 0
    assert credit(index, [*A, *Q, *END]) == 4
