"""The load of other replicas: each tells what it has sent where, several times a second, and adds what the others told.

Without that, every replica sees an idle worker idle until its own requests make it busy, and all of them send theirs
there at once.

One hash holds it, a field for each replica: a counter that grows with every telling, and the busy workers by a number
that is the same in all replicas.

What must always hold:

- A replica counts while its counter moves: seen from here, within ``redis.load.lifetime`` of this process's own clock.
  No two clocks are compared. What has never been seen to move counts nothing, so that those who died before this one
  started are not in its sums.
- What can't be read counts nothing, and is counted. A hash that is none, or holds more than can be read so often, is
  removed: all that belongs in it is told anew in a moment.
- Nothing waits for it: a choice reads columns that are kept up to date beside it, and without Redis what was told runs
  out by itself.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple, Protocol

import msgspec
import xxhash

from kvsync.config.redis import LoadSharingSettings
from kvsync.store.connection import Store
from kvsync.store.replies import Unanswered
from kvsync.telemetry.logs import Throttle

_log = logging.getLogger(__name__)

MOST_REPLICAS: Final = 1024
"""Whose news are looked at."""
MOST_BYTES: Final = 1 << 20
"""Of one replica's news: 20,000 workers have room."""
MOST_OF_TIME: Final = 0.05
"""Of the event loop's time, that adding up may take: many replicas of many workers hear of each other less often."""
GONE_AFTER: Final = 30.0
"""Lifetimes after which the field of a replica that says nothing more is removed."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _News(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: Literal[1]
    counter: _Count
    loads: list[tuple[int, _Count, _Count]]
    """Worker, running, queued."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_News).decode


class Busy(Protocol):
    @property
    def running(self) -> int: ...

    @property
    def queued_prefill_tokens(self) -> int: ...


class Sum(NamedTuple):
    running: int
    queued_prefill_tokens: int


class Loads(Protocol):
    """``kvsync.routing.load.LoadTable``."""

    def own(self) -> Mapping[str, Busy]: ...

    def others(self, loads: Mapping[str, Sum]) -> None: ...


class Workers(Protocol):
    """``kvsync.routing.fleet.Fleet``."""

    @property
    def version(self) -> int: ...

    def addresses(self) -> Iterable[tuple[str, str]]: ...


