"""The event stream of one worker, as a state machine: no socket, no thread, no clock.

Whoever owns the sockets tells the stream what happened (``connected``, ``live``, ``replayed``, ``replay_ended``,
``tick`` …) and carries out, in order, the actions it gets back. Everything that decides what the index gets to see of
a worker is in this file.

What must always hold
    * Batches of one epoch are applied in ascending order, each at most once, and none is left out without a
      :class:`Forget` between its neighbours, unless its number never existed.
    * Batches of two epochs never meet: a :class:`NewEpoch` stands between them.
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
    holes, and lack its tail, since engines up to vLLM 0.32 drop replies to a slow reader. Hence rounds repeat, at most
    ``MAX_ROUNDS`` and ``replay_round_timeout`` in all, until one ends properly with nothing missing and either brought
    nothing new or overlaps the live batches of this connection: behind those, every further loss shows as a gap. A
    number that two rounds stepped over, while both its neighbours came in them, never existed (an engine burns the
    number of a batch that it can't encode).

    *Beyond repair.* The missing batch may hold any removal, so all that is known of the worker is forgotten and the
    stream goes on, no longer ``whole``, with the last unbroken run that waits.

    *Without a replay endpoint* a stream is whole only if its first number is 0, and any gap and any reconnect is beyond
    repair.

    *Tail probe.* The last batches before a pause may be dropped unseen, and a reconnect may go unnoticed. So one round
    is asked for by a stream that says nothing for ``SILENCE`` while its engine serves, and by every stream each
    ``PROBE_INTERVAL``; the first one ``SETTLING`` after a connection on which nothing has come live yet, since a
    publisher may take up a subscription a moment after the handshake, and after it answered the replay. A probe that
    fails changes nothing.
"""

from __future__ import annotations

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
MAX_RESTARTS: Final = 3
"""New epochs in a row that replays show on one connection, before replays are no longer believed: some publisher gives
its batches another timestamp each time it replays them."""
MAX_JUMPS: Final = 4096
"""Holes noted per round; an engine that has more of them is beyond repair anyway."""


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
    SILENCE = "the engine serves and publishes nothing"
    HEARD = "a batch came"


