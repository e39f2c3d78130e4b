"""Random histories of losses, restarts and replays, against what the engine really holds.

``make fuzz`` runs 10,000 of them (profile ``fuzz``), ``make test`` a few hundred.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsync.events import stream
from kvsync.index.reference import ReferenceIndex
from tests.unit.events.engine_model import BLOCKS, REMEMBERED, UNDROPPED, IndexSink, SetSink, Sink, World

STORES, EVICTIONS, CLEAR = st.integers(0, BLOCKS - 1), st.integers(BLOCKS, 2 * BLOCKS - 1), st.just(2 * BLOCKS)
DEEDS = st.lists(st.one_of(STORES, STORES, STORES, EVICTIONS, EVICTIONS, CLEAR), min_size=1, max_size=3)
STEPS = st.lists(st.tuples(DEEDS, st.sampled_from([False, False, False, True])), min_size=1, max_size=5)
"""What a process does in a few steps, and which of them get lost on the live side."""
THEN = st.sampled_from(["nothing", "read", "read", "answer", "answer", "settle"])
"""How far the network works afterwards: not at all; what came live is read; a round is answered, too; all the way."""


@pytest.fixture(autouse=True)
def _to_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "UNDROPPED", UNDROPPED)
    monkeypatch.setattr(stream, "REMEMBERED", REMEMBERED)


class History(RuleBasedStateMachine):
    """The rules are :class:`World`'s methods, put together as they come about."""

    def sink(self) -> Sink:
        return SetSink()

    def make_world(self, **circumstances: Any) -> World:
        return World(self.sink(), **circumstances)

    @initialize(
        buffer_steps=st.sampled_from([1000, 1000, 1000, 3, 1]),
        can_replay=st.sampled_from([True, True, True, True, False]),
        limit=st.sampled_from([100_000, 100_000, 600]),
        history=st.lists(DEEDS, max_size=12),
        then=THEN,
    )
    def begin(self, buffer_steps: int, can_replay: bool, limit: int, history: list[list[int]], then: str) -> None:
        self.world = self.make_world(can_replay=can_replay, buffer_steps=buffer_steps, limit=limit)
        for deeds in history:
            self.world.publish(deeds)
        self.world.connect()
        self.go_on(then)

    def go_on(self, then: str) -> None:
        if then != "nothing":
            self.world.drain(1000, 0)
        if then == "answer":
            self.world.subscribe()
            self.world.grant([], answer=True, cut=None)
            self.world.drain(0, 1000)
        if then == "settle":
            self.world.settle()

    @rule(steps=STEPS, then=THEN)
    def publish(self, steps: list[tuple[list[int], bool]], then: str) -> None:
        for deeds, lost in steps:
            self.world.publish(deeds, lost=lost)
        self.go_on(then)

    @rule(deeds=DEEDS, steps=STEPS, then=THEN)
    def burn(self, deeds: list[int], steps: list[tuple[list[int], bool]], then: str) -> None:
        self.world.burn(deeds)
        self.publish(steps, then)

    @precondition(lambda self: self.world.steps < stream.MAX_DISORDERS)
    @rule(forward=st.booleans(), steps=STEPS, then=THEN)
    def step_clock(self, forward: bool, steps: list[tuple[list[int], bool]], then: str) -> None:
        self.world.step_clock(forward)
        self.publish(steps, then)

    @rule(
        unseen=st.booleans(),
        ahead=st.integers(0, 4),
        follows=st.booleans(),
        cut=st.integers(0, 3),
        steps=STEPS,
        then=THEN,
    )
    def restart(
        self, unseen: bool, ahead: int, follows: bool, cut: int, steps: list[tuple[list[int], bool]], then: str
    ) -> None:
        """``follows``: the new process comes just as far as the one before was followed."""
        last = self.world.stream.last
        self.world.restart(unseen=unseen, ahead=last + 1 if follows and last is not None else ahead, cut=cut)
        if not unseen:
            self.world.drain(0, 0)
            self.world.connect()
        self.world.subscribe()
        self.publish(steps, then)

    @rule(meanwhile=STEPS, subscribed=st.booleans(), steps=STEPS, then=THEN)
    def reconnect(
        self,
        meanwhile: list[tuple[list[int], bool]],
        subscribed: bool,
        steps: list[tuple[list[int], bool]],
        then: str,
    ) -> None:
        self.world.disconnect()
        self.world.drain(0, 0)
        self.publish(meanwhile, "nothing")
        self.world.connect()
        if subscribed:
            self.world.subscribe()
        self.publish(steps, then)

    @rule(
        steps=st.lists(DEEDS, min_size=3, max_size=9),
        told=st.booleans(),
        drops=st.lists(st.booleans(), min_size=2, max_size=9),
        times=st.integers(1, 3),
        then=THEN,
    )
    def outage(self, steps: list[list[int]], told: bool, drops: list[bool], times: int, then: str) -> None:
        """Many batches are lost; the next one tells of it, or a probe does, and replies are dropped as well."""
        self.world.settle()
        for deeds in steps:
            self.world.publish(deeds, lost=True)
        if told:
            self.world.publish([0, BLOCKS, 1])
        else:
            self.world.tick(61.0)
        self.answer(drops, True, None, 1000, times)
        self.go_on(then)

    @rule(meanwhile=STEPS, steps=STEPS, then=THEN)
    def replaced(self, meanwhile: list[tuple[list[int], bool]], steps: list[tuple[list[int], bool]], then: str) -> None:
        """All is well, and another process takes over which nobody has heard of until it has come just as far."""
        self.world.settle()
        self.publish(meanwhile, "read")
        self.restart(True, 0, True, 0, steps, then)

    @rule(cut_at=st.integers(0, 3))
    def disconnect(self, cut_at: int) -> None:
        self.world.drain(cut_at, 0)
        self.world.disconnect()

    @rule(
        drops=st.one_of(st.just([]), st.lists(st.booleans(), min_size=2, max_size=9)),
        answer=st.sampled_from([True, True, True, False]),
        cut=st.one_of(st.none(), st.none(), st.integers(0, 8)),
        read=st.sampled_from([0, 1, 3, 1000, 1000, 1000]),
        times=st.integers(1, 3),
    )
    def answer(self, drops: list[bool], answer: bool, cut: int | None, read: int, times: int) -> None:
        """Rounds in a row that meet with the same fault."""
        self.world.drain(1000, 0)
        for _ in range(times):
            self.world.grant(drops, answer=answer, cut=cut)
            self.world.drain(0, read)
            if not answer or cut is not None:
                self.world.tick(1.0)

    @rule(live=st.integers(0, 4), replayed=st.integers(0, 4))
    def drain(self, live: int, replayed: int) -> None:
        self.world.drain(live, replayed)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 61.0]), served=st.booleans(), then=THEN)
    def tick(self, seconds: float, served: bool, then: str) -> None:
        self.world.tick(seconds, served=served)
        self.go_on(then)

    @rule(how=st.sampled_from(["note", "resync", "hint"]), then=THEN)
    def outside(self, how: str, then: str) -> None:
        {"note": self.world.note, "resync": self.world.resync, "hint": self.world.hint}[how]()
        self.go_on(then)

    @invariant()
    def judge(self) -> None:
        self.world.judge()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.heal()


