"""Engines' event streams: PUB and ROUTER sockets that speak as vLLM's publisher does, many streams in one process.

The PUB side is an XPUB socket (what libzmq's PUB is made of), which tells when a subscriber's subscription has arrived;
so nothing is sent before the subject listens, and nobody has to wait and hope. High-water marks are vLLM's (100,000
messages): nothing is lost as long as no stream has more than that.

    load      make payloads: a script (:mod:`bench.work`) per stream
    open      bind; sequence numbers begin at 0 → endpoints
    publish   send all that is loaded, at a rate or as fast as it goes; → when and how much
    close
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import zmq

from bench.subjects import answer
from bench.traffic import in_turns, payload, rest

HIGH_WATER = 100_000
BUFFERED = 10_000
LOOK = 64
"""Messages between two looks at the replay sockets."""


class Stream:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.events = context.socket(zmq.XPUB)
        self.events.set_hwm(HIGH_WATER)
        self.events.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.replay = context.socket(zmq.ROUTER)
        self.replay.set_hwm(0)
        self.ports = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (self.events, self.replay)]
        self.sent = 0
        self.subscribed = False
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED)

    def send(self, rest: bytes) -> int:
        data = payload(time.time(), rest)
        number = self.sent
        self.sent += 1
        self._buffer.append((number, data))
        self.events.send_multipart((b"", number.to_bytes(8, "big"), data), copy=len(data) < 65_536)
        return len(data)

    def see_to(self) -> None:
        """Answer what came from the subscriber."""
        while self.events.poll(0):
            self.subscribed |= self.events.recv()[:1] == b"\x01"
        while self.replay.poll(0):
            client, _, start = self.replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, data in self._buffer:
                if number >= first:
                    self.replay.send_multipart((client, b"", b"", number.to_bytes(8, "big"), data))
            self.replay.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))

    def close(self) -> None:
        self.events.close(linger=0)
        self.replay.close(linger=0)


class Publisher:
    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._streams: list[Stream] = []
        self._loaded: list[tuple[int, bytes]] = []

    def load(self, scripts: Sequence[Mapping[str, Any]]) -> int:
        self._loaded = [(worker, rest(events)) for worker, events in in_turns(scripts)]
        return len(self._loaded)

    def open(self, streams: int) -> list[list[str]]:
        self._streams = [Stream(self._context) for _ in range(streams)]
        return [[f"tcp://127.0.0.1:{port}" for port in stream.ports] for stream in self._streams]

    def subscribed(self) -> bool:
        self.see_to()
        return all(stream.subscribed for stream in self._streams)

    def publish(self, rate: float | None = None, at: float | None = None, times: bool = False) -> dict[str, Any]:
        """All that is loaded.

        Args:
            rate: messages per second, all streams together.
            at: when to begin, by the monotonic clock, which is one for all processes of a machine.
            times: tell when each message was sent, in their order.
        """
        return self._send(self._loaded, rate, at, times)

    def stream(self, scripts: Sequence[Mapping[str, Any]], rate: float | None = None) -> dict[str, Any]:
        """A script per stream, made while it is sent."""
        return self._send(((worker, rest(events)) for worker, events in in_turns(scripts)), rate)

    def _send(
        self,
        work: Iterable[tuple[int, bytes]],
        rate: float | None = None,
        at: float | None = None,
        times: bool = False,
    ) -> dict[str, Any]:
        size = count = 0
        sent: list[float] = []
        began = at or time.monotonic()
        cpu = time.process_time()
        for worker, data in work:
            if rate is not None:
                self._wait(began + count / rate)
            if times:
                sent.append(time.monotonic())
            size += _wire_bytes(self._streams[worker].send(data))
            count += 1
            if count % LOOK == 0:
                self.see_to()
        return {
            "messages": count,
            "bytes": size,
            "began": began,
            "seconds": time.monotonic() - began,
            "cpu": time.process_time() - cpu,
            "times": sent,
        }

    def _wait(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            time.sleep(left)

    def see_to(self) -> None:
        for stream in self._streams:
            stream.see_to()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams = []


def _wire_bytes(size: int) -> int:
    """Bytes that a batch is on the wire: an empty topic, eight bytes of number, the payload, and ZMTP's framing."""
    return 2 + (2 + 8) + (2 if size < 256 else 9) + size


def main() -> None:
    publisher = Publisher()
    handlers = {name: getattr(publisher, name) for name in ("load", "open", "subscribed", "publish", "stream", "close")}
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        if dict(poller.poll(5)):
            line = sys.stdin.buffer.readline()
            if not line:
                return
            answer(handlers, line)
        publisher.see_to()


if __name__ == "__main__":
    main()
