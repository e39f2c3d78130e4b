"""kvsync following engines: the event manager, its reader thread and the prefix index, put together as ``kvsync serve``
puts them together, on uvloop, without the gateway.

    follow    streams: [worker, events endpoint, replay endpoint]
    live      whether all streams are caught up
    held      credit in blocks per worker, for the prompts of chains
    state     what index and streams say of the workers
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import uvloop

from bench.subjects import answer
from bench.work import BLOCK, tokens
from kvsync.cli.process import settle_collector
from kvsync.config import EventsSettings
from kvsync.discovery.model import Engine
from kvsync.events.contracts import Located, Target
from kvsync.events.manager import EventManager
from kvsync.events.stream import State
from kvsync.index import NATIVE, PrefixIndex

MODEL = "m"


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
        self.index = PrefixIndex(20_000_000)
        self._manager = EventManager(self.index, EventsSettings(enabled=True), locator=Known())
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

    def held(self, chains: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
        found = []
        for seed, blocks in chains:
            prompt = tokens(seed, blocks)
            prompt.append(0)  # a block is never credited with the prompt's last token in it
            matches = self.index.match(prompt, MODEL)
            found.append({worker: match.credit // BLOCK for worker, match in matches.items() if match.credit})
        return found

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

    async def _settle(self) -> None:
        settle_collector()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def main() -> None:
    follower = Follower()
    await follower.start()
    handlers = {name: getattr(follower, name) for name in ("follow", "live", "held", "state")}

    def talk() -> None:
        for line in sys.stdin:
            answer(handlers, line)

    await asyncio.to_thread(talk)


if __name__ == "__main__":
    uvloop.run(main())
