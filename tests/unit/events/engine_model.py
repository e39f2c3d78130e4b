"""A model of an engine, of the network to it and of the reader, around a real stream and a real sink.

It loses what real ones lose and nothing else: live batches (a full publisher queue, a subscription not taken up yet),
replies beyond those that a queue always takes, end markers behind them, whole connections, processes. What must always
hold is asserted with each action; what must hold once all losses have shown themselves, in :meth:`World.judge`.

A process may be replaced without a lost connection (a publisher behind a forwarder). Then it takes ``RESTART_TIME`` at
least, and batches of both may come to be applied for a moment, where the new one's number is just the next one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from kvsync.events.stream import (
    PROBE_INTERVAL,
    RESTART_TIME,
    Action,
    Apply,
    AskReplay,
    Budget,
    Forget,
    NewEpoch,
    Position,
    Relearn,
    State,
    StopReplay,
    Stream,
)
from kvsync.index.match import Index
from tests.wire import Event, batch, cleared, removed, stored

BLOCKS: Final = 6
"""Blocks are prompts of one block each, named by number."""
UNDROPPED: Final = 3
"""Replies that a fresh queue always takes: ZMQ's 1,000, to scale. Whoever uses the model sets the stream's to it."""
REMEMBERED: Final = 4
"""Stamps remembered, to scale likewise."""
REPLAY_TIMEOUT: Final = 1.0
Trust = Literal["exact", "partial", "none"]


def store(block: int) -> Event:
    return stored([block + 1], [block] * 4)


def evict(block: int) -> Event:
    return removed([block + 1])


@dataclass(frozen=True)
class Batch:
    process: int
    seq: int
    events: tuple[Event, ...]
    payload: bytes


class Sink(Protocol):
    """What the stream's batches go to, and what it believes then."""

    def apply(self, told: Batch) -> None: ...

    def forget(self) -> None: ...

    def new_epoch(self) -> None: ...

    def relearn(self) -> None: ...

    def suspend(self) -> None: ...

    def resume(self) -> None: ...

    def trust(self) -> Trust: ...

    def credit(self) -> set[int]: ...

    def copy(self) -> Sink | None:
        """Another replica's that knows the same; ``None`` where that can't be told."""


class SetSink:
    """The plainest index: copies per block."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.lost = False
        self.suspended = True

    def apply(self, told: Batch) -> None:
        for event in told.events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.relearn()
                case "BlockStored":
                    self.copies[event["block_hashes"][0] - 1] += 1
                case "BlockRemoved":
                    self.copies -= Counter([event["block_hashes"][0] - 1])

    def forget(self) -> None:
        self.copies.clear()
        self.lost = True

    def new_epoch(self) -> None:
        self.relearn()

    def relearn(self) -> None:
        self.copies.clear()
        self.lost = False

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False

    def trust(self) -> Trust:
        return "none" if self.suspended else "partial" if self.lost else "exact"

    def credit(self) -> set[int]:
        return set() if self.suspended else set(self.copies)

    def copy(self) -> Sink:
        return deepcopy(self)


class IndexSink:
    """A real index."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.index.add_worker("w", "m")
        self.index.suspend("w")

    def apply(self, told: Batch) -> None:
        self.index.apply_many([("w", told.payload)])

    def forget(self) -> None:
        self.index.forget("w")

    def new_epoch(self) -> None:
        self.index.new_epoch("w")

    def relearn(self) -> None:
        self.index.relearn("w")

    def suspend(self) -> None:
        self.index.suspend("w")

    def resume(self) -> None:
        self.index.resume("w")

    def trust(self) -> Trust:
        return self.index.match([0] * 5, "m")["w"].trust

    def credit(self) -> set[int]:
        return {b for b in range(BLOCKS) if self.index.match([b] * 4 + [9], "m")["w"].credit}

    def copy(self) -> Sink | None:
        image = self.index.dump("w")
        if image is None:
            return None
        other = IndexSink(type(self.index)())
        other.index.restore("w", image)
        return other


@dataclass(frozen=True)
class Snapshot:
    """What a replica told of its worker, and what the model noted of that."""

    position: Position
    sink: Sink
    stretch: list[Batch]
    epochs: int
    fresh: set[int]
    noted: set[int]


