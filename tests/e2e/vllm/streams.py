"""An engine's events as the engine itself remembers them, complete up to this moment.

An answer may reach the client before its last events are on the wire. But the engine queues the events first, and its
publisher thread takes turns: it serves a waiting replay, then takes one batch from the queue. So when a replay from
the next number brings nothing, and it is not the first one asked since the answer, then the queue was empty after the
answer, and everything is published. :func:`catch_up` returns at that moment: no pause is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

_END = b"\xff" * 8
TIMEOUT_MS = 30_000


class Stream:
    """The replay socket of one worker. ``last`` is the last sequence number seen, −1 before the first."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.last = -1
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)

    def ask(self) -> None:
        """Ask for everything after ``last``; :meth:`collect` reads the answer."""
        self._socket.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])

    def collect(self) -> list[list[dict[str, Any]]]:
        """The events of each batch of one replay, in order.

        Raises:
            zmq.Again: the engine did not answer.
            AssertionError: a number is missing: the engine's buffer is too small for this use.
        """
        batches: list[list[dict[str, Any]]] = []
        while True:
            *_, number, payload = self._socket.recv_multipart()
            if number == _END:
                return batches
            sequence = int.from_bytes(number, "big")
            assert sequence == self.last + 1, f"batch {sequence} follows {self.last}"
            self.last = sequence
            batches.append(msgspec.msgpack.decode(payload)[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def catch_up(streams: Mapping[str, Stream]) -> dict[str, Sequence[Sequence[dict[str, Any]]]]:
    """Per worker, all batches since the last call, up to and including those of every answer received so far."""
    news: dict[str, list[list[dict[str, Any]]]] = {worker: [] for worker in streams}
    open_streams, rounds = dict(streams), 0
    while open_streams:
        rounds += 1
        for stream in open_streams.values():
            stream.ask()
        for worker, stream in list(open_streams.items()):
            batches = stream.collect()
            news[worker] += batches
            if not batches and rounds > 1:
                del open_streams[worker]
    return dict(news)
