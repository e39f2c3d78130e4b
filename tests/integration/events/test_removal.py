"""An engine that goes, or comes again, while the reader is busy: lookups know at once, and nothing comes back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from kvsync.events.contracts import Target
from kvsync.index import PrefixIndex
from kvsync.index.match import Index
from kvsync.index.reference import ReferenceIndex
from tests.faults.publisher import Publisher
from tests.integration.events.conftest import SETTINGS, Fleet, engine_of


class Gate:
    """Holds the reader's thread inside a call of its sink."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(30)

    def release(self) -> None:
        self._open.set()


class Held:
    """An index whose ``apply_many`` waits for ``gate``, at a point where it has taken the first batch."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.gate: Gate | None = None

    def apply_many(self, batches: Iterable[tuple[str, bytes]]) -> None:
        first, *rest = batches
        self.index.apply_many([first])
        if self.gate is not None:
            self.gate()
        self.index.apply_many(rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)


def target_of(publisher: Publisher, worker: str = "a") -> Target:
    return Target(
        worker=worker,
        engine=worker,
        source_pod=worker,
        model="m",
        rank=0,
        events=publisher.events,
        replay=publisher.replay,
    )


PROMPT = [1] * 4 + [0]
"""What a publisher's batch with the hash 1 stores, and a token more."""


@pytest.mark.parametrize("implementation", [ReferenceIndex, PrefixIndex], ids=["reference", "serving"])
async def test_a_removal_waits_for_nothing_and_what_is_queued_brings_nothing_back(implementation: type[Index]) -> None:
    held = Held(implementation())
    index = held.index
    fleet = Fleet(sink=held)
    await fleet.manager.start()
    gate = Gate()
    try:
        busy, gone = fleet.publisher(), fleet.publisher()
        gone.publish(1)
        await fleet.follow(busy, "busy")
        await fleet.follow(gone, "gone")
        await fleet.live("busy")
        await fleet.until(lambda: index.match(PROMPT, "m")["gone"].credit == 4)
        held.gate = gate
        busy.publish(5)
        assert await asyncio.to_thread(gate.reached.wait, 10)
        for n in range(1, 50):  # queued in its socket
            gone.publish(n)
        late = fleet.publisher()
        late.publish(1)
        await fleet.follow(late, "late")  # queued as a command: nobody has heard of it yet
        started = time.monotonic()
        await fleet.manager.remove("gone")
        await fleet.manager.remove("late")
        assert time.monotonic() - started < 5, "the reader stands still for 30 s"
        assert set(index.match(PROMPT, "m")) == {"busy"}
        assert {status.worker for status in fleet.manager.workers()} == {"busy"}
        held.gate = None
        gate.release()
        busy.publish(6)
        await fleet.until(lambda: fleet.status("busy").last_sequence == 1)  # all commands before it are done
        assert set(index.match(PROMPT, "m")) == {"busy"}
    finally:
        gate.release()
        await fleet.close()
    assert index.match(PROMPT, "m") == {}


async def test_an_engine_that_comes_again_meanwhile_is_followed_and_gets_nothing_of_its_former_self() -> None:
    index = ReferenceIndex()
    held = Held(index)
    fleet = Fleet(sink=held)
    await fleet.manager.start()
    gate = Gate()
    try:
        old, new = fleet.publisher(), fleet.publisher()
        await fleet.follow(old)
        await fleet.live()
        held.gate = gate
        old.publish(7)
        old.publish(1)
        assert await asyncio.to_thread(gate.reached.wait, 10)
        await fleet.manager.remove("a")
        await fleet.follow(new)
        assert index.match(PROMPT, "m") == {}
        held.gate = None
        gate.release()
        new.publish(2)
        await fleet.until(lambda: "a" in index.match(PROMPT, "m") and fleet.status().last_sequence == 0)
        await fleet.live()
        assert index.match([2] * 4 + [0], "m")["a"].credit == 4
        assert index.match(PROMPT, "m")["a"].credit == index.match([7] * 4 + [0], "m")["a"].credit == 0
    finally:
        gate.release()
        await fleet.close()


async def test_a_command_of_before_a_removal_does_not_bring_the_worker_back(fleet: Fleet) -> None:
    """Even one that nobody waits for any more and that the reader comes to only afterwards."""
    gate = Gate()
    busy, gone, again = fleet.publisher(), fleet.publisher(already=[1]), fleet.publisher(already=[2])
    await fleet.follow(busy, "busy")
    await fleet.live("busy")
    fleet.sink.slow = gate
    busy.publish(1)
    assert await asyncio.to_thread(gate.reached.wait, 10)
    reader = fleet.manager._reader
    assert reader is not None
    first = reader.follow(target_of(gone))
    reader.unfollow("a")
    second = reader.follow(target_of(again))
    fleet.sink.slow = None
    gate.release()
    await asyncio.wrap_future(first)
    await asyncio.wrap_future(second)
    await fleet.holds([2])
    assert [call for call in fleet.sink.calls if call[1] == "a"] == [("remove", "a"), ("add", "a")]
    assert reader.status("a") is not None
    reader.unfollow("a")


