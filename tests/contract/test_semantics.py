"""The rules of the index, one by one (the reference's module text states them)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvsync.events.decode import decode_batch
from kvsync.events.types import Embeds, Image
from kvsync.index.match import Index, Match, Trust
from tests.contract.face import M, W, counts, credit, look, states
from tests.wire import as_array, batch, cleared, removed, stored

# -- lookups


def test_unbroken_run_from_the_first_block(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2, 3], range(12)))
    assert credit(index, range(13)) == 12
    assert credit(index, [*range(9), 99, 100, 101]) == 8
    assert credit(index, [99, *range(1, 13)]) == 0
    index.apply(W, batch(removed([2])))
    assert credit(index, range(13)) == 4


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_last_token_is_always_computed(fed: Callable[..., Index], length: int, expected: int) -> None:
    assert credit(fed(stored([1, 2, 3], range(12))), list(range(length))) == expected


def test_every_form_of_tokens_gives_the_same(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2], [0, 1, 2**32 - 1, 3, 4, 5, 6, 7]))
    tokens = [0, 1, 2**32 - 1, 3, 4, 5, 6, 7, 8]
    packed = array("I", tokens)
    for form in (tokens, tuple(tokens), packed, packed.tobytes(), bytearray(packed.tobytes()), memoryview(packed)):
        assert credit(index, form) == 8


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([-1], OverflowError),
        ([2**32], OverflowError),
        ([1.5], TypeError),
        (["1"], TypeError),
        ([None], TypeError),
        (b"123", ValueError),
        (array("q", [1]), TypeError),
        (array("f", [1]), TypeError),
        (memoryview(array("I", range(8)))[::2], ValueError),
        (5, TypeError),
        (None, TypeError),
    ],
)
def test_what_is_no_prompt(fed: Callable[..., Index], tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        credit(fed(stored([1], range(4))), tokens)


def test_all_workers_of_the_model_answer_and_no_others(index: Index) -> None:
    for worker, model in (("a", M), ("b", M), ("c", "other")):
        index.add_worker(worker, model)
    index.apply("a", batch(stored([1], range(4))))
    assert index.match(range(5), M) == {"a": Match(4, 0, {"gpu": 4}, "exact"), "b": Match(0)}
    assert index.match(range(5), "other") == {"c": Match(0)}
    assert index.match(range(5), "nobody") == {}


def test_workers_of_differing_block_size(index: Index) -> None:
    index.add_worker("a", M)
    index.add_worker("b", M)
    index.apply("a", batch(stored([1, 2], range(8), block_size=4)))
    index.apply("b", batch(stored([1], range(6), block_size=6)))
    found = index.match(range(20), M)
    assert (found["a"].credit, found["b"].credit) == (8, 6)


def test_engines_need_not_agree_on_hashes(index: Index) -> None:
    for worker, hashes in (("a", [1, 2]), ("b", [b"x" * 32, b"y" * 32]), ("c", [-1, -2]), ("d", ["p", "q"])):
        index.add_worker(worker, M)
        index.apply(worker, batch(stored(hashes, range(8))))
    assert {m.credit for m in index.match(range(9), M).values()} == {8}


def test_long_hashes_that_share_their_first_bytes_stay_apart(fed: Callable[..., Index]) -> None:
    one, two = b"samesame" + b"1" * 24, b"samesame" + b"2" * 24
    index = fed(stored([one], range(4)), stored([two], range(4, 8), parent=one), removed([two]))
    assert credit(index, range(9)) == 4


# -- block sizes


def test_block_sizes_are_learned_from_stores_of_each_worker_of_a_model(index: Index) -> None:
    for worker, model in (("a", M), ("b", M), ("other", "n"), ("new", M)):
        index.add_worker(worker, model)
    index.apply("a", batch(stored([1], range(4))))
    index.apply("b", batch(stored([1], range(8), block_size=8)))
    index.apply("other", batch(stored([1], range(16), block_size=16)))
    assert index.block_sizes(M) == {"a": 4, "b": 8, "new": 0}
    assert index.block_sizes("n") == {"other": 16}
    assert index.block_sizes("nobody's") == {}
    index.forget("a")
    index.new_epoch("b")
    index.remove_worker("new")
    assert index.block_sizes(M) == {"a": 4, "b": 0}


def test_the_block_size_is_that_of_the_groups_that_place_blocks(fed: Callable[..., Index]) -> None:
    index = fed(
        stored(
            [1],
            range(8),
            block_size=8,
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=8,
        ),
        stored([2], range(4), block_size=4),
    )
    assert index.block_sizes(M) == {W: 4}


# -- contexts


def test_adapters_salts_and_images_never_meet(fed: Callable[..., Index]) -> None:
    index = fed(
        stored([1, 2], range(8), lora_name="X", lora_id=1, extra_keys=[["X"], ["X"]]),
        stored([3, 4], range(8), extra_keys=[["X"], None]),
        stored([5], range(4), extra_keys=[[["X", 0]]]),
        stored([6], range(4), extra_keys=[[b"X"]]),
    )
    assert credit(index, range(9)) == 0
    assert credit(index, range(9), adapter="X") == 8
    assert credit(index, range(9), cache_salt="X") == 8
    assert credit(index, range(9), block_keys=[[Image("X", 0)]]) == 4
    assert credit(index, range(9), block_keys=[[Image("X", 1)]]) == 0
    assert credit(index, range(9), block_keys=[[Image("X")]]) == 0
    assert credit(index, range(9), block_keys=[[Embeds(b"X")]]) == 4
    assert credit(index, range(9), adapter="X", cache_salt="X") == 0
    assert credit(index, range(9), adapter="Y") == 0


def test_adapter_with_image_and_salt(fed: Callable[..., Index]) -> None:
    index = fed(
        stored([1, 2], range(8), lora_name="X", extra_keys=[["X", ["img", 1], "salt"], ["X", ["img", -3]]]),
        stored([3], range(4), lora_name="X", extra_keys=[["X", "salt"]]),
    )
    keys = [[Image("img", 1)], [Image("img", -3)]]
    assert credit(index, range(9), adapter="X", cache_salt="salt", block_keys=keys) == 8
    assert credit(index, range(9), adapter="X", block_keys=keys) == 0
    assert credit(index, range(9), adapter="X", cache_salt="salt") == 4


def test_numeric_adapter_ids_do_not_split_matches(index: Index) -> None:
    for worker, number in (("a", 1), ("b", 7)):
        index.add_worker(worker, M)
        index.apply(worker, batch(stored([1], range(4), lora_id=number, lora_name="X", extra_keys=[["X"]])))
    assert {m.credit for m in index.match(range(5), M, adapter="X").values()} == {4}


def test_an_adapter_that_the_dialect_gives_by_number_only_matches_nobody(fed: Callable[..., Index]) -> None:
    index = fed(as_array(stored([1], range(4), lora_id=1), "0.10.2"), as_array(stored([2], range(4)), "0.10.2"))
    assert credit(index, range(5)) == 4
    index.apply(W, batch(as_array(removed([2]), "0.10.2")))
    assert credit(index, range(5)) == 0
    assert credit(index, range(5), adapter="1") == 0


# -- residence


def test_copies_are_counted(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4)), stored([1], range(4)), removed([1]))
    assert look(index, range(5)) == Match(4, 0, {"gpu": 4}, "exact")
    index.apply(W, batch(removed([1])))
    assert credit(index, range(5)) == 0
    index.apply(W, batch(removed([1])))
    assert counts(index)["removed_unknown"] == 1
    index.apply(W, batch(stored([1], range(4))))
    assert credit(index, range(5)) == 4


def test_remaining_copy_counts_decide_where_an_engine_sends_them(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4)), stored([1], range(4)), removed([1], remaining_copy_counts=[0]))
    assert credit(index, range(5)) == 0
    index.apply(W, batch(stored([2], range(4)), removed([2], remaining_copy_counts=[5]), removed([2])))
    assert credit(index, range(5)) == 4


def test_a_hash_named_twice_in_one_event(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 1], [0, 1, 2, 3] * 2), removed([1]))
    assert credit(index, [0, 1, 2, 3] * 3) == 4
    index.apply(W, batch(removed([1])))
    assert credit(index, [0, 1, 2, 3] * 3) == 0


def test_reannouncing_worker_loses_credit_at_the_first_removal(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2], range(8)))
    index.mark_reannouncing(W)
    index.apply(W, batch(stored([1, 2], range(8)), removed([2])))
    assert look(index, range(9)) == Match(4, 4, {"gpu": 4}, "exact")
    index.apply(W, batch(stored([2], range(4, 8), parent=1)))
    assert look(index, range(9)) == Match(8, 0, {"gpu": 8}, "exact")
    index.apply(W, batch(removed([2]), removed([2])))
    assert look(index, range(9)) == Match(4, 0, {"gpu": 4}, "exact")


@pytest.mark.parametrize(("facts", "most"), [({"usable_blocks": 3}, 3), ({}, 65_536)])
def test_doubtful_blocks_are_no_more_than_the_engine_has(
    fed: Callable[..., Index], facts: dict[str, int], most: int
) -> None:
    """A re-announced block that is evicted leaves a copy behind that no event ever takes away."""
    index = fed(stored(["held"], range(4)), **facts)
    index.mark_reannouncing(W)
    for first in range(0, most, 4096):
        some = range(first, min(most, first + 4096))
        index.apply(W, batch(*(event for h in some for event in (ghost(h), ghost(h), removed([h])))))
    assert states(index)["doubtful"] == most
    index.apply(W, batch(ghost(most), ghost(most), removed([most])))
    assert (states(index)["doubtful"], states(index)["blocks"]) == (0, 1)
    assert counts(index)["doubtful_dropped"] == most + 1
    assert look(index, range(5)) == Match(4, 0, {"gpu": 4}, "exact")
    index.apply(W, batch(removed([0]), ghost(0)))
    assert (counts(index)["removed_unknown"], credit(index, [0, 7, 7, 7, 7])) == (1, 4)


def ghost(number: int) -> Any:
    return stored([number], [number, 7, 7, 7])


def test_more_copies_than_blocks_means_reannouncing(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2], range(8)), stored([1, 2], range(8)), usable_blocks=3)
    index.apply(W, batch(removed([1])))
    assert look(index, range(9)).credit == 0
    assert look(index, range(9)).expected == 8
    index.apply(W, batch(cleared(), stored([1], range(4)), stored([1], range(4)), removed([1])))
    assert credit(index, range(5)) == 4


def test_reannouncing_hybrid_has_no_credit(fed: Callable[..., Index]) -> None:
    window: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    index = fed(stored([1], range(4)), stored([1], range(4), **window))
    assert credit(index, range(5)) == 4
    index.mark_reannouncing(W)
    assert look(index, range(5)).trust == "none"
    assert credit(index, range(5)) == 0
    for _ in range(2):
        index.apply(W, batch(cleared(), stored([1], range(4), **window), stored([1], range(4))))
        assert look(index, range(5)) == Match(0, 0, {}, "none"), "any clear may be older than the request"
    index.new_epoch(W)
    index.apply(W, batch(stored([1], range(4), **window), stored([1], range(4))))
    assert credit(index, range(5)) == 4


def test_no_clear_ends_a_mark(fed: Callable[..., Index]) -> None:
    """An engine tells of a clear with its next step only: before the blocks of the very request that was marked."""
    index = fed(stored([1, 2], range(8)))
    index.mark_reannouncing(W)
    index.apply(W, batch(stored([9], range(90, 94))))
    for _ in range(2):
        index.apply(W, batch(cleared(), stored([1, 2], range(8))))
        index.apply(W, batch(stored([1, 2], range(8))))
        index.apply(W, batch(removed([2])))
        assert look(index, range(9)) == Match(4, 4, {"gpu": 4}, "exact")
    index.new_epoch(W)
    index.apply(W, batch(stored([1], range(4)), stored([1], range(4)), removed([1])))
    assert look(index, range(9)) == Match(4, 0, {"gpu": 4}, "exact")


def counts_again(index: Index) -> bool:
    """Whether a second copy outlives a removal: not on a worker that is marked as re-announcing."""
    index.apply(W, batch(stored(["c"], range(4)), stored(["c"], range(4)), removed(["c"])))
    found = credit(index, range(5))
    index.apply(W, batch(removed(["c"])))
    assert found in (0, 4)
    return found == 4


def test_a_mark_that_no_batch_followed_outlives_one_new_epoch(fed: Callable[..., Index]) -> None:
    """The request may have gone to the new process already."""
    index = fed()
    index.mark_reannouncing(W)
    index.new_epoch(W)
    assert not counts_again(index)
    index.new_epoch(W)
    assert counts_again(index)
    index.mark_reannouncing(W)
    index.new_epoch(W)
    index.new_epoch(W)
    assert counts_again(index), "one new epoch, not two"
    index.mark_reannouncing(W)
    assert not counts_again(index)
    index.new_epoch(W)
    assert counts_again(index), "a batch followed"


@pytest.mark.parametrize("what", [b"\xc1 garbage", batch(rank=7)], ids=["undecodable", "wrong rank"])
def test_a_batch_that_was_not_applied_does_not_follow_a_mark(index: Index, what: bytes) -> None:
    index.add_worker(W, M, rank=0)
    index.mark_reannouncing(W)
    index.apply(W, what)
    index.new_epoch(W)
    assert not counts_again(index)


def test_a_batch_that_comes_while_suspended_does_not_follow_a_mark(index: Index) -> None:
    """It may have waited for a gap's repair, and be of the process before the one that the request went to."""
    index.add_worker(W, M)
    index.suspend(W)
    index.mark_reannouncing(W)
    index.apply(W, batch(stored(["a"], range(4))))
    index.resume(W)
    index.new_epoch(W)
    assert not counts_again(index)
    index.new_epoch(W)
    assert counts_again(index)


