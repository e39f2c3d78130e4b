"""kvsync's index alone, fed with payloads in its own process.

load      payloads of scripts into memory
apply     all that is loaded, into a new index → seconds
feed      payloads from a process that makes them, into the index that is there
held      credit in blocks per worker, for the prompts of chains
match     look a prompt up so many times → seconds of each look-up
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.subjects import feeding, serve
from bench.work import BLOCK, Chain, tokens
from kvsync.index import NATIVE, PrefixIndex

MODEL = "m"
DRAIN = 64
"""Batches that are handed over together, as a reader does that has many at hand."""


class Applier:
    def __init__(self) -> None:
        self._loaded: list[tuple[str, bytes]] = []

    def begin(self, workers: int) -> bool:
        """A new index."""
        self._index = PrefixIndex(20_000_000)
        for number in range(workers):
            self._index.add_worker(f"w{number}", MODEL)
        return NATIVE

    def load(self, scripts: Sequence[Mapping[str, Any]]) -> int:
        from bench.traffic import frames

        self._loaded = [(f"w{worker}", data) for worker, data in frames(scripts, "vllm")]
        return len(self._loaded)

    def apply(self) -> dict[str, float]:
        began, cpu = time.perf_counter(), time.process_time()
        for at in range(0, len(self._loaded), DRAIN):
            self._index.apply_many(self._loaded[at : at + DRAIN])
        return {"cpu": time.process_time() - cpu, "seconds": time.perf_counter() - began}

    def feed(self, command: Sequence[str]) -> int:
        count = 0
        some: list[tuple[str, bytes]] = []
        for worker, data in feeding(command):
            some.append((f"w{worker}", data))
            count += 1
            if len(some) == DRAIN:
                self._index.apply_many(some)
                some.clear()
        self._index.apply_many(some)
        return count

    def held(self, chains: Sequence[Chain]) -> list[dict[str, int]]:
        found = []
        for seed, blocks in chains:
            prompt = tokens(seed, blocks)
            prompt.append(0)  # a block is never credited with the prompt's last token in it
            matches = self._index.match(prompt, MODEL)
            found.append({worker: match.credit // BLOCK for worker, match in matches.items() if match.credit})
        return found

    def match(self, chain: Chain, times: int) -> list[float]:
        prompt = tokens(*chain)
        prompt.append(0)
        took = []
        for _ in range(times):
            began = time.perf_counter()
            self._index.match(prompt, MODEL)
            took.append(time.perf_counter() - began)
        return took


if __name__ == "__main__":
    applier = Applier()
    serve({name: getattr(applier, name) for name in ("begin", "load", "apply", "feed", "held", "match")})
