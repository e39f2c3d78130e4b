"""What the reader waits on: the sockets of all streams, and its wake-up.

Two ways, of which one serves. :class:`Polled` waits with pyzmq; Python reads every message. With :class:`Drained` the
sink itself waits and reads (:class:`~kvsync.events.contracts.DrainingSink`, the native core): what a stream would apply
without a second thought enters the index without a turn in Python, and the stream is told afterwards; all else is
Python's, message by message, as before.

Belongs to the reader's thread. What must always hold: both ways leave every stream, and the index, in the same state;
and what a stream is told is told before anything else happens to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol
from weakref import WeakValueDictionary

import zmq

from kvsync.config.model import EventsSettings
from kvsync.events.contracts import DrainingSink, Receiver, Sink
from kvsync.events.feed import Feed
from kvsync.events.followed import Followed
from kvsync.events.stream import RESTART_TIME

log = logging.getLogger("kvsync.events")

_Socket = zmq.Socket[Any]


class Inlet(Protocol):
    """See the module."""

    def add(self, followed: Followed, socket: _Socket) -> None:
        """Wait for a socket too. It must be removed before it is closed."""

    def remove(self, socket: _Socket) -> None: ...

    def settle(self, followed: Followed) -> None:
        """Something happened to a stream that decides what may be applied without a second thought."""

    def wait(self, seconds: float, messages: int, size: int) -> Collection[Followed]:
        """Wait until something happens, or so long; give those whose sockets have to be looked at.

        ``messages``, ``size``: what may be read at a time, in bytes the latter."""


def inlet(sink: Sink, feed: Feed, wake: int, settings: EventsSettings, clock: Callable[[], float]) -> Inlet:
    """The way that is open to this sink. ``wake`` is a descriptor that ends a wait by being readable."""
    if isinstance(sink, DrainingSink):
        try:
            receiver = sink.receiver(
                libzmq(),
                wake,
                pause=RESTART_TIME,
                backlog=settings.receive_high_water,
                backlog_size=settings.receive_bytes,
            )
        except (ImportError, OSError) as error:
            log.warning("KV events take the slower way through Python: %s", error)
        else:
            return Drained(receiver, feed, clock)
    return Polled(wake)


def libzmq() -> str:
    """The part of pyzmq that calls libzmq."""
    from zmq.backend.cython import _zmq

    return str(_zmq.__file__)


class Polled:
    """With pyzmq alone."""

    def __init__(self, wake: int) -> None:
        self._poller = zmq.Poller()
        self._poller.register(wake, zmq.POLLIN)
        self._by_socket: dict[object, Followed] = {}

    def add(self, followed: Followed, socket: _Socket) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._by_socket[socket] = followed

    def remove(self, socket: _Socket) -> None:
        self._poller.unregister(socket)
        del self._by_socket[socket]

    def settle(self, followed: Followed) -> None:
        pass

    def wait(self, seconds: float, messages: int, size: int) -> Collection[Followed]:
        ready = self._poller.poll(max(1, round(seconds * 1000)))
        return {f: None for f in (self._by_socket.get(s) for s, _ in ready) if f is not None}


class Drained:
    """The sink waits and reads."""

    def __init__(self, receiver: Receiver, feed: Feed, clock: Callable[[], float]) -> None:
        self._receiver = receiver
        self._feed = feed
        self._clock = clock
        self._followed: WeakValueDictionary[int, Followed] = WeakValueDictionary()
        """By what the receiver knows them by."""
        self._given: dict[int, tuple[int, float]] = {}
        """What the receiver takes without asking, by the address of the socket: what comes behind this."""
        self._unsettled: set[Followed] = set()

    def add(self, followed: Followed, socket: _Socket) -> None:
        self._followed[id(followed)] = followed
        self._receiver.add(id(followed), socket.underlying)

    def remove(self, socket: _Socket) -> None:
        self._receiver.remove(socket.underlying)
        self._given.pop(socket.underlying, None)

    def settle(self, followed: Followed) -> None:
        self._unsettled.add(followed)

    def wait(self, seconds: float, messages: int, size: int) -> Collection[Followed]:
        for followed in self._unsettled:
            self._give(followed)
        self._unsettled.clear()
        reports = self._receiver.wait(seconds, messages, size)
        now = self._clock()
        found = []
        for report in reports:
            followed = self._followed[report.stream]
            sockets = followed.sockets
            if report.count:
                followed.took(report.count, report.last, report.times, now)
                self._feed.timed(followed, report.seconds)
                sockets.took(report.messages, report.size, emptied=report.emptied)
            if sockets.sub is not None:
                self._given.pop(sockets.sub.underlying, None)
                if not report.asks and followed.stream.expects is not None:
                    self._given[sockets.sub.underlying] = followed.stream.expects
            if report.asks:
                followed.progress(None)
                sockets.hand(report.handed)
                self._unsettled.add(followed)
            if report.asks or sockets.overrun:
                found.append(followed)
        return found

    def _give(self, followed: Followed) -> None:
        """Tell the receiver what it may take of a stream."""
        if followed.sockets.sub is None:
            return
        socket = followed.sockets.sub.underlying
        free = not followed.outdated and not self._feed.observed
        expected = followed.stream.expects if free else None
        if expected == self._given.get(socket):
            return
        self._given.pop(socket, None)
        progress = None
        if expected is None:
            self._receiver.leave(socket)
        else:
            progress = self._receiver.follow(socket, followed.target.worker, *expected)
        if progress is not None and expected is not None:
            self._given[socket] = expected
        followed.progress(progress)
