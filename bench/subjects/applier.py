"""kvsync's index alone, fed with payloads in its own process.

load      payloads of scripts into memory
apply     all that is loaded, into a new index → seconds
feed      payloads from a process that makes them, into the index that is there
held      credit in blocks per worker, for the prompts of chains
match     look prompts up in turns, so many times → seconds of each look-up, by the clock and of CPU
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.subjects import feeding, serve, timed, trim
from bench.subjects.credit import MODEL, held
from bench.work import Chain, tokens
from kvsync.config.model import IndexSettings
from kvsync.index import NATIVE, PrefixIndex
from kvsync.index.match import Index
from kvsync.index.reference import ReferenceIndex

DRAIN = 64
"""Batches that are handed over together, as a reader does that has many at hand."""


class Applier:
    def __init__(self) -> None:
        self._loaded: list[tuple[str, bytes]] = []

    def begin(self, workers: int, pure: bool = False) -> bool:
        """A new index. → whether it is the one that was asked for, which takes the native core unless ``pure``."""
        caps = IndexSettings()
        self._index: Index = ReferenceIndex() if pure else PrefixIndex(caps.max_blocks, caps.max_bytes)
        for number in range(workers):
            self._index.add_worker(f"w{number}", MODEL)
        trim()
        return NATIVE or pure

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
        return held(self._index, chains)

    def match(self, chains: Sequence[Chain], times: int) -> dict[str, list[float]]:
        prompts = [tokens(*chain) for chain in chains]
        for prompt in prompts:
            prompt.append(0)
        return timed(lambda prompt: self._index.match(prompt, MODEL), prompts, times)


if __name__ == "__main__":
    applier = Applier()
    serve({name: getattr(applier, name) for name in ("begin", "load", "apply", "feed", "held", "match")})
