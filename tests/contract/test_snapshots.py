"""What one index knows of a worker, told to another: the same answers, and the same ever after.

Every pair of implementations, as maker and taker. The lives are those of ``test_agreement`` and of both oracles.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvsync.events.types import Embeds, Image, Opaque, Salt
from kvsync.index import image
from kvsync.index.match import Index
from tests.contract import test_agreement as agreement
from tests.contract import test_oracle_losses as losses
from tests.contract.conftest import IMPLEMENTATIONS
from tests.contract.face import M, W, counts, credit, look, states, tell
from tests.contract.test_oracle import EngineLife
from tests.wire import batch, cleared, removed, stored

Make = Callable[..., Index]
PAIRS = list(itertools.product(IMPLEMENTATIONS, repeat=2))


@pytest.fixture(params=PAIRS, ids="-".join)
def makes(request: pytest.FixtureRequest) -> tuple[Make, Make]:
    """Who tells, and who is told."""
    teller, told = request.param
    return IMPLEMENTATIONS[teller], IMPLEMENTATIONS[told]


def new(make: Make, *args: Any, **facts: Any) -> Index:
    index = make(*args)
    index.add_worker(W, M, **facts)
    return index


def moved(index: Index, make: Make, *args: Any, **facts: Any) -> Index:
    """Another index that was told all."""
    told = new(make, *args, **facts)
    snapshot = index.dump(W)
    assert snapshot is not None
    told.restore(W, snapshot)
    assert known(told) == known(index)
    return told


def known(index: Index) -> dict[str, Any]:
    return {word: value for word, value in states(index).items() if word != "counts"}


# -- what is told


def test_blocks_with_copies_in_every_tier_and_group(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    full: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    tail: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 3,
    }
    names: list[Any] = [7, 2**64 - 1, -5, b"x" * 32, "text"]
    index.apply(
        W,
        batch(
            stored(names, range(20), None, **full),
            stored(names[3:], range(99), None, **tail),
            stored(names[:2], range(8), None, **full),
            stored(names[1:2], range(4, 8), names[0], medium="CPU", extra_keys=[None], **full),
            stored([50], range(4), None, cache_salt=None, lora_name="a", lora_id=1, extra_keys=[["a"]], **full),
            stored(["unplaced"], [], block_size=0, medium="storage", **full),
        ),
    )
    told = moved(index, makes[1])
    for prompt, adapter in [([*range(20), 1], None), (list(range(9)), None), ([*range(4), 1], "a")]:
        assert look(told, prompt, adapter=adapter) == look(index, prompt, adapter=adapter)
    assert credit(told, [*range(20), 1]) == 20
    for event in (
        removed([7], group_idx=0),
        removed([2**64 - 1], group_idx=0),
        removed([7], group_idx=0),
        removed([2**64 - 1], medium="cpu"),
        removed(["unplaced"], medium="storage"),
        removed([b"x" * 32], group_idx=1),
        removed(["text"]),
    ):
        for each in (index, told):
            each.apply(W, batch(event))
        assert known(told) == known(index)
        for length in range(1, 21):
            assert look(told, range(length)) == look(index, range(length))
    assert states(told)["copies"] == 5


def test_doubt_and_what_made_it(makes: tuple[Make, Make]) -> None:
    index = new(makes[0], usable_blocks=10)
    index.mark_reannouncing(W)
    index.apply(W, batch(stored([1, 2], range(8)), stored([1, 2], range(8)), removed([2])))
    told = moved(index, makes[1], usable_blocks=10)
    assert (look(told, range(9)).credit, look(told, range(9)).expected) == (4, 4)
    told.apply(W, batch(removed([1])))
    assert look(told, range(9)).credit == 0, "it announces again here as well"
    assert tell(told, range(9), 8) == "steady"
    assert look(told, range(9)).credit == 8, "and an answer ends doubt"
    told.new_epoch(W)
    assert not states(told)["reannouncing"]


def test_marks_are_told_and_those_that_are_there_stay(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    hides = batch(stored([1], range(4), extra_keys=...))
    index.apply(W, hides)
    index.mark_hidden_keys(W)
    told = moved(index, makes[1])
    assert look(told, range(5)).trust == "none"
    told.new_epoch(W)
    assert look(told, range(5)).trust == "exact", "fresh or not, nothing hides anything yet"
    told.apply(W, hides)
    assert look(told, range(5)).trust == "none", "no batch had come since: it outlives one new epoch"
    marked = new(makes[1])
    marked.mark_hidden_keys(W)
    index.new_epoch(W)
    index.new_epoch(W)
    index.apply(W, hides)
    snapshot = index.dump(W)
    assert snapshot is not None
    marked.restore(W, snapshot)
    assert look(marked, range(5)).trust == "none"


def test_hidden_keys_stay_hidden_until_all_their_hashes_are_gone(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    index.apply(W, batch(stored([1], range(4)), stored([2, 3], range(8))))
    assert credit(index, range(9)) == 0
    index.apply(W, batch(removed([1])))
    told = moved(index, makes[1])
    assert credit(told, range(9)) == credit(index, range(9)) == 0
    for each in (index, told):
        each.apply(W, batch(removed([2]), stored([4], range(4))))
    assert credit(told, range(9)) == credit(index, range(9)) == 8


def test_losses_are_told(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    index.forget(W)
    index.apply(W, batch(stored([1], range(4))))
    told = moved(index, makes[1])
    assert look(told, range(5)) == look(index, range(5))
    assert look(told, range(5)).trust == "partial"
    told.apply(W, batch(cleared()))
    assert look(told, range(5)).trust == "exact"


def test_eagle_that_answers_showed_is_told(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    index.drops_last_block(W)
    index.apply(W, batch(stored([1, 2], range(8))))
    assert credit(moved(index, makes[1]), range(9)) == 4


def test_more_copies_than_this_registration_has_blocks(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    index.apply(W, batch(stored([1, 2, 3], range(12))))
    told = new(makes[1], usable_blocks=2)
    snapshot = index.dump(W)
    assert snapshot is not None
    told.restore(W, snapshot)
    assert states(told)["reannouncing"]


def test_nothing_is_known_of_a_worker_without_events(makes: tuple[Make, Make]) -> None:
    told = moved(new(makes[0]), makes[1])
    told.apply(W, batch(stored([1], range(4))))
    assert look(told, range(5)).credit == 4


def test_what_waits_was_learned_or_is_out_of_date_is_not_told(make_index: Make) -> None:
    def none(*events: Any) -> Index:
        index = new(make_index)
        index.apply(W, batch(stored([1], range(4)), *events))
        return index

    assert none().dump("nobody") is None
    parked = none(stored([9], range(4), 8))
    assert parked.dump(W) is None
    parked.apply(W, batch(stored([8], range(4, 8), 1)))
    assert parked.dump(W) is not None
    suspended = none()
    suspended.suspend(W)
    assert suspended.dump(W) is None
    suspended.resume(W)
    assert suspended.dump(W) is not None
    learned = none()
    learned.forget(W)
    learned.apply(W, batch(stored([1], range(4))))
    tell(learned, range(20, 30), 8)
    assert states(learned)["observed"] == 2
    assert learned.dump(W) is None
    learned.apply(W, batch(stored([77], range(28, 32), 76)))
    learned.expire(1e9)
    assert learned.dump(W) is None, "a name that was guessed"
    learned.apply(W, batch(cleared()))
    assert learned.dump(W) is not None


def test_a_plain_block_takes_twenty_bytes(make_index: Make) -> None:
    index = new(make_index)
    index.apply(W, batch(stored([1], range(4))))
    small = index.dump(W)
    index.apply(W, batch(stored(range(2, 1002), range(4, 4004), 1)))
    large = index.dump(W)
    assert small is not None
    assert large is not None
    assert len(large) - len(small) == 1000 * 20


# -- taking it


def test_it_is_for_a_new_worker_of_its_model(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    index.apply(W, batch(stored([1], range(4))))
    snapshot = index.dump(W)
    assert snapshot is not None
    told = makes[1]()
    told.restore("nobody", snapshot)
    told.add_worker(W, "other")
    with pytest.raises(ValueError, match=r"of model .model."):
        told.restore(W, snapshot)
    told.add_worker(W, M)
    told.restore(W, snapshot)
    with pytest.raises(ValueError, match="known of the worker already"):
        told.restore(W, snapshot)
    assert (states(told)["blocks"], counts(told)) == (1, {"restored": 1})
    told.forget(W)
    with pytest.raises(ValueError, match="known of the worker already"):
        told.restore(W, snapshot)


def test_a_suspended_worker_stays_suspended(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    index.apply(W, batch(stored([1], range(4))))
    snapshot = index.dump(W)
    assert snapshot is not None
    told = new(makes[1])
    told.suspend(W)
    told.restore(W, snapshot)
    assert (look(told, range(5)).credit, look(told, range(5)).expected) == (0, 4)
    told.resume(W)
    assert look(told, range(5)).credit == 4


def test_answers_to_matches_of_before_count_as_evicted(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    index.apply(W, batch(stored([1], range(4))))
    snapshot = index.dump(W)
    assert snapshot is not None
    told = new(makes[1])
    told.apply(W, batch())
    before = look(told, range(5))
    told.restore(W, snapshot)
    assert tell(told, range(5), 4, before) == "evicted"
    assert tell(told, range(5), 4) == "steady"


def test_the_bound_counts_what_was_restored(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    for first in range(0, 100, 10):
        index.apply(W, batch(stored(range(first, first + 10), [first + 1] * 40)))
    told = new(makes[1], 50)
    snapshot = index.dump(W)
    assert snapshot is not None
    told.restore(W, snapshot)
    assert states(told)["blocks"] <= 50
    assert states(told)["trust"] == "partial"
    assert credit(told, [1] * 41) >= 12, "tails go first"


def test_a_long_image_comes_in_pieces_and_is_whole(makes: tuple[Make, Make]) -> None:
    index = new(makes[0])
    index.add_worker("other", M)
    for first in range(0, 10_000, 500):
        chain = stored(range(first, first + 500), [first] * 1000, None, 2)
        index.apply(W, batch(chain))
        index.apply("other", batch(chain | {"block_hashes": [f"{first}"] * 500}))
    for number in range(0, 6_000):
        index.apply(W, batch(stored([number], [], block_size=0, medium="CPU")))
    told = moved(index, makes[1])
    assert states(told)["copies"] == 16_000
    for first in (0, 4_500, 9_500):
        assert credit(told, [first] * 1001) == 1000
        assert look(told, [first] * 1001) == look(index, [first] * 1001)


def test_workers_with_hashes_of_their_own_share_blocks(makes: tuple[Make, Make]) -> None:
    index, told = makes[0](), makes[1]()
    for number, worker in enumerate("abc"):
        for each in (index, told):
            each.add_worker(worker, M)
        index.apply(worker, batch(stored(range(1000 * number, 1000 * number + 100), range(400))))
    for worker in "cab":
        snapshot = index.dump(worker)
        assert snapshot is not None
        told.restore(worker, snapshot)
    assert told.match(range(401), M) == index.match(range(401), M)
    told.apply("b", batch(removed([1050])))
    assert {worker: match.credit for worker, match in told.match(range(401), M).items()} == {
        "a": 400,
        "b": 200,
        "c": 400,
    }


# -- keys go from one process to another


def test_keys_are_what_they_were() -> None:
    """Who has to change these figures has changed what images mean, and counts up ``VERSION``."""
    assert image.VERSION == 1
    made = {}
    for name, make in IMPLEMENTATIONS.items():
        index = new(make)
        keys = [None, [["img", -3], b"digest", {"k": 1}, "salt"]]
        index.apply(W, batch(stored([1, 2], range(8), extra_keys=[["salt"], keys[1][:3]])))  # type: ignore[index]
        index.apply(W, batch(stored([3], range(4), lora_name="a", lora_id=1, extra_keys=[["a"]])))
        index.apply(W, batch(stored([4], range(4), lora_id=7, extra_keys=[None])))
        snapshot = index.dump(W)
        assert snapshot is not None
        made[name] = {name: f"{key:016x}" for key, name, _ in image.decode(snapshot).plain}
        spots = [Image("img", -3), Embeds(b"digest"), Opaque(b"\x81\xa1k\x01"), Salt("salt")]
        block_keys = [None, spots[:3]]
        assert credit(index, range(9), cache_salt="salt", block_keys=block_keys) == 8
    assert set(map(str, made.values())) == {str(KEYS)}


KEYS = {1: "0439d60768c5459c", 2: "19102b323a5d0797", 3: "2c8b0db3900e62d0", 4: "c63de37748ad7fb1"}


# -- lives


WORDS = ("doubtful", "reannouncing", "blocks", "copies")


@pytest.mark.skipif(len(IMPLEMENTATIONS) < 2, reason="the native core (kvsync-core) is not installed")
def test_a_life_goes_on_elsewhere_as_it_did_here() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.booleans(), st.lists(st.randoms(use_true_random=True), min_size=4, max_size=24), st.data())
    def run(wild: bool, life: list[Random], data: st.DataObject) -> None:
        live(life, data.draw(st.integers(1, len(life) - 1)), wild, seen)

    run()
    for seed in range(80):
        rng = Random(seed)
        live([Random(rng.random()) for _ in range(40)], rng.randrange(20, 40), False, seen, marked=True)
    assert min(seen[word] for word in ("told", "not told", *WORDS)) > 10, seen


def live(life: list[Random], moment: int, wild: bool, seen: Counter[str], *, marked: bool = False) -> None:
    """A life of two workers; at this moment of it others are told, and live on in the same way."""
    here, there = agreement.Pair(), agreement.Pair()
    facts = [agreement.some_facts(life[0]) for _ in agreement.WORKERS]
    for pair in (here, there):
        for worker, facts_of in zip(agreement.WORKERS, facts, strict=True):
            pair.do("add_worker", worker, agreement.MODEL, **facts_of)
            if marked and pair is here:
                pair.do("mark_reannouncing", worker)
    for rng in life[:moment]:
        step(here, rng, wild)
    for worker in agreement.WORKERS:
        images = [index.dump(worker) for index in here.indexes]
        seen["not told" if images[0] is None else "told"] += 1
        if images[0] is None or images[1] is None:
            assert images == [None, None]
            return
        assert told_in_any_order(images[0]) == told_in_any_order(images[1])
        seen.update(word for word in ("doubtful", "reannouncing") if here.same_stats()[worker][word])
        for index, snapshot in zip(there.indexes, reversed(images), strict=True):
            index.restore(worker, snapshot)  # type: ignore[arg-type]
    here.asked.clear()
    alike(here, there, seen)
    for rng in life[moment:]:
        again = Random()
        again.setstate(rng.getstate())
        step(here, rng, wild)
        step(there, again, wild)
        alike(here, there, seen)


def step(pair: agreement.Pair, rng: Random, wild: bool) -> None:
    """Of a life whose workers stay registered with the same facts."""
    worker = rng.choice(agreement.WORKERS)
    what = rng.randrange(12)
    if what == 0:
        pair.do(rng.choice(agreement.MARKS[:-1]), worker)
    elif what < 4 and pair.asked:
        pair.same_observation(worker, rng, rng.choice([1.0, 2.0]))
    elif what == 4:
        pair.do("expire", rng.choice([0.5, 1.0, 2.0]))
    else:
        pair.do("apply", worker, agreement.a_payload(rng, wild))


def alike(here: agreement.Pair, there: agreement.Pair, seen: Counter[str]) -> None:
    ours, theirs = here.same_stats(), there.same_stats()
    for worker, state in ours.items():
        assert {**state, "counts": None} == {**theirs[worker], "counts": None}
        seen.update(word for word in ("blocks", "copies") if state[word])
    for prompt, adapter, salt in itertools.product(agreement.PROMPTS, (None, "A"), (None, "A")):
        assert here.same_match(prompt, adapter=adapter, cache_salt=salt) == there.same_match(
            prompt, adapter=adapter, cache_salt=salt
        )


def told_in_any_order(snapshot: bytes) -> Any:
    told = image.decode(snapshot)
    return (
        told.model,
        told.flags,
        told.marks,
        told.groups,
        set(told.plain),
        {
            (block.name, block.spot, block.shares_key, frozenset((told.places[at], n, d) for at, n, d in block.copies))
            for block in told.others
        },
    )


class MovingLife(EngineLife):
    """An engine's life, followed by one replica after the other."""

    makes: list[Make]
    moves = 0

    @rule()
    def move(self) -> None:
        snapshot = self.index.dump("w")
        if snapshot is None:
            assert self.index.stats()["workers"]["w"]["parked"]  # type: ignore[index]
            return
        type(self).moves += 1
        self.index = self.makes[type(self).moves % len(self.makes)]()
        self.index.add_worker("w", "m")
        self.index.restore("w", snapshot)


