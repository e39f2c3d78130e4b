"""Following a fleet: which streams are open, for whom, and how each of them is doing.

The asyncio side of the room. It knows engines; the reader thread knows streams. What must always hold:

* An engine that is added, changed or removed meets no trace of its former self: the reader ends a registration before
  the next begins.
* No engine waits for another: each has a task of its own that finds its streams, asks again while the engine doesn't
  answer (:data:`RETRY_FIRST` … :data:`RETRY_LAST`), and looks again when a stream connects anew or stays away.

Importing this module needs no pyzmq; :meth:`EventManager.start` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import aiohttp

from kvsync.config.model import EventsSettings
from kvsync.discovery.model import Engine
from kvsync.events.contracts import Locator, NotLocated, Observer, ReaderEnded, Sink, Target, Timer, WorkerStatus
from kvsync.events.sources import HttpLocator
from kvsync.events.stream import State

if TYPE_CHECKING:
    from kvsync.events.reader import Reader

log = logging.getLogger("kvsync.events")

RETRY_FIRST: Final = 1.0
RETRY_LAST: Final = 30.0


class _Registration:
    """One engine, from ``add`` to ``remove`` or to a change that matters."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.look_again = asyncio.Event()
        self.problem: str | None = None
        self.task: asyncio.Task[None] | None = None


