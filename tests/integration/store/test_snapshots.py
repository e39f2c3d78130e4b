"""Snapshots in a real Redis: what one replica tells arrives at another, whole or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvsync.config.warm import SnapshotSettings
from kvsync.events.contracts import Snapshot, Target
from kvsync.events.stream import Position
from kvsync.store.connection import Store
from kvsync.store.snapshots import AT_ONCE, OVERLAP, PART, SHARE, Snapshots
from tests.integration.store.conftest import Told, store, until
from tests.valkey import Valkey, cluster

TARGET = Target("ns/a#1", "a", "a", "tiny", 1, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
MARK = b"\xcb" + bytes(8)


def of_size(size: int, seq: int = 7) -> Snapshot:
    return Snapshot(Position(seq, MARK), Random(seq).randbytes(size))


class Telemetry:
    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[str] = Counter()

    def snapshot(self, action: str, result: str, size: int) -> None:
        self.seen[action, result] += 1
        self.bytes[action] += size


class Replica:
    """One replica's side."""

    def __init__(self, shared: Store, snapshot: Snapshot | None = None, **settings: Any) -> None:
        self.snapshot = snapshot
        self.taken = 0
        self.telemetry = Telemetry()
        self.workers = [(TARGET.worker, TARGET.model)]
        made = SnapshotSettings.model_validate(settings)
        self.it = Snapshots(shared, made, self.take, lambda: self.workers, self.telemetry)

    async def take(self, worker: str) -> Snapshot | None:
        self.taken += 1
        return self.snapshot

    async def write(self) -> str:
        """Returns what came of it."""
        before = self.telemetry.seen.copy()
        await self.it.write(TARGET.worker, TARGET.model)
        ((action, result),) = self.telemetry.seen - before
        assert action == "write"
        return result

    async def read(self, target: Target = TARGET) -> tuple[Snapshot | None, str]:
        before = self.telemetry.seen.copy()
        snapshot = await self.it.read(target)
        ((action, result),) = self.telemetry.seen - before
        assert action == "read"
        return snapshot, result


async def forget_turns(shared: Store) -> None:
    """As if the interval were over."""
    await shared.ask("test", ("DEL", shared.key("snapshot-turn", TARGET.worker)), budget=1.0)


async def keys(valkey: Valkey) -> dict[str, int]:
    """All keys, and for how many milliseconds they live (−1: for ever)."""
    async with valkey.client() as client:
        return {key.decode(): await client.pttl(key) for key in await client.keys("*")}


