"""Orphans that continue what an engine said it had: when a parent gets a name from that, and what refutes a name.

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
    """Which of both parents is A? Behind A only answers tell then."""
    index = lost(Q_OF_B, stored(["cB"], C, "qB"), Q_OF_A)
    had_a(index)
    assert credit(index, [*A, *Q, *C, *END]) == 4
    assert counts(index)["adoption_disputed"] == 1
    assert tell(index, [*A, *Q, *C, *END], 8) == "steady"
    assert credit(index, [*A, *Q, *C, *END]) == 8, "C was stored behind B"
    assert credit(index, [*A, *Z, *END]) == 4


def test_a_wrong_name_is_refuted_by_the_requests_own_store(lost: Lost) -> None:
    """Both stores come after the answer: the other one first. What hangs on the wrong name does not count either."""
    index = lost()
    had_a(index)
    go(index, Q_OF_B, stored(["zB"], Z, "hB"))
    go(index, Q_OF_A)
    assert credit(index, [*A, *Z, *END]) == 4
    assert credit(index, [*A, *Q, *END]) == 4
    go(index, stored(["yB"], C, "hB"), stored(["yyB"], Q, "yB"))
    assert credit(index, [*A, *C, *Q, *END]) == 4
    index.expire(LATER)
    had_a(index)
    assert credit(index, [*A, *Z, *END]) == 4, "as long as those blocks may be there"


def test_the_dispute_outlives_the_end_of_the_head(lost: Lost) -> None:
    """A is stored anew, under its true name; what hung on the wrong one is B's all the same."""
    index = lost()
    had_a(index)
    go(index, Q_OF_B, stored(["zB"], Z, "hB"), Q_OF_A)
    go(index, stored(["hA"], A))
    assert credit(index, [*A, *Z, *END]) == 4


def test_two_runs_that_go_on_alike_name_nothing(lost: Lost) -> None:
    index = lost()
    had_a(index)
    assert tell(index, [*B, *Q, *END], 4) == "steady"
    go(index, Q_OF_A)
    assert (credit(index, [*A, *Q, *END]), credit(index, [*B, *Q, *END])) == (4, 4)
    assert "adopted" not in counts(index)


@pytest.mark.parametrize("order", [0, 1])
def test_a_true_store_of_the_runs_last_block_refutes_another_name(lost: Lost, order: int) -> None:
    index = lost()
    had_a(index)
    if order:
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


def test_a_disputed_block_gets_no_other_name(lost: Lost) -> None:
    index = lost(Q_OF_A, Q_OF_B)
    had_a(index)
    tell(index, [*A, *Z, *END], 4)
    go(index, stored(["zA"], Z, "hC"))
    assert (credit(index, [*A, *Z, *END]), counts(index)["adopted"]) == (4, 1)


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
    before = look(index, A)
    go(index, stored(["qA2"], Q, "hA"))
    assert tell(index, [*A, *Q, *END], 4, before) == "steady"
    assert counts(index)["parked_dropped"] > 1
    assert "adopted" in counts(index), "what was dropped since had come before the match"


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
def test_names_and_disputes_end_when_all_is_forgotten(lost: Lost, end: str) -> None:
    index = lost(Q_OF_A)
    had_a(index)
    tell(index, [*B, *C, *END], 4)
    go(index, stored(["b1"], C, "b2"), stored(["b3"], C, "b4"))
    assert counts(index)["adoption_disputed"] == 1
    if end == "clear":
        go(index, cleared())
    else:
        getattr(index, end)(W)
    go(index, ELSEWHERE, stored(["zA"], Z, "hA"))
    assert states(index)["parked"] == 1
    index.forget(W)
    go(index, stored(["bC"], C, "hB"))
    tell(index, [*A, *END], 4)
    tell(index, [*B, *C, *END], 4)
    assert credit(index, [*B, *C, *END]) == 8


def test_names_are_bounded_oldest_out(lost: Lost) -> None:
    index = lost()
    for i in range(4097):
        go(index, stored([f"q{i}"], [i, 2, 2, 2], f"h{i}"))
        assert tell(index, [i, 1, 1, 1, i, 2, 2, 2, *END], 4) == "steady"
    assert counts(index)["adopted"] == 4097
    assert credit(index, [0, 1, 1, 1, 0, 2, 2, 2, *END]) == 8, "what was placed stays"
    go(index, *(stored([f"z{i}"], Z, f"h{i}") for i in (0, 1, 4096)))
    assert [credit(index, [i, 1, 1, 1, *Z, *END]) for i in (0, 1, 4096)] == [4, 8, 8]


def test_nothing_is_named_once_too_much_is_in_dispute(lost: Lost) -> None:
    index = lost()
    for i in range(4096):
        go(index, stored([f"q{i}"], [i, 2, 2, 2], f"h{i}"), stored([f"r{i}"], [i, 2, 2, 2], f"i{i}"))
        assert tell(index, [i, 1, 1, 1, i, 2, 2, 2, *END], 4) == "steady"
    assert counts(index)["adoption_disputed"] == 4096
    go(index, Q_OF_A)
    had_a(index)
    assert credit(index, [*A, *Q, *END]) == 4
    go(index, cleared(), ELSEWHERE)
    index.forget(W)
    go(index, Q_OF_A)
    had_a(index)
    assert credit(index, [*A, *Q, *END]) == 8


def test_another_worker_and_model_have_no_part_in_it(lost: Lost) -> None:
    index = lost()
    had_a(index)
    index.add_worker("v", M)
    index.apply("v", batch(ELSEWHERE))
    index.forget("v")
    index.apply("v", batch(Q_OF_A))
    assert index.match([*A, *Q, *END], M)["v"].credit == 0
    assert credit(index, [*A, *Q, *END]) == 4
