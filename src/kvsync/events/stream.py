"""The event stream of one worker, as a state machine: no socket, no thread, no clock.

Whoever owns the sockets tells the stream what happened (``connected``, ``live``, ``replayed``, ``replay_ended``,
``tick`` …) and carries out, in order, the actions it gets back. Everything that decides what the index gets to see of
a worker is in this file.

What must always hold
    * Batches of one epoch are applied in ascending order, each at most once, and no number is left out without a
      :class:`Forget` between its neighbours.
    * Batches of two epochs never meet: a :class:`NewEpoch`, :class:`Relearn` or :class:`Forget` stands between them.
    * NewEpoch is emitted only where another process answers than before, and nothing of it was applied yet. Otherwise
      it is Relearn, and what others noted of the process stays: to keep a note of a process that is gone is sound, to
      lose one of a process that is there is not.
    * After a (re)connect nothing that came live is applied before a replay has shown which epoch answers now.
    * What waits is bounded by a byte budget shared by all streams; what exceeds it is dropped and counted, and is found
      missing later, like anything else that is missing.

Theory of operation
    An engine numbers its batches from 0, keeps the last few thousand, publishes each once, and replays on request all
    that it still has from a given number on, followed by an end marker. Nothing on the wire names the epoch: a
    restarted engine counts from 0 again, on the same port.

    *Rounds.* A replay round asks from the last number applied, or from 0 where nothing is applied yet. The last number
    is asked for although it is known, because its timestamp proves the epoch: another one, or the end marker without
    it, means that another process answers. So does a live number that goes back. A round that begins above what was
    asked for says that the engine's buffer no longer reaches back: what lies between is lost for good.

    A round ends at its end marker, or after ``replay_timeout`` without a frame. Even one that ends properly may have
    holes, and lack its tail, since engines up to vLLM 0.32 drop replies to a slow reader: not the first ones, as the
    queue to a reader that has just connected is empty (``UNDROPPED``). Hence rounds repeat, at most ``MAX_ROUNDS`` and
    ``replay_round_timeout`` in all, until one ends properly with nothing missing and either brought nothing new or
    overlaps the live batches of this connection: behind those, every further loss shows as a gap.

    A number that two rounds stepped over, while both its neighbours came in them, exists nowhere (an engine burns the
    number of a batch that it can't encode), if it can't have been dropped in both: no further round is needed, and what
    that batch held, removals perhaps, is lost. Likewise another process answers if rounds too short for a drop lack
    what this connection brought before they were asked for.

    *Beyond repair.* The missing batch may hold any removal, so all that is known of the worker is forgotten and the
    stream goes on, no longer ``whole``, with the last unbroken run that waits. Where none waits, it is forgotten again
    with the first batch that comes: others may have been missed before it. The stream stays so until another process
    answers, or the buffer turns out to reach back to number 0 still: that is tried with the next probes, unless a round
    has shown that it doesn't. (A clear makes good what the *index* knows; the stream hears nothing of it.)

    *Without a replay endpoint* a stream is whole only if its first number is 0, and any gap and any reconnect is beyond
    repair.

    *Tail probe.* The last batches before a pause may be dropped unseen, and a reconnect may go unnoticed. So one round
    is asked for by a stream that says nothing for ``SILENCE`` while its engine serves, and by every stream each
    ``PROBE_INTERVAL``; the first one ``SETTLING`` after a connection on which nothing has come live yet, since a
    publisher may take up a subscription a moment after the handshake, and after it answered the replay. A probe that
    fails changes nothing.

    *Restarts that nothing on the connection shows.* A publisher behind a forwarder may be replaced without a lost
    connection, and the first number heard of the new one may be just the next one. In one process timestamps rise with
    numbers, so a batch older than its predecessor is not applied before a round has proved the epoch; without a replay
    everything is forgotten. And no process is replaced in less than ``RESTART_TIME``: a batch that comes so much later
    than its predecessor is applied, and a probe asked at once from that predecessor. The same is done at a hint from
    elsewhere (``hint_restart``), from the oldest number remembered. What remains unseen: such a restart without a
    replay endpoint, with a buffer so small that it lacks the predecessor, with timestamps that are no float64, or with
    a clock that is behind the old one's by just the pause.

    *From a snapshot.* A stream may begin where another one stood (:class:`Position`), with what was known there: it is
    then as if it had lost its connection there, and the first round shows, as always, whether the same process still
    answers. What may be told on is a position behind which nothing is open: no gap, no round, no doubt.

    *Doubt.* Where somebody finds that what was applied contradicts the engine (``resync``), it is forgotten and the
    epoch is followed anew, from number 0.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, NamedTuple, TypeAlias

MAX_ROUNDS: Final = 5
MAX_BARREN_ROUNDS: Final = 3
"""Rounds in a row that bring nothing new and don't settle the matter: nobody answers, or the gap stays."""
SILENCE: Final = 10.0
PROBE_INTERVAL: Final = 60.0
SETTLING: Final = 1.0
REMEMBERED: Final = 256
"""Numbers whose timestamp is kept for comparison. The last one alone decides; the others only decide sooner."""
UNDROPPED: Final = 500
"""The first replies of a round, which no engine drops: ZMQ queues 1,000 messages to a peer unless told otherwise."""
MAX_RESTARTS: Final = 3
"""New epochs in a row on one connection without a batch on which its live and its replayed side agree. After that its
replays are no longer believed: they come from another engine, have no buffer behind them, or get other timestamps."""
MAX_JUMPS: Final = 4096
"""Holes noted per round; an engine that has more of them is beyond repair anyway."""
MAX_RELEARNS: Final = 3
"""Times that a stream which is not whole begins again from number 0 without becoming whole: each costs what it has."""
RESTART_TIME: Final = 5.0
"""Seconds. No engine ends and another one takes its place and publishes in less."""
MAX_DISORDERS: Final = 3
"""Times on one connection that a timestamp which goes back is taken for a sign: some publishers' say nothing."""


