"""kvsync's router, choosing workers: with the index, records and metrics of ``kvsync serve``, and no sockets.

fill      workers, each with the beginnings of chains (seed, blocks) that it holds, from event batches
choose    for each prompt (seed, blocks), so many times in turn → seconds of each choice, who was chosen, its credit
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from bench.subjects import serve
from bench.traffic import payload, rest
from bench.work import Chain, store, tokens
from kvsync.app import App
from kvsync.cli.process import settle_collector
from kvsync.config import Settings
from kvsync.discovery.model import Change, Engine
from kvsync.index import NATIVE
from kvsync.routing.decision import Query
from kvsync.tokenize.types import Prompt, TokenizedRequest

MODEL = "m"


class Chooser:
    def __init__(self) -> None:
        app = asyncio.run(_app())
        self._index, self._router = app.index, app.router

    def fill(self, held: Sequence[Sequence[Chain]]) -> bool:
        for number, wanted in enumerate(held):
            engine = Engine(uid=f"w{number}", name=f"w{number}", url=f"http://127.0.0.1:{number + 1}", model=MODEL)
            worker = engine.worker(0)
            self._router.apply(Change("added", engine))
            self._index.add_worker(worker, MODEL)
            for events in store(wanted, 64):
                self._index.apply(worker, payload(1.0, rest(events)))
        settle_collector()
        return NATIVE

    def choose(self, prompts: Sequence[Chain], times: int) -> list[list[Any]]:
        asked = [_tokenized(tokens(seed, blocks).tobytes()) for seed, blocks in prompts]
        found = []
        for turn in range(times):
            for number, tokenized in enumerate(asked):
                query = Query(request_id=f"{turn}-{number}", model=MODEL, adapter=None, tokenized=tokenized)
                begun = time.perf_counter()
                decision, ticket = self._router.choose(query)
                took = time.perf_counter() - begun
                ticket.first_byte()
                ticket.end("ok")
                chosen = decision.chosen
                found.append([took, int(chosen.worker.removeprefix("w")), chosen.match.credit])
        return found


async def _app() -> App:
    """Made on a loop, as it asks for; never started."""
    return App(Settings())


def _tokenized(packed: bytes) -> TokenizedRequest:
    return TokenizedRequest((Prompt(packed, len(packed) // 4),), "ids", comparable=True)


if __name__ == "__main__":
    chooser = Chooser()
    serve({"fill": chooser.fill, "choose": chooser.choose})
