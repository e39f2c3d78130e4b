"""A replica that starts where others serve already: warm by a snapshot from Redis, or by replay without one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.client import until
from tests.faults.engine import Engine
from tests.faults.serving import Serving, serving
from tests.faults.words import tokens
from tests.valkey import Valkey


def shared(valkey: Valkey, **snapshots: Any) -> dict[str, Any]:
    return {"url": valkey.url, "timeout": 0.5, "snapshots": {"interval": 0.2, **snapshots}}


async def told(valkey: Valkey, **numbers: int) -> None:
    """Return once there are snapshots of these workers, up to these numbers."""
    async with valkey.client() as client:

        async def look() -> bool:
            heads = [await client.get(f"kvsync:snapshot:{worker}") for worker in numbers]
            found = [msgspec.msgpack.decode(head)["seq"] if head else None for head in heads]
            return found == list(numbers.values())

        await until(look, f"snapshots up to {numbers}")


async def snapshots(gateway: Serving, action: str, result: str) -> float:
    return (await gateway.metrics()).total("kvsync_snapshots_total", action=action, result=result)


async def is_ready(gateway: Serving) -> dict[str, Any]:
    """What it says once it is."""
    found: list[dict[str, Any]] = []

    async def look() -> bool:
        ready, details = gateway.app.report.ready()
        if ready:
            found.append(dict(details))
        return ready

    await until(look, "ready")
    return found[0]


async def test_a_replica_routes_its_first_request_by_the_snapshot_of_another(tmp_path: Path) -> None:
    """(M2) What the engine's buffer no longer tells, the other replica did."""
    prompt = tokens(100)
    async with Valkey(tmp_path) as valkey, Engine("a", buffer_steps=4) as a, Engine("b", buffer_steps=4) as b:
        async with serving(tmp_path, a, b, redis=shared(valkey)) as first:
            a.store(prompt)
            b.store(tokens(32))
            for _ in range(5):
                a.store(tokens(32))
            await first.credited("a", prompt, 96)
            await told(valkey, a=5, b=0)
        a.store(tokens(32))  # nobody listens; and its buffer begins far behind the prompt
        async with serving(tmp_path, a, b, redis=shared(valkey), followed=False) as second:
            details = await is_ready(second)
            assert details["start"] | {"seconds": None} == {
                "workers": 2,
                "warm": 2,
                "cold": 0,
                "behind": 0,
                "seconds": None,
            }
            _, decision = await second.complete("tiny", prompt)
            assert (decision.worker, decision.credited) == ("a", 96)
            assert (await second.workers())["a"]["trust"] == "exact"
            page = await second.metrics()
            assert page.total("kvsync_start_workers", how="snapshot") == 2
            assert page.total("kvsync_snapshots_total", action="read", result="found") == 2
            assert page.total("kvsync_snapshot_bytes_total", action="read") > 0
            a.evict(prompt, keep=32)
            await second.credited("a", prompt, 32)
        async with serving(tmp_path, a, b) as cold:
            assert await cold.credit("a", tokens=prompt, model="tiny") == 0, "the buffer alone tells nothing of it"
            assert (await cold.workers())["a"]["trust"] == "partial"


async def test_without_redis_it_routes_its_first_request_by_replay(tmp_path: Path) -> None:
    """(M2) The engines themselves tell what they hold."""
    prompt = tokens(100)
    async with Engine("a") as a, Engine("b") as b:
        async with serving(tmp_path, a, b) as first:
            a.store(prompt)
            await first.credited("a", prompt, 96)
        async with serving(tmp_path, a, b, followed=False) as second:
            details = await is_ready(second)
            assert (details["start"]["warm"], details["start"]["cold"]) == (0, 2)
            _, decision = await second.complete("tiny", prompt)
            assert (decision.worker, decision.credited) == ("a", 96)


