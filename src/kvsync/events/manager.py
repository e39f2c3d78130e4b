"""Following a fleet: which streams are open, for whom, and how each of them is doing.

The asyncio side of the room. It knows engines; the reader thread knows streams. What must always hold:

* An engine that is added, changed or removed meets no trace of its former self: the reader ends a registration before
  the next begins. A removal waits for nothing: when it returns, the sink knows none of the engine's workers.
* No engine waits for another: each has a task of its own that finds its streams, asks again while the engine doesn't
  answer (:data:`RETRY_FIRST` … :data:`RETRY_LAST`), and looks again when a stream connects anew or stays away.

Importing this module needs no pyzmq; :meth:`EventManager.start` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import aiohttp

from kvsync.config.model import EventsSettings
from kvsync.discovery.access import EngineAccess
from kvsync.discovery.model import Engine
from kvsync.events.contracts import (
    Locator,
    NotLocated,
    Observer,
    ReaderEnded,
    Sink,
    Snapshot,
    Target,
    Timer,
    Turns,
    Warm,
    WorkerStatus,
)
from kvsync.events.scrape import EngineMetrics, OnHits, Scraper
from kvsync.events.sources import HttpLocator
from kvsync.events.stream import State

if TYPE_CHECKING:
    from kvsync.events.reader import Reader

log = logging.getLogger("kvsync.events")

RETRY_FIRST: Final = 1.0
RETRY_LAST: Final = 30.0
WARMING: Final = 8
"""Workers whose snapshots are under way: patience is for one's own, and no more than so many are in memory."""


