"""Failures that others met in their indexes, each as it would show here; the docstrings name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvsync.events.types import Image
from kvsync.index.match import Index, Match
from kvsync.index.reference import ReferenceIndex
from tests.contract.face import M, W, counts, credit, look, states, tell
from tests.wire import as_array, batch, cleared, removed, stored

Fed = Callable[..., Index]


def empty(index: Index) -> bool:
    return not any(states(index)[word] for word in ("blocks", "copies", "placed", "parked", "doubtful"))


# -- wire


@pytest.mark.parametrize(
    "form",
    [1, -1, -(2**63), 2**63, 2**64 - 1, b"8 bytes!", b"\x00" * 32, b"\xff" * 32, "text"],
    ids=["int", "negative", "least", "2**63", "greatest", "8 bytes", "zeros", "ones", "text"],
)
def test_a_hash_of_any_form_is_stored_and_removed(fed: Fed, form: Any) -> None:
    """(W3) Block hashes are signed ints, unsigned ints or raw bytes: each comes and goes, and nothing stays."""
    index = fed(stored([form], range(4)), stored(["child"], range(4, 8), form))
    assert credit(index, range(9)) == 8
    index.apply(W, batch(removed([form]), removed(["child"])))
    assert (credit(index, range(9)), empty(index)) == (0, True)
    assert "removed_unknown" not in counts(index)


def test_hashes_that_share_their_first_bytes(fed: Fed) -> None:
    """(W3) Two 32-byte hashes with the same first (and last) 8 bytes are two blocks."""
    one, two = (b"12345678" + middle * 16 + b"12345678" for middle in (b"a", b"b"))
    index = fed(stored([one], range(4)), stored([two], range(4, 8), one))
    assert (credit(index, range(9)), states(index)["blocks"]) == (8, 2)
    index.apply(W, batch(removed([one])))
    assert (credit(index, range(9)), states(index)["blocks"]) == (0, 1)
    index.apply(W, batch(stored([one], range(4))))
    assert credit(index, range(9)) == 8


def test_the_adapters_name_is_no_image(index: Index) -> None:
    """(W4) Adapter blocks with extra keys [name], [name, image], [name, salt] match their own requests only."""
    image = [[Image("img", 0)]]
    asked: dict[str, dict[str, Any]] = {
        "name": {"adapter": "X"},
        "image": {"adapter": "X", "block_keys": image},
        "salt": {"adapter": "X", "cache_salt": "s"},
        "none": {},
        "image alone": {"block_keys": image},
        "name as image": {"block_keys": [[Image("X")]]},
        "name as salt": {"cache_salt": "X"},
    }
    shown = {"name": ["X"], "image": ["X", ["img", 0]], "salt": ["X", "s"]}
    for worker, keys in shown.items():
        index.add_worker(worker, M)
        index.apply(worker, batch(stored([1], range(4), lora_name="X", lora_id=1, extra_keys=[keys])))
    for name, keys in asked.items():
        found = {worker for worker, match in index.match(range(5), M, **keys).items() if match.credit}
        assert found == ({name} & shown.keys()), name


def test_an_adapter_and_a_salt_of_one_name(fed: Fed) -> None:
    """(W5) The engine gives both the same hash; here adapter X without salt and the base model salted X stay apart."""
    index = fed(stored([7], range(4), lora_name="X", lora_id=1, extra_keys=[["X"]]))
    assert (credit(index, range(5), adapter="X"), credit(index, range(5), cache_salt="X")) == (4, 0)
    index.add_worker(W, M)
    index.apply(W, batch(stored([7], range(4), extra_keys=[["X"]])))
    assert (credit(index, range(5), adapter="X"), credit(index, range(5), cache_salt="X")) == (0, 4)


def test_one_bad_event_costs_itself_only(fed: Fed) -> None:
    """(W6) Good, unknown tag, missing field, repeated hash, good: all that is good applies, nothing is wiped."""
    index = fed(stored([1], range(4)))
    bad = [["BlockTouched", [1]], ["BlockStored"], stored([2, 2], [*range(4, 8)] * 2, 1)]
    index.apply(W, batch(stored([3], range(4, 8), 1), *bad, stored([4], range(8, 12), 3)))
    assert look(index, range(5)) == Match(4, 0, {"gpu": 4}, "partial"), "a store is missing"
    assert credit(index, range(100, 105)) == 0
    assert counts(index)["batches"] == 2
    assert {word: n for word, n in counts(index).items() if word.startswith("skipped")} == {
        "skipped_unknown_tag": 1,
        "skipped_missing_field": 1,
    }
    assert states(index)["blocks"] == 4


# -- clears


def test_a_cleared_worker_alone_is_empty(index: Index) -> None:
    """(I3) A clear empties that worker, others keep theirs; one that sleeps without a word is forgotten."""
    for worker in ("cleared", "asleep", "other"):
        index.add_worker(worker, M)
        index.apply(worker, batch(stored([1, 2], range(8))))
    index.apply("cleared", batch(cleared()))
    index.forget("asleep")
    assert index.match(range(9), M) == {
        "cleared": Match(0),
        "asleep": Match(0, trust="partial"),
        "other": Match(8, 0, {"gpu": 8}, "exact"),
    }


def test_a_clear_is_of_one_rank_and_every_tier(index: Index) -> None:
    """(I4) It names neither tier nor rank. It is its worker's, in every tier: that is the sound reading."""
    for rank in (0, 1):
        index.add_worker(f"rank {rank}", M, rank=rank)
        events = stored([1], range(4)), stored([2], range(4, 8), 1), stored([2], range(4, 8), 1, medium="CPU")
        index.apply(f"rank {rank}", batch(*events, removed([2]), rank=rank))
    index.apply("rank 0", batch(cleared(), rank=0))
    index.apply("rank 1", batch(cleared(), rank=0))
    found = index.match(range(9), M)
    assert found["rank 0"] == Match(0)
    assert found["rank 1"] == Match(8, 0, {"gpu": 4, "cpu": 4}, "partial"), "another rank's batch stands in its stream"