async def test_turning_off_waits_for_nothing_either(fleet: Fleet) -> None:
    gate = Gate()
    publisher = fleet.publisher()
    publisher.publish(1)
    await fleet.follow(publisher)
    await fleet.holds([1])
    fleet.sink.slow = gate
    publisher.publish(2)
    assert await asyncio.to_thread(gate.reached.wait, 10)
    stopping = asyncio.create_task(fleet.manager.stop())
    await fleet.until(lambda: fleet.sink.facts == {})
    assert not stopping.done()
    fleet.sink.slow = None
    gate.release()
    await stopping
    assert fleet.sink.facts == {}


@pytest.mark.faults
async def test_a_storm_of_additions_and_removals_of_one_engine_ends_tracked(fleet: Fleet) -> None:
    """(K5) None waits for the one before, and the last word counts."""
    publisher = fleet.publisher()
    publisher.publish(1)
    engine = engine_of(publisher)
    steps = []
    for n in range(100):
        steps += [fleet.manager.add(engine), fleet.manager.remove("a")]
        if n % 7 == 0:
            steps.append(fleet.manager.change(replace(engine, usable_blocks=n + 1)))
    steps.append(fleet.manager.add(replace(engine, usable_blocks=1_000)))
    await asyncio.gather(*steps)
    await fleet.live()
    await fleet.holds([1])
    assert fleet.sink.facts["a"]["usable_blocks"] == 1_000
    publisher.publish(2)
    await fleet.holds([1, 2])
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert names.count("kv events of ns/a") == 1, "no earlier registration is left behind"


async def test_the_same_engine_at_another_place_is_made_new_and_not_removed(fleet: Fleet) -> None:
    """What the index noted of an engine (requests that make its events say less) must outlast that."""
    first, second = fleet.publisher(), fleet.publisher()
    first.publish(1)
    second.publish(2)
    engine = engine_of(first)
    await fleet.manager.add(engine)
    await fleet.holds([1])
    await fleet.until(lambda: fleet.sink.current == [False, True])
    await fleet.manager.change(replace(engine, events=second.events, replay=second.replay))
    await fleet.holds([2])
    await fleet.until(lambda: fleet.sink.current[-1])
    assert fleet.sink.calls == [("add", "a"), ("forget", "a"), ("add", "a")]
    assert fleet.sink.current == [False, True, False, False, True]
    await fleet.manager.change(replace(engine, kv_events=False))
    assert fleet.sink.calls[-1] == ("remove", "a")


async def test_a_worker_that_is_new_to_the_index_is_introduced_before_its_first_batch() -> None:
    """Once in its life there: not when it is made new with other facts or at another place."""
    fleet: Fleet = Fleet(introduced=lambda worker: fleet.sink.calls.append(("introduced", worker)))
    async with fleet:
        first, second = fleet.publisher(already=[1]), fleet.publisher(already=[2])
        engine = engine_of(first)
        await fleet.manager.add(engine)
        await fleet.holds([1])
        await fleet.manager.change(replace(engine, events=second.events, replay=second.replay))
        await fleet.holds([2])
        await fleet.manager.remove("a")
        await fleet.manager.add(engine)
        await fleet.holds([1])
        life = [("add", "a"), ("introduced", "a")]
        assert fleet.sink.calls == [*life, ("forget", "a"), ("add", "a"), ("remove", "a"), *life]


async def test_an_engine_whose_new_place_is_unknown_is_believed_no_longer(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    publisher.publish(1)
    engine = engine_of(publisher)
    await fleet.manager.add(engine)
    await fleet.holds([1])
    await fleet.until(lambda: fleet.sink.current == [False, True])
    await fleet.manager.change(replace(engine, events=None, replay=None))
    await fleet.until(lambda: fleet.sink.current[-1] is False)
    assert fleet.sink.applied == {"a": []}
    await fleet.until(lambda: fleet.status().alarm == "not_located")
    assert "no events endpoint is configured" in str(fleet.status().problem)


async def test_marks_of_an_engine_outlast_its_move_and_end_with_its_removal() -> None:
    index = PrefixIndex()
    fleet = Fleet(SETTINGS, sink=index)
    await fleet.manager.start()

    def marked() -> bool:
        workers: Any = index.stats()["workers"]
        return bool(workers["a"]["reannouncing"])

    async def known_at(publisher: Publisher) -> None:
        await fleet.until(lambda: fleet.status().endpoint == publisher.events)
        await fleet.live()
        await fleet.until(lambda: index.match(PROMPT, "m")["a"].credit == 4)

    try:
        first, second = fleet.publisher(already=[1]), fleet.publisher(already=[1])
        engine = engine_of(first)
        await fleet.manager.add(engine)
        await known_at(first)
        index.mark_reannouncing("a")
        await fleet.manager.change(replace(engine, events=second.events, replay=second.replay))
        await known_at(second)
        assert marked()
        await fleet.manager.remove("a")
        await fleet.manager.add(engine)
        await known_at(first)
        assert not marked()
    finally:
        await fleet.close()