def test_each_kind_of_mark_ends_by_itself(fed: Callable[..., Index]) -> None:
    index = fed()
    index.mark_reannouncing(W)
    index.apply(W, batch(as_array(stored([1], range(4)), "0.14.0")))
    index.mark_hidden_keys(W)
    index.new_epoch(W)
    assert states(index)["reannouncing"] is False
    index.apply(W, batch(as_array(stored([1], range(4)), "0.14.0")))
    assert look(index, range(5)) == Match(0, 4, {}, "none")


@pytest.mark.parametrize("again", ["relearn", "add_worker", "forget"])
def test_marks_outlive_learning_anew_and_registering_again(fed: Callable[..., Index], again: str) -> None:
    index = fed()
    index.mark_reannouncing(W)
    index.mark_hidden_keys(W)
    index.apply(W, batch())
    getattr(index, again)(W, *([M] if again == "add_worker" else []))
    assert states(index)["reannouncing"] is True
    index.apply(W, batch(as_array(stored([1], range(4)), "0.14.0")))
    assert look(index, range(5)) == Match(0, 4, {}, "none")
    index.new_epoch(W)
    assert states(index)["reannouncing"] is False, "a batch followed"


def test_a_removed_worker_takes_its_marks_along(fed: Callable[..., Index]) -> None:
    index = fed()
    index.mark_reannouncing(W)
    index.remove_worker(W)
    index.add_worker(W, M)
    assert counts_again(index)


