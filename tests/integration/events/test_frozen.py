"""A gateway that stands still while an engine floods it: its memory stays bounded, and what it missed shows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from kvsync.config.model import EventsSettings
from kvsync.events.sockets import WorkerSockets
from tests import wire
from tests.faults.publisher import Publisher
from tests.integration.events.conftest import Fleet

BATCHES = 12_000
QUEUES = 24 << 20
"""Bytes at most of what the kernel took in its place. The flood itself has twice as many."""


def flood_batch(seq: int) -> bytes:
    """Sixteen new blocks in place of those before: what is held stays the same, and no batch may be left out."""
    first = seq * 16
    hashes = range(first, first + 16)
    stored = wire.stored(list(hashes), [h % 50_000 for h in hashes for _ in range(64)], block_size=64)
    gone = [wire.removed([h]) for h in range(first - 16, first)] if seq else []
    return wire.batch(*gone, stored, ts=1_000.0 + seq, rank=0)


class Consumer:
    """``consumer.py`` in a process of its own, which can be frozen."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def says(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        async with asyncio.timeout(30):
            answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return answer

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 30  # a stream that is merely quiet is probed each minute
        while not condition(said := await self.says()):
            assert time.monotonic() < deadline, said
            await asyncio.sleep(0.02)
        return said

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def memory(self, name: str) -> int:
        """Bytes, by the kernel's name: ``VmRSS`` now, ``VmHWM`` at most."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
        raise AssertionError(name)


@asynccontextmanager
async def consuming(publisher: Publisher) -> AsyncIterator[Consumer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.events.consumer",
        publisher.events,
        str(publisher.replay),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    consumer = Consumer(process)
    try:
        yield consumer
    finally:
        consumer.signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("buffer_steps", "trust"), [(BATCHES + 10, "exact"), (1_000, "partial")], ids=["repaired", "reset"]
)
async def test_a_frozen_gateway_finds_what_it_missed(buffer_steps: int, trust: str) -> None:
    """(S9) Frozen under a flood, its engine dropping what it can't send: memory bounded, then repaired or reset."""
    publisher = Publisher(hwm=1_000, buffer_steps=buffer_steps)
    try:
        async with consuming(publisher) as consumer:
            await consumer.until(lambda said: said["state"] == "live")
            publisher.send(flood_batch)
            await consumer.until(lambda said: said["last"] == 0)
            before = consumer.memory("VmRSS")
            consumer.signal(signal.SIGSTOP)
            for _ in range(BATCHES):
                publisher.send(flood_batch)
            assert consumer.memory("VmRSS") < before + QUEUES
            consumer.signal(signal.SIGCONT)  # what was dropped is the end of it: no later batch shows that
            said = await consumer.until(
                # A stream is live a moment before its worker counts again.
                lambda said: said["state"] == "live" and said["last"] == BATCHES and said["trust"] != "none"
            )
            assert said["received"] < BATCHES, "the flood was meant to be more than there is room for"
            assert (said["trust"], said["blocks"]) == (trust, 16)
            replayed = min(buffer_steps, BATCHES) * len(flood_batch(BATCHES))
            assert consumer.memory("VmHWM") < before + QUEUES + 4 * replayed
    finally:
        publisher.close()


class Endless:
    """A socket that always has another reply, until it is ``empty``."""

    def __init__(self) -> None:
        self.empty = False

    def recv_multipart(self, flags: int) -> list[bytes]:
        if self.empty:
            raise zmq.Again
        return [b"", b"", b"\0" * 8, b"x" * 100_000]


def test_replies_that_never_stop_coming_are_an_overrun() -> None:
    context: zmq.Context[Any] = zmq.Context()
    try:
        sockets = WorkerSockets(
            context, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", EventsSettings(receive_bytes=1 << 20), None
        )
        endless = Endless()
        sockets.dealer = cast(Any, endless)
        assert len(list(sockets.replies(10))) == 10
        assert not sockets.replay_overrun
        endless.empty = True
        assert list(sockets.replies(10)) == []
        endless.empty = False
        assert len(list(sockets.replies(10))) == 10
        assert not sockets.replay_overrun, "its queue was empty in between"
        assert len(list(sockets.replies(1))) == 1
        assert sockets.replay_overrun
        sockets.dealer = None
        assert not sockets.replay_overrun
    finally:
        context.destroy(linger=0)


async def test_a_replay_that_outruns_its_reader_is_broken_off(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine replays waits in no queue without a bound; once it can be taken, it is."""
    with monkeypatch.context() as patched:
        patched.setattr(WorkerSockets, "replay_overrun", property(lambda sockets: sockets.dealer is not None))
        publisher = fleet.publisher(already=range(1, 3_001))  # more than one drain takes
        await fleet.follow(publisher)
        await fleet.until(lambda: fleet.status().counts.replays_failed == 1)
        assert fleet.status().errors["overrun"] >= 1
    await fleet.live()
    await fleet.holds(range(1, 3_001))
    assert fleet.sink.trust["a"] == "exact"
