"""Sends a rank's event batches over real ZMQ sockets and answers replay requests, as vLLM's publisher does.

One thread owns the PUB and the ROUTER socket. What must always hold:

- Sequence numbers start at 0 in each life of the publisher and grow by one per batch.
- The last ``buffer_steps`` batches can be asked for again: a request is ``[b"", start]`` with the start as 8 bytes
  big-endian; the answer is every buffered batch from there on, then the end marker. Anything else gets no answer.
- While a replay is answered nothing is published (a subscriber that asks for much delays the others).
- A full subscriber loses batches silently at the PUB's high-water mark, and a replay client of vLLM ≤ 0.32 loses them
  beyond 1,000 queued frames.

Faults (:class:`PublisherFaults`) lose batches or cut replays on purpose.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from kvsync.engine_sim.dialect import Dialect
from kvsync.engine_sim.events import CacheEvent

_STOP = b"stop"


@dataclass(slots=True)
class PublisherFaults:
    """What goes wrong on purpose. Written by any thread, read by the publisher's."""

    drop_next: int = 0
    """Batches that are numbered and buffered, but not published: a gap that a replay repairs."""
    lose_next: int = 0
    """Batches that are numbered but neither published nor buffered: a gap that nothing repairs."""
    replay_frames: int | None = None
    """A replay stops after this many batches, without the end marker."""


class Publisher:
    """The sockets and the thread of one rank; see the module.

    Args:
        endpoint, replay_endpoint: ``tcp://host:port``, bound; port 0 lets the system choose.
        clock: gives the batches' timestamps, in seconds since the epoch.

    Raises:
        zmq.ZMQError: an endpoint can't be bound.
    """

    def __init__(
        self,
        dialect: Dialect,
        rank: int,
        *,
        endpoint: str,
        replay_endpoint: str,
        topic: str = "",
        buffer_steps: int = 10_000,
        high_water: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.faults = PublisherFaults()
        self.running = threading.Event()
        """Cleared: the thread stands still, as in an engine that hangs."""
        self.running.set()
        self.published = 0
        """Batches numbered so far: the next sequence number."""
        self.replays = 0
        """Replay requests answered."""
        self.bad_requests = 0
        """Replay requests without the right frames, left without an answer."""
        self._dialect = dialect
        self._rank = rank
        self._topic = topic.encode()
        self._clock = clock
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(high_water)
            self._pub.bind(endpoint)
            self._router = self._context.socket(zmq.ROUTER)
            if dialect.replay_high_water == "buffer":
                self._router.sndhwm = 2 * (buffer_steps + 1)
            self._router.bind(replay_endpoint)
            self._inbox = self._context.socket(zmq.PULL)
            self._inbox.set_hwm(0)
            self._inbox.bind("inproc://batches")
            self._outbox = self._context.socket(zmq.PUSH)
            self._outbox.set_hwm(0)
            self._outbox.connect("inproc://batches")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _text(self._pub)
        self.replay_endpoint = _text(self._router)
        self._thread = threading.Thread(target=self._run, name=f"publisher-{rank}", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Queue one batch. Called by one thread only, always the same."""
        self._outbox.send(self._dialect.encode_batch(self._clock(), events, self._rank))

    def close(self) -> None:
        """Publish what is queued, then free the ports; as in vLLM, what the network has not taken by then is lost."""
        self.running.set()
        self._outbox.send(_STOP)
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            self.running.wait()
            if self._router in ready:
                self._replay(self._router.recv_multipart())
            if self._inbox in ready:
                payload = self._inbox.recv()
                if payload == _STOP:
                    return
                self._send(payload)

    def _send(self, payload: bytes) -> None:
        seq = self.published
        self.published += 1
        if self.faults.lose_next:
            self.faults.lose_next -= 1
            return
        if self.faults.drop_next:
            self.faults.drop_next -= 1
        else:
            self._pub.send_multipart([self._topic, seq.to_bytes(8, "big"), payload])
        self._buffer.append((seq, payload))

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self.bad_requests += 1
            return
        client, _, start = frames
        first = int.from_bytes(start, "big")
        self.replays += 1
        limit = self.faults.replay_frames
        for sent, (seq, payload) in enumerate(pair for pair in self._buffer if pair[0] >= first):
            if sent == limit:
                return
            self._router.send_multipart([client, *self._dialect.replay_frames(self._topic, seq, payload)])
        if limit is None:
            self._router.send_multipart([client, *self._dialect.replay_end()])


def _text(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")