@pytest.mark.parametrize("end", ["clear", "new_epoch", "relearn"])
def test_more_copies_than_blocks_is_over_when_they_are_gone(fed: Callable[..., Index], end: str) -> None:
    index = fed(stored([1], range(4)), stored([1], range(4)), stored([2], range(4, 8)), usable_blocks=2)
    assert states(index)["reannouncing"] is True
    if end == "clear":
        index.apply(W, batch(cleared()))
    else:
        getattr(index, end)(W)
    assert counts_again(index)


# -- placement


def test_blocks_of_one_event_are_each_others_parents(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2, 3, 4], range(16)))
    assert credit(index, [*range(4, 16), 1]) == 0
    assert credit(index, range(17)) == 16


def test_orphans_wait_and_never_become_roots(fed: Callable[..., Index]) -> None:
    index = fed(stored([3], range(8, 12), parent=2), stored([2], range(4, 8), parent=1))
    assert credit(index, range(8, 13)) == 0
    assert credit(index, range(4, 9)) == 0
    index.apply(W, batch(stored([1], range(4))))
    assert credit(index, range(13)) == 12


def test_an_orphan_that_left_is_not_placed(fed: Callable[..., Index]) -> None:
    index = fed(stored([2, 3], range(4, 12), parent=1), removed([2]), stored([1], range(4)))
    assert credit(index, range(13)) == 4
    index.apply(W, batch(stored([2], range(4, 8), parent=1)))
    assert credit(index, range(13)) == 12


