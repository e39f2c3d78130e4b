"""Random histories of losses, restarts and replays, against what the engine really holds.

``make fuzz`` runs 10,000 of them (profile ``fuzz``), ``make test`` a few hundred.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsync.events import stream
from tests.unit.events.engine_model import DEEDS, UNDROPPED, IndexSink, SetSink, Sink, World


@pytest.fixture(autouse=True)
def _to_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "UNDROPPED", UNDROPPED)


DEEDS_OF_A_STEP = st.lists(st.integers(0, DEEDS - 1), min_size=1, max_size=3)


class History(RuleBasedStateMachine):
    """The rules are :class:`World`'s methods."""

    def sink(self) -> Sink:
        return SetSink()

    @initialize(
        buffer_steps=st.sampled_from([1, 3, 1000, 1000]),
        can_replay=st.sampled_from([True, True, True, False]),
        limit=st.sampled_from([200, 100_000, 100_000]),
        connected=st.booleans(),
    )
    def begin(self, buffer_steps: int, can_replay: bool, limit: int, connected: bool) -> None:
        self.world = World(self.sink(), can_replay=can_replay, buffer_steps=buffer_steps, limit=limit)
        if connected:
            self.world.settle()

    @rule(steps=st.lists(st.tuples(DEEDS_OF_A_STEP, st.booleans()), min_size=1, max_size=4))
    def publish(self, steps: list[tuple[list[int], bool]]) -> None:
        for deeds, lost in steps:
            self.world.publish(deeds, lost=lost)

    @rule()
    def burn(self) -> None:
        self.world.burn()

    @precondition(lambda self: self.world.steps < stream.MAX_DISORDERS)
    @rule(forward=st.booleans())
    def step_clock(self, forward: bool) -> None:
        self.world.step_clock(forward)

    @rule(unseen=st.booleans(), ahead=st.integers(0, 2), follows=st.booleans(), cut=st.integers(0, 3))
    def restart(self, unseen: bool, ahead: int, follows: bool, cut: int) -> None:
        """``follows``: the new process comes just as far as the one before was followed."""
        last = self.world.stream.last
        self.world.restart(unseen=unseen, ahead=last + 1 if follows and last is not None else ahead, cut=cut)

    @precondition(lambda self: self.world.link)
    @rule()
    def disconnect(self) -> None:
        self.world.disconnect()

    @precondition(lambda self: not self.world.link)
    @rule(subscribed=st.booleans())
    def connect(self, subscribed: bool) -> None:
        self.world.connect()
        if subscribed:
            self.world.subscribe()

    @precondition(lambda self: self.world.link and not self.world.subscribed)
    @rule()
    def subscribe(self) -> None:
        self.world.subscribe()

    @rule()
    def note(self) -> None:
        self.world.note()

    @precondition(lambda self: self.world.asked is not None)
    @rule(
        drops=st.lists(st.booleans(), max_size=5),
        answer=st.sampled_from([True, True, True, False]),
        cut=st.one_of(st.none(), st.none(), st.integers(0, 5)),
    )
    def grant(self, drops: list[bool], answer: bool, cut: int | None) -> None:
        self.world.grant(drops, answer=answer, cut=cut)

    @rule(live=st.integers(0, 10), replayed=st.integers(0, 10))
    def drain(self, live: int, replayed: int) -> None:
        self.world.drain(live, replayed)

    @rule(seconds=st.sampled_from([0.1, 0.6, 5.0, 61.0]), served=st.booleans())
    def tick(self, seconds: float, served: bool) -> None:
        self.world.tick(seconds, served=served)

    @rule()
    def settle(self) -> None:
        """The network works for a while."""
        self.world.settle()

    @rule()
    def resync(self) -> None:
        self.world.resync()

    @rule()
    def hint(self) -> None:
        self.world.hint()

    @invariant()
    def judge(self) -> None:
        self.world.judge()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.heal()


class IndexHistory(History):
    """The same with the reference index for a sink."""

    def sink(self) -> Sink:
        return IndexSink()


FUZZ = settings.get_current_profile_name() == "fuzz"
STEPS = settings(stateful_step_count=40, report_multiple_bugs=False)
TestHistory = History.TestCase
TestHistory.settings = settings(STEPS, max_examples=10_000 if FUZZ else 300)
TestIndexHistory = IndexHistory.TestCase
TestIndexHistory.settings = settings(STEPS, max_examples=1_000 if FUZZ else 40)
