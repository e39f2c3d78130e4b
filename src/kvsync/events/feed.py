"""What was read, on its way to the sink and to whoever looks on.

Belongs to the reader's thread; observers may come and go from any. What must always hold: batches reach the sink in the
order in which they were added, each once, and observers see them after the sink. A sink that fails costs the belief in
the workers concerned, an observer that fails its own place, and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from kvsync.events.contracts import Observer, Sink, Target, Timer
from kvsync.events.decode import decode_batch
from kvsync.events.followed import Followed
from kvsync.events.types import EventBatch, SkippedEvent, UndecodableBatch

log = logging.getLogger("kvsync.events")


class Feed:
    """See the module."""

    def __init__(self, sink: Sink, timer: Timer | None) -> None:
        self._sink = sink
        self._timer = timer
        self._read: list[tuple[Followed, int, bytes]] = []
        self._observers: tuple[Observer, ...] = ()
        self._lock = threading.Lock()
        """Guards changes of ``_observers``."""

    def observe(self, observer: Observer) -> None:
        with self._lock:
            self._observers = (*self._observers, observer)

    def unobserve(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(o for o in self._observers if o is not observer)

    @property
    def observed(self) -> bool:
        """Somebody looks on."""
        return bool(self._observers)

    def timed(self, followed: Followed, seconds: float) -> None:
        """A drain with batches of this stream took so long."""
        if self._timer is not None:
            self._timer.applied(followed.target.worker, seconds)

    def add(self, followed: Followed, seq: int, payload: bytes) -> None:
        self._read.append((followed, seq, payload))

    def drop(self) -> None:
        """Whatever was added is not handed over."""
        self._read = []

    def hand_over(self) -> None:
        """Give the sink what was added."""
        if not self._read:
            return
        read, self._read = self._read, []
        last = {followed: seq for followed, seq, _ in read}
        started = time.perf_counter()
        try:
            self._sink.apply_many([(followed.target.worker, payload) for followed, _, payload in read])
        except Exception:
            # A fault of the sink. Which batches it took is unknown, so nothing may be believed of these workers.
            log.exception("the index failed on a drain of %d batches", len(read))
            for followed in last:
                followed.errors["sink"] += 1
                self._sink.forget(followed.target.worker)
        seconds = time.perf_counter() - started
        for followed, seq in last.items():
            followed.applied = seq
            self.timed(followed, seconds)
        if self._observers:
            for followed, seq, payload in read:
                self._show(followed, seq, payload)

    def _show(self, followed: Followed, seq: int, payload: bytes) -> None:
        try:
            batch = _filled(decode_batch(payload), followed.target)
        except UndecodableBatch:
            followed.errors["undecodable"] += 1
            return
        for observer in self._observers:
            try:
                observer(followed.target.worker, seq, batch)
            except Exception:
                log.exception("an observer of KV events failed and is dropped")
                self.unobserve(observer)


def _filled(batch: EventBatch, target: Target) -> EventBatch:
    """The batch with what the wire does not say: who published it."""
    events = tuple(
        e if isinstance(e, SkippedEvent) else replace(e, model_name=target.model, source_pod=target.source_pod)
        for e in batch.events
    )
    return replace(batch, events=events)


__all__ = ["Feed"]