class _Registration:
    """One engine, from ``add`` to ``remove`` or to a change that matters."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.look_again = asyncio.Event()
        self.problem: str | None = None
        self.task: asyncio.Task[None] | None = None


class EventManager:
    """Keeps a sink fed with the events of a changing set of engines.

    All but :meth:`served` and :meth:`workers` belongs to the event loop that called :meth:`start`.

    Args:
        sink: the index.
        locator: finds an engine's streams; by default :class:`kvsync.events.sources.HttpLocator`.
        start_sequence: the first number wanted of each stream; above 0 only for who looks on (``kvsync watch``).
        on_hits: hears, on the event loop, what an engine's metrics counted since the last look: (worker, tokens looked
            up in its prefix cache, tokens found there), requests of others included.
        introduced: hears, in the reader's thread, of each worker that is new to the sink, before any batch of it.
        warm: asked for another replica's snapshot when a stream is first followed.
        warm_timeout: seconds that a stream waits for it at most, once its engine has its turn.
        turns: asked before a stream catches up.
    """

    def __init__(
        self,
        sink: Sink,
        settings: EventsSettings,
        *,
        locator: Locator | None = None,
        timer: Timer | None = None,
        start_sequence: int = 0,
        on_hits: OnHits | None = None,
        introduced: Callable[[str], None] = lambda _: None,
        warm: Warm | None = None,
        warm_timeout: float = 2.0,
        turns: Turns | None = None,
        access: EngineAccess | None = None,
    ) -> None:
        self._sink = sink
        self._settings = settings
        self._locator = locator
        self._timer = timer
        self._start_sequence = start_sequence
        self._on_hits = on_hits
        self._introduced = introduced
        self._warm = warm
        self._warm_timeout = warm_timeout
        self._warming = asyncio.Semaphore(WARMING)
        self._turns = turns
        self._access = access or EngineAccess()
        self._session: aiohttp.ClientSession | None = None
        self._reader: Reader | None = None
        self._scraper: Scraper | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._registrations: dict[str, _Registration] = {}
        self._observers: list[Observer] = []
        self._asleep: set[str] = set()

    @property
    def asleep(self) -> Collection[str]:
        """The workers whose engines sleep, as their metrics said last."""
        return self._asleep

    @property
    def failed(self) -> bool:
        """The reader ended by a fault; nothing is followed any more. Stop this manager and start another."""
        return self._reader is not None and self._reader.failed

    async def start(self) -> None:
        """Start the reader thread.

        Raises:
            ImportError: pyzmq is not installed.
            OSError: what the reader needs can't be had: files, or the keys of ``events.curve``.
        """
        from kvsync.events.reader import Reader

        self._loop = asyncio.get_running_loop()
        self._reader = Reader(
            self._sink,
            self._settings,
            relocate=self._relocate,
            introduced=self._introduced,
            turns=self._turns,
            timer=self._timer,
            start_sequence=self._start_sequence,
        )
        if self._locator is None:
            # Engines are foreign: what they send is neither unpacked, nor kept to be sent back.
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), headers={"Accept-Encoding": "identity"}, auto_decompress=False
            )
            self._locator = HttpLocator(self._session, self._settings.connect_timeout, self._access)
            self._scraper = Scraper(
                self._session,
                self._settings.metrics_interval,
                self._settings.connect_timeout,
                self._scraped,
                self._access,
            )
            self._scraper.start()
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
        if self._scraper is not None:
            await self._scraper.stop()
        if self._reader is not None:
            await asyncio.to_thread(self._reader.stop)
        if self._session is not None:
            await self._session.close()

    async def add(self, engine: Engine) -> None:
        """Follow an engine. Returns at once; an engine that is not there yet is tried until it is."""
        await self.remove(engine.uid)
        self._register(engine)

    async def change(self, engine: Engine) -> None:
        """Take an engine's new description. Only a change of what is followed opens its streams anew; as it is the same
        engine, what the sink noted of it stays."""
        before = self._registrations.get(engine.uid)
        if before is not None and _followed_facts(before.engine) == _followed_facts(engine):
            before.engine = engine
            return
        now = _workers(engine)
        self._end(engine.uid, stay=now)
        self._register(engine)

    async def remove(self, uid: str) -> None:
        """Follow an engine no longer. The sink knows none of its workers when this returns."""
        self._end(uid)

    def resync(self, worker: str) -> None:
        """Have a worker forgotten and followed anew from the beginning of its stream. Any thread may."""
        if self._reader is not None:
            self._reader.resync(worker)

    async def snapshot(self, worker: str) -> Snapshot | None:
        """What is known of a worker, for another replica; ``None`` while that can't be told."""
        if self._reader is None:
            return None
        try:
            return await asyncio.wrap_future(self._reader.snapshot(worker))
        except ReaderEnded:
            return None

    def _register(self, engine: Engine) -> None:
        registration = self._registrations[engine.uid] = _Registration(engine)
        if engine.kv_events:
            registration.task = asyncio.create_task(self._keep(registration), name=f"kv events of {engine.name}")

    def _end(self, uid: str, stay: Collection[str] = ()) -> None:
        """End a registration; ``stay`` are workers that are about to be followed again. Waits for nothing: the commands
        given to the reader here precede those of whatever is registered next."""
        registration = self._registrations.pop(uid, None)
        if registration is None or registration.task is None:
            return
        registration.task.cancel()
        if self._scraper is not None:
            self._scraper.remove(uid)
        assert self._reader is not None
        for worker in _workers(registration.engine):
            if worker in stay:
                self._reader.release(worker)
            else:
                self._reader.unfollow(worker)
                self._asleep.discard(worker)

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
                if registration.problem is not None:
                    status = replace(status, alarm="not_located", problem=registration.problem)
                if self._scraper is not None:
                    status = replace(status, scrapes_failed=self._scraper.failures(engine.uid))
                found.append(status)
        return found

    def _relocate(self, uid: str) -> None:
        """From the reader's thread: an engine may have moved or changed."""

        def wake() -> None:
            registration = self._registrations.get(uid)
            if registration is not None:
                registration.look_again.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(wake)

    def _scraped(self, engine: Engine, page: EngineMetrics) -> None:
        """An engine's metrics were looked at."""
        assert self._reader is not None
        for rank in engine.ranks:
            worker = engine.worker(rank)
            if page.restarted:
                self._reader.hint_restart(worker)
                self._asleep.discard(worker)
            figures = page.ranks.get(rank)
            if figures is None:
                continue
            if figures.asleep is not None:
                self._reader.sleeping(worker, figures.asleep)
                (self._asleep.add if figures.asleep else self._asleep.discard)(worker)
            if figures.queries and self._on_hits is not None:
                self._on_hits(worker, figures.queries, figures.hits)

    async def _follow(self, reader: Reader, target: Target, first: bool) -> None:
        """Follow a stream. ``first``: its worker was not followed before, and may begin with a snapshot; not without a
        replay, as nothing shows then which process answers."""
        if self._warm is None or target.replay is None or not first:
            await asyncio.wrap_future(reader.follow(target, None))
            return
        async with self._warming:  # until the sink has it, so that so many are in memory and no more
            snapshot = await self._told(self._warm, target)
            await asyncio.wrap_future(reader.follow(target, snapshot))

    async def _told(self, warm: Warm, target: Target) -> Snapshot | None:
        """What other replicas told, if it is there in time."""
        try:
            async with asyncio.timeout(self._warm_timeout):
                return await warm(target)
        except TimeoutError:
            log.warning("no snapshot of %s in %g s; all is replayed", target.worker, self._warm_timeout)
        except Exception:  # whatever it is, the stream can be replayed
            log.exception("a snapshot can't be had")
        return None

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
                news = [t for t in located.targets if _news(followed.get(t.worker), t, complete)]
                following = (self._follow(self._reader, target, target.worker not in followed) for target in news)
                done = await asyncio.gather(*following, return_exceptions=True)
                followed.update((t.worker, t) for t, fault in zip(news, done, strict=True) if fault is None)
                for fault in done:
                    if fault is not None:
                        raise fault
                if self._scraper is not None:  # now that the reader knows whom it is about
                    self._scraper.look(registration.engine)
            except NotLocated as error:
                problem = str(error)
            except ReaderEnded:  # the manager says so in ``failed``
                return
            except Exception as error:  # a fault of the sink or of this program: the engine must not be lost by it
                log.exception("%s: its streams can't be followed", registration.engine.name)
                problem = f"{type(error).__name__}: {error}"
            if problem is not None and problem != registration.problem:
                log.warning("%s: %s", registration.engine.name, problem)
            registration.problem = problem
            try:
                async with asyncio.timeout(None if complete and problem is None else delay):
                    await registration.look_again.wait()
                delay = RETRY_FIRST
            except TimeoutError:
                delay = min(2 * delay, RETRY_LAST)


def _workers(engine: Engine) -> set[str]:
    """Those that are followed."""
    return {engine.worker(rank) for rank in engine.ranks} if engine.kv_events else set()


def _followed_facts(engine: Engine) -> Engine:
    """An engine without what has no influence on following it."""
    return replace(engine, adapters=(), labels={}, ready=True, tokenizes=True, policy=None, policy_locked=False)


def _news(before: Target | None, now: Target, complete: bool) -> bool:
    """Whether a stream must be opened (anew). Facts that an engine could not be asked for are no news."""
    if before is None or complete:
        return before != now
    return (before.events, before.replay) != (now.events, now.replay) and now.replay is not None