def test_a_known_hash_in_the_middle_of_an_orphan(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2], range(8)), removed([1]), stored([7, 2, 3], range(12), parent=99))
    assert credit(index, range(13)) == 0
    index.apply(W, batch(stored([1], range(4))))
    assert credit(index, range(13)) == 12


def test_parked_events_are_bounded_oldest_out(fed: Callable[..., Index]) -> None:
    index = fed(*(stored([i + 1], range(4), parent=1_000_000 + i) for i in range(4097)))
    assert counts(index)["parked_dropped"] == 1
    assert look(index, range(5)).trust == "partial", "what was dropped is missing"
    assert index.stats()["workers"][W]["parked"] == 4096  # type: ignore[index]
    index.apply(W, batch(stored([1_000_000, 1_000_001], [*range(8)]), stored([5], range(8, 12), parent=1_000_001)))
    assert credit(index, [*range(8), *range(4), 9]) == 12


def test_a_parked_store_that_is_dropped_after_its_blocks_is_no_loss(fed: Callable[..., Index]) -> None:
    index = fed(*(stored([i + 1], range(4), parent=1_000_000 + i) for i in range(4096)), removed([1]))
    index.apply(W, batch(stored([5000], range(4), parent=2_000_000)))
    assert counts(index)["parked_dropped"] == 1
    assert look(index, range(5)).trust == "exact"
    index.apply(W, batch(stored([5001], range(4), parent=2_000_001)))
    assert look(index, range(5)).trust == "partial", "block 2 is there and got no key"


