"""What a message costs on its way from a ZMQ socket into the index, by the way that it takes. Prints JSON.

    python bench/ingest_ways.py [--messages 60000] [--ways drained,polled] [--repeats 3]

A subject process follows ``streams`` publishers, which another process serves: at full speed, or at a steady rate. Told
is the CPU of the whole subject, by kind of thread, from the moment that all streams are live until everything is in the
index, which is checked: every block is there, and the last prompt of every stream finds all of its blocks. (The event
loop's share is what it takes to ask ten times a second whether all has come.) The ways are those of
``kvsync.events.inlet``: ``drained``, the core reads the sockets itself; ``polled``, pyzmq does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import socket
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import zmq

from kvsync.config.model import EventsSettings
from kvsync.discovery.model import Engine
from kvsync.events.inlet import libzmq
from kvsync.events.manager import EventManager
from kvsync.index import PrefixIndex

MODEL = "model"
BLOCK = 16
CHAIN = 64
"""Blocks of a prompt; then the next one begins."""
CASES = [
    # streams, blocks in a message, messages a second over all streams (None: as fast as can be)
    (4, 1, None),
    (4, 16, None),
    (1, 1, 1250),
    (1, 16, 78),
    (1, 1, 50),
    (1, 1, 3000),
    (64, 16, 50),
    (64, 16, 1000),
    (64, 16, 3125),
    (64, 1, 3000),
]


def tokens_of(stream: int, block: int) -> list[int]:
    """No two blocks of a run are alike; most tokens take three bytes, as a large vocabulary's do."""
    first = (stream * 7919 + block * 104_729) % 100_000
    return [stream, block % 65_536, block >> 16, *range(first, first + BLOCK - 3)]


def name_of(stream: int, block: int) -> int:
    return ((stream << 40 | block) * 0x9E37_79B9_7F4A_7C15 + 1) % 2**64


def messages(stream: int, count: int, blocks: int) -> Iterator[bytes]:
    encode = msgspec.msgpack.encode
    for number in range(count):
        first = number * blocks
        event = {
            "type": "BlockStored",
            "block_hashes": [name_of(stream, block) for block in range(first, first + blocks)],
            "parent_block_hash": name_of(stream, first - 1) if first % CHAIN else None,
            "token_ids": [t for block in range(first, first + blocks) for t in tokens_of(stream, block)],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        yield encode([1.7e9 + number / 1000, [event], 0])


def publish(pipe: Connection, streams: int, blocks: int, rate: float | None, count: int) -> None:
    """Serve the streams; say where; then, told to, publish ``count`` messages in all."""
    context: zmq.Context[Any] = zmq.Context()
    sockets, ends = [], []
    for _ in range(streams):
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for one in (pub, router):
            one.set(zmq.SNDHWM, 0)
            one.bind("tcp://127.0.0.1:*")
        sockets.append((pub, router))
        ends.append([one.get(zmq.LAST_ENDPOINT).decode() for one in (pub, router)])
    each = count // streams
    bodies = [list(messages(stream, each, blocks)) for stream in range(streams)]
    pipe.send(ends)
    poller = zmq.Poller()
    poller.register(pipe.fileno(), zmq.POLLIN)
    for _, router in sockets:
        poller.register(router, zmq.POLLIN)
    while True:  # nothing is published yet, so a replay is its end
        for found, _ in poller.poll():
            if not isinstance(found, zmq.Socket):
                pipe.recv()
                break
            who = found.recv_multipart()[0]
            found.send_multipart([who, b"", b"", b"\xff" * 8, b""])
        else:
            continue
        break
    began = time.monotonic()
    sent = 0
    for number in range(each):
        for stream, (pub, _) in enumerate(sockets):
            if rate is not None:
                while (early := began + sent / rate - time.monotonic()) > 0:
                    time.sleep(early)
            pub.send_multipart([b"kv@pod@model", number.to_bytes(8, "big"), bodies[stream][number]])
            sent += 1
    pipe.send(time.monotonic() - began)
    pipe.recv()
    context.destroy(linger=0)


class WithoutReceiver:
    """The same index with only what a sink must have."""

    def __init__(self, index: Any) -> None:
        for call in ("add_worker", "remove_worker", "forget", "new_epoch", "relearn", "suspend", "resume"):
            setattr(self, call, getattr(index, call))
        self._index = index

    def apply_many(self, batches: Iterable[tuple[str, bytes]]) -> None:
        self._index.apply_many(batches)


def cpu() -> dict[str, float]:
    """Seconds of each kind of thread: ZMQ's, the reader's, the event loop's."""
    used = {"zmq": 0.0, "reader": 0.0, "loop": 0.0}
    for task in Path("/proc/self/task").iterdir():
        zmq_own = (task / "comm").read_text().startswith("ZMQbg")
        kind = "zmq" if zmq_own else "loop" if task.name == str(os.getpid()) else "reader"
        used[kind] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return used


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.1)


