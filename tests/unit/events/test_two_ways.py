"""What the core reads and applies by itself leaves streams, sockets and index as if Python had read every message.

Two worlds live through the same history, one the plain way, one with a real receiver on real sockets (ZMQ's ``inproc``
transport, so nothing depends on time). After every step they must be equal in everything that they know.
"""

from __future__ import annotations

import itertools
import math
import socket
import struct
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, cast

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsync.config.model import EventsSettings
from kvsync.events import stream
from kvsync.events.contracts import Target
from kvsync.events.feed import Feed
from kvsync.events.followed import Followed
from kvsync.events.inlet import Drained, inlet
from kvsync.events.sockets import WorkerSockets
from kvsync.events.stream import REMEMBERED, RESTART_TIME, Budget, State, Stream
from kvsync.index.match import Index
from tests import wire
from tests.unit.events import engine_model
from tests.unit.events.engine_model import Batch, IndexSink, World
from tests.unit.events.test_stream_model import FUZZ, MANY, History

core = pytest.importorskip("kvsync_core")

CONTEXT: zmq.Context[Any] = zmq.Context()
NUMBERS = itertools.count()
TARGET = Target("w", "e", "e", "m", 0, "", None)

Message = list[bytes]


class Way:
    """A stream's own side, up to where the reader decides: its live socket, and the inlet that serves an index."""

    def __init__(self, of: Stream, index: Index, clock: Any = lambda: 0.0) -> None:
        endpoint = f"inproc://two-ways-{next(NUMBERS)}"
        self.publisher: zmq.Socket[bytes] = CONTEXT.socket(zmq.XPUB)
        self.publisher.set(zmq.SNDHWM, 0)
        self.publisher.bind(endpoint)
        self.sockets = WorkerSockets(CONTEXT, endpoint, None, EventsSettings())
        self.sockets.open_live()
        assert self.publisher.recv() == b"\x01"
        self.sign: zmq.Socket[bytes] = CONTEXT.socket(zmq.PAIR)
        self.signed: zmq.Socket[bytes] = CONTEXT.socket(zmq.PAIR)
        self.sign.bind(f"{endpoint}-sign")
        self.signed.connect(f"{endpoint}-sign")
        self.wake, self.call = socket.socketpair()
        self.wake.setblocking(False)
        self.stream = of
        self.followed = Followed(TARGET, of, self.sockets, 0.0)
        made = inlet(index, Feed(index, None), self.wake.fileno(), EventsSettings(), clock)
        assert isinstance(made, Drained)
        self.inlet = made
        assert self.sockets.sub is not None
        for part in (self.sockets.sub, self.signed):
            self.inlet.add(self.followed, part)

    def read(
        self, messages: list[Message], *, sign: bool, called: bool, at_once: int = 1000
    ) -> list[tuple[int, bytes]]:
        """Let messages come, perhaps with a sign on another socket, or a call; those that are left to Python."""
        for frames in messages:
            self.publisher.send_multipart(frames)
        if sign:
            self.sign.send(b"")
        self.inlet.settle(self.followed)
        if called:
            self.call.send(b"\0")
            received = self.stream.counts.received
            self.inlet.wait(10, at_once, 1 << 20)
            assert self.stream.counts.received == received, "a call comes first"
            self.wake.recv(10)
        left = []
        before = -1
        while self.stream.counts.received > before:
            before = self.stream.counts.received
            if self.inlet.wait(0, at_once, 1 << 20):
                left = self.sockets.handed() + list(self.sockets.live(len(messages) + 1))
                break
        if sign:
            self.signed.recv(zmq.NOBLOCK)
        return left

    def close(self) -> None:
        assert self.sockets.sub is not None
        for part in (self.sockets.sub, self.signed):
            self.inlet.remove(part)
        self.sockets.close()
        for part in (self.publisher, self.sign, self.signed):
            part.close(linger=0)
        self.wake.close()
        self.call.close()