def test_parked_bytes_are_bounded(fed: Callable[..., Index]) -> None:
    index = fed()
    tokens = list(range(1 << 18))
    for i in range(20):
        index.apply(W, batch(stored([i + 1], tokens, parent=100 + i, block_size=len(tokens))))
    assert index.stats()["workers"][W]["parked"] == 15  # type: ignore[index]
    assert counts(index)["parked_dropped"] == 5


def test_an_event_parked_under_its_own_hash(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2], range(8), parent=2), stored([1], range(4)))
    assert credit(index, range(9)) in (4, 8)
    index.apply(W, batch(removed([1]), removed([1]), removed([2])))
    assert credit(index, range(9)) == 0


def test_placement_lives_while_any_group_or_tier_holds_the_hash(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4)), stored([1], range(4), medium="CPU", extra_keys=...), removed([1]))
    assert look(index, range(5)) == Match(4, 0, {"cpu": 4}, "exact")
    index.apply(W, batch(removed([1], medium="cpu")))
    assert credit(index, range(5)) == 0
    assert index.stats()["workers"][W]["placed"] == 0  # type: ignore[index]


def test_two_live_hashes_for_one_key_match_nothing(fed: Callable[..., Index]) -> None:
    plain, salted = as_array(stored([1, 2], range(8)), "0.10.2"), as_array(stored([3, 4], range(8)), "0.10.2")
    index = fed(plain, salted)
    assert credit(index, range(9)) == 0
    index.apply(W, batch(as_array(removed([1, 2]), "0.10.2")))
    assert credit(index, range(9)) == 0, "only the salted copy is left"
    index.apply(W, batch(as_array(removed([3, 4]), "0.10.2"), plain))
    assert credit(index, range(9)) == 8


def test_hidden_request_on_a_dialect_that_hides(fed: Callable[..., Index]) -> None:
    index = fed(as_array(stored([1], range(4)), "0.14.0"))
    index.mark_hidden_keys(W)
    assert look(index, range(5)) == Match(0, 4, {}, "none")
    for _ in range(2):
        index.apply(W, batch(["AllBlocksCleared"], as_array(stored([1], range(4)), "0.14.0")))
        assert look(index, range(5)) == Match(0, 4, {}, "none"), "any clear may be older than the request"
    index.new_epoch(W)
    index.apply(W, batch(as_array(stored([1], range(4)), "0.14.0")))
    assert look(index, range(5)).credit == 4


def test_hidden_request_on_a_dialect_that_shows(fed: Callable[..., Index]) -> None:
    index = fed(as_array(stored([1], range(4)), "0.17.0"))
    index.mark_hidden_keys(W)
    assert look(index, range(5)).credit == 4


# -- tiers


def test_gpu_run_first_then_the_offloaded_run(fed: Callable[..., Index]) -> None:
    offload: dict[str, Any] = {"extra_keys": ..., "lora_name": ...}
    index = fed(
        stored([1, 2, 3, 4, 5], range(20)),
        stored([2, 3], range(4, 12), parent=1, medium="CPU", **offload),
        stored([4], range(12, 16), parent=3, medium="STORAGE", **offload),
        removed([2]),
        removed([3]),
        removed([4]),
    )
    assert look(index, range(21)) == Match(16, 0, {"gpu": 4, "cpu": 8, "storage": 4}, "exact")
    index.apply(W, batch(removed([2], medium="CPU")))
    assert look(index, range(21)) == Match(4, 0, {"gpu": 4}, "exact")


def test_placeholders_have_no_size_and_wait_for_a_gpu_store(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], [], medium="CPU", block_size=0, extra_keys=..., kv_cache_spec_kind=...))
    assert credit(index, range(5)) == 0
    index.apply(W, batch(stored([1], range(4)), removed([1])))
    assert look(index, range(5)) == Match(4, 0, {"cpu": 4}, "exact")


def test_an_offload_store_of_an_unknown_hash_might_be_salted(fed: Callable[..., Index]) -> None:
    index = fed(stored([9], range(100, 104)), stored([1], range(4), medium="CPU", extra_keys=...))
    assert credit(index, range(5)) == 0
    shown = fed(stored([9], range(100, 104)), stored([1], range(4), medium="CPU"))
    assert look(shown, range(5)) == Match(4, 0, {"cpu": 4}, "exact")


