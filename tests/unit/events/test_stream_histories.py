"""Random histories of an engine, its network and its reader, against the plain truth of what was published.

The engine here is a list; the network loses what real ones lose: live batches (a full publisher queue), replies (a
full ROUTER queue), end markers, whole connections. However that goes, what reaches the sink must be unbroken stretches
of one epoch with a forgetting between any two of them; and once everything works again, it must reach the present.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsync.events.stream import (
    PROBE_INTERVAL,
    Action,
    Apply,
    AskReplay,
    Budget,
    Forget,
    NewEpoch,
    State,
    StopReplay,
    Stream,
)

REPLAY_TIMEOUT = 1.0


def batch(epoch: int, seq: int) -> bytes:
    return b"\x93\xcb" + struct.pack(">d", 1000.0 * epoch + seq) + b"\x90\x00" + b"x" * (seq % 7)


@dataclass
class Process:
    """One life of the engine."""

    epoch: int
    buffer_steps: int
    next: int = 0
    published: dict[int, bytes] = field(default_factory=dict)

    def buffered(self) -> list[tuple[int, bytes]]:
        return sorted(self.published.items())[-self.buffer_steps :]


class History(RuleBasedStateMachine):
    @initialize(
        buffer_steps=st.sampled_from([1, 3, 1000]),
        can_replay=st.booleans(),
        limit=st.sampled_from([40, 100_000]),
    )
    def begin(self, buffer_steps: int, can_replay: bool, limit: int) -> None:
        self.now = 0.0
        self.process = Process(0, buffer_steps)
        self.lives = {0: self.process}
        self.budget = Budget(limit)
        self.stream = Stream(
            can_replay=can_replay, budget=self.budget, replay_timeout=REPLAY_TIMEOUT, replay_round_timeout=30.0
        )
        self.can_replay = can_replay
        self.link = False
        """The connection as it really is."""
        self.links: deque[bool] = deque()
        """What the monitor has to report."""
        self.told = False
        """The connection as the stream was told."""
        self.wire: deque[tuple[int, bytes]] = deque()
        """Live messages received by ZMQ and not read yet."""
        self.asked: int | None = None
        self.replies: deque[tuple[int, bytes] | None] | None = None
        """What the open round still has to bring; ``None`` in it is the end marker."""
        self.lossy = False
        # What the sink believes.
        self.trust = "exact"
        self.epoch: int | None = None
        self.stretch: list[int] = []

    # -- the engine -------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5), lost=st.booleans())
    def publish(self, count: int, lost: bool) -> None:
        for _ in range(count):
            process = self.process
            body = batch(process.epoch, process.next)
            process.published[process.next] = body
            if self.link and not lost:
                self.wire.append((process.next, body))
            process.next += 1

    @rule()
    def burn(self) -> None:
        self.process.next += 1

    @rule(same_length=st.booleans())
    def restart(self, same_length: bool) -> None:
        """Another process on the same port; at times it has come just as far before anybody connects again."""
        before = self.process
        self.process = Process(before.epoch + 1, before.buffer_steps)
        self.lives[self.process.epoch] = self.process
        self.disconnect()
        if same_length:
            for seq in range(before.next):
                self.process.published[seq] = batch(self.process.epoch, seq)
            self.process.next = before.next

    @precondition(lambda self: self.link)
    @rule()
    def disconnect(self) -> None:
        if self.link:
            self.link = False
            self.links.append(False)

    @precondition(lambda self: not self.link)
    @rule()
    def connect(self) -> None:
        self.link = True
        self.links.append(True)

    # -- the replay side ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.asked is not None)
    @rule(lose=st.lists(st.booleans(), max_size=12), answer=st.booleans())
    def grant(self, lose: list[bool], answer: bool) -> None:
        """The round's turn has come, and the engine answers what it has at this moment."""
        asked, self.asked = self.asked, None
        assert asked is not None
        self.replies = deque()
        if answer:
            answers: list[tuple[int, bytes] | None] = [r for r in self.process.buffered() if r[0] >= asked]
            # A fresh connection's queue is never full at the first reply.
            kept = answers[:1] + [r for i, r in enumerate(answers[1:]) if not (i < len(lose) and lose[i])]
            self.replies.extend(kept)
            if not (lose and lose[-1]):
                self.replies.append(None)
        self.carry_out(self.stream.replay_started(self.now))

    # -- the reader ---------------------------------------------------------------------------------------------------

    @rule(live=st.integers(0, 10), replayed=st.integers(0, 10))
    def drain(self, live: int, replayed: int) -> None:
        """As the reader does it: messages are read before the monitor's reports and told after them.

        A connection that is over takes its socket with it, and all that was read or waits in there.
        """
        read = [self.wire.popleft() for _ in range(min(live, len(self.wire)))]
        while self.links:
            if self.links.popleft():
                self.told = True
                self.carry_out(self.stream.connected(self.now))
            elif self.told:
                self.told = self.link = False
                read.clear()
                self.wire.clear()
                self.links.clear()
                self.carry_out(self.stream.disconnected(self.now))
        for seq, body in read:
            self.carry_out(self.stream.live(seq, body, self.now))
        for _ in range(replayed):
            if not self.replies:
                return
            answer = self.replies.popleft()
            if answer is None:
                self.carry_out(self.stream.replay_ended(self.now))
            else:
                self.carry_out(self.stream.replayed(*answer, self.now))

    @rule(seconds=st.sampled_from([0.1, 0.6, 5.0, 61.0]), served=st.booleans())
    def tick(self, seconds: float, served: bool) -> None:
        self.now += seconds
        self.carry_out(self.stream.tick(self.now, self.now if served else float("-inf")))

    # -- the sink -----------------------------------------------------------------------------------------------------

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(seq, payload):
                    self.applied(seq, payload)
                case Forget():
                    self.trust, self.stretch, self.epoch = "partial", [], None
                case NewEpoch():
                    self.trust, self.stretch, self.epoch = "exact", [], None
                case AskReplay(start):
                    assert self.can_replay
                    assert self.asked is None
                    assert self.replies is None, "two rounds at once"
                    self.asked = start
                case StopReplay():
                    self.asked = self.replies = None

    def applied(self, seq: int, payload: bytes) -> None:
        epoch = next(e for e, life in self.lives.items() if life.published.get(seq) == payload)
        if self.stretch:
            assert epoch == self.epoch, "two epochs met"
            between = [n for n in self.lives[epoch].published if self.stretch[-1] < n < seq]
            assert seq > self.stretch[-1], "not in order, or twice"
            assert not between, "batches left out without a word"
        elif self.trust == "exact":
            missing = [n for n in self.lives[epoch].published if n < seq]
            assert not missing, "called exact without its beginning"
        self.epoch = epoch
        self.stretch.append(seq)

    @invariant()
    def budget_is_kept(self) -> None:
        assert 0 <= self.budget.used <= self.budget.limit

    @invariant()
    def live_streams_wait_for_nothing(self) -> None:
        if self.stream.state is State.LIVE and self.asked is None and self.replies is None:
            assert self.budget.used == 0

    def teardown(self) -> None:
        """From here on everything works: the stream must come to the present, and stay sound on the way."""
        if not hasattr(self, "stream"):
            return
        self.publish(1, lost=False)
        for _ in range(3):
            self.settle()
            self.now += PROBE_INTERVAL
            self.tick(1.0, served=False)
        self.settle()
        if self.stream.whole:
            assert self.stretch == sorted(self.process.published)
        self.publish(1, lost=False)  # where the newest was given up, only what comes next is heard
        self.settle()
        assert self.stream.state is State.LIVE
        assert self.epoch == self.process.epoch
        newest = max(self.process.published)
        assert self.stretch[-1] == newest
        missing = [n for n in self.process.published if n >= self.stretch[0] and n not in self.stretch]
        assert not missing
        if self.stream.whole:
            assert self.trust == "exact"
            assert self.stretch == sorted(self.process.published)
        else:
            assert self.trust == "partial"
        self.stream.close()
        assert self.budget.used == 0

    def settle(self) -> None:
        for _ in range(400):
            if not self.link:
                self.connect()
            self.drain(1000, 1000)
            if self.asked is not None:
                self.grant([], answer=True)
            self.tick(0.6, served=False)
            if not self.wire and self.stream.state is State.LIVE and self.asked is None and self.replies is None:
                return
        raise AssertionError(f"does not settle: {self.stream.state}")


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
