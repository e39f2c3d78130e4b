"""What answers teach: were the credited blocks held all the time, and what did the engine have beyond its events?

Each rule stands beside the case in which the bolder one would credit a block that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from kvsync.events.types import Image, Opaque
from kvsync.index.match import Index, Match
from tests.contract.face import ELSEWHERE, LATER, M, W, counts, credit, look, states, tell
from tests.wire import as_array, batch, cleared, removed, stored

Fed = Callable[..., Index]


def other(number: int) -> Any:
    return stored([f"other {number}"], [number, 7, 7, 7])


def other_gone(number: int) -> Any:
    return removed([f"other {number}"])


# -- steady, evicted, unknown


def test_unknown_worker_model_or_block_size(index: Index) -> None:
    assert index.observe(W, range(9), M, 4, 0, 0, LATER) == "unknown"
    index.add_worker(W, M)
    assert index.observe(W, range(9), M, 4, 0, look(index, range(9)).as_of, LATER) == "unknown", "no block size yet"
    index.apply(W, batch(stored([1], range(4))))
    found = look(index, range(9))
    assert index.observe(W, range(9), "other", 4, 4, found.as_of, LATER) == "unknown"
    assert index.observe(W, range(9), M, 4, 4, found.as_of, LATER) == "steady"
    index.remove_worker(W)
    assert index.observe(W, range(9), M, 4, 4, found.as_of, LATER) == "unknown"


def test_steady_while_no_credited_block_is_removed(fed: Fed) -> None:
    index = fed(stored([1, 2, 3], range(12)))
    before = look(index, range(9))
    assert before.credit == 8
    index.apply(W, batch(removed([3]), removed(["nobody"]), stored([4], range(40, 44))))
    assert tell(index, range(9), 8, before) == "steady"
    index.apply(W, batch(removed([2])))
    assert tell(index, range(9), 8, before) == "evicted"
    assert tell(index, range(9), 4) == "steady"


@pytest.mark.parametrize(
    "gone",
    [
        (stored([2], range(4, 8), 1), removed([2])),
        (removed([2]), stored([2], range(4, 8), 1)),
        (removed([2], medium="CPU"),),
        (removed([2], medium="MOON"),),
        (removed([2], group_idx=7),),
        (removed([2], group_idx=...),),
        (removed([2], remaining_copy_counts=[1]),),
        (removed([5, 2]),),
    ],
    ids=["one of two copies", "stored again", "cpu", "unknown medium", "group", "no group", "copies left", "of two"],
)
def test_any_removal_that_names_a_credited_block_counts(fed: Fed, gone: tuple[Any, ...]) -> None:
    index = fed(stored([1, 2], range(8)))
    before = look(index, range(9))
    index.apply(W, batch(*gone))
    assert tell(index, range(9), 8, before) == "evicted"


def test_the_block_that_an_eagle_drops_from_its_hit_counts_as_credited(fed: Fed) -> None:
    """Without it the hit is one block shorter."""
    index = fed(stored([1, 2, 3, 4], range(16)), spec_decode="eagle")
    before, nothing = look(index, range(13)), look(index, range(5))
    assert (before.credit, nothing.credit) == (8, 0)
    index.apply(W, batch(removed([4])))
    assert tell(index, range(13), 8, before) == "steady"
    index.apply(W, batch(removed([3])))
    assert credit(index, range(13)) == 4
    assert tell(index, range(13), 4, before) == "evicted"
    index.apply(W, batch(removed([1])))
    assert tell(index, range(5), 0, nothing) == "steady"


@pytest.mark.parametrize("loss", ["forget", "new_epoch", "relearn", "add_worker", "clear", "garbage"])
def test_a_loss_of_everything_counts_whatever_the_credit(fed: Fed, loss: str) -> None:
    index = fed(stored([1], range(4)))
    before, nothing = look(index, range(5)), look(index, [7] * 5)
    assert (before.credit, nothing.credit) == (4, 0)
    if loss in ("clear", "garbage"):
        index.apply(W, batch(cleared()) if loss == "clear" else b"\xc1")
    else:
        getattr(index, loss)(W, *([M] if loss == "add_worker" else []))
    index.apply(W, batch(stored([1], range(4))))
    assert tell(index, range(5), 4, before) == "evicted"
    assert tell(index, [7] * 5, 0, nothing) == "evicted"
    assert tell(index, range(5), 4) == "steady"


def test_suspension_is_no_loss(fed: Fed) -> None:
    index = fed(stored([1], range(4)))
    before = look(index, range(5))
    index.suspend(W)
    assert tell(index, range(5), 4, before) == "steady"
    index.resume(W)
    assert tell(index, range(5), 4, before) == "steady"


def test_more_removals_than_are_remembered_may_have_been_any(fed: Fed) -> None:
    index = fed(stored([1], range(4)), *(other(i) for i in range(4097)))
    before = look(index, range(5))
    index.apply(W, batch(*(other_gone(i) for i in range(4096))))
    assert tell(index, range(5), 4, before) == "steady"
    index.apply(W, batch(other_gone(4096)))
    assert tell(index, range(5), 4, before) == "evicted"
    assert tell(index, range(5), 4) == "steady"


def test_the_newer_of_two_removals_of_a_block_is_remembered(fed: Fed) -> None:
    """When the older one makes room."""
    index = fed(stored([1], range(4)), stored([1], range(4)), stored([1], range(4)), *(other(i) for i in range(4095)))
    index.apply(W, batch(removed([1]), *(other_gone(i) for i in range(2000))))
    before = look(index, range(5))
    index.apply(W, batch(removed([1]), *(other_gone(i) for i in range(2000, 4095))))
    assert tell(index, range(5), 4, before) == "evicted"
    assert tell(index, range(5), 4) == "steady"


def test_removals_before_the_match_need_not_be_remembered(fed: Fed) -> None:
    index = fed(stored([1], range(4)), *(other(i) for i in range(4200)))
    index.apply(W, batch(*(other_gone(i) for i in range(4200))))
    before = look(index, range(5))
    index.apply(W, batch(*(other(i) for i in range(50)), *(other_gone(i) for i in range(50))))
    assert tell(index, range(5), 4, before) == "steady"


def test_positions_of_another_registration_or_index(index: Index, make_index: Callable[[], Index]) -> None:
    other_index = make_index()
    for each in (index, other_index):
        each.add_worker(W, M)
        each.apply(W, batch(stored([1], range(4))))
    assert tell(index, range(5), 4, look(other_index, range(5))) == "evicted"
    assert tell(other_index, range(5), 4, look(index, range(5))) == "evicted"
    for as_of in (0, 1, 2**63):
        assert index.observe(W, range(5), M, 4, 4, as_of, LATER) == "evicted"


def test_matches_are_equal_whatever_their_position(fed: Fed) -> None:
    index = fed(stored([1], range(4)))
    before = look(index, range(5))
    index.apply(W, batch(removed(["nobody"])))
    now = look(index, range(5))
    assert before == now
    assert before.as_of < now.as_of


@pytest.mark.parametrize(
    ("cached", "given", "until"),
    [(-1, 0, LATER), (0, -1, LATER), (0, 0, float("nan"))],
    ids=["cached", "credit", "NaN"],
)
def test_what_is_no_answer(fed: Fed, cached: int, given: int, until: float) -> None:
    index = fed(stored([1], range(4)))
    with pytest.raises((ValueError, OverflowError)):
        index.observe(W, range(5), M, cached, given, look(index, range(5)).as_of, until)
    with pytest.raises((TypeError, ValueError)):
        index.observe("nobody", b"123", M, 0, 0, 0, LATER)
    with pytest.raises(ValueError, match="NaN"):
        index.expire(float("nan"))


def test_absurd_answers_are_cut_to_the_prompt(lost: Fed) -> None:
    index = lost()
    before = look(index, range(9))
    assert index.observe(W, range(9), M, 2**62, 2**62, before.as_of, float("inf")) == "steady"
    assert credit(index, range(9)) == 8
    assert index.observe(W, [], M, 2**62, 2**62, before.as_of, LATER) == "steady"


# -- doubt


def doubtful(fed: Fed, blocks: int = 3, **facts: Any) -> Index:
    """A re-announcing worker whose ``blocks`` blocks are in doubt."""
    index = fed(stored(range(1, blocks + 1), range(4 * blocks)), **facts)
    index.mark_reannouncing(W)
    hashes = range(1, blocks + 1)
    index.apply(W, batch(stored(hashes, range(4 * blocks)), *(removed([h]) for h in hashes)))
    return index


def test_a_hit_ends_doubt_as_far_as_it_goes(fed: Fed) -> None:
    index = doubtful(fed)
    assert look(index, range(13)) == Match(0, 12, {}, "exact")
    assert tell(index, range(9), 8) == "steady"
    assert look(index, range(13)) == Match(8, 4, {"gpu": 8}, "exact")
    index.apply(W, batch(removed([1])))
    assert credit(index, range(13)) == 0


def test_a_removal_since_the_match_keeps_the_doubt(fed: Fed) -> None:
    """The block may have gone after the engine served the request."""
    index = doubtful(fed)
    before = look(index, range(13))
    index.apply(W, batch(stored([2], range(4, 8), 1), removed([2])))
    assert tell(index, range(13), 12, before) == "steady", "nothing was credited"
    assert look(index, range(13)) == Match(4, 8, {"gpu": 4}, "exact")


def test_a_hit_does_not_end_doubt_where_credit_was_evicted(fed: Fed) -> None:
    index = doubtful(fed)
    index.apply(W, batch(stored([1], range(4))))
    before = look(index, range(13))
    assert before.credit == 4
    index.apply(W, batch(removed([1])))
    assert tell(index, range(13), 12, before) == "evicted"
    assert look(index, range(13)) == Match(0, 12, {}, "exact")
    assert states(index)["doubtful"] == 3


def test_a_hit_may_have_come_from_another_tier(fed: Fed) -> None:
    """The doubtful GPU copy is not there: only the offloaded one is, and then leaves."""
    index = doubtful(fed, 1)
    index.apply(W, batch(stored([1], range(4), medium="CPU", extra_keys=...)))
    assert tell(index, range(5), 4) == "steady"
    index.apply(W, batch(removed([1], medium="CPU")))
    index.apply(W, batch(removed([1], medium="CPU")))
    assert look(index, range(5)) == Match(0, 4, {}, "exact")


def test_a_hit_on_a_worker_that_lost_something_ends_no_doubt(lost: Fed) -> None:
    """A copy of which nothing is known may have been hit; here it counts for a time, until a removal."""
    index = doubtful(lost, 1)
    assert tell(index, range(5), 4) == "steady"
    assert look(index, range(5)) == Match(4, 0, {"gpu": 4}, "partial")
    index.expire(LATER)
    assert look(index, range(5)) == Match(0, 4, {}, "partial")


def test_a_miss_forgets_what_is_in_doubt_behind_it(fed: Fed) -> None:
    index = doubtful(fed, 4)
    index.apply(W, batch(stored([3], range(8, 12), 2)))
    assert tell(index, range(17), 4) == "steady"
    assert look(index, range(17)) == Match(4, 0, {"gpu": 4}, "exact")
    assert (states(index)["doubtful"], counts(index)["doubtful_missed"]) == (0, 2)
    index.apply(W, batch(stored([2], range(4, 8), 1)))
    assert credit(index, range(17)) == 12, "block 3 was held without a doubt"


def test_a_miss_forgets_in_every_tier_even_when_evicted(fed: Fed) -> None:
    index = fed(stored([1, 2], range(8)))
    index.mark_reannouncing(W)
    both = [stored([2], range(4, 8), 1, medium=medium) for medium in ("GPU", "CPU", "CPU")]
    index.apply(W, batch(stored([1], range(4)), *both, removed([2]), removed([2], medium="CPU")))
    before = look(index, range(9))
    assert (before.credit, before.expected) == (4, 4)
    index.apply(W, batch(removed([1])))
    assert tell(index, range(9), 0, before) == "evicted"
    assert counts(index)["doubtful_missed"] == 3
    assert states(index)["blocks"] == 0


def test_an_answer_without_a_miss_forgets_nothing(fed: Fed) -> None:
    index = doubtful(fed, 2)
    assert tell(index, range(8), 4) == "steady", "the last block can't be hit: its last token is always computed"
    assert look(index, range(9)) == Match(4, 4, {"gpu": 4}, "exact")
    assert tell(index, range(9), 8) == "steady"
    assert "doubtful_missed" not in counts(index)


def test_what_is_behind_a_gap_was_not_missed(fed: Fed) -> None:
    index = doubtful(fed)
    index.apply(W, batch(stored([1], range(4)), removed([2])))
    assert look(index, range(13)) == Match(4, 0, {"gpu": 4}, "exact")
    assert tell(index, range(13), 4) == "steady"
    assert states(index)["doubtful"] == 1, "the answer says no more than was expected"


def test_an_eagle_says_one_block_less_than_it_had(fed: Fed) -> None:
    index = doubtful(fed, 4)
    index.drops_last_block(W)
    assert look(index, range(17)) == Match(0, 12, {}, "exact")
    tell(index, range(17), 4)
    assert states(index)["doubtful"] == 1, "1 is held, 2 was dropped from the hit: in doubt as before, 3 and 4 missed"
    assert counts(index)["doubtful_missed"] == 2


def test_aligned_hits_tell_of_no_miss(fed: Fed) -> None:
    index = doubtful(fed, 4, hit_alignment=8)
    assert tell(index, range(17), 8) == "steady"
    assert states(index)["doubtful"] == 2, "the third may be there: 12 is not aligned"


# -- observed runs


def test_what_the_engine_had_counts_until_its_time_is_over(lost: Fed) -> None:
    index = lost()
    assert tell(index, range(13), 8, until=50) == "steady"
    assert look(index, range(13)) == Match(8, 0, {"gpu": 8}, "partial")
    assert look(index, [*range(4), *range(100, 110)]) == Match(4, 0, {"gpu": 4}, "partial")
    assert (states(index)["observed"], states(index)["blocks"]) == (2, 0)
    index.expire(49.9)
    assert credit(index, range(13)) == 8
    index.expire(50)
    assert look(index, range(13)) == Match(0, 0, {}, "partial")
    assert states(index)["observed"] == 0


def test_events_go_on_behind_what_was_observed(lost: Fed) -> None:
    offload: dict[str, Any] = {"extra_keys": ..., "medium": "CPU"}
    index = lost(stored([1, 2, 3], range(12)), stored([3], range(8, 12), 2, **offload), removed([1]), removed([3]))
    assert credit(index, range(13)) == 0
    assert tell(index, range(9), 4) == "steady"
    assert look(index, range(13)) == Match(12, 0, {"gpu": 8, "cpu": 4}, "partial")


def test_exact_workers_learn_nothing_from_a_hit(fed: Fed) -> None:
    """What they have they tell; the rest may have come from where nobody tells."""
    index = fed(ELSEWHERE)
    assert tell(index, range(9), 8) == "steady"
    assert look(index, range(9)) == Match(0)
    assert "observed_runs" not in counts(index)


def test_nothing_is_learned_while_suspended_and_what_was_is_expected(lost: Fed) -> None:
    index = lost()
    tell(index, range(9), 4)
    index.suspend(W)
    assert look(index, range(9)) == Match(0, 4, {}, "none")
    assert tell(index, range(9), 8) == "steady"
    index.resume(W)
    assert look(index, range(9)) == Match(4, 0, {"gpu": 4}, "partial")


def test_only_what_is_more_than_events_tell_is_recorded(lost: Fed) -> None:
    index = lost(stored([1, 2], range(8)))
    tell(index, range(9), 8)
    tell(index, range(9), 4)
    assert states(index)["observed"] == 0
    index.apply(W, batch(removed([1])))
    assert credit(index, range(9)) == 0


@pytest.mark.parametrize(
    "removal",
    [removed(["never seen"]), removed(["never seen"], medium="CPU"), removed(["never seen"], medium="MOON"),
     removed(["waits"]), removed(["sparse"])],
    ids=["unknown", "cpu", "unknown medium", "parked", "unplaced"],
)  # fmt: skip
def test_a_removal_of_a_block_without_a_key_may_be_one_of_the_run(lost: Fed, removal: Any) -> None:
    """A parked block as well: it is resident, and may be the very block that the engine had."""
    waits = stored(["waits"], range(4, 8), "unknown parent")
    index = lost(waits, stored(["sparse"], range(70, 79)))
    tell(index, range(9), 8)
    assert credit(index, range(9)) == 8
    index.apply(W, batch(removal))
    assert look(index, range(9)) == Match(0, 8, {}, "partial")
    assert states(index)["observed"] == 0
    index.expire(LATER)
    assert look(index, range(9)) == Match(0, 0, {}, "partial")


def test_a_run_is_live_again_when_it_is_observed_again(lost: Fed) -> None:
    index = lost()
    tell(index, range(9), 8, until=50)
    index.apply(W, batch(removed(["never seen"])))
    tell(index, range(9), 8, until=60)
    index.expire(50)
    assert credit(index, range(9)) == 8


def test_a_removal_of_another_block_leaves_runs_alone(lost: Fed) -> None:
    index = lost(other(1))
    tell(index, range(9), 8)
    index.apply(W, batch(other_gone(1)))
    assert credit(index, range(9)) == 8


@pytest.mark.parametrize("fields", [{}, {"medium": "CPU"}, {"medium": "MOON"}, {"remaining_copy_counts": [1]}])
def test_a_removal_that_names_a_block_of_a_run_ends_it(lost: Fed, fields: dict[str, Any]) -> None:
    """The engine may hold two copies of which only one was told: the one that leaves may be the other."""
    index = lost(stored([1, 2], range(8)))
    tell(index, range(13), 12)
    tell(index, [*range(4), *range(100, 105)], 8)
    index.apply(W, batch(removed([2], **fields)))
    assert credit(index, [*range(4), *range(100, 105)]) == 8, "another run"
    assert credit(index, range(13)) < 12
    assert tell(index, range(13), 4) == "steady"


def test_what_was_removed_since_the_match_is_not_recorded(lost: Fed) -> None:
    index = lost(stored([1], range(4)), stored([2, 3], range(4, 12), 1))
    index.apply(W, batch(removed([1])))
    before = look(index, range(17))
    index.apply(W, batch(removed([3]), stored([3], range(8, 12), 2)))
    assert tell(index, range(17), 16, before) == "steady"
    index.apply(W, batch(removed([3])))
    assert credit(index, range(17)) == 8, "only up to the block that may have gone"


def test_nothing_is_recorded_after_a_keyless_removal(lost: Fed) -> None:
    """It may have been one of the blocks, after the engine served the request."""
    index = lost()
    before = look(index, range(9))
    index.apply(W, batch(removed(["never seen"])))
    assert tell(index, range(9), 8, before) == "steady"
    assert look(index, range(9)) == Match(0, 0, {}, "partial")


@pytest.mark.parametrize("end", ["forget", "new_epoch", "relearn", "add_worker", "clear"])
def test_runs_end_when_all_is_forgotten(lost: Fed, end: str) -> None:
    index = lost()
    before = look(index, range(9))
    tell(index, range(9), 8)
    if end == "clear":
        index.apply(W, batch(cleared()))
    else:
        getattr(index, end)(W, *([M] if end == "add_worker" else []))
    index.apply(W, batch(ELSEWHERE))
    index.forget(W)
    assert look(index, range(9)) == Match(0, 0, {}, "partial")
    assert tell(index, range(9), 8, before) == "evicted"
    assert look(index, range(9)) == Match(0, 0, {}, "partial")


def test_credit_that_leant_on_a_run_may_be_evicted_by_any_keyless_removal(lost: Fed) -> None:
    index = lost(stored([1], range(4)))
    tell(index, range(9), 8)
    leant, did_not = look(index, range(9)), look(index, range(5))
    assert (leant.credit, did_not.credit) == (8, 4)
    index.apply(W, batch(removed(["never seen"])))
    assert tell(index, range(9), 8, leant) == "evicted"
    assert tell(index, range(5), 4, did_not) == "steady"


def test_a_miss_ends_runs_that_claim_more(lost: Fed) -> None:
    index = lost()
    tell(index, range(13), 12)
    assert tell(index, range(13), 4) == "steady"
    assert look(index, range(13)) == Match(4, 0, {"gpu": 4}, "partial")


def test_a_miss_ends_no_run_that_was_seen_after_its_match(lost: Fed) -> None:
    """The request that missed computed those blocks: a later one may well have found them."""
    index = lost()
    before = look(index, range(13))
    tell(index, range(13), 12)
    assert tell(index, range(13), 0, before) == "steady"
    assert credit(index, range(13)) == 12


def test_runs_are_bounded_oldest_out(lost: Fed) -> None:
    index = lost()
    prompts = [[i, *range(2**15 + 3)] for i in range(9)]
    for prompt in prompts:
        tell(index, prompt, len(prompt))
    assert counts(index)["observed_dropped"] == 1
    assert states(index)["observed"] == 8 * 2**13
    assert [credit(index, prompt) > 0 for prompt in prompts] == [False] + [True] * 8
    tell(index, prompts[1], 2**15)
    tell(index, prompts[0], 2**15)
    assert [credit(index, prompt) > 0 for prompt in prompts[:3]] == [True, True, False], "observed again: newest"
    longest = range(10**6, 10**6 + 4 * 2**16 + 5)
    tell(index, longest, len(longest))
    assert (states(index)["observed"], credit(index, longest)) == (0, 0)


def test_what_one_worker_had_says_nothing_of_another(index: Index) -> None:
    for worker in (W, "v"):
        index.add_worker(worker, M)
        index.apply(worker, batch(ELSEWHERE))
        index.forget(worker)
    tell(index, range(9), 8)
    assert {name: match.credit for name, match in index.match(range(9), M).items()} == {W: 8, "v": 0}


def test_the_context_of_a_run_is_the_prompts(lost: Fed) -> None:
    index = lost()
    tell(index, range(9), 8, adapter="a", cache_salt="s")
    assert credit(index, range(9), adapter="a", cache_salt="s") == 8
    for keys in ({}, {"adapter": "a"}, {"cache_salt": "s"}, {"adapter": "b", "cache_salt": "s"}):
        assert credit(index, range(9), **keys) == 0


def test_drops_last_block(lost: Fed) -> None:
    """An EAGLE engine drops the last block of every hit, what was observed or not."""
    index = lost(stored([1], range(4)))
    tell(index, range(13), 12)
    for _ in range(2):
        index.drops_last_block(W)
        assert credit(index, range(13)) == 8
        assert credit(index, range(5)) == 0
    index.new_epoch(W)
    index.apply(W, batch(stored([1, 2], range(8))))
    assert credit(index, range(9)) == 4
    index.add_worker(W, M)
    index.apply(W, batch(stored([1, 2], range(8))))
    assert credit(index, range(9)) == 8
    index.drops_last_block("nobody")


# -- where a removal need not name the key that the request has


def test_no_run_on_a_worker_with_other_groups_than_full_attention(lost: Fed) -> None:
    index = lost(stored([7], range(70, 74), group_idx=1, kv_cache_spec_kind="mamba"))
    assert tell(index, range(9), 8) == "steady"
    assert (credit(index, range(9)), counts(index)["observed_unusable"]) == (0, 1)


def test_no_run_on_a_worker_with_aligned_hits(lost: Fed) -> None:
    index = lost(hit_alignment=8)
    assert tell(index, range(9), 8) == "steady"
    assert (credit(index, range(9)), counts(index)["observed_unusable"]) == (0, 1)


def test_a_run_does_not_count_once_another_group_shows(lost: Fed) -> None:
    index = lost()
    tell(index, range(9), 8)
    index.apply(W, batch(stored([7], range(70, 74), group_idx=1, kv_cache_spec_kind="mamba")))
    assert look(index, range(9)) == Match(0, 0, {}, "partial")


@pytest.mark.parametrize("keys", [{"adapter": "a"}, {"cache_salt": "s"}])
def test_where_keys_are_hidden_prompts_with_keys_teach_nothing(fed: Fed, keys: dict[str, Any]) -> None:
    """Its store gives that block a plain key; the removal then names the plain key, and the run would stay."""
    index = fed(as_array(stored([1], range(4)), "0.14.0"))
    index.forget(W)
    assert tell(index, range(5), 4, **keys) == "steady"
    assert counts(index)["observed_unusable"] == 1
    index.apply(W, batch(as_array(stored([1], range(4)), "0.14.0"), as_array(removed([1]), "0.14.0")))
    assert credit(index, range(5), **keys) == 0
    assert tell(index, range(5), 4) == "steady"
    assert credit(index, range(5)) == 4, "a plain prompt's blocks have plain keys"


def test_runs_end_when_a_worker_shows_that_it_hides_keys(lost: Fed) -> None:
    """The salted block gets a plain key here, and that is the one that its removal names."""
    index = lost()
    tell(index, range(9), 8, cache_salt="s")
    index.apply(W, batch(stored([1], range(4), extra_keys=...)))
    index.apply(W, batch(removed([1])))
    assert credit(index, range(9), cache_salt="s") == 0


def test_no_run_on_a_worker_that_shows_keys_of_an_unknown_kind(lost: Fed) -> None:
    """Nothing that it stores has a key that a request can have."""
    index = lost()
    tell(index, range(9), 8)
    index.apply(W, batch(stored([1], range(4), extra_keys=[[{"new": 1}]])))
    index.apply(W, batch(removed([1])))
    assert credit(index, range(9)) == 0
    tell(index, range(9), 8)
    assert (credit(index, range(9)), counts(index)["observed_unusable"]) == (0, 1)
    index.relearn(W)
    index.apply(W, batch(ELSEWHERE))
    index.forget(W)
    tell(index, range(9), 8)
    assert credit(index, range(9)) == 8


@pytest.mark.parametrize("key", [Image("i", 0), Opaque(b"o")])
def test_a_run_ends_before_the_first_image(lost: Fed, key: Any) -> None:
    """Dialects name images in more than one way: a removal may name the block by another key."""
    index = lost()
    keys = [None, [key]]
    assert tell(index, range(13), 12, block_keys=keys) == "steady"
    assert (states(index)["observed"], credit(index, range(13), block_keys=keys)) == (1, 4)
    assert tell(index, range(100, 113), 12, block_keys=[[key]]) == "steady"
    assert states(index)["observed"] == 1


def test_hidden_twins_and_what_is_behind_them(fed: Fed) -> None:
    """Plain and salted block look alike here; what follows the salted one would be credited to the plain prompt."""
    index = fed(as_array(ELSEWHERE, "0.14.0"))
    index.forget(W)
    plain, salted = as_array(stored([1], range(4)), "0.14.0"), as_array(stored([2, 3], range(8)), "0.14.0")
    index.apply(W, batch(plain, salted))
    assert tell(index, range(9), 4) == "steady"
    assert credit(index, range(9)) == 4


# -- learning anew


def test_relearn_begins_again_as_exact(lost: Fed) -> None:
    index = lost(stored([1], range(4)), stored(["orphan"], range(4), "nobody"))
    index.relearn(W)
    assert look(index, range(5)) == Match(0)
    assert (states(index)["parked"], index.block_sizes(M)) == (0, {W: 0})
    assert (counts(index)["relearned"], counts(index).get("epochs", 0)) == (1, 0)
    index.apply(W, batch(stored([1], range(8), block_size=8)))
    assert look(index, range(9)) == Match(8, 0, {"gpu": 8}, "exact")
    index.relearn("nobody")


def test_relearn_leaves_a_suspended_worker_suspended(fed: Fed) -> None:
    index = fed(stored([1], range(4)))
    index.suspend(W)
    index.relearn(W)
    index.apply(W, batch(stored([1], range(4))))
    assert look(index, range(5)) == Match(0, 4, {}, "none")


def test_calls_for_workers_that_are_not_there(index: Index) -> None:
    for method in ("relearn", "drops_last_block"):
        getattr(index, method)("nobody")
    index.expire(0)
    assert index.stats()["workers"] == {}


def test_time_is_the_callers(lost: Fed) -> None:
    """Any clock: only its order counts, negative and infinite times too."""
    index = lost()
    for start, until in zip(count(1000, 100), (-5.0, 0.0, float("inf")), strict=False):
        tell(index, range(start, start + 5), 4, until=until)
    index.expire(float("-inf"))
    assert states(index)["observed"] == 3
    index.expire(-5)
    assert states(index)["observed"] == 2
    index.expire(1e300)
    assert states(index)["observed"] == 1
