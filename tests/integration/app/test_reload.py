"""KV sync switched on and off by changing the file of a gateway that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from kvsync.app import App
from kvsync.config import EventsSettings, load
from kvsync.engine_sim import SimConfig, SimEngine
from kvsync.events.sync import Manager

FILE = """
gateway: {{host: 127.0.0.1, port: 0, drain_timeout: 1}}
admin: {{port: 0}}
events: {{enabled: {enabled}, replay_timeout: {patience}}}
tokenizer: {{remote: {{enabled: true, endpoint: engines}}}}
models:
  - name: tiny
    engines:
      - {{name: a, url: "{engine.url}", events: "{engine.events}", replay: "{engine.replay}"}}
"""


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.02)


async def test_events_enabled_follows_the_file_and_no_request_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.yaml"
    async with SimEngine(SimConfig(blocks=300)) as engine:

        def write(enabled: str, patience: float = 1.0) -> None:
            file.write_text(FILE.format(enabled=enabled, patience=patience, engine=engine))

        write("false")
        app = App(load(file, {}, {}), config_file=file, environ={}, flags={})
        made: list[EventsSettings] = []
        make = app.kv_sync._make_manager

        def make_manager(settings: EventsSettings) -> Manager:
            made.append(settings)
            return make(settings)

        monkeypatch.setattr(app.kv_sync, "_make_manager", make_manager)
        await app.start()
        stop = asyncio.Event()
        statuses: list[int] = []

        async def ask() -> None:
            url = f"http://127.0.0.1:{app.gateway.port}/v1/completions"
            async with aiohttp.ClientSession() as session:
                while not stop.is_set():
                    body = {"model": "tiny", "prompt": [7] * 200, "max_tokens": 1}
                    async with session.post(url, json=body) as response:
                        await response.read()
                        statuses.append(response.status)

        asking = asyncio.create_task(ask())
        try:
            assert app.kv_sync.status().state == "off"
            assert app.index.match([7] * 200, "tiny") == {}
            write("true")
            app.reload()
            await until(lambda: app.kv_sync.status().state == "running")
            await until(lambda: any(match.credit == 192 for match in app.index.match([7] * 200, "tiny").values()))
            write("false")
            app.reload()
            await until(lambda: app.kv_sync.status().state == "off")
            assert app.index.match([7] * 200, "tiny") == {}
            answered = len(statuses)
            await until(lambda: len(statuses) > answered)
            await until(lambda: app.modes.models.get("tiny") == "observed")
            write("true", patience=7.0)
            app.reload()
            await until(lambda: app.kv_sync.status().state == "running")
            await until(lambda: any(match.credit == 192 for match in app.index.match([7] * 200, "tiny").values()))
            (status,) = app.kv_sync.workers()
            assert (status.state, status.whole) == ("live", True)
            assert [settings.replay_timeout for settings in made] == [1.0, 7.0]
        finally:
            stop.set()
            await asking
            await app.stop()
    assert set(statuses) == {200}