@pytest.mark.parametrize("medium", ["gpu", "GPU", "Gpu", None])
def test_media_in_any_letter_case(fed: Callable[..., Index], medium: str | None) -> None:
    assert look(fed(stored([1], range(4), medium=medium)), range(5)).by_tier == {"gpu": 4}


@pytest.mark.parametrize(
    ("medium", "tier"), [("cpu", "cpu"), ("FS", "storage"), ("obj", "storage"), ("Disk", "storage")]
)
def test_offload_media(fed: Callable[..., Index], medium: str, tier: str) -> None:
    assert look(fed(stored([1], range(4)), stored([1], range(4), medium=medium), removed([1])), range(5)).by_tier == {
        tier: 4
    }


def test_an_unknown_medium_is_skipped_and_counted(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4), medium="MOON"), removed([1], medium="MOON"))
    assert credit(index, range(5)) == 0
    assert counts(index)["unknown_medium"] == 2


def test_a_removal_that_names_no_group_means_all_of_its_tier(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4), group_idx=2), removed([1], group_idx=...))
    assert credit(index, range(5)) == 0


# -- hybrid models

FULL: dict[str, Any] = {"group_idx": 1}


def window(size: int, group: int = 0) -> dict[str, Any]:
    return {"group_idx": group, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": size}


def test_window_needs_its_last_blocks_only(fed: Callable[..., Index]) -> None:
    index = fed(
        stored([4, 5], range(20), **window(8), extra_keys=[None, None]),  # names 2 of 5 blocks, before they are placed
        stored([1, 2, 3, 4, 5], range(20), **FULL),
    )
    assert credit(index, range(21)) == 20
    assert credit(index, range(17)) == 0, "block 3 is not held by the window group"
    index.apply(W, batch(stored([3], range(16), **window(8))))
    assert credit(index, range(17)) == 16


def test_window_that_reaches_the_start_needs_fewer(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4), **window(100)), stored([1, 2, 3], range(12), **FULL))
    assert credit(index, range(13)) == 4


def test_state_group_needs_the_one_last_block(fed: Callable[..., Index]) -> None:
    index = fed(
        stored([3], range(12), group_idx=0, kv_cache_spec_kind="mamba"),
        stored([1, 2, 3, 4], range(16), **FULL),
    )
    assert credit(index, range(17)) == 12
    assert credit(index, range(12)) == 0


def test_chunked_attention_needs_its_own_chunk(fed: Callable[..., Index]) -> None:
    chunked: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "chunked_local_attention"}
    index = fed(stored([3, 4], range(16), **chunked), stored([1, 2, 3, 4], range(16), **FULL), attention_chunk_size=8)
    assert credit(index, range(17)) == 16
    assert credit(index, range(8)) == 0
    index.add_worker("unknown chunk", M)
    index.apply("unknown chunk", batch(stored([1], range(4), **chunked), stored([1], range(4), **FULL)))
    assert index.match(range(5), M)["unknown chunk"] == Match(0, 0, {}, "none")


@pytest.mark.parametrize("kind", ["cross_attention", "encoder_only_attention", "something_new"])
def test_kinds_without_a_rule_get_no_credit(fed: Callable[..., Index], kind: str) -> None:
    assert look(fed(stored([1], range(4), kv_cache_spec_kind=kind)), range(5)) == Match(0, 0, {}, "none")


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", ...])
def test_kinds_of_full_attention(fed: Callable[..., Index], kind: Any) -> None:
    assert credit(fed(stored([1], range(4), kv_cache_spec_kind=kind)), range(5)) == 4


def test_groups_without_kinds_get_no_credit(fed: Callable[..., Index]) -> None:
    two = fed(*(as_array(stored([1], range(4), group_idx=g), "0.20.0") for g in (0, 1)))
    assert look(two, range(5)).trust == "none"


def test_sparse_stores_without_a_kind_get_no_credit(fed: Callable[..., Index]) -> None:
    index = fed(as_array(stored([1], range(4)), "0.20.0"), as_array(stored([2], range(8)), "0.20.0"))
    assert look(index, range(5)) == Match(0, 0, {}, "none")


def test_groups_of_differing_block_size_get_no_credit(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4)), stored([1], range(8), block_size=8, group_idx=1))
    assert look(index, range(9)).trust == "none"


