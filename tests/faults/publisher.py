"""A scripted engine side of one event stream: real PUB and ROUTER sockets, with the faults that real ones have.

As strict as vLLM: what is no replay request (an empty frame and eight bytes) gets no answer, and goes to ``refused``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import zmq

T = TypeVar("T")
TOPIC = b"kv@pod1@tiny"
END = b"\xff" * 8


def payload(ts: float, *hashes: int, rank: int | None = 0, removed: bool = False) -> bytes:
    """A batch of one event, in the map dialect."""
    event: dict[str, object] = (
        {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}
        if removed
        else {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": None,
            "token_ids": [h % 1000 for h in hashes for _ in range(4)],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
    )
    return msgspec.msgpack.encode([ts, [event], rank])


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    bound = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")


class Publisher:
    """Publishes numbered batches and answers replays, in a thread of its own (sockets never change threads).

    ``curve_secret``: its secret key, when it demands CURVE. ``already``, ``bodies``: what it had published before
    anybody could connect, as one hash each, or as payloads.

    Attributes may be set at any time:
        drop: numbers that a replay leaves out, each once for every time it stands in the list.
        end_marker: whether replays end properly.
        silent_replay: requests are taken and not answered.
        cut_replay: a replay stops after so many batches, without its end.
    """

    def __init__(
        self,
        *,
        events_port: int = 0,
        replay_port: int | None = 0,
        topic_frame: bool = True,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        started: float = 1_000.0,
        host: str = "127.0.0.1",
        already: Sequence[int] = (),
        bodies: Sequence[bytes] = (),
        curve_secret: bytes | None = None,
    ) -> None:
        self.topic_frame = topic_frame
        self.started = started
        self.drop: list[int] = []
        self.end_marker = True
        self.silent_replay = False
        self.cut_replay: int | None = None
        self.requests: list[int] = []
        """What replays were asked to begin with."""
        self.refused: list[list[bytes]] = []
        """Requests that are none: vLLM warns of them and answers nothing."""
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        bodies = bodies or [payload(started + seq, value) for seq, value in enumerate(already)]
        self._buffer.extend(enumerate(bodies))
        self._next = len(bodies)
        self._work: deque[Callable[[], None]] = deque()
        self._stop = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        if curve_secret is not None:
            for socket in (self._pub, self._router):
                socket.set(zmq.CURVE_SERVER, 1)
                socket.set(zmq.CURVE_SECRETKEY, curve_secret)
        self._pub.set(zmq.LINGER, 0)
        self._pub.set(zmq.SNDHWM, hwm)
        self._pub.set(zmq.IPV6, ":" in host)
        where = f"[{host}]" if ":" in host else host
        self._pub.bind(f"tcp://{where}:{events_port or '*'}")
        self.events = _endpoint(self._pub)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.SNDHWM, 0)
        self._router.set(zmq.IPV6, ":" in host)
        self.replay: str | None = None
        if replay_port is not None:
            self._router.bind(f"tcp://{where}:{replay_port or '*'}")
            self.replay = _endpoint(self._router)
        self._wake = self._context.socket(zmq.PULL)
        self._wake.bind("inproc://wake")
        self._push = self._context.socket(zmq.PUSH)
        self._push.connect("inproc://wake")
        self._moves = threading.Event()
        self._moves.set()
        self.subscribed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, *hashes: int, rank: int | None = 0, removed: bool = False, lost: bool = False) -> int:
        """Publish one batch, or only buffer it as if the live side had dropped it. Returns its number."""

        return self.send(
            lambda seq: payload(self.started + seq, *hashes, rank=rank, removed=removed),
            lost=lost,
        )

    @property
    def published(self) -> int:
        """Numbers given so far, the burnt ones included."""
        return self._next

    def send(self, body: bytes | Callable[[int], bytes], *, lost: bool = False) -> int:
        """Publish one batch with any content (or one made for its number); else like :meth:`publish`."""

        def work() -> int:
            seq, self._next = self._next, self._next + 1
            content = body if isinstance(body, bytes) else body(seq)
            self._buffer.append((seq, content))
            if not lost:
                self._pub.send_multipart([TOPIC, seq.to_bytes(8, "big"), content])
            return seq

        return self._do(work)

    def resend(self, *numbers: int) -> None:
        """Send buffered batches on the live side, in this order: late, again, or in the wrong order."""

        def work() -> None:
            bodies = dict(self._buffer)
            for seq in numbers:
                self._pub.send_multipart([TOPIC, seq.to_bytes(8, "big"), bodies[seq]])

        self._do(work)

    def burn(self) -> None:
        """A number that no batch gets."""

        def work() -> None:
            self._next += 1

        self._do(work)

    def send_live(self, *frames: bytes) -> None:
        """Anything at all, on the live side."""
        self._do(lambda: self._pub.send_multipart(list(frames)))

    def freeze(self) -> None:
        """Stand still, as the thread of an engine that hangs: nothing is sent, answered or closed."""
        self._moves.clear()

    def thaw(self) -> None:
        self._moves.set()

    def close(self) -> None:
        self._stop = True
        self._moves.set()
        self._push.send(b"")
        self._thread.join()
        self._context.destroy(linger=0)

    def _do(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self._work.append(lambda: done.set_result(work()))
        self._push.send(b"")
        return done.result(10)

    def _run(self) -> None:
        poller = zmq.Poller()
        for part in (self._wake, self._router, self._pub):
            poller.register(part, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll())
            self._moves.wait()
            if self._pub in ready and self._pub.recv()[:1] == b"\x01":
                self.subscribed.set()
            if self._router in ready:
                self._answer(self._router.recv_multipart())
            if self._wake in ready:
                self._wake.recv()
                while self._work:
                    self._work.popleft()()

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self.refused.append(frames)
            return
        start = int.from_bytes(frames[2], "big")
        self.requests.append(start)
        if self.silent_replay:
            return
        lead = [frames[0], b""] + ([TOPIC] if self.topic_frame else [])
        left = self.cut_replay
        for seq, body in list(self._buffer):
            if seq < start:
                continue
            if left == 0:
                return
            left = None if left is None else left - 1
            if seq in self.drop:
                self.drop.remove(seq)
                continue
            self._router.send_multipart([*lead, seq.to_bytes(8, "big"), body])
        if self.end_marker and left != 0:
            end_lead = [frames[0], b""] + ([b""] if self.topic_frame else [])
            self._router.send_multipart([*end_lead, END, b""])


def neighbours(count: int) -> list[Publisher]:
    """Publishers without replay on ports that follow each other, as the ranks of one engine have them."""
    while True:
        found = [Publisher(replay_port=None)]
        try:
            first = int(found[0].events.rpartition(":")[2])
            for n in range(1, count):
                found.append(Publisher(events_port=first + n, replay_port=None))
        except zmq.ZMQError:  # one of them is taken: begin elsewhere
            for publisher in found:
                publisher.close()
        else:
            return found