async def subject(pipe: Connection, ends: list[list[str]], way: str, count: int, blocks: int) -> None:
    """Follow; say when all streams are live, and what it took when all has come."""
    index: Any = PrefixIndex()
    sink: Any = index if way == "drained" else WithoutReceiver(index)
    manager = EventManager(sink, EventsSettings())
    await manager.start()
    for number, (events, replay) in enumerate(ends):
        await manager.add(
            Engine(
                uid=str(number),
                name=str(number),
                url="http://127.0.0.1:9",
                model=MODEL,
                usable_blocks=1 << 30,
                events=events,
                replay=replay,
            )
        )
    await until(lambda: all(worker.state == "live" for worker in manager.workers()))
    await asyncio.sleep(0.5)
    before, began = cpu(), time.monotonic()
    pipe.send("live")
    each = count // len(ends)
    await until(lambda: all((worker.last_sequence or 0) == each - 1 for worker in manager.workers()))
    used, took = {kind: seconds - before[kind] for kind, seconds in cpu().items()}, time.monotonic() - began
    held = index.stats()["workers"]
    right = all(held[str(n)]["blocks"] == each * blocks and held[str(n)]["trust"] == "exact" for n in range(len(ends)))
    last = each * blocks // CHAIN * CHAIN or each * blocks
    for n in range(len(ends)):
        first = last - min(CHAIN, last)
        prompt = array("I", [t for block in range(first, last) for t in tokens_of(n, block)] + [0])
        right &= index.match(prompt, MODEL)[str(n)].credit == (last - first) * BLOCK
    pipe.send({"cpu": used, "seconds": took, "right": right})
    await manager.stop()


def subject_process(pipe: Connection, *arguments: Any) -> None:
    asyncio.run(subject(pipe, *arguments))


def run(way: str, streams: int, blocks: int, rate: float | None, count: int) -> dict[str, Any]:
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    publisher = spawn.Process(target=publish, args=(theirs, streams, blocks, rate, count))
    publisher.start()
    ends = ours.recv()
    mine, its = spawn.Pipe()
    follower = spawn.Process(target=subject_process, args=(its, ends, way, count, blocks))
    follower.start()
    assert mine.recv() == "live"
    ours.send("go")
    result: dict[str, Any] = mine.recv()
    ours.recv()
    ours.send("end")
    for process in (publisher, follower):
        process.join()
    return result


def waiting(sockets: int, rounds: int = 200) -> dict[str, Any]:
    """Seconds of CPU that one look at so many silent sockets takes, by way."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, sockets + 10)
    silent = [context.socket(zmq.SUB) for _ in range(sockets)]
    end, call = socket.socketpair()
    receiver: Any = PrefixIndex()
    receiver = receiver.receiver(libzmq(), call.fileno(), pause=5.0, backlog=1, backlog_size=1)
    poller = zmq.Poller()
    for number, one in enumerate(silent):
        poller.register(one, zmq.POLLIN)
        receiver.add(number, one.underlying)
    took = {}
    for way, look in (("drained", lambda: receiver.wait(0.0, 1024, 1 << 20)), ("polled", lambda: poller.poll(0))):
        look()
        began = time.process_time()
        for _ in range(rounds):
            look()
        took[f"{way}_us_per_look"] = round((time.process_time() - began) / rounds * 1e6, 1)
    for one in silent:
        receiver.remove(one.underlying)
        one.close(linger=0)
    context.term()
    end.close()
    call.close()
    return {"silent_sockets": sockets, **took}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a run at a steady rate")
    parser.add_argument("--ways", default="drained,polled")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", default=",".join(map(str, range(len(CASES)))))
    arguments = parser.parse_args()
    rows = []
    for case in map(int, arguments.cases.split(",")):
        streams, blocks, rate = CASES[case]
        count = arguments.messages if rate is None else int(rate * arguments.seconds)
        count = max(1, count // streams) * streams
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in arguments.ways.split(",")}
        for _ in range(arguments.repeats):
            for way, results in found.items():
                results.append(run(way, streams, blocks, rate, count))
        for way, results in found.items():
            used = median(sum(result["cpu"].values()) for result in results)
            shares = {kind: median(result["cpu"][kind] for result in results) for kind in ("zmq", "reader", "loop")}
            rows.append(
                {
                    "way": way,
                    "streams": streams,
                    "blocks": blocks,
                    "rate": rate,
                    "messages": count,
                    "right": all(result["right"] for result in results),
                    "cpu_us_per_message": round(used / count * 1e6, 2),
                    "cpu_us_per_block": round(used / count / blocks * 1e6, 3),
                    "of_these": {kind: round(seconds / count * 1e6, 2) for kind, seconds in shares.items()},
                    "cores": round(used / median(result["seconds"] for result in results), 4),
                    "messages_per_second": round(count / median(result["seconds"] for result in results)),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    looks = [waiting(sockets) for sockets in (2, 128, 2000)]
    print(
        json.dumps(
            {
                "load": os.getloadavg(),
                "libzmq": zmq.zmq_version(),
                "pyzmq": zmq.__version__,
                "rows": rows,
                "looks": looks,
            }
        )
    )


if __name__ == "__main__":
    main()
