"""When is an event visible to routing? An engine of a model of its own publishes single blocks, and the moment of each.

The moments are in memory that the two processes share, on the clock that all processes have (monotonic). Who asks is a
thread of the process that follows: it looks a block up again and again until it is credited. Between two looks it
sleeps for :data:`EVERY`, so that lags are seen that much too long.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from ctypes import c_double
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Self

from bench.work import Prompt as Content
from bench.work import Store, tokens

if TYPE_CHECKING:
    from kvsync.index.match import Index

MODEL = "probe"
EVERY = 0.0001
FIRST = 1 << 33
"""The number of its first prompt."""


def publish(talk: Connection, moments: Any, rate: float) -> None:
    """In a process of its own: bind, say where, wait for a word, publish, and stay until the next one."""
    import zmq

    from bench.subjects.publisher import Stream
    from bench.traffic import rest

    bodies = [rest([Store(Content((FIRST + number, 1)), 0, 1)]) for number in range(len(moments))]
    stream = Stream(zmq.Context())
    talk.send([f"tcp://127.0.0.1:{port}" for port in stream.ports])
    while not talk.poll(0.001):
        stream.see_to()
    talk.recv()
    began = time.monotonic()
    for number, body in enumerate(bodies):
        while (left := began + number / rate - time.monotonic()) > 0:
            stream.see_to()
            time.sleep(min(left, 0.001))
        moments[number] = time.monotonic()
        stream.send(body)
    while not talk.poll(0.001):
        stream.see_to()
    stream.close()


class Probe:
    """The engine, and who waits for its events."""

    def __init__(self, count: int, rate: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._moments = context.RawArray(c_double, count)
        self._talk, theirs = context.Pipe()
        self._process = context.Process(target=publish, args=(theirs, self._moments, rate))
        self.lags: list[float] = []
        self.cpu = 0.0
        """Seconds that waiting took: no part of following."""

    def __enter__(self) -> Self:
        self._process.start()
        self.endpoints: list[str] = self._talk.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._talk.send("end")
        self._process.join()

    def start(self, index: Index, worker: str) -> threading.Thread:
        self._talk.send("go")
        thread = threading.Thread(target=self._watch, args=(index, worker))
        thread.start()
        return thread

    def _watch(self, index: Index, worker: str) -> None:
        for number in range(len(self._moments)):
            asked = tokens(FIRST + number, 1)
            asked.append(0)
            packed = asked.tobytes()
            while not self._moments[number]:
                time.sleep(EVERY)
            while not index.match(packed, MODEL)[worker].credit:
                time.sleep(EVERY)
            self.lags.append(time.monotonic() - self._moments[number])
        self.cpu = time.thread_time()