class IndexHistory(History):
    """The same with the reference index for a sink."""

    def sink(self) -> Sink:
        return IndexSink(ReferenceIndex())


class Replicas(History):
    """The same, with another replica in this one's place now and then, which begins from a snapshot."""

    successions = 0

    @rule(settled=st.booleans())
    def tell(self, settled: bool) -> None:
        if settled:
            self.world.settle()
        self.world.tell()

    @rule(
        told=st.booleans(),
        before=STEPS,
        meanwhile=STEPS,
        restarts=st.sampled_from([0, 0, 0, 1, 2]),
        ahead=st.integers(0, 6),
        then=THEN,
    )
    def succeed(
        self,
        told: bool,
        before: list[tuple[list[int], bool]],
        meanwhile: list[tuple[list[int], bool]],
        restarts: int,
        ahead: int,
        then: str,
    ) -> None:
        """Old or new, the snapshot may be of a process that is gone."""
        if told:
            self.tell(True)
        self.publish(before, "nothing")
        for _ in range(restarts):
            self.world.restart(unseen=False, ahead=ahead, cut=0)
        type(self).successions += self.world.succeed()
        self.publish(meanwhile, "nothing")
        self.world.connect()
        self.world.subscribe()
        self.go_on(then)


class IndexReplicas(Replicas):
    """These with the reference index for a sink."""

    def sink(self) -> Sink:
        return IndexSink(ReferenceIndex())


FUZZ = settings.get_current_profile_name() == "fuzz"
MANY = settings(stateful_step_count=30, report_multiple_bugs=False)
TestHistory = History.TestCase
TestHistory.settings = settings(MANY, max_examples=10_000 if FUZZ else 300)
TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(MANY, max_examples=5_000 if FUZZ else 150)
TestIndexReplicas = IndexReplicas.TestCase
TestIndexReplicas.settings = settings(MANY, max_examples=1_000 if FUZZ else 40)
TestIndexHistory = IndexHistory.TestCase
TestIndexHistory.settings = settings(MANY, max_examples=1_000 if FUZZ else 40)
