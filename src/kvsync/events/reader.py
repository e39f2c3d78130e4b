"""The one thread that reads all streams and feeds the sink.

What must always hold
    * All sockets, streams and sink calls belong to this thread. Others hand it commands, which run between two drains
      in the order given; hence whatever was read for an earlier registration of a worker is with the sink, or gone,
      before the next one begins, and nothing of it arrives later.
    * One turn takes a bounded number of messages and bytes, shared fairly among the sockets that have any, and hands
      them to the sink in one ``apply_many`` (more than one only where a worker must be forgotten in between).
    * Whatever an engine sends, or fails to send, costs its own stream only.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import zmq

from kvsync.config.model import EventsSettings
from kvsync.events.contracts import Observer, ReaderEnded, Sink, Target, Timer, WorkerStatus
from kvsync.events.decode import decode_batch
from kvsync.events.sockets import END, Link, WorkerSockets
from kvsync.events.stream import Action, Apply, AskReplay, Budget, Forget, NewEpoch, State, StopReplay, Stream
from kvsync.events.types import EventBatch, SkippedEvent, UndecodableBatch
from kvsync.telemetry.logs import Throttle

log = logging.getLogger("kvsync.events")

DRAIN_BYTES: Final = 32 << 20
"""What one turn reads at most, beyond the message that reaches it."""
RECONNECT_FIRST: Final = 0.1
RECONNECT_LAST: Final = 5.0
"""Pause before a lost connection is made anew: the first after one that lasted, doubled after each that didn't."""
SAID_AGAIN: Final = 1.0
"""Seconds in which one thing is said once of one worker: an engine that counts to and fro must not fill the disk."""
OVERDUE_AGAIN: Final = 30.0
"""A stream that stays without a connection is reported to the locator each so many seconds."""


class _Followed:
    """One registration of a worker."""

    def __init__(self, target: Target, stream: Stream, sockets: WorkerSockets, now: float) -> None:
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
        self.pause = RECONNECT_FIRST
        self.overdue_since = now
        """Since when a connection is waited for, or when the wait was last reported."""
        self.overdue = False
        self.refused = False
        """Somebody answered in place of the engine since it was last connected."""
        self.logged: State | None = None
        self.applied: int | None = None
        """The last number that the sink has taken."""
        self.current = False
        """What the sink was last told: whether the worker may be relied on."""
        self.served_at = float("-inf")

    def status(self) -> WorkerStatus:
        target, stream = self.target, self.stream
        return WorkerStatus(
            engine=target.engine,
            name=target.source_pod,
            worker=target.worker,
            rank=target.rank,
            state=stream.state,
            whole=stream.whole,
            last_sequence=None if stream.last is None else self.applied,
            endpoint=target.events,
            replay_endpoint=target.replay,
            connected=self.connected,
            connected_since=self.connected_since,
            counts=replace(stream.counts),
            connections=self.connections,
            disconnections=self.disconnections,
            reconnect_attempts=self.reconnect_attempts,
            errors=dict(self.errors + self.sockets.faults),
        )