class State(StrEnum):
    CONNECTING = "connecting"
    CATCHING_UP = "catching_up"
    LIVE = "live"
    REPAIRING = "repairing"
    SILENT = "silent"
    DOWN = "down"


class Cause(Enum):
    """Why a stream changes its state."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    RESTARTED = "another process answers"
    CAUGHT_UP = "nothing is missing"
    GAVE_UP = "what is missing can't be had"
    GAP = "a number is missing"
    DOUBT = "a batch is older than its predecessor"
    ANEW = "followed anew from number 0"
    SILENCE = "the engine serves and publishes nothing"
    HEARD = "a batch came"


TRANSITIONS: Final[dict[State, dict[Cause, State]]] = {
    State.CONNECTING: {
        Cause.CONNECTED: State.CATCHING_UP,
    },
    State.CATCHING_UP: {
        Cause.CAUGHT_UP: State.LIVE,
        Cause.GAVE_UP: State.LIVE,
        Cause.ANEW: State.CATCHING_UP,
        Cause.RESTARTED: State.CATCHING_UP,
        Cause.DISCONNECTED: State.DOWN,
    },
    State.LIVE: {
        Cause.GAP: State.REPAIRING,
        Cause.DOUBT: State.REPAIRING,
        Cause.SILENCE: State.SILENT,
        Cause.ANEW: State.CATCHING_UP,
        Cause.RESTARTED: State.CATCHING_UP,
        Cause.DISCONNECTED: State.DOWN,
    },
    State.REPAIRING: {
        Cause.CAUGHT_UP: State.LIVE,
        Cause.GAVE_UP: State.LIVE,
        Cause.ANEW: State.CATCHING_UP,
        Cause.RESTARTED: State.CATCHING_UP,
        Cause.DISCONNECTED: State.DOWN,
    },
    State.SILENT: {
        Cause.HEARD: State.LIVE,
        Cause.GAP: State.REPAIRING,
        Cause.ANEW: State.CATCHING_UP,
        Cause.RESTARTED: State.CATCHING_UP,
        Cause.DISCONNECTED: State.DOWN,
    },
    State.DOWN: {
        Cause.CONNECTED: State.CATCHING_UP,
    },
}
"""A pair that is not in the table can't happen; meeting one raises ``KeyError``."""


class Apply(NamedTuple):
    """Hand this batch to the index."""

    seq: int
    payload: bytes


class Forget(NamedTuple):
    """Drop all that is known of the worker; what follows is sound but incomplete."""


class NewEpoch(NamedTuple):
    """Another process answers: drop all that is known of the worker; what follows is whole from number 0 on."""


class Relearn(NamedTuple):
    """Drop all that is known of the worker; what follows is whole from number 0 on, and may be of the same process."""


class AskReplay(NamedTuple):
    """Open a replay round when its turn comes, and say so with ``replay_started``. There is never a second one."""

    start: int


class StopReplay(NamedTuple):
    """The open replay round is over, answered or not: nothing more of it may reach the stream."""


Action: TypeAlias = Apply | Forget | NewEpoch | Relearn | AskReplay | StopReplay


class Position(NamedTuple):
    """How far an epoch was followed, from its number 0 on and with nothing left out."""

    seq: int
    """The last number applied."""
    mark: bytes
    """Its stamp."""