def test_a_clear_of_one_tier_is_not_known(fed: Fed) -> None:
    """(I4) A tag that is unknown and sounds like a clear: what it took is unknown, so nothing is credited."""
    index = fed(stored([1], range(4)), {"type": "TierBlocksCleared", "medium": "CPU"}, stored([2], range(100, 104)))
    assert look(index, range(5)) == Match(0, 0, {}, "partial")
    assert credit(index, range(100, 105)) == 4


# -- sizes


def test_block_sizes_are_those_of_the_events(index: Index) -> None:
    """(I6) Context parallelism and hybrid layouts inflate blocks (528 seen): each worker's events say its size."""
    for worker, size in (("cp", 32), ("hybrid", 528)):
        index.add_worker(worker, M)
        index.apply(worker, batch(stored([1, 2], range(2 * size), block_size=size)))
    assert index.block_sizes(M) == {"cp": 32, "hybrid": 528}

    def found(tokens: int) -> dict[str, int]:
        return {worker: match.credit for worker, match in index.match(range(tokens), M).items()}

    assert found(2000) == {"cp": 64, "hybrid": 1056}
    assert found(600) == {"cp": 64, "hybrid": 528}
    assert found(528) == {"cp": 64, "hybrid": 0}
    assert found(16) == {"cp": 0, "hybrid": 0}, "too short for either: load decides"


# -- tiers


def test_a_prefix_in_host_memory_is_found_there(fed: Fed) -> None:
    """(I9) Stored on GPU and CPU, removed from the GPU: found on the CPU; removed there as well: gone."""
    index = fed(stored([1, 2], range(8)), stored([1, 2], range(8), medium="CPU"), removed([1]), removed([2]))
    assert look(index, range(9)) == Match(8, 0, {"cpu": 8}, "exact")
    index.apply(W, batch(removed([1, 2], medium="CPU")))
    assert (look(index, range(9)), empty(index)) == (Match(0), True)


def test_events_without_size_or_tokens(fed: Fed) -> None:
    """(I10) Block size 0 and no tokens: nothing is divided by it, and known hashes alone change their tier."""
    placeholder: dict[str, Any] = {"medium": "CPU", "block_size": 0, "extra_keys": ..., "kv_cache_spec_kind": ...}
    index = fed(stored([1, 2], [], **placeholder))
    assert (look(index, range(9)), index.block_sizes(M)) == (Match(0), {W: 0})
    index.apply(W, batch(stored([1], range(4)), stored([3], [], 1, **placeholder), removed([1])))
    assert look(index, range(13)) == Match(4, 0, {"cpu": 4}, "exact")


