"""kvsync following engines: the event manager, its reader thread and the prefix index, put together as ``kvsync serve``
puts them together, with its metrics, on uvloop, without the gateway.

    follow    streams: [worker, events endpoint, replay endpoint]
    live      whether all streams are caught up
    held      credit in blocks per worker, for the prompts of chains
    state     what index and streams say of the workers
    watch     while events come: look prompts up, see how late the event loop is, and wait for prompts to become visible
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from bench.subjects import answer
from bench.subjects.credit import MODEL, held
from bench.work import BLOCK, Chain, tokens
from kvsync.cli.process import settle_collector
from kvsync.config import EventsSettings
from kvsync.config.model import IndexSettings
from kvsync.discovery.model import Engine
from kvsync.events.contracts import Located, Target
from kvsync.events.manager import EventManager
from kvsync.events.stream import State
from kvsync.index import NATIVE, PrefixIndex
from kvsync.telemetry.metrics import Metrics

LOOKUPS = 500
"""Per second, while events come."""
TICK = 0.005
AHEAD = 0.005
"""Seconds before its time from which a prompt is looked for."""


class Known:
    """Streams are where the configuration says: nothing is asked of engines, which have no HTTP port here."""

    async def locate(self, engine: Engine) -> Located:
        assert engine.events is not None
        target = Target(
            worker=engine.uid,
            engine=engine.uid,
            source_pod=engine.name,
            model=MODEL,
            rank=0,
            events=engine.events,
            replay=engine.replay,
        )
        return Located((target,), True)


class Follower:
    def __init__(self) -> None:
        caps = IndexSettings()
        self.index = PrefixIndex(caps.max_blocks, caps.max_bytes)
        self._manager = EventManager(
            self.index, EventsSettings(enabled=True), locator=Known(), timer=Metrics(prefix_cache=False)
        )
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        await self._manager.start()

    def follow(self, streams: Sequence[Sequence[str]]) -> bool:
        for worker, events, replay in streams:
            engine = Engine(
                uid=worker, name=worker, url="http://127.0.0.1:9", model=MODEL, events=events, replay=replay
            )
            self._run(self._manager.add(engine))
        self._run(self._settle())
        return NATIVE

    def live(self) -> bool:
        return all(status.state is State.LIVE for status in self._manager.workers())

    def held(self, chains: Sequence[Chain]) -> list[dict[str, int]]:
        return held(self.index, chains)

    def state(self) -> dict[str, Any]:
        workers: Any = self.index.stats()["workers"]
        return {
            status.worker: {
                "last": status.last_sequence,
                "connections": status.connections,
                "blocks": workers[status.worker]["blocks"],
                "trust": workers[status.worker]["trust"],
            }
            for status in self._manager.workers()
        }

    def watch(
        self, probes: Sequence[tuple[float, str, int, int]], looked_up: Sequence[Chain], until: float
    ) -> dict[str, list[float]]:
        """
        Args:
            probes: when a worker is to store a prompt, soonest first: time (monotonic), worker, seed, blocks.
            looked_up: prompts that are looked up in turns, :data:`LOOKUPS` times a second.
            until: when to give up.

        Returns:
            ``seen``: when each probe was found whole, ``inf`` if it never was; ``match``, ``late``: seconds.
        """
        found: dict[str, list[float]] = self._run(self._watch(probes, looked_up, until))
        return found

    async def _watch(
        self, probes: Sequence[tuple[float, str, int, int]], looked_up: Sequence[Chain], until: float
    ) -> dict[str, list[float]]:
        seen = [float("inf")] * len(probes)
        match: list[float] = []
        late: list[float] = []
        others = [
            asyncio.create_task(self._look_up([tokens(*chain) for chain in looked_up], match)),
            asyncio.create_task(self._tick(late)),
        ]
        prompts = [(*probe[:2], tokens(probe[2], probe[3] + 1), probe[3] * BLOCK) for probe in probes]
        waiting: list[int] = []
        coming = 0
        while (waiting or coming < len(prompts)) and time.monotonic() < until:
            while coming < len(prompts) and prompts[coming][0] - AHEAD < time.monotonic():
                waiting.append(coming)
                coming += 1
            for number in tuple(waiting):
                _, worker, prompt, wanted = prompts[number]
                if self.index.match(prompt, MODEL)[worker].credit >= wanted:
                    seen[number] = time.monotonic()
                    waiting.remove(number)
            await asyncio.sleep(0.001)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return {"seen": seen, "match": match, "late": late}

    async def _look_up(self, prompts: Sequence[Sequence[int]], took: list[float]) -> None:
        for prompt in itertools.cycle(prompts):
            began = time.perf_counter()
            self.index.match(prompt, MODEL)
            took.append(time.perf_counter() - began)
            await asyncio.sleep(1 / LOOKUPS)

    async def _tick(self, late: list[float]) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK)
            late.append(time.perf_counter() - began - TICK)

    async def _settle(self) -> None:
        settle_collector()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def main() -> None:
    follower = Follower()
    await follower.start()
    handlers = {name: getattr(follower, name) for name in ("follow", "live", "held", "state", "watch")}

    def talk() -> None:
        for line in sys.stdin:
            answer(handlers, line)

    await asyncio.to_thread(talk)


if __name__ == "__main__":
    uvloop.run(main())