def test_a_partial_state_block_is_not_matchable(fed: Callable[..., Index]) -> None:
    mamba: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    index = fed(
        stored([1, 2], range(8)),
        stored([2], range(8), **mamba),
        stored([7], range(4), block_size=2, **mamba),
        removed([7], group_idx=1),
        stored([7], range(2), **mamba),
    )
    assert credit(index, range(9)) == 8
    assert counts(index)["unplaced"] == 3


def test_eagle_drops_the_last_block(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2, 3], range(12)), spec_decode="eagle")
    assert credit(index, range(13)) == 8
    assert credit(index, range(5)) == 0


def test_eagle_wants_one_window_block_more(fed: Callable[..., Index]) -> None:
    index = fed(stored([2, 3], range(12), **window(5)), stored([1, 2, 3], range(12), **FULL), spec_decode="eagle")
    assert credit(index, range(13)) == 8
    index.apply(W, batch(removed([2])))
    assert credit(index, range(13)) == 0


def test_hits_are_rounded_down_to_the_alignment(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2, 3], range(12)), hit_alignment=8)
    assert credit(index, range(13)) == 8


# -- clearing, forgetting, trust


def test_clear_empties_every_tier_of_that_worker_only(index: Index) -> None:
    for worker in ("a", "b"):
        index.add_worker(worker, M)
        index.apply(worker, batch(stored([1], range(4)), stored([1], range(4), medium="CPU")))
    index.apply("a", batch(cleared()))
    found = index.match(range(5), M)
    assert (found["a"], found["b"].credit) == (Match(0), 4)


@pytest.mark.parametrize(
    ("loss", "counted"),
    [
        (b"\xc1 garbage", "undecodable_not_a_batch"),
        (bytes((16 << 20) + 1), "undecodable_too_large"),
        (b"\x92\xcb" + bytes(8) + b"\xdd\x00\x04\x00\x01" + b"\xc0" * ((1 << 18) + 1), "undecodable_too_large"),
        (batch(["BlockRemoved"]), "skipped_missing_field"),
        (batch(["BlockRemoved", [1.5]]), "skipped_bad_hash"),
        (batch({"type": "TierBlocksCleared"}), "skipped_unknown_tag"),
        (batch({"type": "BlocksEvicted"}), "skipped_unknown_tag"),
        (batch([]), "skipped_no_tag"),
    ],
)
def test_what_may_have_removed_forgets(fed: Callable[..., Index], loss: bytes, counted: str) -> None:
    index = fed(stored([1], range(4)))
    index.apply(W, loss)
    assert look(index, range(5)) == Match(0, 0, {}, "partial")
    assert counts(index)[counted] == 1
    index.apply(W, batch(stored([1], range(4))))
    assert look(index, range(5)) == Match(4, 0, {"gpu": 4}, "partial")
    index.apply(W, batch(cleared(), stored([1], range(4))))
    assert look(index, range(5)) == Match(4, 0, {"gpu": 4}, "exact")


@pytest.mark.parametrize(
    ("skipped", "trust"),
    [(["BlockTouched", [1]], "exact"), (["BlockStored"], "partial"), (["BlockStored", [1.5]], "partial")],
)
def test_what_can_not_have_removed_costs_itself_only(fed: Callable[..., Index], skipped: Any, trust: Trust) -> None:
    """But a store that is missing is missing: what is known is not complete."""
    index = fed(stored([1], range(4)), skipped, stored([2], range(4, 8), parent=1))
    assert look(index, range(9)) == Match(8, 0, {"gpu": 8}, trust)
    index.apply(W, batch(cleared()))
    assert look(index, range(9)).trust == "exact"


def test_the_rest_of_the_batch_applies_after_a_loss_inside_it(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4)), ["BlocksEvicted"], stored([2], range(100, 104)))
    assert credit(index, range(5)) == 0
    assert credit(index, range(100, 105)) == 4


def test_forget_and_new_epoch(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4)))
    index.forget(W)
    assert look(index, range(5)) == Match(0, 0, {}, "partial")
    index.new_epoch(W)
    assert look(index, range(5)) == Match(0, 0, {}, "exact")
    index.apply(W, batch(stored([1], range(8), block_size=8), stored([1], range(8), block_size=8), removed([1])))
    assert credit(index, range(9)) == 8, "another block size, and counting again"


def test_a_suspended_worker_has_no_credit_and_keeps_what_it_knows(fed: Callable[..., Index]) -> None:
    index = fed(stored([1, 2], range(8)))
    index.suspend(W)
    assert look(index, range(9)) == Match(0, 8, {}, "none")
    index.apply(W, batch(removed([2]), cleared(), stored([1], range(4))))
    index.forget(W)
    index.new_epoch(W)
    index.apply(W, batch(stored([1], range(4))))
    assert look(index, range(9)) == Match(0, 4, {}, "none"), "only resume ends it"
    index.resume(W)
    assert look(index, range(9)) == Match(4, 0, {"gpu": 4}, "exact")
    index.suspend("nobody")
    index.resume("nobody")


