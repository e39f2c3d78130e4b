"""``max_blocks``: what goes when all workers together hold more blocks than they may, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvsync.index.match import Index, Match
from tests.contract.face import M, W, counts, credit, look, states, tell
from tests.wire import batch, cleared, removed, stored

Make = Callable[..., Index]


def capped(make_index: Make, most: int, *workers: str, **facts: Any) -> Index:
    index = make_index(max_blocks=most)
    for worker in workers or (W,):
        index.add_worker(worker, M, **facts)
    return index


def chain(start: int, blocks: int) -> Any:
    """A chain of blocks of its own; its tokens are ``prompt``'s."""
    return stored([start * 1000 + i for i in range(blocks)], prompt(start, blocks)[:-1])


def prompt(start: int, blocks: int) -> list[int]:
    return [*range(start * 100_000, start * 100_000 + 4 * blocks), 7]


def blocks(index: Index) -> int:
    return sum(worker["blocks"] for worker in index.stats()["workers"].values())  # type: ignore[attr-defined]


def trusts(index: Index) -> dict[str, str]:
    return {name: worker["trust"] for name, worker in index.stats()["workers"].items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("most", [0, -1, -(2**70)])
def test_a_cap_below_one(make_index: Make, most: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        make_index(max_blocks=most)


def test_up_to_the_cap_nothing_goes(make_index: Make) -> None:
    index = capped(make_index, 16)
    index.apply(W, batch(chain(1, 10), chain(2, 6), chain(2, 6)))
    assert (blocks(index), trusts(index)) == (16, {W: "exact"})
    assert make_index().stats()["workers"] == {}


def test_tails_go_first_until_an_eighth_is_free(make_index: Make) -> None:
    index = capped(make_index, 16)
    index.apply(W, batch(chain(1, 10), chain(2, 6)))
    index.apply(W, batch(chain(3, 1)))
    assert look(index, prompt(1, 10)) == Match(28, 0, {"gpu": 28}, "partial")
    assert credit(index, prompt(2, 6)) == 24
    assert credit(index, prompt(3, 1)) == 4
    assert (blocks(index), counts(index)["capped"]) == (14, 3)


def test_a_class_goes_whole_over_all_workers(make_index: Make) -> None:
    index = capped(make_index, 16, "a", "b", "c")
    index.apply("a", batch(chain(1, 6)))
    index.apply("b", batch(chain(2, 6)))
    index.apply("c", batch(chain(3, 5)))
    found = index.match(prompt(1, 6), M)["a"], index.match(prompt(2, 6), M)["b"], index.match(prompt(3, 5), M)["c"]
    assert [match.credit for match in found] == [16, 16, 16], "the sixth blocks, and as that is too few, the fifth"
    assert trusts(index) == {"a": "partial", "b": "partial", "c": "partial"}
    assert blocks(index) == 12


def test_workers_that_lost_nothing_stay_exact(make_index: Make) -> None:
    index = capped(make_index, 8, "a", "b")
    index.apply("a", batch(chain(1, 2)))
    index.apply("b", batch(chain(2, 7)))
    assert trusts(index) == {"a": "exact", "b": "partial"}
    assert index.match(prompt(1, 2), M)["a"] == Match(8, 0, {"gpu": 8}, "exact")


def test_what_has_no_key_goes_before_any_tail(make_index: Make) -> None:
    index = capped(make_index, 8)
    orphans = stored(["o1", "o2"], range(8), "nobody"), stored(["o3"], [], medium="CPU", block_size=0, extra_keys=...)
    index.apply(W, batch(*orphans, chain(1, 5)))
    index.apply(W, batch(chain(2, 1)))
    assert (credit(index, prompt(1, 5)), credit(index, prompt(2, 1))) == (20, 4)
    assert (blocks(index), counts(index)["capped"]) == (6, 3)
    index.apply(W, batch(stored(["nobody"], [1, 1, 1, 1])))
    assert credit(index, [1, 1, 1, 1, *range(8), 7]) == 4, "what was parked is not there any more"


def test_a_chain_that_is_read_outlives_all_that_are_not(make_index: Make) -> None:
    """(I17) A long chain is only read while others come and go: tails go first, and the hot head stays."""
    index = capped(make_index, 32)
    index.apply(W, batch(chain(1, 20)))
    for number in range(2, 40):
        assert credit(index, prompt(1, 10)) == 40, number
        index.apply(W, batch(chain(number, 8)))
    assert blocks(index) <= 32
    assert credit(index, prompt(1, 20)) == 40, "its own tail, which nobody read, has gone"


def test_what_was_read_counts_for_one_sweep(make_index: Make) -> None:
    index = capped(make_index, 8)
    index.apply(W, batch(chain(1, 8)))
    assert credit(index, prompt(1, 8)) == 32
    index.apply(W, batch(chain(2, 1)))
    assert credit(index, prompt(2, 1)) == 0, "not read, whatever its depth"
    assert blocks(index) == 7
    index.apply(W, batch(chain(3, 2)))
    assert look(index, [7]).credit == 0
    assert blocks(index) <= 7


def test_read_ones_go_by_depth_as_well(make_index: Make) -> None:
    index = capped(make_index, 8)
    index.apply(W, batch(chain(1, 8)))
    credit(index, prompt(1, 8))
    index.apply(W, batch(*(chain(number, 1) for number in range(2, 4))))
    credit(index, prompt(1, 8))
    before = blocks(index)
    assert before <= 8
    index.apply(W, batch(chain(9, 8)))
    assert blocks(index) <= 7
    assert credit(index, prompt(1, 8)) > 0


def test_what_is_expected_was_read_as_well(make_index: Make) -> None:
    """While its stream is down nothing is credited; the hot head stays all the same."""
    index = capped(make_index, 8)
    index.apply(W, batch(chain(1, 8)))
    index.suspend(W)
    assert look(index, prompt(1, 4)) == Match(0, 16, {}, "none")
    index.apply(W, batch(chain(2, 4)))
    index.resume(W)
    assert credit(index, prompt(1, 8)) == 16


def test_a_capped_worker_is_partial_until_all_is_new(make_index: Make) -> None:
    for end in ("clear", "new_epoch", "relearn"):
        index = capped(make_index, 4)
        index.apply(W, batch(chain(1, 5)))
        assert trusts(index) == {W: "partial"}
        if end == "clear":
            index.apply(W, batch(cleared()))
        else:
            getattr(index, end)(W)
        assert trusts(index) == {W: "exact"}


def test_what_was_capped_is_gone_from_every_tier_and_group(make_index: Make) -> None:
    index = capped(make_index, 3, usable_blocks=4)
    full: dict[str, Any] = {"group_idx": 1}
    for medium in ("GPU", "CPU"):
        index.apply(W, batch(stored([1, 2], range(8), medium=medium), stored([1, 2], range(8), medium=medium, **full)))
    assert states(index)["copies"] == 8
    index.apply(W, batch(chain(5, 2)))
    assert {k: states(index)[k] for k in ("blocks", "copies", "placed", "doubtful")} == {
        "blocks": 2, "copies": 5, "placed": 2, "doubtful": 0,
    }  # fmt: skip
    index.apply(W, batch(removed([2], medium="CPU"), removed([2])))
    assert counts(index)["removed_unknown"] == 2
    index.apply(W, batch(stored([2], range(4, 8), 1), stored([2], range(4, 8), 1, **full)))
    assert credit(index, range(9)) == 8


def test_the_cap_is_a_loss_for_answers_under_way(make_index: Make) -> None:
    """What was dropped has no key any more: a removal that takes it is not known by it."""
    index = capped(make_index, 4)
    index.apply(W, batch(chain(1, 4)))
    before = look(index, prompt(1, 4))
    for number in (2, 3):  # the first sweep leaves what was read
        index.apply(W, batch(chain(number, 1)))
    index.apply(W, batch(removed([1003])))
    assert counts(index)["removed_unknown"] == 1
    assert tell(index, prompt(1, 4), 16, before) == "evicted"


def test_runs_outlive_the_cap(make_index: Make) -> None:
    index = capped(make_index, 4)
    index.apply(W, batch(chain(1, 5)))
    assert tell(index, prompt(1, 5), 20) == "steady"
    index.apply(W, batch(chain(2, 5)))
    assert credit(index, prompt(1, 5)) == 20
    index.apply(W, batch(removed([1004])))
    assert credit(index, prompt(1, 5)) < 20, "what was dropped leaves without a key"


def test_each_batch_of_many_is_followed_by_a_look_at_the_cap(make_index: Make) -> None:
    index = capped(make_index, 8)
    index.apply_many([(W, batch(chain(number, 6))) for number in range(1, 50)])
    assert blocks(index) <= 8
    assert credit(index, prompt(49, 6)) > 0


def test_a_batch_larger_than_the_cap(make_index: Make) -> None:
    index = capped(make_index, 1)
    index.apply(W, batch(chain(1, 500)))
    assert (blocks(index), credit(index, prompt(1, 500))) == (1, 4)
    index.apply(W, batch(*(chain(number, 1) for number in range(2, 500))))
    assert (blocks(index), credit(index, prompt(2, 1))) == (1, 0), "all of one depth go together, but what was read"
    index.apply(W, batch(*(chain(number, 1) for number in range(500, 600))))
    assert blocks(index) == 0


def test_depth_goes_on_behind_an_adopted_name(make_index: Make) -> None:
    index = capped(make_index, 7)
    index.apply(W, batch(stored(["first"], [5, 5, 5, 5])))
    index.forget(W)
    index.apply(W, batch(stored(["q"], range(12, 16), "hA"), stored(["qq"], range(16, 20), "q"), chain(2, 5)))
    assert tell(index, [*range(20), 7], 12) == "steady"
    assert states(index)["placed"] == 7
    index.add_worker("v", M)
    index.apply("v", batch(chain(3, 1)))
    assert counts(index)["capped"] == 2, "the fifth block of each chain"
    assert look(index, [*range(20), 7]) == Match(12, 4, {"gpu": 12}, "partial")
    assert credit(index, prompt(2, 5)) == 16


def test_caps_from_workers_that_leave(make_index: Make) -> None:
    index = capped(make_index, 8, "a", "b")
    index.apply("a", batch(chain(1, 8)))
    index.remove_worker("a")
    index.apply("b", batch(chain(2, 8)))
    assert trusts(index) == {"b": "exact"}


def test_what_was_read_at_one_worker_was_read_at_all(make_index: Make) -> None:
    index = capped(make_index, 8, "a", "b")
    head, tail = 1000, 1001
    for worker in "ab":
        index.apply(worker, batch(chain(1, 2)))
    index.apply("a", batch(removed([head])))
    assert {name: match.credit for name, match in index.match(prompt(1, 2), M).items()} == {"a": 0, "b": 8}
    index.apply("b", batch(*(chain(number, 1) for number in range(2, 9))))
    assert blocks(index) == 3, "of those that nobody read none is left"
    index.apply("a", batch(stored([head], prompt(1, 1)[:-1])))
    assert index.match(prompt(1, 2), M)["a"].credit == 8, f"{tail} was read at the other one"


@pytest.mark.parametrize("gone", [removed(["x"]), cleared()])
def test_what_was_read_is_not_when_all_have_lost_it_meanwhile(make_index: Make, gone: Any) -> None:
    index = capped(make_index, 8, "a", "b")
    index.apply("a", batch(stored(["x"], prompt(1, 1)[:-1])))
    assert index.match(prompt(1, 1), M)["a"].credit == 4
    index.apply("a", batch(gone))
    index.apply("b", batch(stored(["y"], prompt(1, 1)[:-1])))
    index.apply("a", batch(*(chain(number, 1) for number in range(2, 10))))
    assert index.match(prompt(1, 1), M)["b"].credit == 0
    assert blocks(index) == 0, "none was read"


@pytest.mark.parametrize("most", [0, -1, -(2**70)])
def test_a_cap_on_bytes_below_one(make_index: Make, most: int) -> None:
    with pytest.raises((ValueError, OverflowError), match="max_bytes must be at least 1"):
        make_index(max_bytes=most)


def test_bytes_are_kept(make_index: Make) -> None:
    """Whatever shapes the blocks have: plain, under own names, in two tiers, under long names, unplaced."""
    most = 20 << 20
    index = make_index(max_bytes=most)
    for worker in "abcde":
        index.add_worker(worker, M)
    for number in range(400):
        hashes = [number * 1000 + i for i in range(256)]
        tokens = [(number * 256 + i // 4) % 2**32 for i in range(1024)]
        long = [f"{block_hash:0>200}" for block_hash in hashes]
        index.apply("a", batch(stored(hashes, tokens)))
        index.apply("b", batch(stored([block_hash + 2**40 for block_hash in hashes], tokens)))
        index.apply("c", batch(stored(hashes, tokens), stored(hashes, tokens, medium="CPU")))
        index.apply("d", batch(stored(long, tokens)))
        index.apply("e", batch(stored(long, [], block_size=0, medium="CPU")))
        assert index.stats()["bytes"] < most + (4 << 20)  # type: ignore[operator]
    assert set(trusts(index).values()) == {"partial"}
    assert blocks(index) > 10_000
    for match in index.match([i // 4 for i in range(399 * 256, 399 * 256 + 1024)], M).values():
        assert match.credit <= 1023


def test_what_waits_for_its_parent_drives_no_block_out(make_index: Make) -> None:
    """It has bounds of its own, and to drop blocks would not free it."""
    most = 4 << 20
    index = make_index(max_bytes=most)
    index.add_worker(W, M)
    index.apply(W, batch(chain(1, 1000)))
    for number in range(3):
        index.add_worker(f"parks-{number}", M)
        for orphan in range(60):
            waits = stored([f"{number}-{orphan}"], range(20_000), "nobody", block_size=20_000)
            index.apply(f"parks-{number}", batch(waits))
    parked = sum(state["parked"] for state in index.stats()["workers"].values())  # type: ignore[attr-defined]
    assert parked * 20_000 * 4 > 3 * most, "more than there is room for blocks"
    for number in range(2, 402):  # each batch brings the next look at the bound nearer
        index.apply(W, batch(chain(number, 1)))
    assert all("capped" not in state["counts"] for state in index.stats()["workers"].values())  # type: ignore[attr-defined]
    assert credit(index, prompt(1, 1000)) == 4000
