"""Dynamo's SelectionService, choosing workers: the peer of ``chooser``. Runs in Dynamo's own environment.

follow    streams' endpoints; workers are numbered in their order
ready     whether it may choose each of so many workers
choose    for each prompt (seed, blocks), so many times in turn → seconds of each choice, and who was chosen
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from bench.subjects import serve
from bench.work import BLOCK, tokens


class Selection:
    def __init__(self) -> None:
        from dynamo.llm import SelectionService  # type: ignore[import-not-found]

        self._loop = asyncio.new_event_loop()
        self._service: Any = self._loop.run_until_complete(self._make(SelectionService))

    async def _make(self, service: Any) -> Any:
        return service(indexer_threads=4)

    def follow(self, streams: Sequence[Sequence[str]]) -> None:
        async def register() -> None:
            for number, (events, _) in enumerate(streams):
                worker = {
                    "worker_id": number,
                    "model_name": "m",
                    "endpoint": f"http://127.0.0.1:{number + 1}",
                    "block_size": BLOCK,
                    "kv_events_endpoints": {0: events},
                }
                await self._service.upsert_worker(worker)

        self._loop.run_until_complete(register())

    def ready(self, workers: int) -> bool:
        return bool(self._service.ready()["schedulable_workers"] == workers)

    def choose(self, prompts: Sequence[Sequence[int]], times: int) -> list[list[float]]:
        asked = [{"model_name": "m", "token_ids": tokens(seed, blocks).tolist()} for seed, blocks in prompts]

        async def all_() -> list[list[float]]:
            found = []
            for _ in range(times):
                for request in asked:
                    begun = time.perf_counter()
                    chosen = await self._service.select(request)
                    found.append([time.perf_counter() - begun, chosen["worker_id"]])
            return found

        return self._loop.run_until_complete(all_())


if __name__ == "__main__":
    selection = Selection()
    serve({name: getattr(selection, name) for name in ("follow", "ready", "choose")})
