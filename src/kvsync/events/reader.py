"""The one thread that reads all streams and feeds the sink.

What must always hold
    * All sockets and streams belong to this thread, and so do the sink's calls. Others hand it commands, which run
      between two drains in the order given; hence whatever was read for an earlier registration of a worker is with the
      sink, or gone, before the next one begins, and nothing of it arrives later.
    * Only what a sink knows of a worker is told in another thread, which takes a while: that worker's stream is set
      aside meanwhile, so that what is told is what stood at one number of it, and all others go on.
    * Only the end of a worker waits for nothing: whoever ends it tells the sink at once. What this thread still has for
      the worker is about nobody then, and no command given before brings it back (``_wanted`` says which may).
    * One turn takes a bounded number of messages and bytes, shared fairly among the sockets that have any, and hands
      them to the sink in one ``apply_many`` (more than one only where a worker must be forgotten in between).
    * Whatever an engine sends, or fails to send, costs its own stream only.
    * Half of the files that the process may open are left for others, however many streams are asked for: a process
      without files takes no requests.
"""

from __future__ import annotations

import logging
import resource
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import zmq

from kvsync.config.model import EventsSettings
from kvsync.events.contracts import (
    Observer,
    ReaderEnded,
    Sink,
    Snapshot,
    Target,
    TellingSink,
    Timer,
    TooManyStreams,
    Turns,
    WorkerStatus,
)
from kvsync.events.feed import Feed
from kvsync.events.followed import Followed
from kvsync.events.inlet import inlet
from kvsync.events.sockets import END, Link, WorkerSockets, curve_keys
from kvsync.events.stream import (
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
from kvsync.telemetry.logs import Throttle

log = logging.getLogger("kvsync.events")

_Result = TypeVar("_Result")

DRAIN_BYTES: Final = 32 << 20
"""What one turn reads at most, beyond the message that reaches it."""
SAID_AGAIN: Final = 1.0
"""Seconds in which one thing is said once of one worker: an engine that counts to and fro must not fill the disk."""
_PARTIAL: Final = "trust is partial until the engine clears its cache, restarts, or is followed from number 0 on"
FILES_OF_A_STREAM: Final = 4
"""That is connected (seen)."""
OVERDUE_AGAIN: Final = 30.0
"""A stream that stays without a connection is reported to the locator each so many seconds."""


class _Wanted:
    """A worker from its first ``follow`` to its end: the sink may have it. The commands given meanwhile carry it."""

    def __init__(self) -> None:
        self.known = False
        """The sink has had it."""
        self.followed: Followed | None = None
        """Its stream, or the last it had."""


class _Turnless:
    """A replay that waits for its turn."""

    def __init__(self, start: int) -> None:
        self.start = start


class Reader:
    """Reads all streams in a thread of its own, from :meth:`start` to :meth:`stop`.

    Args:
        relocate: called (in the reader's thread) with an engine's uid when one of its streams connected again or stays
            without a connection: it may have moved or changed.
        introduced: called (in the reader's thread) with a worker that is new to the sink, before any batch of it: what
            somebody noted of its engine earlier is to be told now.
        turns: asked before a stream catches up; without, only ``events.replays_at_once`` bounds replays.

    Raises:
        CurveUnusable: the keys of ``events.curve`` can't be used.
    """

    def __init__(
        self,
        sink: Sink,
        settings: EventsSettings,
        *,
        relocate: Callable[[str], None],
        introduced: Callable[[str], None] = lambda _: None,
        turns: Turns | None = None,
        timer: Timer | None = None,
        start_sequence: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failed = False
        """The thread ended by a fault of this program; its workers are gone from the sink."""
        self._sink = sink
        self._settings = settings
        self._relocate = relocate
        self._introduced = introduced
        self._turns = turns
        self._feed = Feed(sink, timer)
        self._curve = curve_keys(settings.curve)
        self._start_sequence = start_sequence
        self._clock = clock
        self._throttle = Throttle(log, SAID_AGAIN, clock)
        self._budget = Budget(settings.receive_bytes)
        self._followed: dict[str, Followed] = {}
        self._turnless: dict[Followed, _Turnless] = {}
        self._replay_queue: OrderedDict[Followed, int] = OrderedDict()
        self._replaying: set[Followed] = set()
        self._turned_at = float("inf")
        self._ticked_at = float("-inf")
        self._teller = ThreadPoolExecutor(1, "kvsync-snapshot")
        self._taken_up: list[Followed] = []
        """Streams that were set aside, and may have messages which nobody has to be waited for."""
        self._wanted: dict[str, _Wanted] = {}
        self._wanting = threading.Lock()
        """Guards ``_wanted``, together with the sink's additions and removals."""
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._lock = threading.Lock()
        """Guards the order of commands and the wake-up socket."""
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._inlet = inlet(sink, self._feed, self._wake_read.fileno(), settings, clock)
        self._thread = threading.Thread(target=self._run, name="kvsync-events", daemon=True)

    # -- for any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Remove all workers from the sink, end the thread and wait for it."""
        self._unwant_all()
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake()
        self._thread.join()

    def follow(self, target: Target, snapshot: Snapshot | None = None) -> Future[None]:
        """Follow a stream from its beginning, or from where a snapshot was taken. For a worker that is followed already
        it is made new in the sink, not removed: what the sink noted of the engine itself stays.

        The future raises ``ReaderEnded`` after the end, ``TooManyStreams`` when there is no room for another.
        """
        with self._wanting:
            wanted = self._wanted.setdefault(target.worker, _Wanted())
        return self._submit(lambda: self._follow(target, wanted, snapshot))

    def snapshot(self, worker: str) -> Future[Snapshot | None]:
        """What is known of a worker, and where its stream stands. ``None`` while that can't be told for another replica
        to go on from: the worker can't be relied on, something of its epoch was lost, or the sink can't say it.

        The future raises ``ReaderEnded`` after the end.
        """
        answer: Future[Snapshot | None] = Future()

        def look(step: Future[None]) -> None:
            error = step.exception()
            if error is not None and (answer.running() or answer.set_running_or_notify_cancel()):
                answer.set_exception(error)

        def told(followed: Followed, position: Position, image: Future[bytes | None]) -> None:
            self._submit(lambda: self._end_snapshot(followed, position, image, answer)).add_done_callback(look)

        self._submit(lambda: self._begin_snapshot(worker, answer, told)).add_done_callback(look)
        return answer

    def unfollow(self, worker: str) -> None:
        """End a worker: the sink knows it no more when this returns, whatever the thread is busy with."""
        with self._wanting:
            if self._wanted.pop(worker, None) is not None:
                self._sink.remove_worker(worker)

        def work() -> None:
            self._close(worker)

        self._submit(work)

    def release(self, worker: str) -> None:
        """Leave a worker's stream, which is about to be followed elsewhere; until then nothing is believed of it."""
        self._submit(lambda: self._release(worker))

    def resync(self, worker: str) -> None:
        """What is known of a worker is doubted: have it forgotten, and its stream followed from its beginning."""

        def work() -> None:
            followed = self._followed.get(worker)
            if followed is not None:
                log.warning("%s: forgotten and followed anew, because its answers contradict what was known", worker)
                self._carry_out(followed, followed.stream.resync(self._clock()))

        self._submit(work)

    def hint_restart(self, worker: str) -> None:
        """A worker's engine may be another process than before: have its stream look."""

        def work() -> None:
            followed = self._followed.get(worker)
            if followed is not None:
                self._carry_out(followed, followed.stream.hint_restart(self._clock()))

        self._submit(work)

    def sleeping(self, worker: str, asleep: bool) -> None:
        """A worker's engine is asleep, or awake; to be told again and again."""
        self._submit(lambda: self._sleeping(worker, asleep))

    def observe(self, observer: Observer) -> None:
        self._feed.observe(observer)
        self._submit(self._settle_all)

    def unobserve(self, observer: Observer) -> None:
        self._feed.unobserve(observer)
        self._submit(self._settle_all)

    def served(self, worker: str) -> None:
        """A worker's engine answered a request just now."""
        followed = self._followed.get(worker)
        if followed is not None:
            followed.served_at = self._clock()

    def status(self, worker: str) -> WorkerStatus | None:
        """``None``: it is not followed, or not yet: how the stream of a worker of that name was doing that ended, which
        this thread may not have left yet, is nothing to go by."""
        followed, wanted = self._followed.get(worker), self._wanted.get(worker)
        if followed is None or wanted is None or wanted.followed is not followed:
            return None
        return followed.status()

    def _submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        done: Future[_Result] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except Exception as error:  # to whoever waits for it
                done.set_exception(error)
            else:
                done.set_result(result)

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
        except BaseException:
            # A fault of this program or of the sink (one of the native core's is no Exception). Going on could credit
            # what is gone; everything is dropped instead, and the owner starts another reader.
            log.exception("the event reader failed")
            self.failed = True
        finally:
            with self._lock:
                self._closing = True
            self._feed.drop()  # empty, unless the thread failed in the middle of a turn
            try:
                self._unwant_all()
                while self._commands:
                    self._commands.popleft()()
                for worker in list(self._followed):
                    self._close(worker)
            finally:
                self._teller.shutdown()
                self._context.destroy(linger=0)
                self._wake_read.close()
                self._wake_write.close()

    def _turn(self) -> None:
        talkers = self._inlet.wait(self._settings.poll_timeout, self._settings.batch_size, DRAIN_BYTES)
        self._obey()
        taken_up, self._taken_up = self._taken_up, []
        now = self._clock()
        stood_still, self._turned_at = now - self._turned_at, now
        if stood_still > self._settings.heartbeat_timeout + self._settings.poll_timeout:
            self._look_everywhere(stood_still, now)
        # those that were left or set aside just now are not looked at
        talkers = [
            f
            for f in {**dict.fromkeys(talkers), **dict.fromkeys(taken_up)}
            if self._followed.get(f.target.worker) is f and not f.set_aside
        ]
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
        self._feed.hand_over()

    def _look_everywhere(self, stood_still: float, now: float) -> None:
        """This thread, or the whole process, was held up: meanwhile engines may have dropped what they could not send,
        and nothing on a connection that is quiet now would show it."""
        log.warning("event streams were not read for %.1f s; each of them is looked at", stood_still)
        for followed in self._followed.values():
            self._carry_out(followed, followed.stream.hint_restart(now))

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        while self._commands:
            self._commands.popleft()()

    def _settle_all(self) -> None:
        for followed in self._followed.values():
            self._inlet.settle(followed)

    def _follow(self, target: Target, wanted: _Wanted, snapshot: Snapshot | None) -> None:
        worker = target.worker
        if worker not in self._followed:
            self._refuse_beyond_files()
        before = self._close(worker)
        with self._wanting:
            if self._wanted.get(worker) is not wanted:  # ended meanwhile
                return
            self._sink.add_worker(
                worker,
                target.model,
                usable_blocks=target.usable_blocks,
                attention_chunk_size=target.attention_chunk_size,
                spec_decode=target.spec_decode,
                hit_alignment=target.hit_alignment,
                rank=target.rank,
            )
        self._sink.suspend(worker)
        if not wanted.known:
            wanted.known = True
            self._introduced(worker)
        if before is not None and before.outdated:
            snapshot = None  # the engine slept: it may tell of the cache that is gone
        since = None if snapshot is None else self._restore(target, snapshot)
        now = self._clock()
        stream = Stream(
            can_replay=target.replay is not None,
            budget=self._budget,
            replay_timeout=self._settings.replay_timeout,
            replay_round_timeout=self._settings.replay_round_timeout,
            start=self._start_sequence,
            since=since,
        )
        sockets = WorkerSockets(self._context, target.events, target.replay, self._settings, self._curve)
        curve = self._curve is not None
        followed = Followed(target, stream, sockets, now, before=before, restored=since is not None, curve=curve)
        followed.errors["snapshot"] += snapshot is not None and since is None
        self._followed[worker] = wanted.followed = followed
        if target.replay is not None:
            begins = "" if since is None else f" from number {since.seq} of a snapshot on"
            log.info("%s: following %s, replay %s%s", worker, target.events, target.replay, begins)
        else:
            late = f"what it may have published before is out of reach; {_PARTIAL}"
            log.info("%s: following %s, without replay: %s", worker, target.events, late)
        self._open_live(followed, now)

    def _refuse_beyond_files(self) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and (len(self._followed) + 1) * FILES_OF_A_STREAM > files // 2:
            raise TooManyStreams(
                f"{len(self._followed)} event streams are open, and there are files for no more: each takes "
                f"{FILES_OF_A_STREAM}, and half of the {files} that may be open are for them (ulimit -n allows more, "
                "unless an engine is said to have more ranks than it has)"
            )

    def _restore(self, target: Target, snapshot: Snapshot) -> Position | None:
        """Have the sink take a snapshot. Where its stream goes on then; ``None``: it begins anew."""
        if not isinstance(self._sink, TellingSink) or target.replay is None or self._start_sequence:
            return None
        try:
            self._sink.restore(target.worker, snapshot.image)
        except ValueError as error:
            log.warning("%s: its snapshot can't be used, so all is replayed: %s", target.worker, error)
            return None
        return snapshot.position

    def _begin_snapshot(
        self,
        worker: str,
        answer: Future[Snapshot | None],
        told: Callable[[Followed, Position, Future[bytes | None]], None],
    ) -> None:
        """Have the sink tell; ``told`` is called in another thread when it has. Where it can't, that is answered."""
        if not answer.set_running_or_notify_cancel():
            return
        followed, sink = self._followed.get(worker), self._sink
        position = None
        if followed is not None and followed.usable and not followed.outdated and not followed.set_aside:
            self._feed.hand_over()
            position = followed.stream.position
        if followed is None or position is None or not isinstance(sink, TellingSink):
            answer.set_result(None)
            return
        self._set_aside(followed)
        image = self._teller.submit(sink.dump, worker)
        image.add_done_callback(partial(told, followed, position))

    def _end_snapshot(
        self,
        followed: Followed,
        position: Position,
        image: Future[bytes | None],
        answer: Future[Snapshot | None],
    ) -> None:
        still = self._take_up(followed)  # else something happened to it, before or after it was told
        if (failed := image.exception()) is not None:
            answer.set_exception(failed)
            return
        told = image.result()
        answer.set_result(Snapshot(position, told) if still and told is not None else None)

    def _set_aside(self, followed: Followed) -> None:
        for part in (followed.sockets.sub, followed.sockets.monitor):
            if part is not None:
                self._inlet.remove(part)
        followed.set_aside = True

    def _take_up(self, followed: Followed) -> bool:
        """Read a stream again, if it is still set aside."""
        if not followed.set_aside:
            return False
        followed.set_aside = False
        for part in (followed.sockets.sub, followed.sockets.monitor):
            if part is not None:
                self._inlet.add(followed, part)
        self._inlet.settle(followed)
        self._taken_up.append(followed)
        return True

    def _release(self, worker: str) -> None:
        if self._close(worker) is not None:
            self._sink.suspend(worker)
            self._sink.forget(worker)

    def _close(self, worker: str) -> Followed | None:
        """Leave a stream, with what was read of it handed over. The sink still has the worker, unless it was ended."""
        followed = self._followed.get(worker)
        if followed is None:
            return None
        self._feed.hand_over()
        del self._followed[worker]
        self._stop_replay(followed)
        self._close_live(followed)
        followed.sockets.close()
        followed.stream.close()
        return followed

    def _unwant_all(self) -> None:
        with self._wanting:
            while self._wanted:
                self._sink.remove_worker(self._wanted.popitem()[0])

    def _sleeping(self, worker: str, asleep: bool) -> None:
        followed = self._followed.get(worker)
        if followed is None or followed.asleep is asleep:
            return
        self._take_up(followed)
        if asleep:
            self._feed.hand_over()
            followed.fell_asleep()
            self._inlet.settle(followed)
            self._tell_usable(followed)
            self._sink.forget(worker)
            log.info("%s: its engine sleeps and has lost its cache; its blocks are forgotten", worker)
        else:
            followed.asleep = False
            self._tell_usable(followed)
            log.info("%s: its engine is awake", worker)

    # -- one stream -----------------------------------------------------------------------------------------------

    def _open_live(self, followed: Followed, now: float) -> None:
        try:
            followed.sockets.open_live()
        except zmq.ZMQError as error:  # tried again like a lost connection
            followed.errors["endpoint"] += 1
            log.warning("%s: %s: %s", followed.target.worker, followed.target.events, error)
            followed.pause(now)
            return
        for part in (followed.sockets.sub, followed.sockets.monitor):
            if part is not None:
                self._inlet.add(followed, part)

    def _close_live(self, followed: Followed) -> None:
        self._take_up(followed)
        for part in (followed.sockets.sub, followed.sockets.monitor):
            if part is not None:
                self._inlet.remove(part)
        followed.sockets.close_live()

    def _drain(self, followed: Followed, share: int, size: int, now: float) -> None:
        """Read what one worker's sockets have.

        Messages are read first and the monitor second, so that no message of a connection is taken that is known to
        be over: what is read when its end is reported may be younger than that, and a replay brings it again.
        """
        sockets, stream = followed.sockets, followed.stream
        messages = sockets.handed()
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
        if sockets.replay_overrun:
            followed.errors["overrun"] += 1
            log.warning("%s: more is replayed than can be taken; the replay is broken off", followed.target.worker)
            self._stop_replay(followed)  # its round runs out of time
        self._log_state(followed)

    def _link(self, followed: Followed, link: Link, now: float) -> None:
        if link is Link.RETRIED:
            followed.reconnect_attempts += 1
        elif link is Link.REFUSED:
            followed.errors["handshake"] += 1
            if not followed.refused:
                followed.refused = True
                if followed.overdue:  # said before this was known
                    log.warning("%s: %s", followed.target.worker, followed.overdue_text())
        elif link is Link.DOWN and followed.connected:
            self._disconnected(followed, now)
        elif link is Link.UP:
            followed.went_up(now)
            self._carry_out(followed, followed.stream.connected(now))
            self._log_state(followed)
            if followed.connections > 1:
                self._relocate(followed.target.engine)

    def _disconnected(self, followed: Followed, now: float) -> None:
        """The connection is over, and its socket with it; another is opened after a pause."""
        followed.went_down(now)
        self._close_live(followed)
        followed.pause(now)
        self._carry_out(followed, followed.stream.disconnected(now))
        self._log_state(followed)

    def _tick(self, followed: Followed, now: float) -> None:
        if followed.sockets.sub is None and now >= followed.reconnect_at:
            followed.reconnect_attempts += 1
            self._open_live(followed, now)
        if not followed.connected:
            patience = OVERDUE_AGAIN if followed.overdue else self._settings.connect_timeout
            if now - followed.overdue_since >= patience:
                followed.errors["connect_timeout"] += 1
                followed.overdue_since = now
                if not followed.overdue:
                    log.warning("%s: %s", followed.target.worker, followed.overdue_text())
                followed.overdue = True
                self._relocate(followed.target.engine)
        self._carry_out(followed, followed.stream.tick(now, followed.served_at))
        self._log_state(followed)

    def _carry_out(self, followed: Followed, actions: list[Action]) -> None:
        worker = followed.target.worker
        outdated = False
        if actions:
            self._take_up(followed)
        for action in actions:
            match action:
                case Apply(seq, payload):
                    self._feed.add(followed, seq, payload)
                    if followed.outdated:
                        followed.judge(seq, payload)
                        outdated = followed.outdated
                case StopReplay():
                    self._stop_replay(followed)
                case AskReplay(start):
                    self._ask_replay(followed, start)
                case Forget():
                    self._feed.hand_over()
                    followed.restored = False
                    self._sink.forget(worker)
                    self._log_forgotten(followed)
                case NewEpoch():
                    self._feed.hand_over()
                    followed.restored = False
                    followed.renewed()
                    outdated = False
                    self._sink.new_epoch(worker)
                    self._throttle.log(logging.INFO, f"{worker} epoch", "%s: a new epoch begins", worker)
                case Relearn():
                    self._feed.hand_over()
                    followed.restored = False
                    followed.numbered_anew()
                    self._sink.relearn(worker)
                    what = "followed from number 0 on: nothing is missing"
                    self._throttle.log(logging.INFO, f"{worker} relearn", "%s: %s", worker, what)
        if outdated:
            self._feed.hand_over()
            self._sink.forget(worker)
        followed.caught_up()
        self._inlet.settle(followed)
        if followed.stream.state is not followed.judged:
            followed.judged = followed.stream.state
            self._tell_usable(followed)
            if followed.stream.current:
                followed.came_up(self._clock())
        if followed.overlooked:
            followed.overlooked = False
            log.info("%s: the clear of its last sleep is behind; followed anew", worker)
            self._carry_out(followed, followed.stream.resync(self._clock()))

    def _tell_usable(self, followed: Followed) -> None:
        if followed.usable is not followed.relied_on:
            self._feed.hand_over()
            followed.relied_on = followed.usable
            (self._sink.resume if followed.usable else self._sink.suspend)(followed.target.worker)

    def _ask_replay(self, followed: Followed, start: int) -> None:
        """Only what catches up may be long, and comes at the same time everywhere: repairs and probes need no turn."""
        if self._turns is None or followed.stream.state is not State.CATCHING_UP:
            self._replay_queue[followed] = start
            return
        turnless = self._turnless[followed] = _Turnless(start)

        def granted() -> None:
            if self._turnless.get(followed) is turnless:
                del self._turnless[followed]
                self._replay_queue[followed] = start

        followed.turn = self._turns.ask(followed.target.engine, lambda: self._submit(granted))

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
                assert followed.sockets.dealer is not None
                self._inlet.add(followed, followed.sockets.dealer)
            self._carry_out(followed, followed.stream.replay_started(now))

    def _stop_replay(self, followed: Followed) -> None:
        self._turnless.pop(followed, None)
        self._replay_queue.pop(followed, None)
        self._replaying.discard(followed)
        if followed.turn is not None:
            followed.turn.end()
            followed.turn = None
        dealer = followed.sockets.dealer
        if dealer is not None:
            self._inlet.remove(dealer)
            followed.sockets.stop_replay()

    def _log_forgotten(self, followed: Followed) -> None:
        worker = followed.target.worker
        if followed.target.replay is None and followed.applied is None:
            return  # nothing was known, and none can be asked for: said when it was opened
        what = "events are lost and its blocks forgotten"
        self._throttle.log(logging.WARNING, f"{worker} forget", "%s: %s; %s", worker, what, _PARTIAL)

    def _log_state(self, followed: Followed) -> None:
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
            if followed.mute:
                log.warning("%s: %s", worker, followed.silent_text())
