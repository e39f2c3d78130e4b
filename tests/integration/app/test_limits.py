"""Limits in the whole gateway, with a real server behind it: AIBrix's headers and errors, whoever carries the bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.client import Answer, streamed, until
from tests.faults.engine import Engine, cut, stall, status
from tests.faults.network import Proxy
from tests.faults.serving import Serving, serving
from tests.valkey import Valkey

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
TOKENS = 5
"""Of each answer: three of the prompt and two."""
ALICE = {"user": "alice"}
NOW = 1_700_000_000.0


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[Valkey]:
    home = tmp_path / "valkey"
    home.mkdir()
    async with Valkey(home) as server:
        yield server


def sections(url: str | None, **more: Any) -> dict[str, Any]:
    return {"events": {"enabled": False}, "redis": {"url": url, "timeout": 0.5}, "limits": {"users": True}, **more}


async def up(gateway: Serving) -> None:
    async def look() -> bool:
        return bool((await gateway.ready())["redis"]["state"] == "up")

    await until(look, "Redis is reached")


@asynccontextmanager
async def limited(folder: Path, engine: Engine, url: str | None, **more: Any) -> AsyncIterator[Serving]:
    """A gateway for which it is always the same moment: what a test counts stands in one window."""
    async with serving(folder, engine, **sections(url, **more)) as gateway:
        gateway.app.limits._wall = lambda: NOW
        if url is not None:
            await up(gateway)
        yield gateway


async def ask(gateway: Serving, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return await gateway.post(COMPLETIONS, {**BODY, **fields}, headers if headers is not None else ALICE)


async def counted(valkey: Valkey, what: str, count: int, user: str = "alice") -> None:
    """Return once the shared count of this minute is that."""
    async with valkey.client() as client:

        async def look() -> bool:
            key = f"aibrix:{user}_{what}_CURRENT:{int(NOW) // 60 % 64}"
            return bool(int(await client.get(key) or 0) == count)

        await until(look, f"{what} of {user} is {count}")


async def record(valkey: Valkey, user: str = "alice", **figures: int) -> None:
    async with valkey.client() as client:
        await client.set(f"aibrix-users/{user}", json.dumps({"name": user, **figures}))


async def test_requests_and_tokens_of_a_user(tmp_path: Path, valkey: Valkey) -> None:
    await record(valkey, rpm=3, tpm=100)
    async with Engine("a") as engine, limited(tmp_path, engine, valkey.url) as gateway:
        for n in (1, 2, 3):
            answer = await ask(gateway)
            assert answer.status == 200
            assert answer.headers["x-update-rpm"] == str(n)
        await counted(valkey, "TPM", 3 * TOKENS)
        refused = await ask(gateway)
        assert refused.status == 429
        assert refused.headers["x-error-rpm-exceeded"] == "true"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.error == {
            "message": "user: alice has exceeded RPM: 3",
            "type": "rate_limit_error",
            "code": "rate_limit_exceeded",
            "param": None,
        }
        assert (await ask(gateway, {"user": "bob"})).status == 200
        nobody = await ask(gateway, {})
        assert nobody.status == 200
        assert "x-update-rpm" not in nobody.headers
        assert len(engine.served) == 5
        await record(valkey, rpm=100, tpm=16)
        assert (await ask(gateway)).status == 200
        await counted(valkey, "TPM", 4 * TOKENS)
        refused = await ask(gateway)
        assert refused.status == 429
        assert refused.headers["x-error-tpm-exceeded"] == "true"
        assert refused.error["message"] == "user: alice has exceeded TPM: 16"
        figures = await gateway.metrics()
        assert figures.total("kvsync_requests_total", path=COMPLETIONS, status="429", reason="rpm_exceeded") == 1
        assert figures.total("kvsync_limited_total", limit="user", result="tpm_exceeded", counted="shared") == 1


async def test_two_gateways_count_together(tmp_path: Path, valkey: Valkey) -> None:
    await record(valkey, rpm=3)
    (tmp_path / "two").mkdir()
    async with (
        Engine("a") as engine,
        limited(tmp_path, engine, valkey.url) as one,
        limited(tmp_path / "two", engine, valkey.url) as two,
    ):
        assert [(await ask(each)).status for each in (one, two, one, two, one)] == [200, 200, 200, 429, 429]


async def test_streams_of_a_user_whose_tokens_are_limited_have_to_say_what_they_took(
    tmp_path: Path, valkey: Valkey
) -> None:
    await record(valkey, tpm=1000)
    async with Engine("a") as engine, limited(tmp_path, engine, valkey.url) as gateway:
        refused = await ask(gateway, stream=True)
        assert refused.status == 400
        assert refused.headers["x-error-no-stream-options-include-usage"]
        assert refused.error["message"] == "include usage for stream options not set"
        assert refused.error["param"] == "stream_options"
        assert (await gateway.post(COMPLETIONS, streamed(BODY), ALICE)).status == 200
        await counted(valkey, "TPM", TOKENS)
        assert (await ask(gateway, {"user": "bob"}, stream=True)).status == 200  # limited by default: the prompt counts
        await counted(valkey, "TPM", 3, "bob")


async def test_usage_that_the_gateway_asks_for_is_counted_and_not_shown(tmp_path: Path, valkey: Valkey) -> None:
    await record(valkey, tpm=1000)
    audit = {"inject_usage": True}
    async with Engine("a") as engine, limited(tmp_path, engine, valkey.url, audit=audit) as gateway:
        answer = await ask(gateway, stream=True)
        assert answer.status == 200
        assert not any("usage" in piece for piece in answer.pieces)
        await counted(valkey, "TPM", TOKENS)


async def test_a_tenant_is_who_its_key_says_whatever_the_header_says(tmp_path: Path, valkey: Valkey) -> None:
    await record(valkey, "acme", rpm=1)
    key = "a-key-of-acme-which-is-long"
    tenants: Any = [{"name": "acme", "api_keys": [key]}]
    async with Engine("a") as engine, limited(tmp_path, engine, valkey.url, tenants=tenants) as gateway:
        for name, wanted in (("alice", 200), ("bob", 429)):
            answer = await ask(gateway, {"user": name, "authorization": f"Bearer {key}"})
            assert answer.status == wanted
        assert answer.error["message"] == "user: acme has exceeded RPM: 1"


async def test_what_an_answer_that_fails_takes(tmp_path: Path, valkey: Valkey) -> None:
    async with Engine("a") as engine, limited(tmp_path, engine, valkey.url) as gateway:
        engine.next.append(status(400))
        assert (await ask(gateway)).status == 400
        engine.next.append(cut(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"))
        with pytest.raises(Exception, match=r"payload|Response|closed"):
            await ask(gateway)
        await counted(valkey, "TPM", 3)  # the prompt of the one that broke off
        engine.next.append(stall)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ask(gateway)
        await counted(valkey, "TPM", 6)  # its client left, and the engine had it


async def test_a_models_seconds(tmp_path: Path, valkey: Valkey) -> None:
    async with Engine("a") as engine, limited(tmp_path, engine, valkey.url) as gateway:
        assert (await ask(gateway, {})).status == 200
        content = yaml.safe_load(gateway._file.read_text())
        content["models"][0]["requests_per_second"] = 2
        gateway._file.write_text(yaml.safe_dump(content))
        gateway.app.reload()

        async def look() -> bool:
            return (await ask(gateway, {})).status == 429

        await until(look, "a model's limit holds")
        assert len(engine.served) >= 3
        refused = await ask(gateway, {})
        assert refused.headers["x-error-model-rps-exceeded"] == "true"
        assert refused.error["message"] == "model: tiny has exceeded RPS: 2"


@pytest.mark.faults
async def test_without_redis_each_gateway_counts_alone_and_nobody_waits(tmp_path: Path, valkey: Valkey) -> None:
    """The limiter's server is a black hole, slow, dead: bounded delay, a fallback, recovery (D1)."""
    await record(valkey, rpm=1000)
    async with (
        Engine("a") as engine,
        Proxy(valkey.url) as proxy,
        limited(tmp_path, engine, proxy.endpoint) as gateway,
    ):
        await up(gateway)
        assert (await ask(gateway)).status == 200

        async def longest(count: int) -> float:
            found = 0.0
            for _ in range(count):
                begun = time.monotonic()
                assert (await ask(gateway)).status == 200
                found = max(found, time.monotonic() - begun)
            return found

        proxy.hold()
        assert await longest(20) < 1.0  # 50 ms each at most, and nothing once it rests
        proxy.release()
        await up(gateway)
        proxy.delay = 0.3
        assert await longest(20) < 1.0
        proxy.delay = 0.0
        valkey.stop()
        assert await longest(20) < 1.0
        assert (await gateway.ready())["ready"] is True
        figures = await gateway.metrics()
        assert figures.total("kvsync_limited_total", limit="user", result="allowed", counted="alone") > 40
        await valkey.start()
        await record(valkey, rpm=1)
        await up(gateway)

        async def look() -> bool:
            return (await ask(gateway)).status == 429

        await until(look, "limits are shared again")


