"""Many engines in one thread, whose replays go on only as far as a test lets them: so how many run at once is seen."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import zmq

from tests.faults.publisher import END, TOPIC, payload


@dataclass
class _Member:
    pub: zmq.Socket[bytes]
    router: zmq.Socket[bytes]
    events: str
    replay: str
    bodies: list[bytes]
    open: dict[bytes, int] = field(default_factory=dict)
    """By who asked: the next number to send."""


class Farm:
    """``count`` engines with ``length`` batches each; batch n of engine i stores the hash i × length + n + 1."""

    def __init__(self, count: int, length: int) -> None:
        self.requests: Counter[int] = Counter()
        """Replays asked for, by engine."""
        self.most = 0
        """Replays that were under way at one time."""
        self.doubled: set[int] = set()
        """Engines that were asked for a replay while they answered another."""
        self._granted = threading.Semaphore(0)
        self._stop = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self.members = [self._member(i * length + 1, length) for i in range(count)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def grant(self, batches: int) -> None:
        """Let replays send so many more batches, taken in turn."""
        self._granted.release(batches)

    @property
    def under_way(self) -> int:
        return sum(len(member.open) for member in self.members)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _member(self, first: int, length: int) -> _Member:
        pub, events = self._bound(zmq.PUB)
        router, replay = self._bound(zmq.ROUTER)
        return _Member(pub, router, events, replay, [payload(1_000.0 + n, first + n) for n in range(length)])

    def _bound(self, kind: int) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, 1_000)  # as vLLM's: a reader that pauses loses the rest
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        return socket, f"tcp://127.0.0.1:{port}"

    def _run(self) -> None:
        poller = zmq.Poller()
        for member in self.members:
            poller.register(member.router, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(0 if self.under_way else 5):
                i = next(i for i, member in enumerate(self.members) if member.router is socket)
                self._take(i, self.members[i])
            self.most = max(self.most, self.under_way)
            for member in self.members:
                for who in list(member.open):
                    self._go_on(member, who)

    def _take(self, i: int, member: _Member) -> None:
        who, _, start = member.router.recv_multipart()
        if member.open:
            self.doubled.add(i)
        self.requests[i] += 1
        member.open[who] = int.from_bytes(start, "big")

    def _go_on(self, member: _Member, who: bytes) -> None:
        seq = member.open[who]
        if seq >= len(member.bodies):
            member.router.send_multipart([who, b"", b"", END, b""])
            del member.open[who]
        elif self._granted.acquire(timeout=0.001):
            member.router.send_multipart([who, b"", TOPIC, seq.to_bytes(8, "big"), member.bodies[seq]])
            member.open[who] = seq + 1