class Budget:
    """Bytes that may wait, over all streams together. Not thread-safe: one reader owns it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        self.used -= size


@dataclass(slots=True)
class Counts:
    """What happened on one stream since it was opened."""

    received: int = 0
    """Batches that came live."""
    replayed: int = 0
    """Batches that came by replay, known ones included."""
    applied: int = 0
    duplicates: int = 0
    """Batches that came live although they were known already."""
    missed: int = 0
    """Numbers found missing when a live batch came (most of them are repaired)."""
    lost: int = 0
    """Numbers given up as beyond repair."""
    over_budget: int = 0
    """Batches dropped because too much was waiting."""
    discarded: int = 0
    """Batches that waited and were dropped with their gap, their connection or their epoch."""
    replays: int = 0
    """Rounds asked for."""
    replays_answered: int = 0
    """Rounds that ended with their end marker."""
    replays_failed: int = 0
    """Rounds that ran out of time."""
    stray: int = 0
    """Replayed frames that belong to no open round, or stand out of order in it."""
    forgotten: int = 0
    relearned: int = 0
    """Times that a stream which was not whole began again from number 0."""
    epochs: int = 0
    """New epochs seen after the first."""
    resyncs: int = 0
    """Times that what was applied was doubted from outside."""
    disorders: int = 0
    """Batches older than their predecessor."""


@dataclass(slots=True)
class _Round:
    asked: int
    probe: bool = False
    anew: bool = False
    """A probe from number 0, although more is applied already: does the buffer reach back?"""
    doubt: tuple[int, bytes] | None = None
    hinted: bool = False
    """What a probe looks into: see the stream's ``_doubt`` and ``_hinted``."""
    mark: bytes | None = None
    """The stamp of ``asked``, where it is known: it may be remembered no more when the answer comes."""
    started_at: float | None = None
    heard_at: float = 0.0
    published: int = -1
    """The highest number that was known to exist when the request was sent: the engine must have it."""
    frames: int = 0
    previous: int | None = None
    """The last number that came in this round."""
    new: int = 0
    jumps: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of neighbours in this round with numbers missing between them."""
    sure: set[tuple[int, int]] = field(default_factory=set)
    """Those between which nothing can have been dropped."""

    def lacks(self) -> bool:
        """It is too short for dropped replies, and misses what the engine has published."""
        if self.frames >= UNDROPPED or self.published < self.asked:
            return False
        return self.previous is None or self.previous < self.published


def stamp(payload: bytes) -> bytes:
    """What tells a batch from one of another epoch with the same number: its timestamp, read without decoding.

    Publishers write a batch as an array (one byte, since it has two or three items) whose first item is the time as
    float64: marker 0xCB and 8 bytes. In any other form the first 32 bytes are taken, which hold the time all the same;
    an engine replays the very bytes that it published.
    """
    return payload[1:10] if payload[1:2] == b"\xcb" else payload[:32]


_FLOAT64: Final = struct.Struct(">d").unpack_from


def _time(mark: bytes) -> float:
    """The time in a batch's stamp, seconds by the engine's clock; without one NaN, for which no comparison holds."""
    return float(_FLOAT64(mark, 1)[0]) if len(mark) == 9 and mark[0] == 0xCB else math.nan


def _goes_back(before: bytes, behind: bytes) -> bool:
    return _time(behind) < _time(before)


class Marks:
    """Numbers and their stamps, of each remainder by ``REMEMBERED`` the one noted last."""

    def __init__(self) -> None:
        self._ring: list[tuple[int, bytes] | None] = [None] * REMEMBERED
        self._run = b""
        """Times not yet in the ring, 8 bytes each: most are never looked at, and objects cost as much as a message."""
        self._behind = 0
        """The number behind the last of them."""

    def note(self, seq: int, mark: bytes) -> None:
        if self._run:
            self._unroll()
        self._ring[seq % REMEMBERED] = (seq, mark)

    def note_run(self, last: int, times: bytes) -> None:
        """Numbers up to ``last``, whose stamps are float64 times; of a longer run the last ``REMEMBERED`` will do."""
        if self._run and last + 1 - len(times) // 8 == self._behind:
            times = self._run + times
        elif self._run:
            self._unroll()
        self._run, self._behind = times[-8 * REMEMBERED :], last + 1

    def of(self, seq: int) -> bytes | None:
        self._unroll()
        mark = self._ring[seq % REMEMBERED]
        return mark[1] if mark is not None and mark[0] == seq else None

    def all(self) -> list[tuple[int, bytes]]:
        self._unroll()
        return [mark for mark in self._ring if mark is not None]

    def drop_behind(self, seq: int) -> None:
        self._unroll()
        self._ring = [mark if mark is not None and mark[0] <= seq else None for mark in self._ring]

    def clear(self) -> None:
        self._ring, self._run = [None] * REMEMBERED, b""

    def _unroll(self) -> None:
        first = self._behind - len(self._run) // 8
        for at in range(0, len(self._run), 8):
            seq = first + at // 8
            self._ring[seq % REMEMBERED] = (seq, b"\xcb" + self._run[at : at + 8])
        self._run = b""


class Stream:
    """One worker's stream. See the module's text.

    Every input method returns the actions to carry out, in order. ``now`` is any monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        can_replay: bool,
        budget: Budget,
        replay_timeout: float,
        replay_round_timeout: float,
        start: int = 0,
        since: Position | None = None,
    ) -> None:
        """
        Args:
            start: the first number wanted; above 0 only for who does not need what is below.
            since: where another stream stood, whose batches up to there the sink has. Not with a ``start``.
        """
        self.state = State.CONNECTING
        self.counts = Counts()
        self.whole = True
        """Every batch of this epoch, from ``start`` on, has been applied or is being fetched."""
        self.last: int | None = None
        """The last number applied in this epoch, unless that was forgotten and nothing is applied since."""
        self._can_replay = can_replay
        self._replays = can_replay
        """Replays are believed on this connection."""
        self._budget = budget
        self._replay_timeout = replay_timeout
        self._replay_round_timeout = replay_round_timeout
        self._start = start
        self._out: list[Action] = []
        self._next: int | None = None
        """The number to apply next; ``None`` while it is open where the epoch is picked up."""
        self._verified = False
        """The epoch that answers now is the one that ``last`` belongs to."""
        self._waiting: dict[int, bytes] = {}
        self._marks = Marks()
        """Of one process; it is that of ``last``, where there is one."""
        self._anchor: tuple[int, bytes] | None = None
        """The last number applied of that process before ``last`` was given up, and its stamp."""
        self._at = math.nan
        """When the last batch applied was published, by the engine's clock."""
        self._seen = -1
        """The highest number known to exist, dropped ones included."""
        self._live_last = -1
        """The last number that came live on this connection: the publisher never goes back."""
        self._live_first: int | None = None
        """The first number that came live on this connection."""
        self._heard_at = 0.0
        self._probed_at = 0.0
        self._settled = False
        """The publisher is known to have taken up this connection's subscription, or was asked once more."""
        self._doubt: tuple[int, bytes] | None = None
        """A number, and its stamp, behind which another process may have taken over: the next probe begins there."""
        self._hinted = False
        """Another process may have taken over at some time: the next probe begins as early as can be compared."""
        self._reaches_back = True
        """The engine may still have this epoch's number 0, as far as its replays have shown."""
        self._relearns = 0
        self._round: _Round | None = None
        self._rounds = 0
        self._barren = 0
        self._lacking = False
        """A round of this repair lacked what the engine has published."""
        self._restarts = 0
        self._disorders = 0
        self._spent = 0.0
        """Seconds that the ended rounds of this repair took, their waiting for a turn apart."""
        self._jumps: set[tuple[int, int]] = set()
        """Jumps of the properly ended rounds of this repair."""
        self._sure: set[tuple[int, int]] = set()
        """Those of them between which nothing can have been dropped."""
        self._absent: dict[int, int] = {}
        """Numbers that exist nowhere, as first one → the existing number behind it."""
        if since is not None:
            self.last, self._next, self._at = since.seq, since.seq + 1, _time(since.mark)
            self._marks.note(*since)

    @property
    def position(self) -> Position | None:
        """Where another stream can go on from; ``None`` while that is open, or where something was lost."""
        settled = self._round is None and self._doubt is None and not self._hinted
        if not self.current or not self.whole or self._start or self.last is None or not settled:
            return None
        return Position(self.last, self._stamp_of_last())

    @property
    def current(self) -> bool:
        """Everything that the worker is known to have published is applied. While a connection is down, a gap is being
        repaired or a replay runs, a removal may be missing: then nobody may rely on what was applied."""
        return self.state is State.LIVE or self.state is State.SILENT

    # -- inputs ---------------------------------------------------------------------------------------------------

    def connected(self, now: float) -> list[Action]:
        """The live socket has shaken hands. Whatever it received before must have been handed over, or thrown away."""
        self._go(Cause.CONNECTED)
        self._live_first = None
        self._live_last = -1
        # What else was seen may be of another epoch.
        self._seen = -1 if self.last is None else self.last
        self._next = None if self.last is None else self.last + 1
        self._restarts = self._disorders = self._relearns = 0
        self._settled = False
        self._heard_at = now
        if self._replays:
            self._begin_repair()
        else:
            self._forget()
            self._pick_up_anywhere()
            self._go(Cause.GAVE_UP)
        return self._flush()

    def disconnected(self, now: float) -> list[Action]:
        """The live socket has lost its connection; it connects again by itself."""
        self._close_round()
        self._discard_waiting()  # a replay brings it again, from whoever answers then
        self._verified = False
        self._replays = self._can_replay
        self._go(Cause.DISCONNECTED)
        return self._flush()

    def live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch was published."""
        self.counts.received += 1
        self._heard_at = now
        mark = stamp(payload)
        if seq == self._next and self.state is State.LIVE:
            at = _time(mark)
            if 0.0 <= at - self._at < RESTART_TIME:  # the common case, kept short
                self._live_last = self._seen = self.last = seq
                if self._live_first is None:
                    self._live_first = seq
                self._next = seq + 1
                self._marks.note(seq, mark)
                self._at = at
                self.counts.applied += 1
                return [Apply(seq, payload)]
        if self.state in (State.CONNECTING, State.DOWN):  # read late; a replay brings it again
            self.counts.discarded += 1
            return []
        if self.state is State.SILENT:
            self._go(Cause.HEARD)
        known = self._known(seq, mark)
        if known == mark:
            self.counts.duplicates += 1
            self._note_live(seq)
        elif known is not None or seq <= self._live_last:
            # What it contradicts may be older than what was applied last, unless it is that, or remembered with it.
            remembered = seq not in self._waiting and self._remembered(seq) is not None
            apart = remembered if self.last is None else self._seen <= self.last
            self._restart((seq, payload), mixed=not apart)
        else:
            self._note_live(seq)
            self._accept_live(seq, payload)
        self._look()
        return self._flush()

    @property
    def expects(self) -> tuple[int, float] | None:
        """The next number and the time of the last batch, if a live batch of that number which is no older, and less
        than ``RESTART_TIME`` younger, is to be applied and nothing else is to be done; else ``None``.

        Whoever has such batches applied elsewhere tells it with :meth:`took` before anything else.
        """
        if self.state is not State.LIVE or self._next is None or math.isnan(self._at):
            return None
        return self._next, self._at

    def took(self, count: int, last: int, times: bytes, now: float) -> None:
        """``count`` batches up to number ``last`` came live, each as :attr:`expects` wants it, and were applied.

        ``times``: what stood in the last of them for float64 times, ``REMEMBERED`` if there were as many.
        """
        self.counts.received += count
        self.counts.applied += count
        self._heard_at = now
        if self._live_first is None:
            self._live_first = last + 1 - count
        self._live_last = self._seen = self.last = last
        self._next = last + 1
        self._marks.note_run(last, times)
        self._at = _time(b"\xcb" + times[-8:])

    def replay_started(self, now: float) -> list[Action]:
        """The request of the open round has been sent."""
        if self._round is not None:
            self._round.started_at = self._round.heard_at = now
            self._round.published = self._seen
        return self._flush()

    def replayed(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch came in the open round."""
        current = self._round
        if current is None or current.started_at is None:
            self.counts.stray += 1
            return []
        current.heard_at = now
        if seq < current.asked or (current.previous is not None and seq <= current.previous):
            self.counts.stray += 1
            return []
        self.counts.replayed += 1
        mark = stamp(payload)
        known = current.mark if seq == current.asked else None
        if known is None:
            known = self._known(seq, mark)
        if known is not None and known != mark:
            self._restart(mixed=seq in self._waiting or (self.last is not None and seq != self.last))
            return self._flush()
        if known is not None and self._live_first is not None and self._live_first <= seq <= self._live_last:
            self._restarts = 0  # both sides are of one process
        current.frames += 1
        if current.previous is None:
            self._begin_round_at(current, seq)
            if current.probe and current.anew:  # the buffer does not reach back, and the rest is of no use
                self._close_round()
                self._probed_at = now
                self._look()
                return self._flush()
        elif seq > current.previous + 1 and len(current.jumps) < MAX_JUMPS:
            current.jumps.add((current.previous, seq))
            if current.frames <= UNDROPPED:
                current.sure.add((current.previous, seq))
        current.previous = seq
        self._drain()
        assert self._next is not None
        if seq >= self._next:
            self._seen = max(self._seen, seq)
            if seq not in self._waiting:
                current.new += 1
            if seq == self._next:
                self._drop_waiting(seq)
                self._apply(seq, payload)
            elif seq not in self._waiting:
                self._hold(seq, payload)
        self._drain()
        if current.probe and self._incomplete():
            self._turn_to_repair(current, Cause.GAP)
        return self._flush()

    def replay_ended(self, now: float) -> list[Action]:
        """The open round's end marker came."""
        if self._round is None or self._round.started_at is None:
            self.counts.stray += 1
        else:
            self.counts.replays_answered += 1
            self._end_round(self._round, now, proper=True)
        return self._flush()

    def tick(self, now: float, served_at: float = float("-inf")) -> list[Action]:
        """Time goes by. ``served_at`` is when the engine last answered a request, as far as anybody saw."""
        current = self._round
        if current is not None:
            if current.started_at is None:
                return []
            spent = self._spent + now - current.started_at
            if now - current.heard_at >= self._replay_timeout or spent >= self._replay_round_timeout:
                self.counts.replays_failed += 1
                self._end_round(current, now, proper=False)
        elif self.current:
            if served_at - self._heard_at >= SILENCE and self.state is State.LIVE:
                self._go(Cause.SILENCE)
            unproved = served_at > max(self._heard_at, self._probed_at)  # what it served since may have published
            mute = unproved and now - self._heard_at >= SILENCE
            settled = self._settled or self._live_first is not None
            pause = SILENCE if mute else PROBE_INTERVAL if settled else SETTLING
            if self._replays and now - self._probed_at >= pause:
                self._probe()
        return self._flush()

    def resync(self, now: float) -> list[Action]:
        """Somebody doubts what was applied: forget it, and follow the epoch anew from its number 0."""
        self.counts.resyncs += 1
        if self.state is not State.CONNECTING or self.last is not None:  # else nothing was applied
            self._close_round()
            self._forget()
            if self._replays:
                self._discard_waiting()
                self._drop_applied()
                if self.state not in (State.CONNECTING, State.DOWN):
                    self._verified = False  # what comes live waits
                    self._go(Cause.ANEW)
                    self._begin_repair()
        return self._flush()

    def hint_restart(self, now: float) -> list[Action]:
        """The engine's process may be another one than before: look at once.

        Without replays, and without a connection, there is nothing to do: what ends a process ends its connection.
        """
        if self._replays and self.state not in (State.CONNECTING, State.DOWN):
            self._hinted = True
            self._look()
        return self._flush()

    def close(self) -> None:
        """Give the waiting batches' bytes back. The stream must not be used afterwards."""
        self._discard_waiting()

    # -- epochs and losses ----------------------------------------------------------------------------------------

    def _restart(self, first: tuple[int, bytes] | None = None, *, mixed: bool = False) -> None:
        """Another process answers.

        ``first``: the live batch that showed it, if one did. ``mixed``: some of what was applied may be the new
        process's, and so may be what was noted since.
        """
        self._close_round()
        self._discard_waiting()
        self._out.append(Relearn() if mixed else NewEpoch())
        self.counts.epochs += 1
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            self._replays = False
        self.whole = True
        self.last = self._next = None
        self._start = 0
        self._verified = False
        self._forget_process()
        self._seen = self._live_last = -1
        self._live_first = None
        self._go(Cause.RESTARTED)
        if first is not None:
            self._note_live(first[0])
        if self._replays:
            if first is not None:
                self._hold(*first)
            self._begin_repair()
        elif first is None:
            self._give_up()
        else:
            if first[0] != 0:
                self._forget()
            self._next = first[0]
            self._verified = True
            self._apply(*first)
            self._go(Cause.CAUGHT_UP if self.whole else Cause.GAVE_UP)

    def _forget(self) -> None:
        self._out.append(Forget())
        self.counts.forgotten += 1
        self.whole = False
        self._drop_doubts()

    def _relearn(self) -> None:
        self._out.append(Relearn())
        self.counts.relearned += 1
        self.whole = True
        self._drop_doubts()

    def _drop_doubts(self) -> None:
        """Nothing is known that could be doubted."""
        self._at = math.nan
        self._doubt = None
        self._hinted = False

    def _forget_process(self) -> None:
        """What comes from now on may be of another process than what is remembered."""
        self._marks.clear()
        self._anchor = None
        self._reaches_back = True
        self._relearns = 0
        self._drop_doubts()

    def _drop_applied(self) -> None:
        """What was applied no longer counts; its last number still tells the process."""
        if self.last is not None:
            self._anchor = self.last, self._stamp_of_last()
            self._marks.drop_behind(self.last)
        self.last = self._next = None

    def _pick_up_anywhere(self) -> None:
        """Go on with whatever number comes first."""
        self._drop_applied()
        self._verified = True

    def _give_up(self) -> None:
        """What is missing can't be had: go on with the last unbroken run that waits."""
        behind = self._next
        self._forget()
        self._absent.clear()
        if not self._verified:
            self._pick_up_anywhere()
            self._seen = self._live_last  # the rest may be of another process
        if self._seen in self._waiting:
            self._go_on_from(self._run_up_to(self._seen))
        elif self._seen >= (self._next or 0):  # the newest was dropped, so no run that waits reaches the end
            self._go_on_from(self._seen + 1)
        if self.last is None and self._next is not None:
            self._forget_process()
        if behind is not None and self._next is not None:
            self.counts.lost += max(0, self._next - behind)
        self._drain()
        self._go(Cause.GAVE_UP)

    def _distrust(self, seq: int, payload: bytes) -> None:
        """A live batch contradicts the order of time: it may be another process's."""
        self._disorders += 1
        self.counts.disorders += 1
        if self._replays:
            self.counts.discarded += 1  # the replay brings it, and what waits
            self._discard_waiting()
            self._verified = False
            if self.state is State.LIVE:
                self._go(Cause.DOUBT)
            self._begin_repair()
        else:
            self._forget()
            self._forget_process()
            self._next = seq
            self._apply(seq, payload)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _begin_repair(self) -> None:
        self._close_round()
        self._start_repair()
        self._ask(_Round(self._start if self.last is None else self.last))

    def _start_repair(self) -> None:
        self._rounds = self._barren = 0
        self._lacking = False
        self._spent = 0.0
        self._jumps.clear()
        self._sure.clear()
        self._absent.clear()

    def _turn_to_repair(self, current: _Round, cause: Cause) -> None:
        """A probe found something amiss: it is the first round of a repair."""
        current.probe = False
        self._start_repair()
        self._rounds = 1
        self._go(cause)

    def _probe(self) -> None:
        last = self.last
        current = _Round(self._start if last is None else last, probe=True, doubt=self._doubt, hinted=self._hinted)
        if last is not None:
            if not self.whole and self._reaches_back and self._start == 0 and self._relearns < MAX_RELEARNS:
                current.asked = 0
                current.anew = True
            else:
                marks = [m for m in self._marks.all() if self._hinted and last - REMEMBERED < m[0] < last]
                if self._doubt is not None:
                    marks.append(self._doubt)
                if marks:
                    current.asked, current.mark = min(marks)
        self._settled = True
        self._spent = 0.0
        self._doubt = None
        self._hinted = False
        self._ask(current)

    def _look(self) -> None:
        """Probe at once if there is a reason."""
        if (self._hinted or self._doubt is not None) and self._round is None and self.current and self._replays:
            self._probe()

    def _ask(self, current: _Round) -> None:
        if current.mark is None:
            current.mark = self._remembered(current.asked)
        self._round = current
        self._rounds += 1
        self.counts.replays += 1
        self._out.append(AskReplay(current.asked))

    def _close_round(self, *, answered: bool = False) -> None:
        current, self._round = self._round, None
        if current is not None:
            self._out.append(StopReplay())
            if current.probe and not answered:  # so another one has to settle what it was asked for
                self._doubt = self._doubt if current.doubt is None else current.doubt
                self._hinted |= current.hinted

    def _begin_round_at(self, current: _Round, seq: int) -> None:
        """The first number of a round shows what the engine still has."""
        if current.asked == self._start and seq > self._start:
            self._reaches_back = False
        if current.anew and self._reaches_back:
            self._relearns += 1
            self._drop_applied()
            self._turn_to_repair(current, Cause.ANEW)
        # What is needed below it may wait already; that it is of the process that answers, its overlap shows.
        first = self._run_up_to(seq) if seq in self._waiting else seq
        if self.last is None:
            if first > self._start:
                self.counts.lost += first - self._start
                self._forget()  # even if nothing was applied: see _pick_up
                self._forget_process()
                self._reaches_back = False
            elif not self.whole:
                self._relearn()
            self._go_on_from(first)
        elif seq > self.last:  # the engine's buffer begins behind what could prove the epoch
            assert self._next is not None
            self.counts.lost += max(0, first - self._next)
            self._forget()
            if not self._verified:
                self._forget_process()
            if current.probe:
                self._turn_to_repair(current, Cause.GAP)
            self._go_on_from(first)
        self._verified = True

    def _run_up_to(self, seq: int) -> int:
        """Where the unbroken run of waiting batches begins that leads up to ``seq``, which waits."""
        while seq - 1 in self._waiting and not _goes_back(stamp(self._waiting[seq - 1]), stamp(self._waiting[seq])):
            seq -= 1
        return seq

    def _go_on_from(self, seq: int) -> None:
        self._discard_waiting(below=seq)
        self._next = seq

    def _end_round(self, current: _Round, now: float, *, proper: bool) -> None:
        self._close_round(answered=proper)
        self._probed_at = now
        assert current.started_at is not None
        self._spent += now - current.started_at
        lacking = proper and current.lacks()
        if proper and current.previous is None:
            if self.last is not None or self._anchor is not None:
                # It no longer knows its own last number: its history is another one.
                self._restart(mixed=self.last is not None and current.asked < self.last)
                return
            if not lacking:
                self._begin_without_history()
        if proper:
            for before, behind in current.jumps & self._jumps & (current.sure | self._sure):
                self._absent[before + 1] = behind
            self._jumps |= current.jumps
            self._sure |= current.sure
        self._drain()
        if current.probe:
            self._end_probe(current, proper=proper, lacking=lacking)
            return
        if proper and not lacking and not self._incomplete() and (current.new == 0 or self._joined()):
            self._catch_up()
            return
        self._lacking |= lacking
        self._barren = 0 if current.new else self._barren + 1
        overtime = self._spent >= self._replay_round_timeout
        if self._rounds < MAX_ROUNDS and self._barren < MAX_BARREN_ROUNDS and not overtime:
            self._ask(_Round(self._start if self.last is None else self.last))
        elif self._lacking:
            self._restart(mixed=True)
        else:
            self._give_up()

    def _begin_without_history(self) -> None:
        """A whole round brought nothing."""
        self._verified = True
        if self._next is not None:
            return
        if self._start == 0:  # nothing published yet
            if not self.whole:
                self._relearn()
            self._next = 0
        elif self._waiting:  # nothing from ``start`` on: what comes live will do
            self._next = min(self._waiting)

    def _end_probe(self, current: _Round, *, proper: bool, lacking: bool) -> None:
        if lacking:
            self._restart(mixed=True)
        elif current.new and not (proper and current.frames < UNDROPPED):
            self._go(Cause.GAP)
            self._begin_repair()
        elif proper:
            self._look()

    def _catch_up(self) -> None:
        if self._next is not None:
            self._discard_waiting(below=self._next)
        if self.whole:
            self._relearns = 0
        self._go(Cause.CAUGHT_UP)
        self._look()

    def _incomplete(self) -> bool:
        return not self._verified or (self._next is not None and self._seen >= self._next)

    def _joined(self) -> bool:
        """What is applied reaches into the live batches of this connection."""
        return self._live_first is not None and self._next is not None and self._live_first < self._next

    # -- batches --------------------------------------------------------------------------------------------------

    def _note_live(self, seq: int) -> None:
        self._live_last = max(self._live_last, seq)
        self._seen = max(self._seen, seq)
        if self._live_first is None:
            self._live_first = seq

    def _accept_live(self, seq: int, payload: bytes) -> None:
        mark = stamp(payload)
        if not self._verified:
            self._hold(seq, payload)
        elif self._next is None:
            self._pick_up(seq, payload)
        elif seq < self._next:
            # Too old to be remembered, it seems. But what is older by its number can't be younger by its time.
            if self._disorders < MAX_DISORDERS and _time(mark) > self._at:
                self._distrust(seq, payload)
            else:
                self.counts.duplicates += 1
        elif seq == self._next:
            if self._disorders < MAX_DISORDERS and _time(mark) < self._at:
                self._distrust(seq, payload)
            else:
                self._doubt_after_pause(mark)
                self._apply(seq, payload)
                self._drain()
        else:
            self._hold(seq, payload)
            if self.state is State.LIVE:
                self.counts.missed += seq - self._next
                self._go(Cause.GAP)
                if self._replays:
                    self._begin_repair()
                else:
                    self._give_up()

    def _doubt_after_pause(self, mark: bytes) -> None:
        """``mark`` is that of the next batch to apply, which came live."""
        if self._doubt is None and self.last is not None and _time(mark) - self._at >= RESTART_TIME:
            self._doubt = self.last, self._stamp_of_last()

    def _pick_up(self, seq: int, payload: bytes) -> None:
        """The first batch since everything was forgotten."""
        if seq == 0 and self._anchor is not None:
            self._restart((seq, payload))  # its number 0 was published before
            return
        if not self.whole:
            if seq == 0:
                self._relearn()  # an epoch seen from its beginning, although there is no replay
            else:
                self._forget()  # nothing was applied; but what answers told meanwhile may have gone with a batch missed
        self._forget_process()
        self._next = seq
        self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        mark = stamp(payload)
        self._out.append(Apply(seq, payload))
        self.counts.applied += 1
        self.last = seq
        self._next = seq + 1
        self._marks.note(seq, mark)
        self._at = _time(mark)

    def _drain(self) -> None:
        """Apply what waits, as far as nothing is missing."""
        while self._next is not None and self._verified:
            payload = self._waiting.get(self._next)
            if payload is not None:
                if self._disorders < MAX_DISORDERS and _time(stamp(payload)) < self._at:
                    # It came before the process that answers now, or the clock was set; a replay tells.
                    self._disorders += 1
                    self.counts.disorders += 1
                    self._discard_waiting()
                    return
                if self._live_first is not None and self._next >= self._live_first:
                    self._doubt_after_pause(stamp(payload))
                self._drop_waiting(self._next)
                self._apply(self._next, payload)
            elif self._next in self._absent:
                self._step_over(self._absent.pop(self._next))
            else:
                return

    def _step_over(self, behind: int) -> None:
        """The engine has no batches from the next number up to this one: what was in them is lost, and no replay from
        number 0 can be whole."""
        assert self._next is not None
        self.counts.lost += behind - self._next
        self._forget()
        self._reaches_back = False
        self._next = behind

    def _hold(self, seq: int, payload: bytes) -> None:
        if self._budget.take(len(payload)):
            self._waiting[seq] = payload
        else:
            self.counts.over_budget += 1

    def _drop_waiting(self, seq: int) -> None:
        """It waits no more, if it did."""
        payload = self._waiting.pop(seq, None)
        if payload is not None:
            self._budget.give(len(payload))

    def _discard_waiting(self, below: int | None = None) -> None:
        for seq in [s for s in self._waiting if below is None or s < below]:
            self._drop_waiting(seq)
            self.counts.discarded += 1

    def _known(self, seq: int, mark: bytes) -> bytes | None:
        """The stamp of a batch that was applied a short while ago, or waits; ``mark`` is what comes with its number."""
        if seq in self._waiting:
            return stamp(self._waiting[seq])
        known = self._remembered(seq)
        if known is None or known == mark or self.last is None or seq <= self.last:
            return known
        # Another process took over before the epoch was taken up anew: all that was applied since is of one.
        self._marks.drop_behind(self.last)
        self._anchor = None
        return None

    def _stamp_of_last(self) -> bytes:
        mark = None if self.last is None else self._remembered(self.last)
        assert mark is not None
        return mark

    def _remembered(self, seq: int) -> bytes | None:
        mark = self._marks.of(seq)
        if mark is None and self._anchor is not None and self._anchor[0] == seq:
            mark = self._anchor[1]
        return mark

    # -- the table ------------------------------------------------------------------------------------------------

    def _go(self, cause: Cause) -> None:
        self.state = TRANSITIONS[self.state][cause]

    def _flush(self) -> list[Action]:
        out, self._out = self._out, []
        return out