async def test_absent_at_start(tmp_path: Path, valkey: Valkey) -> None:
    valkey.stop()
    limits = {"users": True, "requests_per_minute": 2}
    async with Engine("a") as engine, serving(tmp_path, engine, **sections(valkey.url, limits=limits)) as gateway:
        gateway.app.limits._wall = lambda: NOW
        assert [(await ask(gateway)).status for _ in range(3)] == [200, 200, 429]
        assert (await gateway.ready())["ready"] is True
        assert (await gateway.ready())["redis"]["state"] in ("connecting", "down")
        await valkey.start()
        await up(gateway)
        assert (await ask(gateway, {"user": "carol"})).headers["x-update-rpm"] == "1"
        await counted(valkey, "RPM", 1, "carol")


async def test_limits_without_any_redis_are_this_gateways_own(tmp_path: Path) -> None:
    limits = {"users": True, "requests_per_minute": 2}
    async with Engine("a") as engine, limited(tmp_path, engine, None, limits=limits) as gateway:
        assert [(await ask(gateway)).status for _ in range(3)] == [200, 200, 429]


async def test_without_limits_a_user_is_a_header_like_others(tmp_path: Path, valkey: Valkey) -> None:
    off = {"users": False}
    async with Engine("a") as engine, serving(tmp_path, engine, **sections(valkey.url, limits=off)) as gateway:
        await up(gateway)
        answer = await ask(gateway)
        assert answer.status == 200
        assert "x-update-rpm" not in answer.headers
        async with valkey.client() as client:
            assert await client.keys("aibrix*") == []


async def test_gateways_add_each_other_s_load(tmp_path: Path, valkey: Valkey) -> None:
    (tmp_path / "two").mkdir()
    off = {"users": False}
    async with (
        Engine("a") as a,
        Engine("b") as b,
        serving(tmp_path, a, b, **sections(valkey.url, limits=off)) as one,
        serving(tmp_path / "two", a, b, **sections(valkey.url, limits=off)) as two,
    ):
        await up(one)
        await up(two)
        a.open.clear()
        b.open.clear()
        busy = asyncio.create_task(ask(one, {}))

        async def look() -> bool:
            return bool(sum(row["running_elsewhere"] for row in (await two.workers()).values()) == 1)

        await until(look, "the other's request is seen")
        rows = await two.workers()
        taken = next(name for name, row in rows.items() if row["running_elsewhere"])
        assert rows[taken]["queued_prefill_tokens_elsewhere"] == 3
        assert rows[taken]["running"] == 0
        assert (await two.ready())["redis"]["replicas"] == 1
        a.open.set()
        b.open.set()
        await busy

        async def gone() -> bool:
            return not any(row["running_elsewhere"] for row in (await two.workers()).values())

        await until(gone, "its end is seen")
