"""Keys, tenants and certificates that are renewed while a whole gateway runs."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvsync.app import App
from kvsync.config import load
from tests.certificates import Authority
from tests.faults.http import FakeEngine
from tests.integration.gateway.harness import BODY, Client, always, post, reply

NAME = "gateway.test"
FIRST, SECOND, THIRD = (f"key-number-{number}-0123456789" for number in "123")


class Running:
    def __init__(self, folder: Path, app: App, authority: Authority, engine: FakeEngine) -> None:
        self.folder = folder
        self.app = app
        self.authority = authority
        self.engine = engine

    async def client(self) -> Client:
        return await Client.open(self.app.gateway.port, self.authority.client(), NAME)

    async def status(self, key: str) -> int:
        client = await self.client()
        await client.send(post(BODY, b"/v1/completions", b"Authorization: Bearer " + key.encode()))
        answer = await client.answer()
        client.close()
        return answer.status

    async def becomes(self, key: str, status: int) -> None:
        async def look() -> bool:
            return await self.status(key) == status

        await until(look)


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(15):
        while not await look():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.05)


def write(folder: Path, engine: FakeEngine, **tenants: Any) -> None:
    settings = {
        "gateway": {
            "host": "127.0.0.1",
            "port": 0,
            "drain_timeout": 0.2,
            "tls": {"cert": "port.crt", "key": "port.key"},
            "engine_api_key_file": "engine-key",
        },
        "admin": {"port": 0},
        "models": [{"name": "m", "engines": [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]}],
        "tenants": [{"name": name, **given} for name, given in tenants.items()],
    }
    new = folder / "new"
    new.write_text(json.dumps(settings))
    new.rename(folder / "kvsync.yaml")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    authority = Authority(tmp_path)
    authority.issue(NAME)
    engine = FakeEngine("e", always(reply(b"good")))
    await engine.start()
    (tmp_path / "keys").write_text(FIRST)
    (tmp_path / "engine-key").write_text("first-key-of-engines")
    write(tmp_path, engine, a={"api_keys_file": "keys"})
    file = tmp_path / "kvsync.yaml"
    app = App(load(file, {}, {}), config_file=file, environ={}, flags={})
    await app.start()
    yield Running(tmp_path, app, authority, engine)
    await app.stop()
    await engine.stop()


async def test_keys_come_and_go_with_their_file(running: Running) -> None:
    kept = await running.client()
    assert await running.status(FIRST) == 200
    assert await running.status(SECOND) == 401
    (running.folder / "keys").write_text(SECOND + "\n")
    await running.becomes(SECOND, 200)
    assert await running.status(FIRST) == 401
    # A connection that was open when a key was revoked is no way in.
    await kept.send(post(BODY, b"/v1/completions", b"Authorization: Bearer " + FIRST.encode()))
    assert (await kept.answer()).status == 401
    kept.close()


async def test_tenants_come_and_go_with_the_configuration(running: Running) -> None:
    write(running.folder, running.engine, a={"api_keys_file": "keys"}, b={"api_keys": [THIRD]})
    running.app.reload()
    await running.becomes(THIRD, 200)
    assert await running.status(FIRST) == 200
    write(running.folder, running.engine, b={"api_keys": [THIRD]})
    running.app.reload()
    await running.becomes(FIRST, 401)
    assert await running.status(THIRD) == 200


async def test_a_list_of_tenants_that_vanishes_opens_nothing(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async def told() -> bool:
        return "only a new start opens" in caplog.text

    write(running.folder, running.engine)
    running.app.reload()
    await until(told)
    assert await running.status("") == 401
    assert await running.status(FIRST) == 200


async def test_certificates_and_the_engines_key_are_renewed_and_counted(running: Running) -> None:
    def serial(client: Client) -> object:
        tls: ssl.SSLObject = client.writer.get_extra_info("ssl_object")
        shown = tls.getpeercert()
        assert shown is not None
        return shown["serialNumber"]

    old = await running.client()
    before = serial(old)
    running.authority.issue(NAME)
    (running.folder / "engine-key").write_text("second-key-of-engines")

    async def renewed() -> bool:
        client = await running.client()
        client.close()
        await running.status(FIRST)
        sent = running.engine.requests[-1].get(b"authorization")
        return serial(client) != before and sent == [b"Bearer second-key-of-engines"]

    await until(renewed)
    await old.send(post(BODY, b"/v1/completions", b"Authorization: Bearer " + FIRST.encode()))
    assert (await old.answer()).status == 200
    old.close()
    (running.folder / "port.crt").unlink()

    async def counted() -> bool:
        url = f"http://127.0.0.1:{running.app.admin.port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            page = await response.text()
        found = dict(re.findall(r'kvsync_config_reloads_total\{result="(\w+)"\} ([0-9.]+)', page))
        return float(found.get("applied", 0)) >= 2 and float(found.get("broken", 0)) >= 1

    await until(counted)
    assert await running.status(FIRST) == 200
