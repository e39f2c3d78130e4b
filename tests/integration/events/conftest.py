from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import pytest_asyncio

from kvsync.config.model import EventsSettings
from kvsync.discovery.model import Engine
from kvsync.events.contracts import Progress, Receiver, Report, Sink, Timer, WorkerStatus
from kvsync.events.decode import decode_batch
from kvsync.events.manager import EventManager
from kvsync.events.types import BlockStoredEvent, UndecodableBatch
from tests.faults.publisher import Publisher

SETTINGS = EventsSettings(
    replay_timeout=0.5, poll_timeout=0.02, heartbeat_interval=0.2, heartbeat_timeout=0.5, connect_timeout=1.0
)


@dataclass
class RecordingSink:
    """Writes down every call; ``held`` is what an index would believe (stored hashes since the last forgetting)."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    trust: dict[str, str] = field(default_factory=dict)
    applied: dict[str, list[int]] = field(default_factory=dict)
    """Per worker, the first stored hash of each batch, since the last forgetting."""
    current: list[bool] = field(default_factory=list)
    """Each time that a worker was said to be no longer, or again, current."""
    drains: list[int] = field(default_factory=list)
    slow: Callable[[], None] | None = None
    """Called at the beginning of each drain."""
    on_forget: Callable[[], None] | None = None
    undecodable: list[int] = field(default_factory=list)

    def add_worker(self, worker: str, model: str, **facts: Any) -> None:
        self.calls.append(("add", worker))
        self.facts[worker] = {"model": model, **facts}
        self.applied[worker] = []
        self.trust[worker] = "exact"

    def remove_worker(self, worker: str) -> None:
        self.calls.append(("remove", worker))
        for known in (self.facts, self.trust, self.applied):
            known.pop(worker, None)

    def apply_many(self, batches: Iterable[tuple[str, bytes]]) -> None:
        if self.slow is not None:
            self.slow()
        n = 0
        for worker, payload in batches:
            n += 1
            try:
                batch = decode_batch(payload)
            except UndecodableBatch:
                self.undecodable.append(1)
                continue
            for event in batch.events:
                if isinstance(event, BlockStoredEvent):
                    first = event.block_hashes[0]
                    assert isinstance(first, int)
                    if worker in self.applied:
                        self.applied[worker].append(first)
        self.drains.append(n)

    def forget(self, worker: str) -> None:
        if self.on_forget is not None:
            self.on_forget()
        self.calls.append(("forget", worker))
        self._begin(worker, "partial")

    def _begin(self, worker: str, trust: str) -> None:
        if worker in self.facts:
            self.trust[worker] = trust
            self.applied[worker] = []

    def suspend(self, worker: str) -> None:
        self.current.append(False)

    def resume(self, worker: str) -> None:
        self.current.append(True)

    def new_epoch(self, worker: str) -> None:
        self.calls.append(("new_epoch", worker))
        self._begin(worker, "exact")

    def relearn(self, worker: str) -> None:
        self.calls.append(("relearn", worker))
        self._begin(worker, "exact")


class DrainedSink(RecordingSink):
    """The same in front of the native core, which reads live sockets itself: what it took, its answers show."""

    def __init__(self) -> None:
        super().__init__()
        self.index = import_module("kvsync_core").PrefixIndex()
        self.taken = 0
        """Batches that took no turn in Python."""

    def receiver(self, *arguments: Any, **options: Any) -> Receiver:
        return _Watched(self.index.receiver(*arguments, **options), self._took)

    def add_worker(self, worker: str, model: str, **facts: Any) -> None:
        super().add_worker(worker, model, **facts)
        self.index.add_worker(worker, model, **facts)

    def remove_worker(self, worker: str) -> None:
        super().remove_worker(worker)
        self.index.remove_worker(worker)

    def apply_many(self, batches: Iterable[tuple[str, bytes]]) -> None:
        batches = list(batches)
        super().apply_many(batches)
        self.index.apply_many(batches)

    def suspend(self, worker: str) -> None:
        super().suspend(worker)
        self.index.suspend(worker)

    def resume(self, worker: str) -> None:
        super().resume(worker)
        self.index.resume(worker)

    def _begin(self, worker: str, trust: str) -> None:
        super()._begin(worker, trust)
        (self.index.forget if trust == "partial" else self.index.relearn)(worker)

    def _took(self, worker: str, count: int) -> None:
        """The publishers' block n is a prompt of tokens n, below 1,000."""
        self.taken += count
        if worker not in self.facts:
            return
        model, known = self.facts[worker]["model"], set(self.applied[worker])
        found = (n for n in range(1000) if n not in known)
        new = [n for n in found if self.index.match([n] * 4 + [0], model)[worker].credit]
        assert len(new) <= count
        self.applied[worker] += new


