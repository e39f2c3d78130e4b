"""One process that follows its engines over ZMQ: ``python -m bench.scale.followed WORKERS BLOCKS SECONDS`` → JSON.

Each engine has a PUB and a ROUTER socket; two other processes have them all. The caches are filled in process first,
then the engines publish what full caches do: 50,000 blocks stored and as many evicted each second by all together, 16 a
batch. Meanwhile prompts are looked up. Afterwards each stream must have all that was sent, and the index as many blocks
as before.
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
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import uvloop

from bench.model import Wrong
from bench.process import Subject, memory, until
from bench.scale.content import LONG, MIDDLE, SHORT, Fleet, payloads
from bench.scale.held import CLEARED, DRAIN, MADE, MODEL, name, percentiles
from bench.scale.probe import MODEL as PROBED
from bench.scale.probe import Probe
from bench.traffic import payload, rest
from bench.work import BLOCK, script
from kvsync.cli.process import settle_collector
from kvsync.config import EventsSettings, Settings
from kvsync.discovery.model import Engine
from kvsync.events.contracts import Located, Target
from kvsync.events.manager import EventManager
from kvsync.events.stream import State
from kvsync.index import NATIVE, PrefixIndex
from kvsync.index.match import Index

T = TypeVar("T")
RATE = 50_000
"""Blocks stored each second, by all engines."""
PER_BATCH = 16
TURNOVER = 1_000_000
"""Blocks that engines evict before they come to what they stored in this run, of all together."""
PUBLISHERS = 2
PROBES = 100
"""Each second."""
IDLE = 5.0
"""Seconds without an event, for what streams cost that say nothing."""
LOOKUPS_EVERY = 0.02
PROBE = "probe"
CLEARS = 5


def waiting() -> float:
    """Seconds that this process's threads were ready to run and had no core; those of threads that ended are lost."""
    delays = [int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")]
    return sum(delays) / 1e9


def seconds_of(lags: Sequence[float]) -> list[Sequence[float]]:
    """Those of each second."""
    return [lags[at : at + PROBES] for at in range(0, len(lags), PROBES)]


class Known:
    """Streams are where the fleet says: nothing is asked of engines, which have no HTTP port here."""

    async def locate(self, engine: Engine) -> Located:
        assert engine.events is not None
        target = Target(engine.uid, engine.uid, engine.name, engine.model, 0, engine.events, engine.replay)
        return Located((target,), True)


class Following:
    """The event manager on a loop of its own, as ``kvsync serve`` has it, without the gateway."""

    def __init__(self, index: Index) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.manager = self._run(self._started(index))

    async def _started(self, index: Index) -> EventManager:
        manager = EventManager(index, EventsSettings(enabled=True), locator=Known())
        await manager.start()
        return manager

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def add(self, worker: str, model: str, events: str, replay: str) -> None:
        url = "http://127.0.0.1:9"
        self._run(self.manager.add(Engine(uid=worker, name=worker, url=url, model=model, events=events, replay=replay)))

    def live(self) -> bool:
        return all(status.state is State.LIVE for status in self.manager.workers())

    def stop(self) -> None:
        self._run(self.manager.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Followed:
    def __init__(self, workers: int, blocks: int, seconds: float) -> None:
        if not NATIVE:
            raise Wrong("kvsync-core is not installed: this would measure the pure-Python index")
        self.workers = workers
        self.seconds = seconds
        self.each = TURNOVER // workers // PER_BATCH * PER_BATCH
        self.fleet = Fleet(workers, blocks - self.each * workers)
        self.index: Index = PrefixIndex(max_bytes=Settings().index.max_bytes)
        self.batches = round(RATE / PER_BATCH * seconds / workers)
        """Of each engine."""

    def run(self) -> dict[str, Any]:
        before = memory(os.getpid())
        with ExitStack() as stack:
            shares = [range(self.workers)[at::PUBLISHERS] for at in range(PUBLISHERS)]
            publishers = [stack.enter_context(Subject("publisher", python=sys.executable)) for _ in shares]
            for publisher, share in zip(publishers, shares, strict=True):
                publisher.tell("load", scripts=[self.churn(worker) for worker in share])
            probe = stack.enter_context(Probe(round(PROBES * self.seconds), PROBES))
            following = Following(self.index)
            stack.callback(following.stop)
            for publisher, share in zip(publishers, shares, strict=True):
                publisher.answer(300)  # while it makes payloads it answers no replay
                for worker, (events, replay) in zip(share, publisher.ask("open", streams=len(share)), strict=True):
                    following.add(name(worker), MODEL, events, replay)
            following.add(PROBE, PROBED, *probe.endpoints)
            until(following.live, 120)
            until(lambda: all(publisher.ask("subscribed") for publisher in publishers), 60)
            streams = memory(os.getpid()) - before
            self.fill()
            settle_collector()
            held = self.blocks()
            filled = memory(os.getpid())
            idle = self.idle()
            measured = self.measure(publishers, probe)
            self.check(following, held)
            clears = self.clear()
            return {
                "workers": self.workers,
                "blocks": held,
                "memory_of_streams": streams,
                "grown_meanwhile": memory(os.getpid()) - filled,
                "idle_cpu": idle,
                **measured,
                "clear": clears,
            }

    def churn(self, worker: int) -> dict[str, Any]:
        return {
            "kind": "churn",
            "first": self.first(worker) + self.each // PER_BATCH,
            "count": self.batches,
            "length": PER_BATCH,
            "per_batch": PER_BATCH,
            "live": self.each,
        }

    def first(self, worker: int) -> int:
        """The first prompt of its turnover: no two engines have one in common."""
        return 1_000_000 * (worker + 1)

    def fill(self) -> None:
        """What each engine will evict first, then the rest."""
        for worker in range(self.workers):
            prompts = [(self.first(worker) + number, PER_BATCH) for number in range(self.each // PER_BATCH)]
            for events in script("store", wanted=prompts, per_batch=PER_BATCH):
                self.index.apply(name(worker), payload(1.0, rest(events)))
        batches = payloads(self.fleet.prompts())
        while made := [(name(worker), body) for worker, body in itertools.islice(batches, MADE)]:
            for at in range(0, len(made), DRAIN):
                self.index.apply_many(made[at : at + DRAIN])

    def state(self) -> dict[str, Any]:
        workers: Any = self.index.stats()["workers"]
        return {worker: state for worker, state in workers.items() if worker != PROBE}

    def blocks(self) -> int:
        return sum(state["blocks"] for state in self.state().values())

    def idle(self) -> float:
        """CPU seconds a second."""
        began, used = time.monotonic(), time.process_time()
        time.sleep(IDLE)
        return (time.process_time() - used) / (time.monotonic() - began)

    def measure(self, publishers: list[Subject], probe: Probe) -> dict[str, Any]:
        rng = random.Random(7)
        by_length = {
            length: [p for p in self.fleet.prompts() if p.blocks == length] for length in (SHORT, MIDDLE, LONG)
        }
        asked = [(p.tokens().tobytes(), p) for some in by_length.values() for p in rng.sample(some, 32)]
        times: dict[int, list[float]] = {length: [] for length in by_length}
        began, used, own, waited = time.monotonic(), time.process_time(), time.thread_time(), waiting()
        for publisher in publishers:
            publisher.tell("publish", rate=RATE / PER_BATCH / PUBLISHERS)
        watching = probe.start(self.index, PROBE)
        while time.monotonic() < began + self.seconds:
            tokens, prompt = rng.choice(asked)
            asked_at = time.perf_counter()
            found = self.index.match(tokens, MODEL)
            times[prompt.blocks].append(time.perf_counter() - asked_at)
            if found[name(prompt.worker)].credit != prompt.blocks * BLOCK:
                raise Wrong(f"{found[name(prompt.worker)]} for prompt {prompt.number}")
            time.sleep(LOOKUPS_EVERY)
        own = time.thread_time() - own
        waited = waiting() - waited
        sent = [publisher.answer() for publisher in publishers]
        watching.join()
        seconds, used = time.monotonic() - began, time.process_time() - used
        stored = sum(one["messages"] for one in sent) * PER_BATCH
        return {
            "blocks_per_second": stored / max(one["seconds"] for one in sent),
            "messages": sum(one["messages"] for one in sent),
            "seconds": seconds,
            "cpu_of_events": used - own - probe.cpu,
            "cpu_per_block": (used - own - probe.cpu) / stored,
            "cpu_of_publishers": sum(one["cpu"] for one in sent),
            "wire_bytes_per_block": sum(one["bytes"] for one in sent) / stored,
            "waited": waited,
            "lag": percentiles(probe.lags),
            "lag_p99_of_median_second": median(percentiles(some)["p99"] for some in seconds_of(probe.lags)),
            "lookups": [{"tokens": blocks * BLOCK, **percentiles(found)} for blocks, found in times.items()],
        }

    def check(self, following: Following, held: int) -> None:
        """Nothing was lost, and all of it is applied."""

        def last() -> bool:
            statuses = following.manager.workers()
            return all(s.last_sequence == self.batches - 1 for s in statuses if s.worker != PROBE)

        until(last, 60)
        for status in following.manager.workers():
            if status.connections != 1 or not status.whole:
                raise Wrong(f"{status.worker}: {status}")
        if self.blocks() != held or any(state["trust"] != "exact" for state in self.state().values()):
            raise Wrong(f"{self.blocks()} blocks, {held} before")

    def clear(self) -> dict[str, Any]:
        """A clear among live streams: how long it takes."""
        calls = []
        for worker in range(CLEARS):
            began = time.perf_counter()
            self.index.apply(name(worker), CLEARED)
            calls.append(time.perf_counter() - began)
            if self.state()[name(worker)]["blocks"]:
                raise Wrong(f"worker {worker} still has blocks")
        return percentiles(calls)


def main() -> None:
    workers, blocks, seconds = map(int, sys.argv[1:])
    print(json.dumps(Followed(workers, blocks, seconds).run()))


if __name__ == "__main__":
    main()
