"""What engines say of themselves in ``GET /metrics`` and no event carries, looked at again and again.

``vllm:engine_sleep_state`` per rank
    An engine that sleeps has lost its cache, and the clear that says so is published with its next step only.
``vllm:prefix_cache_queries_total``, ``vllm:prefix_cache_hits_total`` per rank
    Tokens looked up and found, over all requests of all gateways.
``process_start_time_seconds``
    Another one than before, or counters that went back, hint at a restart.

One task looks at all engines, at a bounded number of them at once, and at none twice at once. An engine that doesn't
answer is asked less and less often, and nothing is concluded from its silence: its stream tells whether it is there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import aiohttp

from kvsync.discovery.access import EngineAccess, NoPage, fetch
from kvsync.discovery.model import Engine
from kvsync.events.pages import MAX_METRICS_BYTES, rank_of, samples

AT_ONCE: Final = 8
LONGEST_PAUSE: Final = 60.0
"""Seconds between two looks at an engine that doesn't answer, unless the interval itself is longer."""
JITTER: Final = 0.1
"""Looks spread by this share of the interval, to either side."""
_MOST: Final = 2.0**53
"""A counter beyond this is none."""

OnHits: TypeAlias = Callable[[str, int, int], None]
"""Gets (worker, tokens looked up in its prefix cache, tokens found there), since the last time."""


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """One rank at one look."""

    asleep: bool | None = None
    """``None``: the page doesn't say."""
    queries: int = 0
    """Tokens looked up since the last look."""
    hits: int = 0
    """Tokens found, of those."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One look at an engine's page."""

    ranks: Mapping[int, RankMetrics]
    restarted: bool
    """It looks like another process than at the last look; a hint only."""


@dataclass(slots=True)
class Page:
    """What one page says."""

    started: float | None = None
    asleep: dict[int, bool] = field(default_factory=dict)
    counted: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Per rank, tokens looked up in the prefix cache and tokens found there, where it gives both."""

    def since(self, before: Page | None) -> EngineMetrics:
        """The news since an earlier page of the same engine."""
        restarted = before is not None and None not in (self.started, before.started) and self.started != before.started
        then = before.counted if before is not None else {}
        ranks = {}
        for rank in self.asleep.keys() | self.counted.keys():
            queries = hits = 0
            if rank in self.counted and rank in then:
                queries, hits = (round(now - was) for now, was in zip(self.counted[rank], then[rank], strict=True))
                if queries < 0 or hits < 0:
                    restarted = True
                    queries = hits = 0
            ranks[rank] = RankMetrics(self.asleep.get(rank), queries, min(hits, queries))
        return EngineMetrics(ranks, restarted)


def parse_page(body: bytes) -> Page:
    """What a page of metrics says, as far as it makes sense."""
    page = Page()
    for _, value in samples(body, b"process_start_time_seconds"):
        page.started = value
    for labels, value in samples(body, b"vllm:engine_sleep_state"):
        rank, state = rank_of(labels), labels.get("sleep_state")
        if rank is not None and state is not None and value in (0, 1):
            sleeps = value == 0 if state == "awake" else value == 1
            page.asleep[rank] = page.asleep.get(rank, False) or sleeps
    queries, hits = _sums(body, b"vllm:prefix_cache_queries_total"), _sums(body, b"vllm:prefix_cache_hits_total")
    page.counted = {rank: (queries[rank], hits[rank]) for rank in queries.keys() & hits.keys()}
    return page


def _sums(body: bytes, name: bytes) -> dict[int, float]:
    """A counter's sum per rank."""
    sums: dict[int, float] = {}
    for labels, value in samples(body, name):
        rank = rank_of(labels)
        if rank is not None and 0 <= value <= _MOST:
            sums[rank] = sums.get(rank, 0.0) + value
    return sums


class _Watched:
    """One engine, from its first :meth:`Scraper.look` to its removal."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.due = float("-inf")
        self.busy = False
        self.page: Page | None = None
        self.failures: Counter[str] = Counter()
        self.failed_in_a_row = 0


class Scraper:
    """See the module. All methods belong to the event loop that called :meth:`start`.

    Args:
        interval: seconds between two looks at an engine.
        timeout: seconds that one look may take.
        report: gets each look's news.
        access: how engines are spoken to.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        interval: float,
        timeout: float,
        report: Callable[[Engine, EngineMetrics], None],
        access: EngineAccess,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._access = access
        self._interval = interval
        self._timeout = timeout
        self._report = report
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        """Somebody is due who was not before, or there is room for another look."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="engine metrics")

    async def stop(self) -> None:
        tasks = [*self._looks, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._watched.clear()

    def look(self, engine: Engine) -> None:
        """Look at an engine now, and at every interval from now on."""
        watched = self._watched.setdefault(engine.uid, _Watched(engine))
        watched.engine = engine
        watched.due = float("-inf")
        self._news.set()

    def remove(self, uid: str) -> None:
        """Look at an engine no longer; nothing of a look under way is reported."""
        self._watched.pop(uid, None)

    def failures(self, uid: str) -> Mapping[str, int]:
        """Looks at an engine that failed, by reason."""
        watched = self._watched.get(uid)
        return {} if watched is None else dict(watched.failures)

    async def _run(self) -> None:
        while True:
            self._news.clear()
            now = self._clock()
            idle = sorted((w for w in self._watched.values() if not w.busy), key=lambda w: w.due)
            room = AT_ONCE - len(self._looks)
            for watched in idle[:room]:
                if watched.due <= now:
                    self._begin(watched)
            waiting = [w.due for w in idle if not w.busy]
            pause = None if not waiting or len(self._looks) >= AT_ONCE else max(0.0, min(waiting) - now)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()

    def _begin(self, watched: _Watched) -> None:
        watched.busy = True
        watched.due = float("inf")
        look = asyncio.create_task(self._look(watched), name=f"metrics of {watched.engine.name}")
        self._looks.add(look)
        look.add_done_callback(self._ended)

    def _ended(self, look: asyncio.Task[None]) -> None:
        self._looks.discard(look)
        self._news.set()

    async def _look(self, watched: _Watched) -> None:
        engine = watched.engine
        try:
            body = await fetch(self._session, self._access, engine.url, "/metrics", MAX_METRICS_BYTES, self._timeout)
        except NoPage as error:
            watched.failures[error.reason] += 1
            watched.failed_in_a_row += 1
        else:
            watched.failed_in_a_row = 0
            if body is not None and self._watched.get(engine.uid) is watched:
                page = parse_page(body)
                news, watched.page = page.since(watched.page), page
                self._report(engine, news)
        finally:
            watched.busy = False
            if watched.due == float("inf"):  # else it was asked for meanwhile
                watched.due = self._clock() + self._pause(watched) * random.uniform(1 - JITTER, 1 + JITTER)

    def _pause(self, watched: _Watched) -> float:
        """Doubled with each failure in a row."""
        doublings = min(watched.failed_in_a_row, 32)
        return min(self._interval * float(2**doublings), max(LONGEST_PAUSE, self._interval))


__all__ = ["EngineMetrics", "OnHits", "Page", "RankMetrics", "Scraper", "parse_page"]