def test_a_part_of_an_offloaded_chunk_is_told_apart(fed: Fed) -> None:
    """(I10) Blocks of a chunk are announced singly, though a store may give back whole chunks only: what is on the CPU
    is said to be there, so that policies discount it."""
    index = fed(stored([1, 2, 3, 4], range(16)))
    index.apply(W, batch(*(stored([i], [], medium="CPU", block_size=0, extra_keys=...) for i in (1, 2, 3, 4))))
    index.apply(W, batch(*(removed([i]) for i in (2, 3, 4))))
    assert look(index, [*range(12), *range(100, 105)]) == Match(12, 0, {"gpu": 4, "cpu": 8}, "exact")


# -- what tells blocks apart


def test_the_match_ends_before_the_first_image_that_differs(fed: Fed) -> None:
    """(I12) Placeholders are the same for every image: its identifier is not."""
    ids = [*range(8), *[0] * 8, 7]
    index = fed(stored([1, 2, 3, 4], ids[:-1], extra_keys=[None, None, [["cat", 0]], [["cat", -4]]]))
    cat, dog = ([None, None, [Image(name, 0)], [Image(name, -4)]] for name in ("cat", "dog"))
    assert [credit(index, ids, block_keys=keys) for keys in (cat, dog, None)] == [16, 8, 8]


def test_a_partial_block_that_is_announced_again(fed: Fed) -> None:
    """(I14) Removed on its promotion to a full block, then announced with too few tokens: not matchable, counted."""
    index = fed(stored(["partial"], range(2)), stored(["full"], range(4)), removed(["partial"]))
    index.apply(W, batch(stored(["partial"], range(2)), stored(["partial"], range(4, 6), "full")))
    assert [credit(index, range(length)) for length in (3, 5, 7, 9)] == [0, 4, 4, 4]
    assert counts(index)["unplaced"] == 3
    index.apply(W, batch(removed(["partial"]), removed(["partial"])))
    assert (states(index)["blocks"], credit(index, range(5))) == (1, 4)


def test_a_partial_state_block_leaves_the_promoted_one(fed: Fed) -> None:
    """(I14) As engines with state groups send it: the promoted block stays matchable."""
    mamba: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    index = fed(stored([1, 2], range(8)), stored([2], range(8), **mamba))
    index.apply(W, batch(stored([7], range(4), block_size=2, **mamba), removed([7], group_idx=1)))
    index.apply(W, batch(stored([7], range(2), **mamba)))
    assert credit(index, range(9)) == 8
    assert counts(index)["unplaced"] == 3
    assert credit(index, range(3)) == 0


def test_numbers_of_adapters_differ_between_engines(index: Index) -> None:
    """(I18) Each engine numbers its adapters as it loads them: the name is what counts."""
    for number, worker in enumerate("abc"):
        index.add_worker(worker, M)
        index.apply(worker, batch(stored([1], range(4), lora_id=number + 1, lora_name="X", extra_keys=[["X"]])))
    assert {match.credit for match in index.match(range(5), M, adapter="X").values()} == {4}
    assert {match.credit for match in index.match(range(5), M, adapter="Y").values()} == {0}


def test_an_adapter_that_was_loaded_anew(index: Index) -> None:
    """(I18) One name, other weights: two hashes for one key match nothing; forgetting one engine leaves the others."""
    for worker in "ab":
        index.add_worker(worker, M)
        index.apply(worker, batch(stored(["old"], range(4), lora_name="X", lora_id=1, extra_keys=[["X"]])))
    index.apply("a", batch(stored(["new"], range(4), lora_name="X", lora_id=2, extra_keys=[["X"]])))
    found = index.match(range(5), M, adapter="X")
    assert (found["a"].credit, found["b"].credit) == (0, 4)
    index.forget("a")
    index.apply("a", batch(stored(["new"], range(4), lora_name="X", lora_id=2, extra_keys=[["X"]])))
    found = index.match(range(5), M, adapter="X")
    assert (found["a"].credit, found["b"].credit) == (4, 4)


Colliding = tuple[int, list[int], list[int]]


@pytest.fixture
def colliding() -> Colliding:
    """A block size, and the tokens of two blocks that have one key at the start of a plain prompt of model ``M``.

    XXH3 multiplies 8 bytes of its input, ^ 8 bytes of a constant (+ the seed), with the next 8: where the former are
    chosen so that they give 0, the latter don't count.
    """
    constant = int.from_bytes(bytes.fromhex("ded46de9839097db"), "little")
    # the tokens, little-endian; the seed is the parent's key, here that of the context
    context = len(M).to_bytes(8, "little") + M.encode() + bytes(8) + b"-" + (8).to_bytes(4, "little")
    zero = (constant + xxhash.xxh3_64_intdigest(context)) % 2**64
    blind = [1, 1, 1, 1, zero % 2**32, zero >> 32]
    return 8, [*blind, 1, 2], [*blind, 3, 4]


