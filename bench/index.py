"""How fast the index is: raw payloads in, matches out, the reference and the native core side by side.

    python bench/index.py [--blocks 200000] [--repeats 5]

CPU time of the process, medians over fresh indexes, and the answers are checked. What is measured:

- ``apply_many``: payloads as vLLM 0.32 sends them (maps, 64-bit hashes, 16 tokens a block, vocabulary of 152 k), dealt
  to 64 workers, one call for every 64 batches; a thousand blocks make a chain. ``churn`` removes every block again, as
  an engine with a full cache does: one removal event a block, in the batch of a store.
- ``match``: one prompt of 131,072 tokens (``array('I')``) over 64 workers that hold all of it, a part each (an even
  spread), or nothing.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from array import array
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import msgspec

from kvsync.index.match import Index
from kvsync.index.reference import ReferenceIndex

MODEL = "model"
WORKERS = [f"worker-{i}" for i in range(64)]
BLOCK = 16
VOCABULARY = 152_000
CHAIN = 1000
DRAIN = 64
PROMPT = 131_072

Batch = tuple[str, bytes]
encode = msgspec.msgpack.encode


def stored(hashes: list[int], parent: int | None, tokens: list[int]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(block_hash: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU", "group_idx": 0}


def batches(blocks: int, per_batch: int, churn: bool) -> list[Batch]:
    """``blocks`` blocks in all; with ``churn`` each batch first removes what the same worker stored a chain ago."""
    rng = random.Random(1)
    made: list[Batch] = []
    chains = {worker: list[int]() for worker in WORKERS}
    for number in range(blocks // per_batch):
        worker = WORKERS[number % len(WORKERS)]
        chain = chains[worker]
        hashes = [rng.getrandbits(64) for _ in range(per_batch)]
        gone = chain[-CHAIN : len(chain) - CHAIN + per_batch] if churn and len(chain) >= CHAIN else []
        parent = chain[-1] if len(chain) % CHAIN else None
        tokens = rng.choices(range(VOCABULARY), k=per_batch * BLOCK)
        events = [*map(removed, gone), stored(hashes, parent, tokens)]
        made.append((worker, encode([float(number), events, 0])))
        chain += hashes
    return made


def new_index(make: Callable[[], Index]) -> Index:
    index = make()
    for worker in WORKERS:
        index.add_worker(worker, MODEL)
    return index


def timed(action: Callable[[], Any]) -> float:
    before = time.process_time()
    action()
    return time.process_time() - before


def apply_all(index: Index, work: list[Batch]) -> None:
    for at in range(0, len(work), DRAIN):
        index.apply_many(work[at : at + DRAIN])


def blocks_per_second(make: Callable[[], Index], work: list[Batch], blocks: int, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        index = new_index(make)
        times.append(timed(lambda index=index: apply_all(index, work)))  # type: ignore[misc]
        states: Any = index.stats()["workers"]
        assert sum(state["counts"]["stored"] for state in states.values()) == len(work)
        assert all(state["placed"] == state["blocks"] for state in states.values())
    return blocks / median(times)


def seconds_per_match(make: Callable[[], Index], parts: list[float], repeats: int) -> float:
    """``parts``: how much of the prompt each worker holds, dealt round-robin."""
    prompt = array("I", random.Random(2).choices(range(VOCABULARY), k=PROMPT + 1))
    index = new_index(make)
    expected = {}
    for worker, part in zip(WORKERS, itertools.cycle(parts), strict=False):
        count = int(PROMPT // BLOCK * part)
        tokens = prompt[: count * BLOCK].tolist()
        for at in range(0, count, 256):
            hashes = list(range(at + 1, min(at + 256, count) + 1))
            event = stored(hashes, at or None, tokens[at * BLOCK : (at + 256) * BLOCK])
            index.apply(worker, encode([1.0, [event], 0]))
        expected[worker] = count * BLOCK
    assert {worker: match.credit for worker, match in index.match(prompt, MODEL).items()} == expected
    return median(timed(lambda: index.match(prompt, MODEL)) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200_000, help="blocks per run")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    makes: dict[str, Callable[[], Index]] = {"reference": ReferenceIndex}
    if find_spec("kvsync_core"):
        makes["core"] = import_module("kvsync_core").PrefixIndex

    def row(
        name: str, unit: str, measure: Callable[[Callable[[], Index]], float], faster: Callable[[float, float], float]
    ) -> None:
        figures = {implementation: measure(make) for implementation, make in makes.items()}
        shown = "  ".join(f"{implementation} {figure:>12,.3f}" for implementation, figure in figures.items())
        ratio = f"  {faster(figures['reference'], figures['core']):,.0f}x" if "core" in figures else ""
        print(f"{name:<34} {unit:<12} {shown}{ratio}", flush=True)

    for per_batch, churn in ((16, False), (1, False), (16, True)):
        work = batches(arguments.blocks, per_batch, churn)
        name = f"apply_many, {per_batch} a batch{', churn' if churn else ''}"
        row(
            name,
            "M blocks/s",
            lambda make, work=work: blocks_per_second(make, work, arguments.blocks, arguments.repeats) / 1e6,  # type: ignore[misc]
            lambda reference, core: core / reference,
        )
    for name, parts in (("all", [1.0]), ("a part each", [i / 64 for i in range(64)]), ("nothing", [0.0])):
        row(
            f"match, 64 workers hold {name}",
            "ms",
            lambda make, parts=parts: seconds_per_match(make, parts, arguments.repeats) * 1e3,  # type: ignore[misc]
            lambda reference, core: reference / core,
        )


if __name__ == "__main__":
    main()