TRANSITIONS: Final[dict[State, dict[Cause, State]]] = {
    State.CONNECTING: {
        Cause.CONNECTED: State.CATCHING_UP,
    },
    State.CATCHING_UP: {
        Cause.CAUGHT_UP: State.LIVE,
        Cause.GAVE_UP: State.LIVE,
        Cause.RESTARTED: State.CATCHING_UP,
        Cause.DISCONNECTED: State.DOWN,
    },
    State.LIVE: {
        Cause.GAP: State.REPAIRING,
        Cause.SILENCE: State.SILENT,
        Cause.RESTARTED: State.CATCHING_UP,
        Cause.DISCONNECTED: State.DOWN,
    },
    State.REPAIRING: {
        Cause.CAUGHT_UP: State.LIVE,
        Cause.GAVE_UP: State.LIVE,
        Cause.RESTARTED: State.CATCHING_UP,
        Cause.DISCONNECTED: State.DOWN,
    },
    State.SILENT: {
        Cause.HEARD: State.LIVE,
        Cause.GAP: State.REPAIRING,
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
    """Drop all that is known of the worker; what follows is another epoch, from its number 0 on."""


class Relearn(NamedTuple):
    """Drop all that is known of the worker; what follows is the same epoch, from its number 0 on."""


class AskReplay(NamedTuple):
    """Open a replay round when its turn comes, and say so with ``replay_started``. There is never a second one."""

    start: int


class StopReplay(NamedTuple):
    """The open replay round is over, answered or not: nothing more of it may reach the stream."""


Action: TypeAlias = Apply | Forget | NewEpoch | Relearn | AskReplay | StopReplay


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
    epochs: int = 0
    """New epochs seen after the first."""


@dataclass(slots=True)
class _Round:
    asked: int
    anchored: bool
    """``asked`` is a number already applied, whose timestamp is known."""
    probe: bool
    started_at: float | None = None
    heard_at: float = 0.0
    previous: int | None = None
    """The last number that came in this round."""
    new: int = 0
    jumps: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of neighbours in this round with numbers missing between them."""


def stamp(payload: bytes) -> bytes:
    """What tells a batch from one of another epoch with the same number: its timestamp, read without decoding.

    Publishers write a batch as an array (one byte, since it has two or three items) whose first item is the time as
    float64: marker 0xCB and 8 bytes. In any other form the first 32 bytes are taken, which hold the time all the same;
    an engine replays the very bytes that it published.
    """
    return payload[1:10] if payload[1:2] == b"\xcb" else payload[:32]


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
    ) -> None:
        """
        Args:
            start: the first number wanted; above 0 only for who does not need what is below.
        """
        self.state = State.CONNECTING
        self.counts = Counts()
        self.whole = True
        """Every batch of this epoch, from ``start`` on, has been applied or is being fetched."""
        self.last: int | None = None
        """The last number applied in this epoch."""
        self._can_replay = can_replay
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
        self._stamps: list[tuple[int, bytes] | None] = [None] * REMEMBERED
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
        self._round: _Round | None = None
        self._rounds = 0
        self._barren = 0
        self._restarts = 0
        self._spent = 0.0
        """Seconds that the ended rounds of this repair took, their waiting for a turn apart."""
        self._jumps: set[tuple[int, int]] = set()
        """Jumps of the properly ended rounds of this repair."""
        self._absent: dict[int, int] = {}
        """Numbers that never existed, as first one → the existing number behind it."""

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
        self._seen = -1 if self.last is None else self.last  # what else was seen may be of another epoch
        self._restarts = 0
        self._settled = False
        self._heard_at = now
        if self._can_replay:
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
        self._go(Cause.DISCONNECTED)
        return self._flush()

    def live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch was published."""
        self.counts.received += 1
        self._heard_at = now
        if seq == self._next and self.state is State.LIVE:  # the common case, kept short
            self._live_last = self._seen = self.last = seq
            self._settled = True
            self._next = seq + 1
            self._stamps[seq % REMEMBERED] = (seq, stamp(payload))
            self.counts.applied += 1
            return [Apply(seq, payload)]
        if self.state in (State.CONNECTING, State.DOWN):  # read late; a replay brings it again
            self.counts.discarded += 1
            return []
        if self.state is State.SILENT:
            self._go(Cause.HEARD)
        known = self._known(seq)
        if known is not None and known == stamp(payload):
            self.counts.duplicates += 1
            self._note_live(seq)
        elif known is not None or seq <= self._live_last:
            self._restart((seq, payload))
        else:
            self._note_live(seq)
            self._accept_live(seq, payload)
        return self._flush()

    def replay_started(self, now: float) -> list[Action]:
        """The request of the open round has been sent."""
        if self._round is not None:
            self._round.started_at = self._round.heard_at = now
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
        known = self._known(seq)
        if known is not None and known != stamp(payload):
            self._restart_by_replay()
            return self._flush()
        if current.previous is None:
            self._begin_round_at(current, seq)
        elif seq > current.previous + 1 and len(current.jumps) < MAX_JUMPS:
            current.jumps.add((current.previous, seq))
        current.previous = seq
        assert self._next is not None
        self._drain()
        if known is None and seq >= self._next:
            current.new += 1
            self._seen = max(self._seen, seq)
            if seq == self._next:
                self._apply(seq, payload)
            else:
                self._hold(seq, payload)
        self._drain()
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
        elif self.state in (State.LIVE, State.SILENT):
            if served_at - self._heard_at >= SILENCE and self.state is State.LIVE:
                self._go(Cause.SILENCE)
            unproved = served_at > max(self._heard_at, self._probed_at)  # what it served since may have published
            mute = unproved and now - self._heard_at >= SILENCE
            settled = self._settled or self._live_first is not None
            pause = SILENCE if mute else PROBE_INTERVAL if settled else SETTLING
            if self._can_replay and now - self._probed_at >= pause:
                self._settled = True
                self._spent = 0.0
                self._ask(probe=True)
        return self._flush()

    def close(self) -> None:
        """Give the waiting batches' bytes back. The stream must not be used afterwards."""
        self._discard_waiting()

    # -- epochs and losses ----------------------------------------------------------------------------------------

    def _restart(self, first: tuple[int, bytes] | None = None) -> None:
        """Another process answers. ``first`` is the live batch that showed it, if one did."""
        self._close_round()
        self._discard_waiting()
        self._out.append(NewEpoch())
        self.counts.epochs += 1
        self.whole = True
        self.last = self._next = None
        self._start = 0
        self._verified = False
        self._stamps = [None] * REMEMBERED
        self._seen = self._live_last = -1
        self._live_first = None
        self._go(Cause.RESTARTED)
        if first is not None:
            self._note_live(first[0])
        if self._can_replay:
            if first is not None:
                self._hold(*first)
            self._begin_repair()
        elif first is not None:
            if first[0] != 0:
                self._forget()
            self._next = first[0]
            self._verified = True
            self._apply(*first)
            self._go(Cause.CAUGHT_UP if self.whole else Cause.GAVE_UP)

    def _restart_by_replay(self) -> None:
        self._restarts += 1
        self._restart()
        if self._restarts > MAX_RESTARTS:
            self._close_round()
            self._give_up()

    def _forget(self) -> None:
        self._out.append(Forget())
        self.counts.forgotten += 1
        self.whole = False

    def _pick_up_anywhere(self) -> None:
        """Go on with whatever number comes first."""
        self.last = self._next = None
        self._verified = True

    def _give_up(self) -> None:
        """What is missing can't be had: go on with the last unbroken run that waits."""
        behind = self._next
        self._forget()
        self._absent.clear()
        if self._seen in self._waiting:
            self._go_on_from(self._run_up_to(self._seen))
        elif self._seen >= (behind or 0):  # the newest was dropped, so no run that waits reaches the end
            self._go_on_from(self._seen + 1)
        elif not self._verified:
            self._pick_up_anywhere()
        if behind is not None and self._next is not None:
            self.counts.lost += self._next - behind
        self._verified = True
        self._drain()
        self._go(Cause.GAVE_UP)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _begin_repair(self) -> None:
        self._close_round()
        self._rounds = self._barren = 0
        self._spent = 0.0
        self._jumps.clear()
        self._absent.clear()
        self._ask()

    def _ask(self, *, probe: bool = False) -> None:
        start = self._start if self.last is None else self.last
        self._round = _Round(start, anchored=self.last is not None, probe=probe)
        self._rounds += 1
        self.counts.replays += 1
        self._out.append(AskReplay(start))

    def _close_round(self) -> None:
        if self._round is not None:
            self._round = None
            self._out.append(StopReplay())

    def _begin_round_at(self, current: _Round, seq: int) -> None:
        """The first number of a round shows what the engine still has. What is needed below it may wait already."""
        first = self._run_up_to(seq)
        if self._next is None:
            if first > current.asked:
                self.counts.lost += first - current.asked
                self._forget()
            elif not self.whole and first == 0:
                self._out.append(NewEpoch())  # partial until now: from here on everything is had, from 0 on
                self.whole = True
            self._go_on_from(first)
        elif seq > current.asked and (first > self._next or not self._verified):
            # The engine's buffer begins behind what is needed, or behind what could prove the epoch.
            self.counts.lost += max(0, first - self._next)
            self._forget()
            self._go_on_from(first)
        self._verified = True

    def _run_up_to(self, seq: int) -> int:
        """Where the unbroken run of waiting batches begins that leads up to ``seq``; without one, ``seq``."""
        while seq - 1 in self._waiting:
            seq -= 1
        return seq

    def _go_on_from(self, seq: int) -> None:
        self._discard_waiting(below=seq)
        self._next = seq

    def _end_round(self, current: _Round, now: float, *, proper: bool) -> None:
        self._close_round()
        self._probed_at = now
        assert current.started_at is not None
        self._spent += now - current.started_at
        if proper and current.previous is None:
            if current.anchored:  # it no longer knows its own last number: its history is another one
                self._restart_by_replay()
                return
            if self._next is None and self._start == 0:  # nothing published yet
                if not self.whole:
                    self._out.append(NewEpoch())
                    self.whole = True
                self._next = 0
            elif self._next is None and self._waiting:  # nothing from ``start`` on: what comes live will do
                self._next = min(self._waiting)
            self._verified = True
        if proper:
            for before, behind in current.jumps & self._jumps:
                self._absent[before + 1] = behind
            self._jumps |= current.jumps
        self._drain()
        if current.probe:
            if current.new:
                self._go(Cause.GAP)
                self._begin_repair()
            return
        if proper and not self._incomplete() and (current.new == 0 or self._joined()):
            self._restarts = 0
            self._go(Cause.CAUGHT_UP)
            return
        self._barren = 0 if current.new else self._barren + 1
        overtime = self._spent >= self._replay_round_timeout
        if self._rounds >= MAX_ROUNDS or self._barren >= MAX_BARREN_ROUNDS or overtime:
            self._give_up()
        else:
            self._ask()

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
        if not self._verified:
            self._hold(seq, payload)
        elif self._next is None:
            if seq == 0:
                self._out.append(NewEpoch())  # an epoch seen from its beginning, although there is no replay
                self.whole = True
            self._next = seq
            self._apply(seq, payload)
        elif seq < self._next:
            self.counts.duplicates += 1
        elif seq == self._next:
            self._apply(seq, payload)
            self._drain()
        else:
            self._hold(seq, payload)
            if self.state is State.LIVE:
                self.counts.missed += seq - self._next
                self._go(Cause.GAP)
                if self._can_replay:
                    self._begin_repair()
                else:
                    self._give_up()

    def _apply(self, seq: int, payload: bytes) -> None:
        self._out.append(Apply(seq, payload))
        self.counts.applied += 1
        self.last = seq
        self._next = seq + 1
        self._stamps[seq % REMEMBERED] = (seq, stamp(payload))

    def _drain(self) -> None:
        """Apply what waits, as far as nothing is missing."""
        while self._next is not None and self._verified:
            payload = self._waiting.pop(self._next, None)
            if payload is not None:
                self._budget.give(len(payload))
                self._apply(self._next, payload)
            elif self._next in self._absent:
                self._next = self._absent.pop(self._next)
            else:
                return

    def _hold(self, seq: int, payload: bytes) -> None:
        if self._budget.take(len(payload)):
            self._waiting[seq] = payload
        else:
            self.counts.over_budget += 1

    def _discard_waiting(self, below: int | None = None) -> None:
        for seq in [s for s in self._waiting if below is None or s < below]:
            self._budget.give(len(self._waiting.pop(seq)))
            self.counts.discarded += 1

    def _known(self, seq: int) -> bytes | None:
        """The timestamp of a batch that was applied a short while ago, or waits."""
        remembered = self._stamps[seq % REMEMBERED]
        if remembered is not None and remembered[0] == seq:
            return remembered[1]
        waiting = self._waiting.get(seq)
        return None if waiting is None else stamp(waiting)

    # -- the table ------------------------------------------------------------------------------------------------

    def _go(self, cause: Cause) -> None:
        self.state = TRANSITIONS[self.state][cause]

    def _flush(self) -> list[Action]:
        out, self._out = self._out, []
        return out