def test_a_collision_of_keys_is_one_wrong_turn_at_most(index: Index, colliding: Colliding) -> None:
    """(I19) Somebody makes two prompts of one key: the second is sent where the first is. The engine has hashes of its
    own and serves nothing of it; its answer says so."""
    size, mine, yours = colliding
    index.add_worker(W, M)
    index.apply(W, batch(stored(["mine"], mine, block_size=size)))
    assert credit(index, [*mine, 9]) == size
    wrong = look(index, [*yours, 9])
    assert wrong.credit == size, "the case that this test is about"
    assert tell(index, [*yours, 9], 0, wrong) == "steady", "so it is audited: less than was credited"
    index.apply(W, batch(stored(["yours"], yours, block_size=size)))
    assert (credit(index, [*mine, 9]), credit(index, [*yours, 9])) == (0, 0), "two hashes of one key match nothing"


def test_a_collision_does_not_reach_another_tenant_or_model(index: Index, colliding: Colliding) -> None:
    """(I19) Model, adapter and salt are in the key: no collision of tokens leads from one to another."""
    size, mine, yours = colliding
    for model in (M, "other"):
        index.add_worker(model, model)
    index.add_worker(W, M)
    index.apply(W, batch(stored(["mine"], mine, block_size=size)))
    for keys in ({"cache_salt": "somebody"}, {"adapter": "A"}, {"adapter": "A", "cache_salt": "somebody"}):
        for tokens in (mine, yours):
            assert credit(index, [*tokens, 9], **keys) == 0
    assert index.match([*yours, 9], "other") == {"other": Match(0)}


# -- memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_suffixes_that_come_and_go_leave_nothing(fed: Fed, make_index: Callable[..., Index]) -> None:
    """(L1) Unique suffixes stored and removed under one prefix: what is known and what it takes stay the same."""
    rounds = 8 if make_index is ReferenceIndex else 150
    index = fed(stored(["prefix"], range(4)))

    def churn(first: int) -> None:
        for start in range(first, first + 2000, 200):
            numbers = range(start, start + 200)
            index.apply(W, batch(*(stored([i, -i - 1], [i, 0, 0, 0, i, 1, 1, 1], "prefix") for i in numbers)))
            credit(index, [*range(4), start, 0, 0, 0, start, 1, 1, 1, 9])
            index.apply(W, batch(*(removed([-i - 1]) for i in numbers), *(removed([i]) for i in numbers)))

    for warm in range(5):
        churn(2000 * warm)
    before = resident_bytes()
    for number in range(5, 5 + rounds):
        churn(2000 * number)
    assert (states(index)["blocks"], states(index)["placed"], states(index)["copies"]) == (1, 1, 1)
    assert resident_bytes() - before < rounds * 2000 * 2 * 27, "less than half of what others keep of each (54 bytes)"


def test_answers_and_orphans_leave_nothing(fed: Fed) -> None:
    """(L1) Runs, names, orphans and remembered removals are bounded or end with what they are about."""
    index = fed(stored(["elsewhere"], range(900, 904)))
    index.forget(W)
    for i in range(4500):
        index.apply(W, batch(stored([i], [i, 2, 2, 2], f"parent {i}")))
        tell(index, [i, 1, 1, 1, i, 2, 2, 2, 9], 4, until=i)
        index.apply(W, batch(removed([i]), removed([f"parent {i}"])))
        index.expire(i)
    state = states(index)
    assert {
        word: state[word] for word in ("blocks", "placed", "guessed", "parked", "observed", "copies")
    } == dict.fromkeys(("blocks", "placed", "guessed", "parked", "observed", "copies"), 0)


def test_an_old_dialect_has_no_extra_keys_to_confuse(fed: Fed) -> None:
    """(W4) Before 0.17 an adapter's name is in its own field alone."""
    index = fed(as_array(stored([1], range(4), lora_name="X", lora_id=1), "0.14.0"))
    assert (credit(index, range(5), adapter="X"), credit(index, range(5))) == (4, 0)
