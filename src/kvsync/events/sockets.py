"""The ZMQ sockets of one worker: live batches, replies to a replay request, and what became of the connection.

Nothing here decides anything; :mod:`kvsync.events.stream` does. What must always hold: no frame, however malformed,
raises; what can't be read is counted by reason. All sockets of one object belong to one thread.

Wire facts (vLLM's ``ZmqEventPublisher``)
    A live message is ``[topic, seq, payload]``, seq being 8 bytes big-endian. A replay request is exactly
    ``[b"", start]`` from a DEALER; a REQ socket would get one reply only. A reply is ``[b"", seq, payload]``, from
    0.26 on ``[b"", topic, seq, payload]``; the end marker has the seq −1. So both are read from the end.

    Each round has a DEALER of its own: late replies to a round that timed out can't be taken for the next one's, and
    the engine's side starts with an empty queue, which it bounds and overflows.

    Likewise each connection has a SUB of its own. ZMQ would connect again by itself, into the same queue: nobody could
    tell the last messages of the old process from the first of the new one.

No high-water mark
    ZMQ aborts the whole process when a heartbeat finds a connection dead while its queue is at RCVHWM (libzmq #3937,
    open; seen with 4.3.5). Heartbeats are needed, so the queue has no mark, and the backlog is bounded here: a
    connection whose queue was not empty for so many messages or bytes is *overrun*, and whoever reads closes it.
    Replays have no mark either: engines up to vLLM 0.32 drop replies that a reader does not take at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvsync.config.curve import BadKey, secret_key
from kvsync.config.model import CurveSettings, EventsSettings

MAX_MESSAGE_BYTES: Final = 16 << 20
"""ZMQ drops a connection that announces a larger message. The largest real batches have a few hundred kB."""
RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 5_000
"""Between two tries to connect: doubled from the first to the second."""
END: Final = -1

_SocketT: TypeAlias = "zmq.Socket[bytes]"
_FAILED_HANDSHAKES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class CurveKeys(NamedTuple):
    """What a client of CURVE needs, as Z85 text."""

    server: bytes
    public: bytes
    secret: bytes


class CurveUnusable(OSError):
    """The keys that are configured can't be used; the text says why, and the mend."""


def curve_keys(settings: CurveSettings) -> CurveKeys | None:
    """The keys that are configured, the secret one from its file; ``None``: no CURVE.

    Raises:
        CurveUnusable
    """
    server, public, file = settings.server_key, settings.public_key, settings.secret_key_file
    if server is None or public is None or file is None:
        return None
    if not zmq.has("curve"):
        raise CurveUnusable("events.curve is configured and this libzmq has no CURVE (install the wheels of pyzmq)")
    try:
        secret = secret_key(file).encode()
    except BadKey as bad:
        raise CurveUnusable(f"events.curve.secret_key_file: {bad} ({bad.mend})") from None
    if zmq.curve_public(secret) != public.encode():
        raise CurveUnusable(f"events.curve.public_key does not belong to the secret key in {file} (give its own)")
    return CurveKeys(server.encode(), public.encode(), secret)


class Link(Enum):
    """What a monitor tells of the live connection."""

    UP = auto()
    DOWN = auto()
    RETRIED = auto()
    """Another try to connect is about to be made."""
    REFUSED = auto()
    """Somebody answered who speaks no ZMQ, or not with us."""


