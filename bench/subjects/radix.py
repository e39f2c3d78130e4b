"""Dynamo's ``RadixTree`` alone, in its own environment. The face is that of ``bench.subjects.applier``.

It takes events that are decoded and hashed already. Where only the memory or the applying counts, random numbers stand
for the hashes of tokens; with ``hashed`` they are made by Dynamo's own ``compute_block_hash_for_seq``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

from bench.subjects import feeding, serve, timed, trim
from bench.work import BLOCK, Chain, Prompt, Store, ready, script, tokens


class Radix:
    def __init__(self) -> None:
        self._loaded: list[tuple[int, bytes]] = []
        self._hashed = False

    def begin(self, workers: int, hashed: bool = False) -> bool:
        self._tree = RadixTree()
        self._hashed = hashed
        trim()
        return True

    def load(self, scripts: Sequence[Mapping[str, Any]]) -> int:
        """The batches of all scripts, in turns."""
        self._loaded = []
        left = [(worker, script(**one)) for worker, one in enumerate(scripts)]
        while left:
            still = []
            for worker, batches in left:
                events = next(batches, None)
                if events is not None:
                    for event in events:
                        if self._hashed and isinstance(event, Store):
                            _hash(event.prompt)
                        self._loaded.append((worker, ready(event, len(self._loaded))))
                    still.append((worker, batches))
            left = still
        return len(self._loaded)

    def apply(self) -> dict[str, float]:
        apply_event = self._tree.apply_event
        began, cpu = time.perf_counter(), time.process_time()
        for worker, event in self._loaded:
            apply_event(worker, event)
        return {"cpu": time.process_time() - cpu, "seconds": time.perf_counter() - began}

    def feed(self, command: Sequence[str]) -> int:
        apply_event = self._tree.apply_event
        count = 0
        for worker, event in feeding(command):
            apply_event(worker, event)
            count += 1
        return count

    def held(self, chains: Sequence[Chain]) -> list[dict[str, int]]:
        found = []
        for chain in chains:
            hashes = compute_block_hash_for_seq(tokens(*chain).tolist(), BLOCK) if self._hashed else Prompt(chain).ready
            scores = self._tree.find_matches(hashes).scores
            found.append({f"w{worker}": blocks for (worker, _), blocks in scores.items()})
        return found

    def match(self, chains: Sequence[Chain], times: int) -> dict[str, list[float]]:
        """Hash and find. It takes a list or an array of tokens: the faster of the two."""
        arrays = [tokens(*chain) for chain in chains]
        ways = (arrays, [ids.tolist() for ids in arrays])
        return min((self._match(prompts, times) for prompts in ways), key=lambda took: sum(took["cpu"]))

    def _match(self, prompts: Sequence[Sequence[int]], times: int) -> dict[str, list[float]]:
        return timed(lambda ids: self._tree.find_matches(compute_block_hash_for_seq(ids, BLOCK)), prompts, times)


def _hash(prompt: Prompt) -> None:
    """Put the true hashes of its blocks' tokens in a prompt."""
    if "ready" not in prompt.__dict__:
        prompt.__dict__["ready"] = compute_block_hash_for_seq(prompt.ids, BLOCK)


if __name__ == "__main__":
    radix = Radix()
    serve({name: getattr(radix, name) for name in ("begin", "load", "apply", "feed", "held", "match")})