@pytest.mark.parametrize(("window", "state"), [(0, False), (4, False), (0, True)])
def test_replicas_that_follow_each_other_equal_the_oracle(window: int, state: bool) -> None:
    makes = list(IMPLEMENTATIONS.values())
    attributes = {"make": staticmethod(makes[0]), "makes": makes, "window": window, "state": state}
    life = type("Life", (MovingLife,), attributes)
    case = life.TestCase  # type: ignore[attr-defined]
    case.settings = settings(
        max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
    assert life.moves > 60  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", losses.KINDS)
def test_credit_is_held_whatever_was_lost_and_whoever_took_over(kind: str) -> None:
    makes = list(IMPLEMENTATIONS.values())
    moves = 0
    for seed in range(60):
        life = losses.LossyLife(makes[seed % len(makes)](), losses.KINDS[kind], seed)
        for number in range(60):
            try:
                life.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {number}: {error}") from error
            snapshot = life.index.dump("w") if life.rng.random() < 0.2 else None
            if snapshot is not None:
                moves += 1
                life.index = makes[(seed + number) % len(makes)]()
                life.index.add_worker("w", agreement.MODEL)
                life.index.restore("w", snapshot)
                life.requests.clear()  # they were another replica's
    assert moves > 100


# -- images that are none


def sample(rng: Random) -> bytes:
    """An image of some life."""
    while True:
        index = IMPLEMENTATIONS["reference"]()
        index.add_worker(W, M)
        for _ in range(rng.randrange(1, 8)):
            index.apply(W, agreement.a_payload(rng, wild=True))
        snapshot = index.dump(W)
        if snapshot is not None:
            return snapshot


def sealed(body: bytes) -> bytes:
    """With the digest that belongs to it."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def damaged(rng: Random) -> bytes:
    data = bytearray(sample(rng))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(max(1, rng.choice([40, len(data)])))
        how = rng.randrange(6)
        if how <= 2:
            data[at : at + 1] = bytes([rng.choice([0, 1, 2, 3, 4, 8, 12, 16, 0x7F, 0x80, 0xFF, rng.randrange(256)])])
        elif how == 3:
            del data[at : at + rng.randrange(1, 30)]
        elif how == 4:
            data[at:at] = data[at : at + rng.choice([1, 6, 9, 20, 22])]
        else:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**16, 2**31, 2**32, 2**60, 2**63, 2**64 - 1]))
    return bytes(data)


def test_damaged_images_are_refused_by_all_and_change_nothing() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=800, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=True), st.booleans(), st.binary(max_size=60))
    def run(rng: Random, seal: bool, noise: bytes) -> None:
        data = damaged(rng) if rng.randrange(20) else noise
        data = sealed(data[:-8]) if seal else data
        found: list[Any] = []
        for make in IMPLEMENTATIONS.values():
            index = new(make)
            try:
                index.restore(W, data)
            except ValueError as error:
                assert known(index) == known(new(make))
                assert counts(index) == {}
                seen[str(error).partition(":")[2] or "other"] += 1
                found.append(str(error) if "for a worker" not in str(error) else "of another model")
            else:
                seen["taken"] += 1
                again = index.dump(W)
                assert again is not None
                matches = [look(index, prompt) for prompt in agreement.PROMPTS]
                found.append((known(index), matches, told_in_any_order(again)))
                for _ in range(3):
                    index.apply(W, agreement.a_payload(Random(len(data)), wild=True))
        for one in found:
            assert one == found[0]

    run()
    wanted = {" its digest differs", " it ends before all is said", " bytes that belong to nothing", "taken"}
    assert wanted <= seen.keys(), seen
    assert len(seen) > 12, seen


@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
def test_every_cut_and_every_changed_byte_is_found(make: Make) -> None:
    index = new(make)
    index.apply(W, batch(stored([1, "x"], range(8)), stored([2], [], block_size=0, medium="CPU")))
    data = index.dump(W)
    assert data is not None
    told = new(make)
    for at in range(len(data)):
        for bad in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at] + b"\0" + data[at:]):
            with pytest.raises(ValueError, match="image"):
                told.restore(W, bad)
    assert counts(told) == {}
    told.restore(W, data)


@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
def test_what_an_image_may_not_say(make: Make) -> None:
    group = image.GroupImage(0, "full_attention", 0, 4, False)
    block = image.BlockImage("n", (5, 0), False, ((0, 1, False),))

    def refused(what: str, **said: Any) -> None:
        fields: dict[str, Any] = {"groups": [group], "places": [("gpu", 0)], "plain": [(1, 2, 0)], "others": [block]}
        data = image.encode(image.Image(M, **fields | said))
        assert data is not None
        with pytest.raises(ValueError, match=what):
            new(make).restore(W, data)

    refused("a hash twice", plain=[(1, 2, 0), (3, 2, 0)])
    refused("a hash twice", plain=[(1, 2, 0)], others=[image.BlockImage(2, None, False, ((0, 1, False),))])
    refused("a key twice", plain=[(1, 2, 0), (1, 3, 0)])
    refused("a key twice", plain=[(5, 2, 0)])
    refused("a key twice", plain=[(5, 2, 0)], others=[image.BlockImage("n", (5, 0), True, ((0, 1, False),))])
    refused("a place twice", places=[("gpu", 0), ("gpu", 0)])
    refused("a place that can't be", places=[("gpu", 256)])
    refused("nowhere", places=[], others=[])
    refused("copies that can't be", others=[image.BlockImage("n", None, False, ((1, 1, False),))])
    refused("copies that can't be", others=[image.BlockImage("n", None, False, ((0, 0, False),))])
    refused("copies that can't be", others=[image.BlockImage("n", None, False, ((0, 1, False), (0, 1, False)))])
    refused("a block that is nowhere", others=[image.BlockImage("n" * 20, None, False, ())])
    refused("a block of no form", others=[image.BlockImage("n", None, True, ((0, 1, False),))])
    refused("a hash of no form", others=[image.BlockImage(b"", (5, 0), False, ((0, 1, False),))])
    refused("a hash of no form", others=[image.BlockImage(b"x" * 65, None, False, ((0, 1, False),))])
    refused("a hash of no form", others=[image.BlockImage("x" * 257, None, False, ((0, 1, False),))])
    refused("groups out of order", groups=[group, group])
    refused("groups out of order", groups=[image.GroupImage(256, None, 0, 4, False)])
    refused("a group that can't be", groups=[image.GroupImage(0, None, 0, 2**31, False)])
    refused("flags", marks=(3, 0))
    refused("flags", marks=(0, 4))


def test_a_version_that_is_not_read_here(make_index: Make) -> None:
    data = new(make_index).dump(W)
    assert data is not None
    other = sealed(data[:8] + (image.VERSION + 1).to_bytes(2, "little") + data[10:-8])
    with pytest.raises(ValueError, match=f"version {image.VERSION + 1}, and {image.VERSION} is read here"):
        new(make_index).restore(W, other)
    with pytest.raises(ValueError, match="not an image"):
        new(make_index).restore(W, sealed(b"other" + data[5:-8]))


def test_a_large_announcement_in_a_small_image_costs_nothing(make_index: Make) -> None:
    for plain, others in ((2**60, 0), (0, 2**60), (2**64 - 1, 2**64 - 1)):
        head = struct.pack("<8sHHHHIQQ", image.MAGIC, image.VERSION, 0, 0, 1, 0, plain, others)
        with pytest.raises(ValueError, match="image"):
            new(make_index).restore(W, sealed(head + b"\0" * 9))