@dataclass
class Process:
    """One life of the engine."""

    number: int
    buffer_steps: int
    unseen: bool = False
    """It took over without a lost connection."""
    next: int = 0
    published: dict[int, Batch] = field(default_factory=dict)
    held: Counter[int] = field(default_factory=Counter)
    """Copies per block."""

    @property
    def newest(self) -> int:
        return max(self.published, default=-1)

    def buffered(self) -> list[Batch]:
        return list(self.published.values())[-self.buffer_steps :]

    def does(self, deeds: Iterable[int]) -> tuple[Event, ...]:
        """Carry out what numbers stand for: store a block, evict one, clear. What can't be done is left out."""
        events = []
        for deed in deeds:
            held = sorted(+self.held)
            if deed < BLOCKS and self.held[deed] < 2:
                self.held[deed] += 1
                events.append(store(deed))
            elif BLOCKS <= deed < 2 * BLOCKS and held:
                block = held[deed % len(held)]
                self.held[block] -= 1
                events.append(evict(block))
            elif deed == 2 * BLOCKS:
                self.held.clear()
                events.append(cleared())
        return tuple(events)


class World:
    """See the module. The methods are what may happen; each ends with what the stream wants carried out."""

    def __init__(self, sink: Sink, *, can_replay: bool, buffer_steps: int, limit: int) -> None:
        self.sink = sink
        self.now = 0.0
        self.process = Process(0, buffer_steps)
        self.lives = [self.process]
        self.budget = Budget(limit)
        self.can_replay = can_replay
        self.stream = Stream(
            can_replay=can_replay, budget=self.budget, replay_timeout=REPLAY_TIMEOUT, replay_round_timeout=30.0
        )
        self.link = False
        """The connection as it really is."""
        self.links: deque[bool] = deque()
        """What the monitor has to report."""
        self.told = False
        """The connection as the stream was told."""
        self.subscribed = False
        """The publisher has taken up the subscription."""
        self.wire: deque[Batch] = deque()
        """Live messages received and not read yet."""
        self.asked: int | None = None
        self.replies: deque[Batch | None] | None = None
        """What the open round still has to bring; ``None`` in it is the end marker."""
        self.served_by: tuple[int, int] | None = None
        """Which process answers the open round, and which number it can begin with."""
        self.proved: tuple[int, int] | None = None
        """The same of the last round that ended properly."""
        self.arrived = -1
        """The newest number of the present process that the stream was given on this connection."""
        self.stretch: list[Batch] = []
        """What was applied since all was dropped last."""
        self.clock = 1_000_000.0
        """The engines' clock, less ``now``."""
        self.steps = 0
        self.epochs = 0
        self.fresh: set[int] = set()
        """Processes that somebody noted something of, and that no batch was applied of since."""
        self.noted: set[int] = set()
        self.snapshot: Snapshot | None = None

    # -- the engine -------------------------------------------------------------------------------------------------

    def publish(self, deeds: Sequence[int], *, lost: bool = False) -> None:
        process = self.process
        events = process.does(deeds)
        if not events:
            return
        self.clock += 1e-4  # no two batches have one timestamp
        told = Batch(process.number, process.next, events, batch(*events, ts=self.clock + self.now))
        process.published[process.next] = told
        process.next += 1
        if self.link and self.subscribed and not lost:
            self.wire.append(told)

    def burn(self, deeds: Sequence[int]) -> None:
        """A batch that can't be encoded: what is done comes true, and nobody ever hears of it."""
        self.process.does(deeds)
        self.process.next += 1

    def step_clock(self, forward: bool) -> None:
        """The engine's clock is set, by more than a restart takes."""
        self.steps += 1
        self.clock += 1000.0 if forward else -1000.0

    def restart(self, *, unseen: bool, ahead: int, cut: int) -> None:
        """Another process takes over.

        It has published ``ahead`` batches already which nobody got; of a replay that is under way ``cut`` more replies
        come.
        """
        unseen = unseen and self.told and self.link and not self.links
        self.process = Process(len(self.lives), self.process.buffer_steps, unseen=unseen)
        self.lives.append(self.process)
        self.arrived = -1
        if self.replies is not None:
            self.replies = deque(list(self.replies)[:cut])
        if unseen:
            self.now += RESTART_TIME
        else:
            self.disconnect()
        for n in range(ahead):
            self.publish([n % BLOCKS], lost=True)

    def disconnect(self) -> None:
        if self.link:
            self.link = self.subscribed = False
            self.links.append(False)

    def connect(self) -> None:
        if not self.link:
            self.link = True
            self.links.append(True)

    def subscribe(self) -> None:
        self.subscribed = self.link

    def note(self) -> None:
        """Something is noted of the process, which has to stay as long as it lives."""
        self.fresh.add(self.process.number)

    # -- the replay side --------------------------------------------------------------------------------------------

    def grant(self, drops: Sequence[bool], *, answer: bool, cut: int | None) -> None:
        """The round's turn has come, and the engine answers what it has at this moment.

        ``drops``: which of the replies behind the first ``UNDROPPED`` are dropped, the end marker among them. ``cut``:
        the connection ends after so many. Without ``answer`` the request goes astray.
        """
        if self.asked is None:
            return
        asked, self.asked = self.asked, None
        answers = [*(b for b in self.process.buffered() if b.seq >= asked), None]
        self.served_by = self.process.number, asked if answers[0] is None else answers[0].seq
        self.replies = deque()
        if answer:
            kept = [r for i, r in enumerate(answers) if i < UNDROPPED or not (drops and drops[i % len(drops)])]
            self.replies.extend(kept[:cut])
        self.carry_out(self.stream.replay_started(self.now))

    # -- the reader -------------------------------------------------------------------------------------------------

    def drain(self, live: int, replayed: int) -> None:
        """As the reader does it: messages are read before the monitor's reports and told after them.

        A connection that is over takes its socket with it, and all that was read or waits in there.
        """
        read = self.receive([self.wire.popleft() for _ in range(min(live, len(self.wire)))])
        while self.links:
            if self.links.popleft():
                self.told = True
                self.carry_out(self.stream.connected(self.now))
            elif self.told:
                self.told = self.link = self.subscribed = False
                read.clear()
                self.wire.clear()
                self.links.clear()
                self.arrived = -1
                self.carry_out(self.stream.disconnected(self.now))
        for told in read:
            self.carry_out(self.stream.live(told.seq, told.payload, self.now))
            if self.told:
                self._arrives(told)
        for _ in range(replayed):
            if not self.replies:
                return
            answer = self.replies.popleft()
            if answer is None:
                self.proved = self.served_by
                self.carry_out(self.stream.replay_ended(self.now))
            else:
                self._arrives(answer)
                self.carry_out(self.stream.replayed(answer.seq, answer.payload, self.now))

    def receive(self, read: list[Batch]) -> list[Batch]:
        """What is left to the stream of messages that were just read: all, unless something else stands before it."""
        return read

    def _arrives(self, told: Batch) -> None:
        if told.process == self.process.number:
            self.arrived = max(self.arrived, told.seq)

    def tick(self, seconds: float, *, served: bool = False) -> None:
        self.now += seconds
        self.carry_out(self.stream.tick(self.now, self.now if served else float("-inf")))

    def resync(self) -> None:
        self.carry_out(self.stream.resync(self.now))
        assert not self.sink.credit() or self.stretch, "doubted, and still credited"

    def hint(self) -> None:
        self.carry_out(self.stream.hint_restart(self.now))

    def tell(self) -> None:
        """A snapshot is taken, where one can be."""
        position = self.stream.position
        if position is None:
            return
        sink = self.sink.copy()
        if sink is not None:
            self.snapshot = Snapshot(position, sink, [*self.stretch], self.epochs, {*self.fresh}, {*self.noted})

    def succeed(self) -> bool:
        """Another replica takes this one's place, from the last snapshot. False: there is none."""
        told = self.snapshot
        sink = None if told is None else told.sink.copy()
        if told is None or sink is None:
            return False
        self.stream.close()
        self.link = self.told = self.subscribed = False
        self.links.clear()
        self.wire.clear()
        self.asked = self.replies = self.served_by = self.proved = None
        self.arrived = -1
        self.sink, self.stretch, self.epochs = sink, [*told.stretch], told.epochs
        self.fresh, self.noted = {*told.fresh}, {*told.noted}
        self.sink.suspend()
        self.stream = Stream(
            can_replay=self.can_replay,
            budget=self.budget,
            replay_timeout=REPLAY_TIMEOUT,
            replay_round_timeout=30.0,
            since=told.position,
        )
        return True

    # -- what the stream wants --------------------------------------------------------------------------------------

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(seq, payload):
                    told = next(b for life in self.lives if (b := life.published.get(seq)) and b.payload is payload)
                    self.note_applied(told)
                    self.sink.apply(told)
                case Forget():
                    self.stretch.clear()
                    self.sink.forget()
                case Relearn():
                    self.stretch.clear()
                    self.sink.relearn()
                case NewEpoch():
                    self.stretch.clear()
                    self.sink.new_epoch()
                    self.epochs += 1
                    assert self.epochs < len(self.lives), "a new epoch of the same process"
                    assert self.process.number not in self.noted, "what was noted of the process is lost"
                    self.noted.clear()
                case AskReplay(start):
                    assert self.can_replay
                    assert self.asked is None
                    assert self.replies is None, "two rounds at once"
                    self.asked = start
                case StopReplay():
                    self.asked = self.replies = None
        (self.sink.resume if self.stream.current else self.sink.suspend)()

    def note_applied(self, told: Batch) -> None:
        self._check(told)
        self.stretch.append(told)
        if told.process in self.fresh:
            self.fresh.discard(told.process)
            self.noted.add(told.process)

    def _check(self, told: Batch) -> None:
        """What must hold whenever a batch is applied."""
        life = self.lives[told.process]
        if self.stretch:
            before = self.stretch[-1]
            if told.process != before.process:
                assert self.process.unseen, "two epochs met"
                assert told.process > before.process or not self.stream.current, "an epoch that had ended came back"
                assert told.seq == before.seq + 1, "two epochs met where numbers show it"
                return
            assert told.seq > before.seq, "not in order, or twice"
            assert not [n for n in life.published if before.seq < n < told.seq], "batches left out without a word"
        elif self.sink.trust() == "exact" or not self.sink.credit():
            left_out = [n for n in life.published if n < told.seq]
            assert not (left_out and self.stream.whole), "called whole without its beginning"

    # -- judgement --------------------------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """All that arrived is applied, and nothing is under way."""
        connected = self.link and self.told and self.subscribed and not self.links
        return connected and not self.wire and self.asked is None and self.replies is None and self.stream.current

    @property
    def shown(self) -> bool:
        """Every loss has shown itself: the newest batch came; and where a process took over unseen and its first number
        was just the next one, a round from before that place has ended."""
        if self.arrived < self.process.newest or self.process.newest != self.process.next - 1:
            return False  # a number that is burned shows itself when another comes behind it
        foreign = [told.seq for told in self.stretch if told.process != self.process.number]
        if not foreign or not self.process.unseen:
            return True
        if self.proved is None or self.proved[0] != self.process.number:
            return False
        return self.proved[1] <= foreign[-1]

    def judge(self) -> None:
        assert 0 <= self.budget.used <= self.budget.limit
        if self.stream.current:
            assert self.budget.used == 0, "called current although something waits"
        else:
            assert not self.sink.credit()
        if not self.quiet:
            return
        if not self.shown:
            return
        held = set(+self.process.held)
        credit = self.sink.credit()
        assert credit <= held, "credited with what it does not hold"
        if self.sink.trust() == "exact":
            assert credit == held, "called exact and is not"

    # -- a healthy network ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """From here on everything works; the stream has to come to rest."""
        for _ in range(400):
            self.connect()
            self.subscribe()
            self.drain(1000, 1000)
            self.grant([], answer=True, cut=None)
            self.drain(1000, 1000)
            self.judge()
            if self.quiet:
                return
            self.tick(0.6)
        raise AssertionError(f"does not settle: {self.stream.state}")

    def _whole_replay(self) -> bool:
        """The buffer holds every batch since number 0, none was burned, and all of it fits."""
        published = self.process.published
        whole = len(published) <= self.process.buffer_steps and len(published) == self.process.next
        return whole and self.budget.limit > sum(len(b.payload) for b in published.values())

    def heal(self) -> None:
        """A healthy network and time: the stream becomes live, and as exact as can be."""
        self.settle()
        assert self.stream.state is State.LIVE or self.stream.state is State.SILENT
        self.disconnect()
        for _ in range(4):
            self.settle()
            self.tick(PROBE_INTERVAL)
        self.settle()
        told = self.process.newest == self.process.next - 1
        can_be_shown = self.can_replay and told and len(self.process.published) <= self.process.buffer_steps
        assert self.shown or not can_be_shown
        if self.can_replay and self._whole_replay():
            assert self.sink.trust() == "exact", "a whole replay could be had"
        self.publish([2 * BLOCKS])
        self.settle()
        assert self.sink.trust() == "exact", "a clear makes everything good"
        epochs = self.epochs
        self.restart(unseen=False, ahead=0, cut=0)
        self.settle()
        self.publish([0])
        self.settle()
        assert self.shown
        assert self.sink.trust() == "exact", "a new epoch was followed from its beginning"
        assert self.stream.whole
        assert [told.seq for told in self.stretch] == [0]
        assert self.epochs == epochs + 1, "another process was shown"
        self.stream.close()
        assert self.budget.used == 0