class WorkerSockets:
    """The sockets of one worker. Opening them never waits for the network."""

    def __init__(
        self,
        context: zmq.Context[Any],
        events: str,
        replay: str | None,
        settings: EventsSettings,
        curve: CurveKeys | None = None,
    ) -> None:
        self.faults: Counter[str] = Counter()
        """Messages dropped, by reason: ``frame_count``, ``sequence_size``, ``sequence_range``."""
        self.sub: _SocketT | None = None
        self.monitor: _SocketT | None = None
        self.dealer: _SocketT | None = None
        self._context = context
        self._events = events
        self._replay = replay
        self._settings = settings
        self._curve = curve
        self._handed: list[list[bytes]] = []
        self._backlog_messages = 0
        self._backlog_bytes = 0
        self._replay_bytes = 0

    @property
    def overrun(self) -> bool:
        """More comes than is read: the live queue has not been empty for too long."""
        return (
            self._backlog_messages > self._settings.receive_high_water
            or self._backlog_bytes > self._settings.receive_bytes
        )

    @property
    def replay_overrun(self) -> bool:
        """The same of the open replay round."""
        return self.dealer is not None and self._replay_bytes > self._settings.receive_bytes

    def open_live(self) -> None:
        """Connect to the live side.

        Raises:
            zmq.ZMQError: ZMQ refuses the endpoint (no address, no port), or there are no sockets left.
        """
        self._backlog_messages = self._backlog_bytes = 0
        self.sub = self._context.socket(zmq.SUB)
        try:
            # Everything is set before connect: ZMQ reads most options then and never again.
            self._prepare(self.sub)
            self.sub.set(zmq.SUBSCRIBE, b"")
            interval, timeout = _ms(self._settings.heartbeat_interval), _ms(self._settings.heartbeat_timeout)
            self.sub.set(zmq.HEARTBEAT_IVL, interval)
            self.sub.set(zmq.HEARTBEAT_TIMEOUT, timeout)
            self.sub.set(zmq.HEARTBEAT_TTL, min(timeout, 6_553_599))  # ZMQ's own limit
            self.monitor = self.sub.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | _FAILED_HANDSHAKES
            )
            self.sub.connect(self._events)
        except zmq.ZMQError:
            self.close_live()
            raise

    def close_live(self) -> None:
        """Disconnect; whatever was received and not read is gone."""
        if self.sub is None:
            return
        if self.monitor is not None:
            self.sub.disable_monitor()
            self.monitor.close(linger=0)
        self.sub.close(linger=0)
        self.sub = self.monitor = None
        self._handed = []

    def links(self) -> Iterator[Link]:
        """What happened to the live connection since the last call, oldest first."""
        while self.monitor is not None and (frames := _receive(self.monitor)) is not None:
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                yield Link.UP
            elif event == zmq.EVENT_DISCONNECTED:
                yield Link.DOWN
            elif event == zmq.EVENT_CONNECT_RETRIED:
                yield Link.RETRIED
            elif event & _FAILED_HANDSHAKES:
                yield Link.REFUSED

    def live(self, limit: int) -> Iterator[tuple[int, bytes]]:
        """At most ``limit`` live messages, as far as they are there. Counts the malformed ones and leaves them out."""
        for _ in range(limit):
            frames = None if self.sub is None else _receive(self.sub)
            if frames is None:
                self._backlog_messages = self._backlog_bytes = 0
                return
            message = self._count(frames)
            if message is not None:
                yield message

    def handed(self) -> list[tuple[int, bytes]]:
        """The live messages that somebody else has read and left to be taken (:meth:`hand`); as with :meth:`live`."""
        read, self._handed = self._handed, []
        return [message for frames in read if (message := self._count(frames)) is not None]

    def hand(self, messages: list[list[bytes]]) -> None:
        self._handed += messages

    def took(self, messages: int, size: int, *, emptied: bool) -> None:
        """Somebody else has read so many live messages; if ``emptied``, since the queue was last empty."""
        self._backlog_messages = messages + (0 if emptied else self._backlog_messages)
        self._backlog_bytes = size + (0 if emptied else self._backlog_bytes)

    def ask(self, start: int) -> None:
        """Open a replay round; an open one is dropped.

        Raises:
            zmq.ZMQError: ZMQ refuses the replay endpoint.
        """
        assert self._replay is not None
        self.stop_replay()
        self._replay_bytes = 0
        self.dealer = self._context.socket(zmq.DEALER)
        try:
            self._prepare(self.dealer)
            self.dealer.connect(self._replay)
            self.dealer.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.stop_replay()
            raise

    def replies(self, limit: int) -> Iterator[tuple[int, bytes]]:
        """At most ``limit`` replies of the open round; its end marker has the number ``END``."""
        for _ in range(limit):
            if self.dealer is None:  # closed by whoever looked at the reply before
                return
            frames = _receive(self.dealer)
            if frames is None:
                self._replay_bytes = 0
                return
            self._replay_bytes += sum(map(len, frames))
            message = self._parse(frames, (3, 4))
            if message is not None and (message[0] == END or self._in_range(message[0])):
                yield message

    def stop_replay(self) -> None:
        if self.dealer is not None:
            self.dealer.close(linger=0)
            self.dealer = None

    def close(self) -> None:
        self.stop_replay()
        self.close_live()

    def _prepare(self, socket: _SocketT) -> None:
        timeout = _ms(self._settings.connect_timeout)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.CONNECT_TIMEOUT, timeout)
        socket.set(zmq.HANDSHAKE_IVL, timeout)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if self._curve is not None:
            socket.set(zmq.CURVE_SERVERKEY, self._curve.server)
            socket.set(zmq.CURVE_PUBLICKEY, self._curve.public)
            socket.set(zmq.CURVE_SECRETKEY, self._curve.secret)

    def _count(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        self._backlog_messages += 1
        self._backlog_bytes += sum(map(len, frames))
        message = self._parse(frames, (3,))
        return message if message is not None and self._in_range(message[0]) else None

    def _parse(self, frames: list[bytes], counts: tuple[int, ...]) -> tuple[int, bytes] | None:
        if len(frames) not in counts:
            self.faults["frame_count"] += 1
            return None
        if len(frames[-2]) != 8:
            self.faults["sequence_size"] += 1
            return None
        return int.from_bytes(frames[-2], "big", signed=True), frames[-1]

    def _in_range(self, seq: int) -> bool:
        if seq < 0:  # 2**63 batches are out of reach, and −1 is no live number
            self.faults["sequence_range"] += 1
            return False
        return True


def _receive(socket: _SocketT) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