def known(of: Stream) -> dict[str, Any]:
    """All that a stream knows."""
    state = dict(vars(of))
    state["_at"] = struct.pack(">d", state["_at"])  # NaN is no number, and equal to itself here
    state["_budget"] = state["_budget"].used
    state["_marks"] = deepcopy(state["_marks"]).all()  # a look changes how they are kept
    return state


# -- histories ----------------------------------------------------------------------------------------------------


class DrainedWorld(World):
    """The core reads what comes live."""

    def __init__(self, **circumstances: Any) -> None:
        self.index: Index = core.PrefixIndex()
        super().__init__(IndexSink(self.index), **circumstances)
        self.way = Way(self.stream, self.index, lambda: self.now)
        self.called = itertools.cycle([False, False, True, False, False])
        self.alone = 0
        """Batches that took no turn in Python."""

    def receive(self, read: list[Batch]) -> list[Batch]:
        messages = [[b"topic", told.seq.to_bytes(8, "big"), told.payload] for told in read]
        before = self.stream.counts.received
        left = self.way.read(messages, sign=bool(self.links), called=next(self.called))
        taken = self.stream.counts.received - before
        assert [(told.seq, told.payload) for told in read[taken:]] == left
        for told in read[:taken]:
            self.note_applied(told)
            self._arrives(told)
        self.alone += taken
        return read[taken:]


def test_the_world_that_is_compared_takes_the_short_way() -> None:
    world = DrainedWorld(can_replay=True, buffer_steps=1000, limit=100_000)
    try:
        world.settle()
        world.publish([0])
        world.drain(1000, 0)
        assert world.alone == 0, "the first one decides where the epoch is picked up"
        for block in range(1, 4):
            world.publish([block])
        world.drain(1000, 0)
        assert world.alone == 3
    finally:
        world.way.close()


class Twins:
    """Whatever is done is done in both worlds, and must leave them equal."""

    def __init__(self, **circumstances: Any) -> None:
        self._plain = World(IndexSink(core.PrefixIndex()), **circumstances)
        self._drained = DrainedWorld(**circumstances)

    def __getattr__(self, name: str) -> Any:
        plain, drained = getattr(self._plain, name), getattr(self._drained, name)
        if not callable(plain):
            return plain

        def both(*arguments: Any, **options: Any) -> None:
            plain(*arguments, **options)
            drained(*arguments, **options)
            self._compare()

        return both

    def _compare(self) -> None:
        plain, drained = self._plain, self._drained
        assert known(plain.stream) == known(drained.stream)
        assert isinstance(plain.sink, IndexSink)
        assert plain.sink.index.stats() == drained.index.stats()
        assert plain.sink.credit() == drained.sink.credit()
        assert [told.payload for told in plain.stretch] == [told.payload for told in drained.stretch]

    def heal(self) -> None:
        self._plain.heal()
        self._drained.heal()
        self._compare()

    def end(self) -> None:
        self._drained.way.close()


class TwinHistory(History):
    def make_world(self, **circumstances: Any) -> World:
        self.twins = Twins(**circumstances)
        return cast(World, self.twins)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "twins"):
                self.twins.end()


TestTwinHistory = TwinHistory.TestCase
TestTwinHistory.settings = settings(MANY, max_examples=2_000 if FUZZ else 80)