class Telemetry(Protocol):
    def replicas(self, others: int) -> None: ...

    def load_news_unusable(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Heard:
    """One other replica."""

    news: bytes
    counter: int
    since: float
    """When its counter was first seen as it is."""
    moved: bool = False
    loads: tuple[tuple[int, int, int], ...] = ()


class SharedLoads:
    """This replica's part in it.

    Args:
        store: where it is told.
        settings: how often, and how long it counts.
        loads: what to tell, and where to add what was told.
        workers: who they are.
        telemetry: where is counted what can't be used.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        settings: LoadSharingSettings,
        loads: Loads,
        workers: Workers,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._settings = settings
        self._loads = loads
        self._workers = workers
        self._telemetry = telemetry
        self._clock = clock
        self._throttle = Throttle(_log, clock=clock)
        self._me = secrets.token_hex(8).encode()
        self._counter = 0
        self._heard: dict[bytes, _Heard] = {}
        self._known: tuple[int, dict[str, int], dict[int, str]] = (-1, {}, {})
        """As of this version of the fleet: numbers by worker, workers by number."""
        self._exchanging: asyncio.Task[None] | None = None
        self._took = 0.0
        """Seconds that the last news took to be added up."""
        self._added: tuple[int, list[_Heard]] = (-1, [])
        """What is in the sums, as of this version of the fleet."""

    @property
    def replicas(self) -> int:
        """How many others count now."""
        return sum(1 for heard in self._heard.values() if self._counts(heard))

    @property
    def pause(self) -> float:
        """Seconds until the next time."""
        return max(self._settings.interval, self._took / MOST_OF_TIME)

    async def step(self) -> None:
        """Wait for the next time, then tell and read. A Redis that is slow does not keep others' news from running
        out."""
        await asyncio.sleep(self.pause)
        if self._exchanging is not None and self._exchanging.done():
            finished, self._exchanging = self._exchanging, None
            finished.result()
        if self._exchanging is None and self._store.configured:
            self._exchanging = asyncio.create_task(self.exchange(), name="shared load")
        self.add_up()

    async def stop(self) -> None:
        """Tell that nothing is to be counted any more, if that can be told at once."""
        exchanging, self._exchanging = self._exchanging, None
        if exchanging is not None:
            exchanging.cancel()
            await asyncio.gather(exchanging, return_exceptions=True)
        await self._ask("load_tell", ("HDEL", self._key, self._me))

    async def exchange(self) -> None:
        """Tell what we sent, and hear what the others did."""
        self._counter += 1
        life = str(int(1000 * GONE_AFTER * self._settings.lifetime))
        await self._ask("load_tell", ("HSET", self._key, self._me, self._news()), ("PEXPIRE", self._key, life))
        try:
            (fields,) = await self._store.ask("load_read", ("HGETALL", self._key), budget=self._store.settings.timeout)
        except Unanswered as unanswered:  # the store has counted it
            if unanswered.reason in ("too_large", "error"):
                await self._begin_anew(str(unanswered))
            return
        begun = time.perf_counter()
        self._hear(fields)
        self.add_up()
        self._took = time.perf_counter() - begun
        if len(fields) > MOST_REPLICAS + 1:
            await self._begin_anew(f"{len(fields)} fields")
        elif gone := self._gone():
            await self._ask("load_tell", ("HDEL", self._key, *gone))

    async def _begin_anew(self, found: str) -> None:
        """What stands there is none of ours, or too much of it to be read so often. Whoever is there tells again."""
        self._throttle.warning("anew", "what is at %s is no load of replicas, and is removed: %s", self._key, found)
        await self._ask("load_tell", ("DEL", self._key))

    def add_up(self) -> None:
        """Have what others told counted as it is now."""
        counting = [heard for heard in self._heard.values() if self._counts(heard)]
        version, _, workers = self._numbered()
        before, added = self._added
        if before == version and len(added) == len(counting) and all(map(operator.is_, added, counting)):
            return
        self._added = version, counting
        self._telemetry.replicas(len(counting))
        all_running: dict[int, int] = {}
        all_queued: dict[int, int] = {}
        for heard in counting:
            for number, running, queued in heard.loads:
                all_running[number] = all_running.get(number, 0) + running
                all_queued[number] = all_queued.get(number, 0) + queued
        sums = {
            workers[number]: Sum(running, all_queued[number])
            for number, running in all_running.items()
            if number in workers
        }
        self._loads.others(sums)

    @property
    def _key(self) -> str:
        return self._store.key("load")

    async def _ask(self, kind: str, *commands: tuple[str | bytes, ...]) -> None:
        with suppress(Unanswered):  # the store has counted it
            await self._store.ask(kind, *commands, budget=self._store.settings.timeout)

    def _news(self) -> bytes:
        _, numbers, _ = self._numbered()
        busy = [
            (numbers[worker], load.running, load.queued_prefill_tokens)
            for worker, load in self._loads.own().items()
            if (load.running or load.queued_prefill_tokens) and worker in numbers
        ]
        return _encode([1, self._counter, busy])

    def _hear(self, fields: Mapping[bytes, bytes]) -> None:
        now = self._clock()
        heard: dict[bytes, _Heard] = {}
        for name, news in fields.items():
            if name == self._me:
                continue
            if len(heard) >= MOST_REPLICAS:
                self._telemetry.load_news_unusable("too_many")
                break
            heard[name] = self._heard_of(self._heard.get(name), news, now)
        # One whose field is gone has said that it ends: it counts nothing from now on.
        self._heard = heard

    def _heard_of(self, before: _Heard | None, news: bytes, now: float) -> _Heard:
        if before is not None and before.news == news:
            return before
        reason = "too_large"
        if len(news) <= MOST_BYTES:
            try:
                told = _decode(news)
            except (msgspec.DecodeError, RecursionError):
                reason = "malformed"
            else:
                if before is None or before.counter == told.counter:
                    since = now if before is None else before.since
                    return _Heard(news, told.counter, since, False if before is None else before.moved)
                return _Heard(news, told.counter, now, True, tuple(told.loads))
        self._telemetry.load_news_unusable(reason)
        # Remembered, so that it is told once; counts nothing, and goes in time.
        return _Heard(news, -1, now)

    def _counts(self, heard: _Heard) -> bool:
        return heard.moved and self._clock() - heard.since <= self._settings.lifetime

    def _gone(self) -> list[bytes]:
        limit = self._clock() - GONE_AFTER * self._settings.lifetime
        return [name for name, heard in self._heard.items() if heard.since < limit]

    def _numbered(self) -> tuple[int, dict[str, int], dict[int, str]]:
        version = self._workers.version
        if self._known[0] != version:
            numbers = {
                worker: xxhash.xxh3_64_intdigest(address.encode()) for worker, address in self._workers.addresses()
            }
            self._known = version, numbers, {number: worker for worker, number in numbers.items()}
        return self._known


__all__ = ["GONE_AFTER", "MOST_BYTES", "MOST_REPLICAS", "Loads", "SharedLoads", "Sum", "Telemetry", "Workers"]