class Reader:
    """Reads all streams in a thread of its own, from :meth:`start` to :meth:`stop`.

    Args:
        relocate: called (in the reader's thread) with an engine's uid when one of its streams connected again or stays
            without a connection: it may have moved or changed.
    """

    def __init__(
        self,
        sink: Sink,
        settings: EventsSettings,
        *,
        relocate: Callable[[str], None],
        timer: Timer | None = None,
        start_sequence: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failed = False
        """The thread ended by a fault of this program; its workers are gone from the sink."""
        self._sink = sink
        self._settings = settings
        self._relocate = relocate
        self._timer = timer
        self._start_sequence = start_sequence
        self._clock = clock
        self._throttle = Throttle(log, SAID_AGAIN, clock)
        self._budget = Budget(settings.receive_bytes)
        self._followed: dict[str, _Followed] = {}
        self._by_socket: dict[object, _Followed] = {}
        self._replay_queue: OrderedDict[_Followed, int] = OrderedDict()
        self._replaying: set[_Followed] = set()
        self._batch: list[tuple[str, bytes]] = []
        self._sequences: list[int] = []
        self._observers: tuple[Observer, ...] = ()
        self._ticked_at = float("-inf")
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._lock = threading.Lock()
        """Guards the order of commands and the wake-up socket."""
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._poller = zmq.Poller()
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvsync-events", daemon=True)

    # -- for any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it. All workers are removed from the sink."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake()
        self._thread.join()

    def follow(self, target: Target) -> Future[None]:
        """Follow a stream from its beginning; an earlier registration of its worker ends first.

        The future raises ``ReaderEnded`` after the end.
        """
        return self._submit(lambda: self._follow(target))

    def unfollow(self, worker: str) -> Future[None]:
        """End a registration. When the future is done, the sink hears nothing more of the worker."""
        return self._submit(lambda: self._unfollow(worker))

    def observe(self, observer: Observer) -> None:
        with self._lock:
            self._observers = (*self._observers, observer)

    def unobserve(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(o for o in self._observers if o is not observer)

    def served(self, worker: str) -> None:
        """A worker's engine answered a request just now."""
        followed = self._followed.get(worker)
        if followed is not None:
            followed.served_at = self._clock()

    def status(self, worker: str) -> WorkerStatus | None:
        followed = self._followed.get(worker)
        return None if followed is None else followed.status()

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                work()
            except Exception as error:  # to whoever waits for it
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            if self._closing:
                done.set_exception(ReaderEnded("the event reader has ended"))
            else:
                self._commands.append(command)
                self._wake()
        return done

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full of wake-ups already
            self._wake_write.send(b"\0")

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            # A fault of this program or of the sink. Going on could credit what is gone; everything is dropped instead,
            # and the owner starts another reader.
            log.exception("the event reader failed")
            self.failed = True
        finally:
            with self._lock:
                self._closing = True
            self._batch.clear()  # empty, unless the thread failed in the middle of a turn
            self._sequences.clear()
            try:
                while self._commands:
                    self._commands.popleft()()
                for worker in list(self._followed):
                    self._unfollow(worker)
            finally:
                self._context.destroy(linger=0)
                self._wake_read.close()
                self._wake_write.close()

    def _turn(self) -> None:
        ready = self._poller.poll(max(1, round(self._settings.poll_timeout * 1000)))
        self._obey()
        now = self._clock()
        talkers = {f: None for f in (self._by_socket.get(s) for s, _ in ready) if f is not None}
        if talkers:
            share = max(1, self._settings.batch_size // len(talkers))
            size = DRAIN_BYTES // len(talkers)
            for followed in talkers:
                self._drain(followed, share, size, now)
        if now - self._ticked_at >= self._settings.poll_timeout:
            self._ticked_at = now
            for followed in self._followed.values():
                self._tick(followed, now)
        self._start_replays(now)
        self._hand_over()

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        while self._commands:
            self._commands.popleft()()

    def _follow(self, target: Target) -> None:
        self._unfollow(target.worker)
        now = self._clock()
        stream = Stream(
            can_replay=target.replay is not None,
            budget=self._budget,
            replay_timeout=self._settings.replay_timeout,
            replay_round_timeout=self._settings.replay_round_timeout,
            start=self._start_sequence,
        )
        sockets = WorkerSockets(self._context, target.events, target.replay, self._settings)
        followed = _Followed(target, stream, sockets, now)
        self._followed[target.worker] = followed
        self._sink.add_worker(
            target.worker,
            target.model,
            usable_blocks=target.usable_blocks,
            attention_chunk_size=target.attention_chunk_size,
            spec_decode=target.spec_decode,
            hit_alignment=target.hit_alignment,
            rank=target.rank,
        )
        self._sink.suspend(target.worker)
        log.info("%s: following %s, replay %s", target.worker, target.events, target.replay or "not available")
        self._open_live(followed, now)

    def _unfollow(self, worker: str) -> None:
        followed = self._followed.get(worker)
        if followed is None:
            return
        self._hand_over()
        del self._followed[worker]
        self._stop_replay(followed)
        self._close_live(followed)
        followed.sockets.close()
        followed.stream.close()
        self._sink.remove_worker(worker)

    # -- one stream -----------------------------------------------------------------------------------------------

    def _open_live(self, followed: _Followed, now: float) -> None:
        try:
            followed.sockets.open_live()
        except zmq.ZMQError as error:  # tried again like a lost connection
            followed.errors["endpoint"] += 1
            log.warning("%s: %s: %s", followed.target.worker, followed.target.events, error)
            self._pause(followed, now)
            return
        for part in (followed.sockets.sub, followed.sockets.monitor):
            self._poller.register(part, zmq.POLLIN)
            self._by_socket[part] = followed

    def _close_live(self, followed: _Followed) -> None:
        if followed.sockets.sub is not None:
            for part in (followed.sockets.sub, followed.sockets.monitor):
                self._poller.unregister(part)
                del self._by_socket[part]
            followed.sockets.close_live()

    def _pause(self, followed: _Followed, now: float) -> None:
        followed.reconnect_at = now + followed.pause
        followed.pause = min(2 * followed.pause, RECONNECT_LAST)

    def _drain(self, followed: _Followed, share: int, size: int, now: float) -> None:
        """Read what one worker's sockets have.

        Messages are read first and the monitor second, so that no message of a connection is taken that is known to
        be over: what is read when its end is reported may be younger than that, and a replay brings it again.
        """
        sockets, stream = followed.sockets, followed.stream
        messages = []
        for message in sockets.live(share):
            messages.append(message)
            size -= len(message[1])
            if size < 0:
                break
        for link in sockets.links():
            self._link(followed, link, now)
        if sockets.sub is None:
            stream.counts.discarded += len(messages)
            return
        for seq, payload in messages:
            self._carry_out(followed, stream.live(seq, payload, now))
        if sockets.overrun:
            followed.errors["overrun"] += 1
            log.warning("%s: more comes than can be taken; its queue is dropped", followed.target.worker)
            self._disconnected(followed, now)
            return
        for seq, payload in sockets.replies(share):
            if seq == END:
                self._carry_out(followed, stream.replay_ended(now))
            else:
                self._carry_out(followed, stream.replayed(seq, payload, now))
                size -= len(payload)
                if size < 0:
                    break
        self._log_state(followed)

    def _link(self, followed: _Followed, link: Link, now: float) -> None:
        if link is Link.RETRIED:
            followed.reconnect_attempts += 1
        elif link is Link.REFUSED:
            followed.errors["handshake"] += 1
            if not followed.refused:
                followed.refused = True
                if followed.overdue:  # said before this was known
                    self._log_overdue(followed)
        elif link is Link.DOWN and followed.connected:
            self._disconnected(followed, now)
        elif link is Link.UP:
            followed.connected, followed.connected_since, followed.changed_at = True, time.time(), now
            followed.connections += 1
            followed.overdue = followed.refused = False
            self._carry_out(followed, followed.stream.connected(now))
            self._log_state(followed)
            if followed.connections > 1:
                self._relocate(followed.target.engine)

    def _disconnected(self, followed: _Followed, now: float) -> None:
        """The connection is over, and its socket with it; another is opened after a pause."""
        if now - followed.changed_at >= RECONNECT_LAST:
            followed.pause = RECONNECT_FIRST
        followed.connected, followed.connected_since, followed.changed_at = False, None, now
        followed.disconnections += 1
        followed.overdue_since = now
        self._close_live(followed)
        self._pause(followed, now)
        self._carry_out(followed, followed.stream.disconnected(now))
        self._log_state(followed)

    def _tick(self, followed: _Followed, now: float) -> None:
        if followed.sockets.sub is None and now >= followed.reconnect_at:
            followed.reconnect_attempts += 1
            self._open_live(followed, now)
        if not followed.connected:
            patience = OVERDUE_AGAIN if followed.overdue else self._settings.connect_timeout
            if now - followed.overdue_since >= patience:
                followed.errors["connect_timeout"] += 1
                followed.overdue_since = now
                if not followed.overdue:
                    self._log_overdue(followed)
                followed.overdue = True
                self._relocate(followed.target.engine)
        self._carry_out(followed, followed.stream.tick(now, followed.served_at))
        self._log_state(followed)

    def _carry_out(self, followed: _Followed, actions: list[Action]) -> None:
        worker = followed.target.worker
        for action in actions:
            match action:
                case Apply(seq, payload):
                    self._batch.append((worker, payload))
                    self._sequences.append(seq)
                case StopReplay():
                    self._stop_replay(followed)
                case AskReplay(start):
                    self._replay_queue[followed] = start
                case Forget():
                    self._hand_over()
                    self._sink.forget(worker)
                    self._log_forgotten(followed)
                case NewEpoch():
                    self._hand_over()
                    self._sink.new_epoch(worker)
                    self._throttle.log(logging.INFO, f"{worker} epoch", "%s: a new epoch begins", worker)
        if followed.stream.current is not followed.current:
            self._hand_over()
            followed.current = followed.stream.current
            (self._sink.resume if followed.current else self._sink.suspend)(worker)

    def _start_replays(self, now: float) -> None:
        while self._replay_queue and len(self._replaying) < self._settings.replays_at_once:
            followed, start = self._replay_queue.popitem(last=False)
            self._replaying.add(followed)
            try:
                followed.sockets.ask(start)
            except zmq.ZMQError as error:  # the round will time out
                followed.errors["endpoint"] += 1
                log.warning("%s: replay endpoint %s: %s", followed.target.worker, followed.target.replay, error)
            else:
                self._poller.register(followed.sockets.dealer, zmq.POLLIN)
                self._by_socket[followed.sockets.dealer] = followed
            self._carry_out(followed, followed.stream.replay_started(now))

    def _stop_replay(self, followed: _Followed) -> None:
        self._replay_queue.pop(followed, None)
        self._replaying.discard(followed)
        dealer = followed.sockets.dealer
        if dealer is not None:
            self._poller.unregister(dealer)
            del self._by_socket[dealer]
            followed.sockets.stop_replay()

    def _log_overdue(self, followed: _Followed) -> None:
        why = ": something else answers there, without a ZMQ handshake" if followed.refused else ""
        log.warning("%s: no connection to %s yet%s", followed.target.worker, followed.target.events, why)

    def _log_forgotten(self, followed: _Followed) -> None:
        worker = followed.target.worker
        if followed.target.replay is None and followed.applied is None:  # nothing was known, and none can be asked for
            level, what = logging.INFO, "what it published before is out of reach"
        else:
            level, what = logging.WARNING, "events are lost and its blocks forgotten"
        until = "trust is partial until the engine clears its cache or restarts"
        self._throttle.log(level, f"{worker} forget {level}", "%s: %s; %s", worker, what, until)

    def _log_state(self, followed: _Followed) -> None:
        state = followed.stream.state
        if state is not followed.logged:
            worker, last = followed.target.worker, followed.stream.last
            self._throttle.log(
                logging.WARNING if state is State.DOWN else logging.INFO,
                f"{worker} {state}",
                "%s: %s, last sequence %s",
                worker,
                state,
                "none" if last is None else last,
            )
            followed.logged = state

    # -- the sink -------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Give the sink what was read."""
        batch, sequences = self._batch, self._sequences
        if not batch:
            return
        self._batch, self._sequences = [], []
        started = time.perf_counter()
        try:
            self._sink.apply_many(batch)
        except Exception:
            # A fault of the sink. Which batches it took is unknown, so nothing may be believed of these workers.
            log.exception("the index failed on a drain of %d batches", len(batch))
            for worker in dict.fromkeys(w for w, _ in batch):
                self._followed[worker].errors["sink"] += 1
                self._sink.forget(worker)
        seconds = time.perf_counter() - started
        last = {worker: seq for (worker, _), seq in zip(batch, sequences, strict=True)}
        for worker, seq in last.items():
            self._followed[worker].applied = seq
            if self._timer is not None:
                self._timer.applied(worker, seconds)
        if self._observers:
            for (worker, payload), seq in zip(batch, sequences, strict=True):
                self._show(worker, seq, payload)

    def _show(self, worker: str, seq: int, payload: bytes) -> None:
        followed = self._followed[worker]
        try:
            batch = _filled(decode_batch(payload), followed.target)
        except UndecodableBatch:
            followed.errors["undecodable"] += 1
            return
        for observer in self._observers:
            try:
                observer(worker, seq, batch)
            except Exception:
                log.exception("an observer of KV events failed and is dropped")
                self.unobserve(observer)


def _filled(batch: EventBatch, target: Target) -> EventBatch:
    """The batch with what the wire does not say: who published it."""
    events = tuple(
        e if isinstance(e, SkippedEvent) else replace(e, model_name=target.model, source_pod=target.source_pod)
        for e in batch.events
    )
    return replace(batch, events=events)
