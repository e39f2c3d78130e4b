"""A subscriber's two sockets, for tests: everything has a deadline."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from kvsync.engine_sim.events import Cleared
from kvsync.engine_sim.publisher import Publisher

DEADLINE_MS = 10_000
END = b"\xff" * 8


class Subscriber:
    """SUB and DEALER of one publisher.

    A subscription takes effect some time after the handshake, and nothing says when. So empty batches are published
    until one arrives, then a last one of a form that no engine sends; ``base`` is the sequence number that follows it.
    """

    def __init__(self, source: Publisher) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.rcvtimeo = DEADLINE_MS
        self._sub.connect(source.endpoint)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.rcvhwm = 0
        self._dealer.rcvtimeo = DEADLINE_MS
        self._dealer.connect(source.replay_endpoint)
        for _ in range(DEADLINE_MS // 5):
            source.publish([])
            if self._sub.poll(5):
                break
        source.publish([Cleared(), Cleared()])
        last, batch = self.batch()
        while batch[1] not in ([["AllBlocksCleared"]] * 2, [{"type": "AllBlocksCleared"}] * 2):
            last, batch = self.batch()
        self.base = last + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def frames(self) -> list[bytes]:
        """The next message as it came."""
        return self._sub.recv_multipart()

    def batch(self) -> tuple[int, list[Any]]:
        """The next message's sequence number and batch."""
        _, seq, payload = self.frames()
        batch: list[Any] = msgspec.msgpack.decode(payload)
        return int.from_bytes(seq, "big"), batch

    def silent(self, milliseconds: int = 100) -> bool:
        """Whether nothing comes for a while."""
        return not self._sub.poll(milliseconds)

    def ask(self, *frames: bytes) -> None:
        self._dealer.send_multipart(frames)

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """A whole replay, ended by its end marker."""
        self.ask(b"", start.to_bytes(8, "big"))
        found: list[tuple[int, bytes]] = []
        while True:
            answer = self._dealer.recv_multipart()
            if answer[-2] == END:
                return found
            found.append((int.from_bytes(answer[-2], "big"), answer[-1]))

    def answer(self, milliseconds: int = DEADLINE_MS) -> list[bytes] | None:
        """One frame group of a replay, or ``None`` if none comes in time."""
        return self._dealer.recv_multipart() if self._dealer.poll(milliseconds) else None
