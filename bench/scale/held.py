"""One process, filled without sockets: ``python -m bench.scale.held WORKERS BLOCKS LOOKUPS`` → a line of JSON.

Everything is checked: how many blocks there are, what each lookup says, that a removed worker is gone. Memory is what
the process has in RAM beside files.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.model import Wrong
from bench.process import memory, until
from bench.scale.content import LONG, MIDDLE, PREFIX, SHORT, Fleet, Prompt, payloads
from bench.work import BLOCK
from kvsync.app import App
from kvsync.cli.process import settle_collector
from kvsync.config import Settings
from kvsync.discovery.model import Change, Engine
from kvsync.index import NATIVE
from kvsync.routing.decision import Query
from kvsync.tokenize.types import Prompt as Tokens
from kvsync.tokenize.types import TokenizedRequest

MODEL = "m"
DRAIN = 64
"""Batches of one call."""
MADE = 512
"""Batches made at a time, few enough to be no part of the memory that is measured."""
REMOVALS = 5
"""Workers that are removed, and as many that are cleared."""
CLEARED = b"\x93\xcb?\xf0\x00\x00\x00\x00\x00\x00\x91\x81\xa4type\xb0AllBlocksCleared\x00"


def name(worker: int) -> str:
    return f"worker-{worker}"


def percentiles(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "most": ordered[-1],
        "count": len(ordered),
    }


class Lost(NamedTuple):
    """A worker that was removed or cleared. Seconds and bytes."""

    blocks: int
    call: float
    sweep: float
    """What ``kvsync serve`` does each second: it gives back what workers held that lost all."""
    lookup: float
    """The longest meanwhile."""
    uncounted: float
    """What the index says that it takes less."""
    returned: float
    """What the process has less in RAM."""


class Held:
    def __init__(self, fleet: Fleet, lookups: int) -> None:
        if not NATIVE:
            raise Wrong("kvsync-core is not installed: this would measure the pure-Python index")
        self.fleet = fleet
        self.lookups = lookups
        app = asyncio.run(_app())
        self.index, self.router = app.index, app.router
        self.prompts = list(fleet.prompts())
        self._rng = random.Random(5)
        for worker in range(fleet.workers):
            engine = Engine(uid=name(worker), name=name(worker), url="http://127.0.0.1:9", model=MODEL)
            self.router.apply(Change("added", engine))
            self.index.add_worker(name(worker), MODEL)

    def run(self) -> dict[str, Any]:
        settle_collector()
        before = memory(os.getpid())
        filled = self.fill()
        self.check(self.fleet.blocks)
        grown = memory(os.getpid()) - before
        held = self.blocks()
        return {
            "workers": self.fleet.workers,
            "blocks": held,
            "distinct": self.distinct(),
            "process": before,
            "memory": grown,
            "bytes_per_block": grown / held,
            "counted": self.counted(),
            **filled,
            "lookups": [self.look_up(kind, blocks) for blocks in (SHORT, MIDDLE, LONG) for kind in ("held", "new")],
            "choices": [self.choose(blocks) for blocks in (SHORT, MIDDLE, LONG)],
            "removal": self.lose("remove", self.index.remove_worker),
            "clear": self.lose("clear", lambda worker: self.index.apply(worker, CLEARED)),
        }

    # -- filling

    def distinct(self) -> int:
        systems = {prompt.system.number for prompt in self.prompts}
        return sum(prompt.blocks - PREFIX for prompt in self.prompts) + len(systems) * PREFIX

    def fill(self) -> dict[str, Any]:
        seconds = 0.0
        batches = payloads(self.prompts)
        while made := [(name(worker), body) for worker, body in itertools.islice(batches, MADE)]:
            began = time.process_time()
            for at in range(0, len(made), DRAIN):
                self.index.apply_many(made[at : at + DRAIN])
            seconds += time.process_time() - began
        return {"apply_seconds_per_block": seconds / self.blocks()}

    def state(self) -> dict[str, Any]:
        workers: Any = self.index.stats()["workers"]
        return dict(workers)

    def blocks(self) -> int:
        return sum(state["blocks"] for state in self.state().values())

    def check(self, most: int) -> None:
        """All blocks that were told are there, and all have a key."""
        states = self.state().values()
        there, placed = sum(state["blocks"] for state in states), sum(state["placed"] for state in states)
        if not most - SHORT < there <= most or placed != there:
            raise Wrong(f"{there} blocks, {placed} with a key, of at most {most}")

    # -- lookups

    def look_up(self, kind: str, blocks: int) -> dict[str, Any]:
        """``held``: a system prompt that many have, and the rest at one worker. ``new``: nobody has its first block."""
        fitting = [prompt for prompt in self.prompts if prompt.blocks == blocks]
        times, cpu = [], []
        for _ in range(self.lookups):
            if kind == "held":
                prompt = self._rng.choice(fitting)
                tokens, credit = prompt.tokens().tobytes(), blocks * BLOCK
            else:
                prompt, credit = Prompt(0, 0, blocks), 0
                tokens = array("I", self._rng.choices(range(100_000), k=blocks * BLOCK + 1)).tobytes()
            began, used = time.perf_counter(), time.thread_time()
            found = self.index.match(tokens, MODEL)
            cpu.append(time.thread_time() - used)
            times.append(time.perf_counter() - began)
            if len(found) != self.fleet.workers or found[name(prompt.worker)].credit != credit:
                raise Wrong(f"{found[name(prompt.worker)]} for prompt {prompt.number} of {credit} tokens")
        return {"kind": kind, "tokens": blocks * BLOCK, **percentiles(times), "cpu": percentiles(cpu)}

    def choose(self, blocks: int) -> dict[str, Any]:
        """Choosing a worker for a prompt that one holds, and the end of the request; as the gateway does it."""
        fitting = [prompt for prompt in self.prompts if prompt.blocks == blocks]
        times, cpu = [], []
        for number in range(self.lookups):
            prompt = self._rng.choice(fitting)
            tokens = prompt.tokens().tobytes()
            request = TokenizedRequest((Tokens(tokens, len(tokens) // 4),), "ids", comparable=True)
            query = Query(f"{blocks}-{number}", MODEL, None, request)
            began, used = time.perf_counter(), time.thread_time()
            decision, ticket = self.router.choose(query)
            ticket.first_byte()
            ticket.end("ok")
            cpu.append(time.thread_time() - used)
            times.append(time.perf_counter() - began)
            if decision.chosen.worker != name(prompt.worker) or decision.chosen.match.credit != blocks * BLOCK:
                raise Wrong(f"{decision.chosen} for prompt {prompt.number}")
        return {"tokens": blocks * BLOCK, **percentiles(times), "cpu": percentiles(cpu)}

    # -- losing a worker

    def lose(self, what: str, how: Callable[[str], None]) -> dict[str, Any]:
        """Lose workers in turn, and store again what they held: how long the call takes, how long giving back what they
        held, how long the longest lookup took meanwhile, and what is held more in the end."""
        lost = []
        before = memory(os.getpid())
        for number in range(1, REMOVALS + 1):
            worker = name(number)
            blocks = self.state()[worker]["blocks"]
            lost.append(Lost(blocks, *self.lose_one(worker, how)))
            if what == "remove":
                if worker in self.index.match(b"", MODEL):
                    raise Wrong(f"{worker} is removed and answers")
                self.index.add_worker(worker, MODEL)
            if self.state()[worker]["blocks"]:
                raise Wrong(f"{worker} still has blocks")
            for _, body in payloads(prompt for prompt in self.prompts if prompt.worker == number):
                self.index.apply(worker, body)
        self.check(self.fleet.blocks)
        blocks = sum(one.blocks for one in lost)
        return {
            "blocks": blocks / REMOVALS,
            "call": percentiles([one.call for one in lost]),
            "sweep": percentiles([one.sweep for one in lost]),
            "longest_lookup": max(one.lookup for one in lost),
            "uncounted_per_block": sum(one.uncounted for one in lost) / blocks,
            "returned_per_block": sum(one.returned for one in lost) / blocks,
            "kept_after_refill": memory(os.getpid()) - before,
        }

    def lose_one(self, worker: str, how: Callable[[str], None]) -> tuple[float, float, float, float, float]:
        """The rest of a :class:`Lost`."""
        tokens = self._rng.choice(self.prompts).tokens().tobytes()[: 4 * (SHORT * BLOCK + 1)]
        lookups: list[float] = []
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                began = time.perf_counter()
                self.index.match(tokens, MODEL)
                lookups.append(time.perf_counter() - began)

        before, counted = memory(os.getpid()), self.counted()
        thread = threading.Thread(target=watch)
        thread.start()
        until(lambda: lookups)
        began = time.perf_counter()
        how(worker)
        called = time.perf_counter()
        self.index.expire(0.0)
        swept = time.perf_counter()
        over.set()
        thread.join()
        uncounted, returned = counted - self.counted(), before - memory(os.getpid())
        return called - began, swept - called, max(lookups), uncounted, returned

    def counted(self) -> int:
        """Bytes that the index says it takes."""
        counted: Any = self.index.stats()["bytes"]
        return int(counted)


async def _app() -> App:
    """Index and router of ``kvsync serve``; made on a loop, as it asks for, and never started."""
    return App(Settings())


def main() -> None:
    workers, blocks, lookups = map(int, sys.argv[1:])
    print(json.dumps(Held(Fleet(workers, blocks), lookups).run()))


if __name__ == "__main__":
    main()