class _Watched:
    """A receiver, and somebody who hears what it took."""

    def __init__(self, receiver: Receiver, took: Callable[[str, int], None]) -> None:
        self._receiver = receiver
        self._took = took
        self._streams: dict[int, int] = {}
        self._workers: dict[int, str] = {}
        self.remove, self.leave = receiver.remove, receiver.leave

    def add(self, stream: int, socket: int) -> None:
        self._streams[socket] = stream
        self._receiver.add(stream, socket)

    def follow(self, socket: int, worker: str, next: int, at: float) -> Progress | None:
        self._workers[self._streams[socket]] = worker
        return self._receiver.follow(socket, worker, next, at)

    def wait(self, seconds: float, messages: int, size: int) -> Sequence[Report]:
        reports = self._receiver.wait(seconds, messages, size)
        for report in reports:
            if report.count:
                self._took(self._workers[report.stream], report.count)
        return reports


SINKS: list[type[RecordingSink]] = [RecordingSink, DrainedSink] if find_spec("kvsync_core") else [RecordingSink]
"""Both ways from a socket to a sink: through Python, and read by the sink itself."""


class Fleet:
    """A manager with its recording sink, and publishers that are closed with it."""

    def __init__(
        self,
        settings: EventsSettings = SETTINGS,
        sink: Sink | None = None,
        recorder: RecordingSink | None = None,
        timer: Timer | None = None,
        **callbacks: Any,
    ) -> None:
        self.sink = recorder or RecordingSink()
        self.manager = EventManager(self.sink if sink is None else sink, settings, timer=timer, **callbacks)
        self.publishers: list[Publisher] = []

    async def __aenter__(self) -> Self:
        await self.manager.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def publisher(self, **options: Any) -> Publisher:
        publisher = Publisher(**options)
        self.publishers.append(publisher)
        return publisher

    async def close(self) -> None:
        await self.manager.stop()
        for publisher in self.publishers:
            publisher.close()

    async def follow(self, publisher: Publisher, uid: str = "a", **facts: Any) -> None:
        await self.manager.add(engine_of(publisher, uid, **facts))

    def status(self, worker: str = "a") -> WorkerStatus:
        return next(s for s in self.manager.workers() if s.worker == worker)

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not in time; {self.manager.workers()}; {self.sink}")
            await asyncio.sleep(0.005)

    async def live(self, worker: str = "a") -> None:
        await self.until(lambda: self.status(worker).state == "live")

    async def holds(self, hashes: Iterable[int], worker: str = "a") -> None:
        wanted = list(hashes)
        await self.until(lambda: self.sink.applied.get(worker) == wanted)


def engine_of(publisher: Publisher, uid: str = "a", **facts: Any) -> Engine:
    defaults: dict[str, Any] = {"usable_blocks": 63, "model": "m"} | facts
    # Nothing listens on port 9 of loopback; with all facts given nobody asks there either.
    return Engine(
        uid=uid,
        name=f"ns/{uid}",
        url="http://127.0.0.1:9",
        events=publisher.events,
        replay=publisher.replay,
        **defaults,
    )


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    it = Fleet()
    await it.manager.start()
    try:
        yield it
    finally:
        await it.close()