def test_batches_of_another_rank_are_dropped(index: Index) -> None:
    index.add_worker(W, M, rank=1)
    index.apply(W, batch(stored([1], range(4)), rank=0))
    assert (credit(index, range(5)), counts(index)["wrong_rank"]) == (0, 1)
    index.apply(W, batch(stored([1], range(4)), rank=1))
    index.apply(W, batch(stored([2], range(4, 8), parent=1), rank=None))
    assert look(index, range(9)) == Match(8, 0, {"gpu": 8}, "partial"), "what the other batch told is not known"
    index.relearn(W)
    assert look(index, range(9)).trust == "exact"


# -- workers


def test_workers_come_and_go(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4)))
    index.remove_worker(W)
    assert index.match(range(5), M) == {}
    index.apply(W, batch(stored([1], range(4))))
    index.forget(W)
    index.new_epoch(W)
    index.mark_reannouncing(W)
    index.mark_hidden_keys(W)
    index.remove_worker(W)
    assert index.match(range(5), M) == {}
    index.add_worker(W, M)
    assert look(index, range(5)) == Match(0)


def test_adding_a_worker_again_makes_it_new(fed: Callable[..., Index]) -> None:
    index = fed(stored([1], range(4)))
    index.add_worker(W, M)
    assert credit(index, range(5)) == 0


@pytest.mark.parametrize("group", [-1, 256, 2**63 - 1, -(2**63)])
def test_groups_that_can_not_be_are_skipped(fed: Callable[..., Index], group: int) -> None:
    index = fed(stored([1], range(4)), stored([2], range(4, 8), parent=1, group_idx=group))
    assert (credit(index, range(9)), counts(index)["skipped_bad_group"]) == (4, 1)
    index.apply(W, batch(removed([1], group_idx=group)))
    assert look(index, range(9)) == Match(0, 0, {}, "partial"), "what was removed is unknown"
    index.new_epoch(W)
    index.apply(W, batch(stored([1], range(4), group_idx=255)))
    assert credit(index, range(9)) == 4


def test_an_empty_prompt_has_no_credit_whatever_the_groups(index: Index) -> None:
    kinds = ("full_attention", "sliding_window", "mamba", "chunked_local_attention")
    for place, kind in enumerate(kinds):
        index.add_worker(kind, M, attention_chunk_size=4)
        index.apply(kind, batch(stored([place], range(4), kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=4)))
    assert index.match([], M) == dict.fromkeys(kinds, Match(0))


@pytest.mark.parametrize(
    "facts", [{"usable_blocks": 0}, {"attention_chunk_size": -1}, {"hit_alignment": 0}, {"spec_decode": "medusa"}]
)
def test_facts_that_can_not_be(index: Index, facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(facts))):
        index.add_worker(W, M, **facts)


def test_decoded_batches_are_as_good_as_bytes(fed: Callable[..., Index]) -> None:
    index = fed()
    index.add_worker(W, M)
    payload = batch(
        stored([1, b"x" * 32], range(8), extra_keys=[["s"], None]),
        stored(["p"], range(4), lora_name="a", extra_keys=[["a", ["i", 1]]]),
        removed([b"x" * 32]),
        ["BlocksEvicted"],
        stored([7], range(4), extra_keys=[["s"]]),
    )
    index.apply(W, decode_batch(payload))
    other = index.stats()["workers"][W]  # type: ignore[index]
    index.add_worker(W, M)
    index.apply_many([(W, payload), ("nobody", payload)])
    assert index.stats()["workers"][W] == other  # type: ignore[index]
    assert credit(index, range(5), cache_salt="s") == 4


def test_stats_of_a_worker(fed: Callable[..., Index]) -> None:
    stats = fed(stored([1, 2], range(8)), stored([1], range(4)), removed([2])).stats()
    worker = stats["workers"][W]  # type: ignore[index]
    assert {k: worker[k] for k in ("model", "trust", "block_size", "blocks", "copies", "placed", "parked")} == {
        "model": M,
        "trust": "exact",
        "block_size": 4,
        "blocks": 1,
        "copies": 2,
        "placed": 1,
        "parked": 0,
    }
    assert worker["counts"] == {"batches": 1, "stored": 2, "removed": 1}