@pytest.fixture(autouse=True)
def _to_scale(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.cls is TestTwinHistory:
        monkeypatch.setattr(stream, "UNDROPPED", engine_model.UNDROPPED)
        monkeypatch.setattr(stream, "REMEMBERED", engine_model.REMEMBERED)


# -- messages of every kind ---------------------------------------------------------------------------------------

STARTED = 1_000.0


class Pair:
    """Two live streams that have applied number 0, without a replay: so every loss shows at once."""

    def __init__(self) -> None:
        self.indexes: list[Index] = [core.PrefixIndex(), core.PrefixIndex()]
        self.streams = [
            Stream(can_replay=False, budget=Budget(1 << 20), replay_timeout=1.0, replay_round_timeout=30.0)
            for _ in self.indexes
        ]
        self.plain = WorkerSockets(CONTEXT, "", None, EventsSettings())
        self.way = Way(self.streams[1], self.indexes[1])
        first = wire.batch(wire.stored([1], [1] * 4), ts=STARTED)
        for index, of in zip(self.indexes, self.streams, strict=True):
            index.add_worker("w", "m")
            of.connected(0.0)
            self.carry_out(index, of.live(0, first, 0.0))
        assert self.streams[1].expects == (1, STARTED)

    @staticmethod
    def carry_out(index: Index, actions: list[stream.Action]) -> None:
        for action in actions:
            match action:
                case stream.Apply(_, payload):
                    index.apply("w", payload)
                case stream.Forget():
                    index.forget("w")
                case stream.NewEpoch():
                    index.new_epoch("w")
                case stream.Relearn():
                    index.relearn("w")

    def come(self, messages: list[Message], **circumstances: Any) -> None:
        """Let messages come, in both; then both must know the same."""
        self.plain.hand(messages)
        for seq, payload in self.plain.handed():
            self.carry_out(self.indexes[0], self.streams[0].live(seq, payload, 0.0))
        for seq, payload in self.way.read(messages, **circumstances):
            self.carry_out(self.indexes[1], self.streams[1].live(seq, payload, 0.0))
        assert known(self.streams[0]) == known(self.streams[1])
        assert self.indexes[0].stats() == self.indexes[1].stats()
        assert self.plain.faults == self.way.sockets.faults


@pytest.fixture
def pair() -> Iterator[Pair]:
    it = Pair()
    yield it
    it.way.close()


def message(number: int, time: float, *hashes: int) -> Message:
    events = [wire.stored([h], [h % 1000] * 4) for h in hashes]
    return [b"topic", number.to_bytes(8, "big"), wire.batch(*events, ts=time)]


def test_a_run_of_batches_takes_no_turn_in_python(pair: Pair) -> None:
    run = [message(n, STARTED + n / 100, n) for n in range(1, 1000)]
    assert pair.way.read(run, sign=False, called=False) == []
    assert pair.streams[1].counts.applied == 1000
    pair.streams[1] = pair.way.stream
    for seq, body in ((int.from_bytes(frames[1], "big"), frames[2]) for frames in run):
        pair.carry_out(pair.indexes[0], pair.streams[0].live(seq, body, 0.0))
    assert known(pair.streams[0]) == known(pair.streams[1]), "more than are remembered"
    assert len(run) > REMEMBERED
    assert pair.indexes[0].stats() == pair.indexes[1].stats()


def test_what_was_read_when_another_socket_has_news_is_left_to_python(pair: Pair) -> None:
    """A monitor may tell that the connection is over: the reader decides first."""
    run = [message(n, STARTED, n) for n in range(1, 4)]
    assert [seq for seq, _ in pair.way.read(run, sign=True, called=False)] == [1, 2, 3]
    assert pair.streams[1].counts.applied == 1
    assert pair.indexes[1].match([1, 1, 1, 1, 0], "m")["w"].credit == 4
    assert pair.indexes[1].match([2, 2, 2, 2, 0], "m")["w"].credit == 0


@pytest.mark.parametrize(
    ("gap", "alone"), [(0.0, 1), (RESTART_TIME - 0.001, 1), (RESTART_TIME, 0), (RESTART_TIME + 0.001, 0), (-0.001, 0)]
)
def test_a_batch_that_may_be_of_another_process_is_left_to_the_stream(pair: Pair, gap: float, alone: int) -> None:
    left = pair.way.read([message(1, STARTED + gap, 2)], sign=False, called=False)
    assert 1 - len(left) == alone


ODD: list[Message] = [
    [b"topic only"],
    [b"topic", bytes(8)],
    [b"topic", bytes(7), b"\x93"],
    [b"topic", bytes(9), b"\x93"],
    [b"topic", b"\xff" * 8, b"\x93"],
    [b"topic", bytes(8), b"\x93", b"one more"],
    [b"topic", b"", b"\x93", b"", b"and", b"more"],
]


@pytest.mark.parametrize("odd", ODD, ids=lambda frames: f"{len(frames)}-frames")
def test_a_malformed_message_stops_nothing_but_itself(pair: Pair, odd: Message) -> None:
    pair.come([message(1, STARTED, 2), odd, message(2, STARTED, 3)], sign=False, called=False)
    assert sum(pair.way.sockets.faults.values()) == 1
    assert pair.streams[1].counts.applied == 3
    pair.come([message(3, STARTED, 4)], sign=False, called=False)
    assert pair.streams[1].counts.applied == 4


GAPS = st.sampled_from([0.0, 0.0, 0.01, 0.01, RESTART_TIME - 0.001, RESTART_TIME, 60.0, -0.01, math.nan, math.inf])
STEPS = st.sampled_from([1, 1, 1, 1, 1, 1, 0, 2, -1, -5, 40])
CLOCKS = st.sampled_from(["float64"] * 6 + ["float32", "int", "nothing", "cut"])


@st.composite
def _messages(draw: st.DrawFn) -> list[Message]:
    number, time, made = 0, STARTED, []
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.integers(0, 9)) == 0:
            made.append(draw(st.sampled_from(ODD)))
            continue
        number = max(0, number + draw(STEPS))
        gap = draw(GAPS)
        time = time + gap if math.isfinite(gap) else time
        body = message(number, time if math.isfinite(gap) else gap, draw(st.integers(1, 9)))[2]
        match draw(CLOCKS):
            case "float32":
                body = body[:1] + b"\xca" + struct.pack(">f", time) + body[10:]
            case "int":
                body = body[:1] + b"\x01" + body[10:]
            case "nothing":
                body = b""
            case "cut":
                body = body[: draw(st.integers(0, len(body)))]
        made.append([b"topic", number.to_bytes(8, "big"), body])
    return made


