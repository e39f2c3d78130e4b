"""One registration of a worker in the reader: its stream, its sockets, and what became of them.

Belongs to the reader's thread; :meth:`Followed.status` may be called from any. What must always hold: a worker may be
relied on (:attr:`Followed.usable`) only while its stream is current *and* its engine is awake *and* it has published
anything at all, or has had no reason to.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Final

from kvsync.events.contracts import Alarm, Progress, Target, Turn, WorkerStatus
from kvsync.events.decode import decode_batch
from kvsync.events.sockets import WorkerSockets
from kvsync.events.stream import State, Stream
from kvsync.events.types import AllBlocksClearedEvent, UndecodableBatch

RECONNECT_FIRST: Final = 0.1
RECONNECT_LAST: Final = 5.0
"""Pause before a lost connection is made anew: the first after one that lasted, doubled after each that didn't."""

_PUBLISHING: Final = (
    'publishing has to be on there (--kv-events-config with "enable_kv_cache_events": true and "publisher": "zmq")'
)
_LISTENING: Final = "with an endpoint that has * or :: for a host: with any other vLLM connects instead of listening"
_CACHING: Final = (
    "prefix caching not off, and the events endpoint not be the replay endpoint; prompts below one block publish "
    "nothing"
)


class Followed:
    """See the module.

    Args:
        before: the registration of the same worker that this one takes the place of.
        restored: the sink has what another replica's stream told up to where this one begins.
        curve: whether the connection uses CURVE.
    """

    def __init__(
        self,
        target: Target,
        stream: Stream,
        sockets: WorkerSockets,
        now: float,
        *,
        before: Followed | None = None,
        restored: bool = False,
        curve: bool = False,
    ) -> None:
        self.target = target
        self.stream = stream
        self.sockets = sockets
        self.errors: Counter[str] = Counter()
        self.connected = False
        self.connected_since: float | None = None
        self.connections = 0
        self.disconnections = 0
        self.reconnect_attempts = 0
        self.changed_at = now
        """When the connection was made or lost."""
        self.reconnect_at = now
        """When the live socket is opened, while it is not."""
        self.overdue_since = now
        """Since when a connection is waited for, or when the wait was last reported."""
        self.overdue = False
        self.refused = False
        """Somebody answered in place of the engine since it was last connected."""
        self.set_aside = False
        """Nothing is read of it while the sink tells what it knows of the worker: its sockets are not waited for."""
        self.logged: State | None = None
        self.judged: State | None = None
        """The state in which it was last asked whether the worker may be relied on; that can't change within one."""
        self.restored = restored
        """What is known began with another replica's, and nothing has spoken against that."""
        self.turn: Turn | None = None
        """Its turn at replaying, where it needs one."""
        self.caught_up_in: float | None = None
        """Seconds until its stream had caught up for the first time."""
        self._since = now
        self.applied: int | None = stream.last
        """The last number that the sink has taken."""
        self.relied_on = False
        """What the sink was last told: whether the worker may be relied on."""
        self.served_at = float("-inf")
        self.asleep: bool = before is not None and before.asleep
        self._outdated: float | None = math.inf if before is not None and before.outdated else None
        """Batches up to this number tell of a cache that is gone, and so do those behind it up to the next clear;
        infinity while it is open which number that is. ``None``: none do."""
        self._answers = 1
        """Replay rounds that must have been answered until one was asked for after the sleep was known."""
        self._behind: int | None = None
        """The last number that such a round left known: all that was published before the sleep is up to there."""
        self.overlooked = False
        """The clear must have come before it could be told from an earlier one."""
        self._pause = RECONNECT_FIRST
        self._curve = curve
        self._progress: Progress | None = None
        self._told = 0
        """Batches of ``_progress`` that the stream was told of."""
        self._telling = threading.Lock()
        """Guards these two, together with what the stream is told: nothing is counted twice."""

    @property
    def usable(self) -> bool:
        return not self.asleep and self.stream.current and not self.mute

    @property
    def mute(self) -> bool:
        """Its engine answers requests and has never published a batch: nothing is known of it."""
        never = self.stream.counts.applied == 0 and self.stream.last is None
        return self.stream.state is State.SILENT and never

    # -- what the sink takes by itself ----------------------------------------------------------------------------

    def progress(self, progress: Progress | None) -> None:
        """The sink takes batches by itself from now on, or no more; the stream was told of all before."""
        with self._telling:
            self._progress, self._told = progress, 0

    def took(self, count: int, last: int, times: bytes, now: float) -> None:
        """Tell the stream what the sink took."""
        with self._telling:
            self.stream.took(count, last, times, now)
            self.applied = last
            self._told += count

    # -- its connection -------------------------------------------------------------------------------------------

    def pause(self, now: float) -> None:
        """Open the live socket again after a while, later each time."""
        self.reconnect_at = now + self._pause
        self._pause = min(2 * self._pause, RECONNECT_LAST)

    def went_up(self, now: float) -> None:
        self.connected, self.connected_since, self.changed_at = True, time.time(), now
        self.connections += 1
        self.overdue = self.refused = False

    def went_down(self, now: float) -> None:
        if now - self.changed_at >= RECONNECT_LAST:
            self._pause = RECONNECT_FIRST
        self.connected, self.connected_since, self.changed_at = False, None, now
        self.disconnections += 1
        self.overdue_since = now

    def came_up(self, now: float) -> None:
        """Its stream has caught up."""
        if self.caught_up_in is None:
            self.caught_up_in = now - self._since

    # -- a cache that is gone -------------------------------------------------------------------------------------

    @property
    def outdated(self) -> bool:
        """The engine slept, and no clear came since: whatever its batches store was gone before they came."""
        return self._outdated is not None

    def fell_asleep(self) -> None:
        self.asleep = True
        self._outdated = math.inf
        self._answers = self.stream.counts.replays_answered + 2  # one may be under way
        self._behind = None
        self.caught_up()

    def caught_up(self) -> None:
        """Note how far the batches of before a sleep reach, once all that was published is known."""
        if self._outdated is None or not self.stream.current:
            return
        last = -1 if self.stream.last is None else self.stream.last
        if self._outdated == math.inf:
            self._outdated = last
        if self._behind is None and self.stream.counts.replays_answered >= self._answers:
            self._behind = last

    def numbered_anew(self) -> None:
        """What comes from now on may be of another process than the numbers noted."""
        self._behind = None
        self._answers = self.stream.counts.replays_answered + 1

    def renewed(self) -> None:
        """Another process answers, whose cache is what its batches say."""
        self._outdated = None

    def judge(self, seq: int, payload: bytes) -> None:
        """Look whether a batch has the clear that an engine publishes with its first step after a sleep.

        A batch that was certainly published after the sleep and has none is not the first one: then the clear came
        before, unnoticed among what was published while the stream was behind, or was lost.
        """
        if self._outdated is None:
            return
        if seq > self._outdated and self._clears(payload):
            self._outdated = None
        elif self._behind is not None and seq > self._behind:
            self._outdated = None
            self.overlooked = True

    def _clears(self, payload: bytes) -> bool:
        if b"AllBlocksCleared" not in payload:  # spares the decoding of nearly all
            return False
        try:
            batch = decode_batch(payload)
        except UndecodableBatch:
            return False
        if batch.data_parallel_rank not in (None, self.target.rank):  # the index drops it
            return False
        return any(isinstance(event, AllBlocksClearedEvent) for event in batch.events)

    # -- how it is doing ------------------------------------------------------------------------------------------

    def status(self) -> WorkerStatus:
        target, stream = self.target, self.stream
        alarm, problem = self._alarm()
        with self._telling:  # what the stream will be told is true already
            ahead = 0 if self._progress is None else self._progress.count - self._told
            counts = replace(
                stream.counts, received=stream.counts.received + ahead, applied=stream.counts.applied + ahead
            )
            applied = None if stream.last is None or self.applied is None else self.applied + ahead
        return WorkerStatus(
            engine=target.engine,
            name=target.source_pod,
            worker=target.worker,
            rank=target.rank,
            state=stream.state,
            whole=stream.whole,
            last_sequence=applied,
            endpoint=target.events,
            replay_endpoint=target.replay,
            connected=self.connected,
            connected_since=self.connected_since,
            asleep=self.asleep,
            restored=self.restored and self.caught_up_in is not None,
            caught_up_in=self.caught_up_in,
            counts=counts,
            connections=self.connections,
            disconnections=self.disconnections,
            reconnect_attempts=self.reconnect_attempts,
            errors=dict(self.errors + self.sockets.faults),
            alarm=alarm,
            problem=problem,
        )

    def _alarm(self) -> tuple[Alarm | None, str | None]:
        if self.overdue and self.refused:
            return "handshake", self.overdue_text()
        if self.overdue:
            return "no_connection", self.overdue_text()
        if self.mute:
            return "silent", self.silent_text()
        return None, None

    def overdue_text(self) -> str:
        """Why there is no connection, as far as that can be seen, with the mend."""
        told = f"no connection to {self.target.events} yet"
        if not self.refused and self.connections:
            return f"{told}: it was connected before; look whether the engine runs, and at the network"
        if not self.refused:
            return f"{told}: nobody listens there; {_PUBLISHING}, {_LISTENING}"
        if self._curve:
            return (
                f"{told}: the CURVE handshake fails; events.curve.server_key has to be the public key of the publisher "
                "there, and events.curve.public_key one that it admits"
            )
        return (
            f"{told}: something else answers there, without a ZMQ handshake; give the port of the events endpoint, and "
            "events.curve if the publisher wants CURVE"
        )

    def silent_text(self) -> str:
        """Why the engine publishes nothing, as far as that can be told from here, with the mend."""
        return (
            f"the engine serves requests and no KV event comes from {self.target.events}, so it is routed to by load; "
            f"{_PUBLISHING}, {_CACHING}"
        )


__all__ = ["RECONNECT_FIRST", "RECONNECT_LAST", "Followed"]
