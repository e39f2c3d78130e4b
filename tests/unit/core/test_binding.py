"""The Python side of the native core: what the binding itself does, beside the rules that the contract suite judges."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from array import array
from typing import Any

import pytest

from kvsync.events.decode import MAX_HASHES
from kvsync.events.types import AllBlocksClearedEvent, BlockRemovedEvent, BlockStoredEvent, EventBatch, SkippedEvent
from kvsync.index.match import Index, Match
from tests.wire import batch, cleared, removed, stored

kvsync_core = pytest.importorskip("kvsync_core", reason="the native core (kvsync-core) is not installed")

MODEL = "m"


@pytest.fixture
def index() -> Any:
    index = kvsync_core.PrefixIndex()
    index.add_worker("w", MODEL)
    return index


def test_it_is_imported_alone() -> None:
    code = (
        "import sys; sys.modules['kvsync'] = None; import kvsync_core; print(kvsync_core.PrefixIndex().match([1], 'm'))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "{}\n"


@pytest.mark.parametrize("name", [name for name in vars(Index) if not name.startswith("_")])
def test_the_face_is_that_of_the_protocol(name: str) -> None:
    expected = inspect.signature(getattr(Index, name)).parameters.values()
    given = inspect.signature(getattr(kvsync_core.PrefixIndex, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in given if p.name != "self"] == [
        (p.name, p.kind, p.default) for p in expected if p.name != "self"
    ]


# -- matches


def test_a_match_is_a_value(index: Any) -> None:
    index.apply("w", batch(stored([1], range(4))))
    match = index.match(range(5), MODEL)["w"]
    assert (match.credit, match.expected, match.by_tier, match.trust) == (4, 0, {"gpu": 4}, "exact")
    assert repr(match) == repr(Match(4, 0, {"gpu": 4}, "exact", match.as_of))
    assert match == Match(4, 0, {"gpu": 4})
    assert Match(4, 0, {"gpu": 4}) == match
    assert match == index.match(range(5), MODEL)["w"]
    for other in (
        Match(4, 1, {"gpu": 4}),
        Match(3, 0, {"gpu": 4}),
        Match(4, 0, {"cpu": 4}),
        Match(4, 0, {"gpu": 4}, "none"),
    ):
        assert match != other
        assert other != match
    assert match != 4
    assert match != object()
    with pytest.raises(TypeError):
        match < match  # noqa: B015
    with pytest.raises(AttributeError):
        match.credit = 5
    match.by_tier["gpu"] = 5
    assert match.by_tier == {"gpu": 4}, "a copy each time"


def test_a_worker_has_one_name(index: Any) -> None:
    """The same object in every answer, and as long as an answer holds it."""
    names = [next(iter(index.match([1], MODEL))), next(iter(index.block_sizes(MODEL)))]
    assert names[0] is names[1]
    threads = [threading.Thread(target=index.remove_worker, args=("w",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == ["w", "w"]
    assert index.match([1], MODEL) == {}
    index.add_worker("w", MODEL)
    assert list(index.match([1], MODEL)) == ["w"]


# -- what answers teach


@pytest.mark.parametrize("as_of", [-(2**70), -1, 0, 2**63, 2**64, 2**70])
def test_a_moment_that_is_none_of_this_index(index: Any, as_of: int) -> None:
    index.apply("w", batch(stored([1], range(4))))
    assert index.observe("w", range(5), MODEL, 4, 4, as_of, 1.0) == "evicted"


def test_figures_beyond_any_prompt(index: Any) -> None:
    index.apply("w", batch(stored([1], range(4))))
    as_of = index.match(range(9), MODEL)["w"].as_of
    assert index.observe("w", range(9), MODEL, 2**70, 2**70, as_of, float("inf")) == "steady"
    index.expire(float("-inf"))
    for cached, until in (("1", 1.0), (1.5, 1.0), (None, 1.0), (1, None), (1, "1")):
        with pytest.raises(TypeError):
            index.observe("w", range(9), MODEL, cached, 0, as_of, until)


# -- event objects


def store_event(**fields: Any) -> BlockStoredEvent:
    event = {"block_hashes": (1,), "parent_block_hash": None, "raw_token_ids": bytes(8), "block_size": 2}
    return BlockStoredEvent(**event | fields)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (store_event(block_hashes=(2**64,)), OverflowError),
        (store_event(block_hashes=(-(2**63) - 1,)), OverflowError),
        (store_event(block_hashes=(1.5,)), TypeError),
        (store_event(block_hashes=5), TypeError),
        (store_event(parent_block_hash=[1]), TypeError),
        (store_event(raw_token_ids=bytes(7)), ValueError),
        (store_event(raw_token_ids=None), TypeError),
        (store_event(block_size=-1), OverflowError),
        (store_event(block_size=2**31), OverflowError),
        (store_event(extra_keys=((), ())), ValueError),
        (store_event(extra_keys=(("text",),)), TypeError),
        (store_event(group_idx=2**63), OverflowError),
        (store_event(group_idx=256), ValueError),
        (BlockRemovedEvent((1,), group_idx=-1), ValueError),
        (store_event(medium=5), TypeError),
        (BlockRemovedEvent((1,), remaining_copy_counts=(1, 2)), ValueError),
        (BlockRemovedEvent((1,), remaining_copy_counts=(-1,)), OverflowError),
        (BlockRemovedEvent((1,), remaining_copy_counts=(2**32,)), OverflowError),
        (SkippedEvent("tag", "no such reason", True), ValueError),
        ("text", TypeError),
        (None, TypeError),
    ],
)
def test_event_objects_that_no_wire_can_carry(index: Any, event: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        index.apply("w", EventBatch(0.0, (AllBlocksClearedEvent(), event)))
    assert index.stats()["workers"]["w"]["counts"] == {}, "nothing of the batch is applied"
    index.apply("nobody", EventBatch(0.0, (event,)))


def test_a_batch_of_more_hashes_than_lookups_can_wait_for(index: Any) -> None:
    """Applied wholly or not at all: one more is a loss, and takes what was known."""
    half = list(range(MAX_HASHES // 2))
    index.apply("w", batch(stored(half, []), stored(half, []), cleared()))
    index.apply("w", batch(stored([1], range(4))))
    state = index.stats()["workers"]["w"]
    assert (state["blocks"], state["counts"]["batches"]) == (1, 2)
    index.apply("w", batch(stored([2], range(4, 8)), stored(half, []), stored(half, [])))
    state = index.stats()["workers"]["w"]
    assert (state["blocks"], state["trust"], state["counts"]["undecodable_too_large"]) == (0, "partial", 1)


# -- iterables of batches


def test_what_precedes_a_fault_is_applied(index: Any) -> None:
    def batches() -> Any:
        yield "w", batch(cleared())
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        index.apply_many(batches())
    for bad in ([("w",)], ["w"], [("w", b"", b"")], [(5, b"")], 5):
        with pytest.raises((TypeError, ValueError)):
            index.apply_many(bad)
    assert index.stats()["workers"]["w"]["counts"] == {"cleared": 1, "batches": 1}


def test_a_buffer_may_change_after_it_was_handed_over(index: Any) -> None:
    data = bytearray(batch(stored([1], range(4))))

    def batches() -> Any:
        yield "w", data
        data[:] = bytes(len(data))

    index.apply_many(batches())
    assert index.match(range(5), MODEL)["w"].credit == 4
    data.append(0)  # not held any more: a held buffer can't be resized


def test_buffers_are_let_go(index: Any) -> None:
    tokens = array("I", range(5))
    index.match(tokens, MODEL)
    tokens.append(5)
    with pytest.raises(TypeError):
        index.match(memoryview(array("q", [1])), MODEL)


def test_tokens_are_read_wherever_they_stand(index: Any) -> None:
    """Bytes are read in place where they stand as tokens must, everything else is copied."""

    class Bytes(bytes):
        pass

    tokens = array("I", range(1 << 15))
    index.apply("w", batch(stored(list(range(1 << 11)), tokens, block_size=16)))
    data = tokens.tobytes()
    for shift in range(4):
        shifted = memoryview(bytes(shift) + data)[shift:]
        assert index.match(shifted, MODEL)["w"].credit == len(tokens) - 16
    for given in (data, Bytes(data), bytearray(data), tokens, memoryview(tokens), memoryview(data).cast("I")):
        match = index.match(given, MODEL)["w"]
        assert match.credit == len(tokens) - 16
        assert index.observe("w", given, MODEL, match.credit, match.credit, match.as_of, 1.0) == "steady"
    for given in (data[:-1], Bytes(data[1:]), bytearray(3), memoryview(data)[:-2]):
        with pytest.raises(ValueError, match="no multiple of 4"):
            index.match(given, MODEL)
    assert index.match(b"", MODEL)["w"].credit == index.match(bytearray(), MODEL)["w"].credit == 0


# -- threads


def test_lookups_while_a_drain_is_applied(index: Any) -> None:
    """A drain holds neither the GIL nor a lock for longer than a batch: lookups go on while it runs."""
    hashes, tokens = list(range(1, 65)), range(64 * 4)
    drain = [("w", batch(stored(hashes, tokens))), ("w", batch(removed(hashes[::-1])))] * 4000
    started, done = threading.Event(), threading.Event()

    def apply() -> None:
        started.set()
        index.apply_many(drain)
        done.set()

    writer = threading.Thread(target=apply)
    writer.start()
    started.wait(10)
    during = []
    while not done.is_set():
        during.append(index.match(range(257), MODEL)["w"].credit)
    writer.join()
    assert set(during) <= {0, 256}, "whole batches only"
    assert len(during) > 1, "lookups went on meanwhile"
    assert index.stats()["workers"]["w"]["counts"]["batches"] == 8000


def test_long_prompts_from_many_threads(index: Any) -> None:
    """Above the length from which a lookup lets go of the GIL, answers are the same."""
    tokens = array("I", range(1 << 19))
    index.apply("w", batch(stored(list(range(1 << 13)), tokens[: 1 << 17], block_size=16)))
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(index.match(tokens, MODEL)["w"].credit)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1 << 17] * 4