@settings(max_examples=2_000 if FUZZ else 200)
@given(
    runs=st.lists(
        st.tuples(_messages(), st.booleans(), st.booleans(), st.sampled_from([1, 3, 1000])), min_size=1, max_size=4
    )
)
def test_messages_of_every_kind(runs: list[tuple[list[Message], bool, bool, int]]) -> None:
    pair = Pair()
    try:
        for messages, sign, called, at_once in runs:
            pair.come(messages, sign=sign, called=called and not sign, at_once=at_once)
    finally:
        pair.way.close()


# -- what the receiver refuses ----------------------------------------------------------------------------------------


def test_no_batch_of_a_worker_that_ended_meanwhile_is_applied(pair: Pair) -> None:
    pair.come([message(1, STARTED, 2)], sign=False, called=False)
    pair.indexes[1].remove_worker("w")
    pair.way.read([message(2, STARTED, 3)], sign=False, called=False)
    pair.indexes[1].add_worker("w", "m")
    pair.way.read([message(3, STARTED, 4)], sign=False, called=False)
    assert pair.indexes[1].match([4, 4, 4, 4, 0], "m")["w"].credit == 0, "it was another registration's"
    assert pair.streams[1].state is State.LIVE


def test_the_library_has_to_be_one_that_is_loaded_and_has_libzmq() -> None:
    index = core.PrefixIndex()
    for library, why in [("/nowhere/_zmq.so", "is not loaded"), (core.kvsync_core.__file__, "shows no zmq_version")]:
        with pytest.raises(OSError, match=why):
            index.receiver(library, 0, pause=5.0, backlog=1, backlog_size=1)


def test_sockets_that_are_none_are_refused(pair: Pair) -> None:
    receiver = pair.way.inlet._receiver
    with pytest.raises(ValueError, match="not a socket"):
        receiver.add(1, 0)
    with pytest.raises(OSError):
        receiver.add(1, pair.way.signed.underlying)
    receiver.remove(1)
    assert not receiver.follow(1, "w", 0, 0.0)
    assert not receiver.follow(pair.way.signed.underlying, "nobody", 0, 0.0)
    for seconds in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError):
            receiver.wait(seconds, 1, 1)