async def test_an_engine_that_was_restarted_meanwhile_is_not_credited_with_what_the_snapshot_says(
    tmp_path: Path,
) -> None:
    old, new = tokens(100), tokens(100)
    async with Valkey(tmp_path) as valkey, Engine("a") as a:
        async with serving(tmp_path, a, redis=shared(valkey)) as first:
            a.store(old)
            await first.credited("a", old, 96)
            await told(valkey, a=0)
        a.restart()
        a.store(new)
        async with serving(tmp_path, a, redis=shared(valkey)) as second:
            await second.credited("a", new, 96)
            assert await second.credit("a", tokens=old, model="tiny") == 0
            start = (await is_ready(second))["start"]
            assert (start["warm"], start["cold"]) == (0, 1)
            assert await snapshots(second, "read", "found") == 1


async def test_a_redis_that_is_gone_costs_a_replay_and_nothing_else(tmp_path: Path) -> None:
    """(D1) Absent at the start: a start without it."""
    prompt = tokens(100)
    async with Valkey(tmp_path) as valkey, Engine("a") as a:
        async with serving(tmp_path, a, redis=shared(valkey)) as first:
            a.store(prompt)
            await first.credited("a", prompt, 96)
            await told(valkey, a=0)
        await asyncio.to_thread(valkey.stop)
        async with serving(tmp_path, a, redis=shared(valkey), followed=False) as second:
            details = await is_ready(second)
            assert (details["start"]["cold"], details["redis"]["state"]) == (1, "down")
            assert await second.credit("a", tokens=prompt, model="tiny") == 96
            assert (await second.metrics()).total("kvsync_replay_turn_seconds_count", result="alone") >= 1


async def test_a_redis_that_hangs_holds_the_start_up_for_its_patience_only(tmp_path: Path) -> None:
    """(D1) It takes connections and never answers."""
    prompt = tokens(100)
    async with Valkey(tmp_path) as valkey, Engine("a") as a:
        a.store(prompt)
        valkey.freeze()
        try:
            async with serving(tmp_path, a, redis=shared(valkey, patience=0.3)) as gateway:
                await gateway.credited("a", prompt, 96)
        finally:
            valkey.thaw()


async def test_snapshots_can_be_switched_off(tmp_path: Path) -> None:
    prompt = tokens(100)
    async with Valkey(tmp_path) as valkey, Engine("a") as a:
        a.store(prompt)
        async with serving(tmp_path, a, redis=shared(valkey, enabled=False)) as gateway:
            await gateway.credited("a", prompt, 96)
            async with valkey.client() as client:
                assert not [key for key in await client.keys("*") if b"snapshot" in key]


async def test_who_has_not_caught_up_is_waited_for_and_counted(tmp_path: Path) -> None:
    nowhere = {"name": "z", "url": "http://127.0.0.1:9", "events": "tcp://127.0.0.1:8"}
    async with Engine("a") as a:
        async with serving(tmp_path, a, nowhere, followed=False) as gateway:
            await gateway.live("a")
            ready, details = gateway.app.report.ready()
            start = details["start"]
            assert isinstance(start, dict)
            assert (ready, start["behind"], start["seconds"]) == (False, 1, None)
            status, _ = await gateway.admin.get("/readyz")
            assert status == 503
        async with serving(tmp_path, a, nowhere, followed=False, ready={"patience": 0.2}) as gateway:
            details = await is_ready(gateway)
            assert details["start"]["seconds"] >= 0.2
            await gateway.live("a")
            assert (await gateway.metrics()).total("kvsync_start_workers", how="behind") == 1


@pytest.mark.parametrize("share", [0.5, 0.4])
async def test_the_share_that_is_enough_is_a_setting(tmp_path: Path, share: float) -> None:
    nowhere = {"name": "z", "url": "http://127.0.0.1:9", "events": "tcp://127.0.0.1:8"}
    async with (
        Engine("a") as a,
        serving(tmp_path, a, nowhere, followed=False, ready={"share": share}) as gateway,
    ):
        details = await is_ready(gateway)
        assert (details["start"]["cold"], details["start"]["behind"]) == (1, 1)