@pytest.mark.parametrize("size", [1, PART - 1, PART, PART + 1, (2 * AT_ONCE + 1) * PART + 5])
async def test_what_one_replica_tells_arrives_at_another(valkey: Valkey, size: int) -> None:
    async with store(valkey.url) as one, store(valkey.url) as other:
        snapshot = of_size(size)
        writer, reader = Replica(one, snapshot), Replica(other)
        assert await reader.read() == (None, "none")
        assert await writer.write() == "written"
        assert await reader.read() == (snapshot, "found")
        assert (writer.telemetry.bytes["write"], reader.telemetry.bytes["read"]) == (size, size)
        lives = await keys(valkey)
        assert len(lives) == 2 + -(-size // PART)
        assert all(0 < ttl <= 600_000 for ttl in lives.values())
        assert all(key.startswith("kvsync:snapshot") for key in lives)


async def test_one_replica_writes_for_all_once_in_an_interval(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        replicas = [Replica(shared, of_size(100), interval=60) for _ in range(5)]
        results = Counter(await asyncio.gather(*(replica.write() for replica in replicas)))
        assert results == {"written": 1, "elsewhere": 4}
        assert sum(replica.taken for replica in replicas) == 1
        assert 50_000 < (await keys(valkey))["kvsync:snapshot-turn:ns/a#1"] <= 54_000


async def test_each_fleet_has_its_own(valkey: Valkey) -> None:
    async with store(valkey.url) as one, store(valkey.url, prefix="other") as other:
        assert await Replica(one, of_size(1)).write() == "written"
        assert await Replica(other).read() == (None, "none")


async def test_who_can_not_tell_leaves_it_to_others(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        assert await Replica(shared, None).write() == "not_now"
        assert await Replica(shared, of_size(1)).write() == "written"


async def test_what_has_not_changed_lives_on_and_is_not_written_again(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        replica = Replica(shared, of_size(PART + 1), lifetime=100)
        await replica.write()
        before = await keys(valkey)
        async with valkey.client() as client:
            for key in before:
                await client.pexpire(key, 5_000)
        await forget_turns(shared)
        assert await replica.write() == "unchanged"
        after = await keys(valkey)
        assert after.keys() == before.keys()
        assert all(ttl > 50_000 for key, ttl in after.items() if "turn" not in key)
        async with valkey.client() as client:
            await client.delete(next(key for key in before if "part" in key))
        await forget_turns(shared)
        assert await replica.write() == "written", "a part was gone"
        assert await replica.read() == (replica.snapshot, "found")


@pytest.mark.parametrize("what", ["form", "size"])
async def test_at_the_same_number_other_knowledge_takes_its_place(valkey: Valkey, what: str) -> None:
    """Another version wrote it, or an audit had the worker forgotten while nothing was published."""
    async with store(valkey.url) as shared:
        replica = Replica(shared, of_size(1000))
        await replica.write()
        assert replica.snapshot is not None
        position, image = replica.snapshot.position, replica.snapshot.image
        replica.snapshot = Snapshot(position, b"x" + image[1:] if what == "form" else image[:-1])
        await forget_turns(shared)
        assert await replica.write() == "written"
        assert await replica.read() == (replica.snapshot, "found")


@pytest.mark.parametrize("junk", ["another type", "no end", "noise"])
async def test_what_is_no_snapshot_is_written_over(valkey: Valkey, junk: str) -> None:
    async with valkey.client() as client, store(valkey.url) as shared:
        replica = Replica(shared, of_size(9))
        key = "kvsync:snapshot:ns/a#1"
        if junk == "another type":
            await client.lpush(key, "a list")
        elif junk == "noise":
            await client.set(key, b"\x00" * 9000)
        else:
            await replica.write()
            good = msgspec.msgpack.decode(await client.get(key))
            await client.set(key, msgspec.msgpack.encode(good | {"size": 2**62}))
            await forget_turns(shared)
        async with asyncio.timeout(5):
            assert await replica.read() == (None, "too_large" if junk == "no end" else "unreadable")
            assert await replica.write() == "written"
        assert await replica.read() == (replica.snapshot, "found")


async def test_a_newer_one_takes_its_place_and_the_older_is_gone_soon(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        replica = Replica(shared, of_size(2 * PART, seq=1))
        await replica.write()
        old = {key for key in await keys(valkey) if "part" in key}
        replica.snapshot = of_size(PART, seq=2)
        await forget_turns(shared)
        assert await replica.write() == "written"
        assert await replica.read() == (replica.snapshot, "found")
        lives = await keys(valkey)
        assert all(0 < lives[key] <= 1000 * OVERLAP for key in old), "who reads just now still finds it"


async def test_too_large_is_neither_written_nor_read(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        assert await Replica(shared, of_size(2048), max_bytes=1024).write() == "too_large"
        assert not [key for key in await keys(valkey) if "turn" not in key]
        await forget_turns(shared)
        assert await Replica(shared, of_size(2048)).write() == "written"
        assert await Replica(shared, max_bytes=1024).read() == (None, "too_large")


async def test_whatever_stands_there_is_a_snapshot_of_this_worker_or_none(valkey: Valkey) -> None:
    async with valkey.client() as client, store(valkey.url) as shared:
        replica = Replica(shared, of_size(PART + 10))
        await replica.write()
        key = "kvsync:snapshot:ns/a#1"
        head = await client.get(key)
        assert isinstance(head, bytes)
        good = msgspec.msgpack.decode(head)

        async def reads(value: bytes) -> tuple[Snapshot | None, str]:
            await client.set(key, value)
            return await replica.read()

        for bad in (b"\xc1", b"\x90", b"\x80", head[:-1], head + b"x", b"\xff" * 5000, b"\xdf\xff\xff\xff\xff"):
            assert await reads(bad) == (None, "unreadable")
        changed: list[dict[str, Any]] = [
            {"worker": "another"}, {"model": "another"}, {"seq": -1}, {"seq": 2**63}, {"seq": "1"}, {"mark": b""},
            {"mark": b"x" * 33}, {"size": 0}, {"size": -5}, {"parts": "x"}, {"parts": good["parts"][::-1]},
            {"digest": 1}, {"size": PART}, {"size": PART + 11}, {"more": 1}, {"size": 2 * PART + 1},
        ]  # fmt: skip
        for change in changed:
            assert await reads(msgspec.msgpack.encode(good | change)) == (None, "unreadable"), change
        assert await reads(msgspec.msgpack.encode(good | {"size": 2**62})) == (None, "too_large")
        assert await reads(head) == (replica.snapshot, "found")
        parts = [name for name in await keys(valkey) if "part" in name]
        await client.setrange(parts[0], 3, b"\0\0\0\0")
        assert await replica.read() == (None, "unreadable")
        await client.set(parts[0], b"x" * (5 * PART))
        assert await replica.read() == (None, "unreadable")
        await client.delete(parts[0])
        assert await replica.read() == (None, "unreadable")
        await client.delete(parts[0])
        await client.lpush(parts[0], "a list")
        assert await replica.read() == (None, "unanswered")


async def test_one_that_is_replaced_while_it_is_read_is_read_anew(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        replica = Replica(shared, of_size(PART, seq=1))
        await replica.write()
        newer = of_size(PART, seq=2)
        reading = Replica(shared)
        asked: Callable[..., Awaitable[list[object]]] = reading.it._ask

        async def ask(kind: str, *commands: Any) -> list[object]:
            replies = await asked(kind, *commands)
            if kind == "snapshot_head" and replica.snapshot is not newer:
                replica.snapshot = newer
                await forget_turns(shared)
                old = [key for key in await keys(valkey) if "part" in key]
                assert await replica.write() == "written"
                async with valkey.client() as client:
                    await client.delete(*old)
            return replies

        reading.it._ask = ask  # type: ignore[method-assign]
        assert await reading.read() == (newer, "found")


async def test_without_redis_there_are_none_and_nobody_waits() -> None:
    async with store(None, up=False) as shared:
        assert await Replica(shared, of_size(1)).read() == (None, "unanswered")


async def test_a_server_that_is_not_there_costs_its_refusal_only() -> None:
    told = Told()
    async with store("redis://127.0.0.1:1", told, up=False, timeout=0.5) as shared:
        async with asyncio.timeout(5):
            assert await Replica(shared).read() == (None, "unanswered")
        assert told.results["snapshot_head", "down"] == 1


async def test_who_asks_while_it_connects_gets_it(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        assert await Replica(shared, of_size(9)).write() == "written"
    async with store(valkey.url, up=False) as shared:
        assert not shared.up
        assert (await Replica(shared).read())[1] == "found"


async def test_a_full_server_refuses_and_keeps_nothing_for_long(tmp_path: Path) -> None:
    full = Valkey(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    async with full as valkey, store(valkey.url) as shared:
        replica = Replica(shared, of_size(16 << 20))
        assert await replica.write() == "unanswered"
        assert await replica.read() == (None, "none"), "no head was written"
        lives = await keys(valkey)
        assert all(0 < ttl <= 1000 * OVERLAP for key, ttl in lives.items() if "part" in key)


async def test_a_round_comes_to_every_worker(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        replica = Replica(shared, of_size(5), interval=0.2)
        replica.workers = [(f"w{n}", "tiny") for n in range(7)]
        for _ in replica.workers:
            await replica.it.step()
        for worker, model in replica.workers:
            found = await replica.it.read(Target(worker, "a", "a", model, 0, "", None))
            assert found == replica.snapshot


async def test_who_could_not_be_told_is_asked_once_more_in_the_round(valkey: Valkey) -> None:
    async with store(valkey.url) as shared:
        replica = Replica(shared, None, interval=0.1)
        replica.workers = [("v", "tiny"), ("w", "tiny")]
        for _ in range(4):
            await replica.it.step()
        assert replica.telemetry.seen == {("write", "not_now"): 4}
        replica.snapshot = of_size(5)
        for _ in range(2):
            await replica.it.step()
        assert replica.telemetry.seen["write", "written"] == 2


async def test_a_worker_that_takes_long_to_be_told_makes_the_round_longer(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with store(valkey.url) as shared:
        replica = Replica(shared, of_size(5), interval=10)
        replica.workers = [("v", "tiny"), ("w", "tiny")]
        seconds = iter([0.0, 0.1, 10.0, 11.0])
        replica.it._clock = lambda: next(seconds)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await replica.it.step()
        await replica.it.step()
    assert [pause for pause in slept if pause >= 5.0] == [5.0, pytest.approx(1.0 / SHARE)]


async def test_on_a_cluster(tmp_path: Path) -> None:
    async with cluster(tmp_path) as nodes:
        url = "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        async with store(url, mode="cluster", timeout=5.0) as shared:
            replica = Replica(shared, of_size((2 * AT_ONCE + 1) * PART + 5))
            assert await replica.write() == "written"
            assert await replica.read() == (replica.snapshot, "found")
            await forget_turns(shared)
            assert await replica.write() == "unchanged"


async def test_a_server_that_comes_back_gets_them_again(tmp_path: Path) -> None:
    async with Valkey(tmp_path) as valkey, store(valkey.url, timeout=0.5) as shared:
        replica = Replica(shared, of_size(5), interval=0.1)
        await asyncio.to_thread(valkey.stop)
        assert await replica.write() == "unanswered"
        await until(lambda: not shared.up, "the outage is noticed")
        for _ in range(3):
            await replica.it.step()  # asks nobody
        assert replica.telemetry.seen == {("write", "unanswered"): 1}
        await valkey.start()
        await until(lambda: shared.up, "reached again")
        while await replica.read() != (replica.snapshot, "found"):
            await replica.it.step()