class EventManager:
    """Keeps a sink fed with the events of a changing set of engines.

    All methods but :meth:`served` and :meth:`workers` belong to the event loop that called :meth:`start`.

    Args:
        sink: the index.
        locator: finds an engine's streams; by default :class:`kvsync.events.sources.HttpLocator`.
        start_sequence: the first number wanted of each stream; above 0 only for who looks on (``kvsync watch``).
    """

    def __init__(
        self,
        sink: Sink,
        settings: EventsSettings,
        *,
        locator: Locator | None = None,
        timer: Timer | None = None,
        start_sequence: int = 0,
    ) -> None:
        self._sink = sink
        self._settings = settings
        self._locator = locator
        self._timer = timer
        self._start_sequence = start_sequence
        self._session: aiohttp.ClientSession | None = None
        self._reader: Reader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._registrations: dict[str, _Registration] = {}
        self._observers: list[Observer] = []

    @property
    def failed(self) -> bool:
        """The reader ended by a fault; nothing is followed any more. Stop this manager and start another."""
        return self._reader is not None and self._reader.failed

    async def start(self) -> None:
        """Start the reader thread.

        Raises:
            ImportError: pyzmq is not installed.
        """
        from kvsync.events.reader import Reader

        self._loop = asyncio.get_running_loop()
        if self._locator is None:
            # Engines are foreign: what they send is neither unpacked, nor kept to be sent back.
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), headers={"Accept-Encoding": "identity"}, auto_decompress=False
            )
            self._locator = HttpLocator(self._session, self._settings.connect_timeout)
        self._reader = Reader(
            self._sink,
            self._settings,
            relocate=self._relocate,
            timer=self._timer,
            start_sequence=self._start_sequence,
        )
        for observer in self._observers:
            self._reader.observe(observer)
        self._reader.start()

    async def stop(self) -> None:
        """End everything. The sink has none of the manager's workers afterwards."""
        tasks = [r.task for r in self._registrations.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._registrations.clear()
        if self._reader is not None:
            await asyncio.to_thread(self._reader.stop)
        if self._session is not None:
            await self._session.close()

    async def add(self, engine: Engine) -> None:
        """Follow an engine. Returns at once; an engine that is not there yet is tried until it is."""
        await self.remove(engine.uid)
        registration = _Registration(engine)
        self._registrations[engine.uid] = registration
        if engine.kv_events:
            registration.task = asyncio.create_task(self._keep(registration), name=f"kv events of {engine.name}")

    async def change(self, engine: Engine) -> None:
        """Take an engine's new description. Only a change of what is followed opens its streams anew."""
        registration = self._registrations.get(engine.uid)
        if registration is not None and _followed_facts(registration.engine) == _followed_facts(engine):
            registration.engine = engine
        else:
            await self.add(engine)

    async def remove(self, uid: str) -> None:
        """Follow an engine no longer. Afterwards the sink hears nothing more of its workers."""
        registration = self._registrations.pop(uid, None)
        if registration is None or registration.task is None:
            return
        registration.task.cancel()
        await asyncio.gather(registration.task, return_exceptions=True)
        assert self._reader is not None
        reader = self._reader
        ends = [reader.unfollow(registration.engine.worker(rank)) for rank in registration.engine.ranks]
        with suppress(ReaderEnded):  # then the sink has none of the workers any more
            await asyncio.gather(*map(asyncio.wrap_future, ends))

    def served(self, worker: str) -> None:
        """Tell that a worker answered a request just now: a stream that stays silent all the same is probed.

        May be called from any thread.
        """
        if self._reader is not None:
            self._reader.served(worker)

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Let an observer see every batch from now on; the function returned ends that. Costs a decoding per batch.

        May be called before :meth:`start`: then nothing is missed.
        """
        self._observers.append(observer)
        if self._reader is not None:
            self._reader.observe(observer)

        def end() -> None:
            self._observers.remove(observer)
            if self._reader is not None:
                self._reader.unobserve(observer)

        return end

    def workers(self) -> list[WorkerStatus]:
        """How each worker's stream is doing, those that can't be followed yet included."""
        found = []
        for registration in list(self._registrations.values()):
            if registration.task is None:
                continue
            engine = registration.engine
            for rank in engine.ranks:
                worker = engine.worker(rank)
                status = self._reader.status(worker) if self._reader is not None else None
                if status is None:
                    status = WorkerStatus(
                        engine=engine.uid,
                        name=engine.name,
                        worker=worker,
                        rank=rank,
                        state=State.CONNECTING,
                        whole=False,
                        last_sequence=None,
                        endpoint=None,
                        replay_endpoint=None,
                        connected=False,
                        connected_since=None,
                    )
                found.append(replace(status, problem=registration.problem))
        return found

    def _relocate(self, uid: str) -> None:
        """From the reader's thread: an engine may have moved or changed."""

        def wake() -> None:
            registration = self._registrations.get(uid)
            if registration is not None:
                registration.look_again.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(wake)

    async def _keep(self, registration: _Registration) -> None:
        """Keep one engine's streams where the engine says they are."""
        assert self._locator is not None
        assert self._reader is not None
        followed: dict[str, Target] = {}
        delay = RETRY_FIRST
        while True:
            registration.look_again.clear()
            complete = False
            problem = None
            try:
                located = await self._locator.locate(registration.engine)
                complete = located.complete
                for target in located.targets:
                    before = followed.get(target.worker)
                    if not _news(before, target, complete):
                        continue
                    await asyncio.wrap_future(self._reader.follow(target))
                    followed[target.worker] = target
            except NotLocated as error:
                problem = str(error)
            except ReaderEnded:  # the manager says so in ``failed``
                return
            if problem is not None and problem != registration.problem:
                log.warning("%s: %s", registration.engine.name, problem)
            registration.problem = problem
            try:
                async with asyncio.timeout(None if complete else delay):
                    await registration.look_again.wait()
                delay = RETRY_FIRST
            except TimeoutError:
                delay = min(2 * delay, RETRY_LAST)


def _followed_facts(engine: Engine) -> Engine:
    """An engine without what has no influence on following it."""
    return replace(engine, adapters=(), labels={}, ready=True)


def _news(before: Target | None, now: Target, complete: bool) -> bool:
    """Whether a stream must be opened (anew). Facts that an engine could not be asked for are no news."""
    if before is None or complete:
        return before != now
    return (before.events, before.replay) != (now.events, now.replay) and now.replay is not None
