"""KV sync switched on and off by changing the file of a gateway that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from kvsync import app as module
from kvsync.app import App
from kvsync.config import EventsSettings, Settings, load
from kvsync.discovery.model import Change, Engine
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


PLAIN = """
gateway: {{host: 127.0.0.1, port: 0, drain_timeout: 1}}
admin: {{port: 0}}
events: {{condition_interval: {interval}}}
models: [{{name: tiny, engines: [{{name: a, url: "http://127.0.0.1:9"}}]}}]
"""


async def test_however_many_reloads_come_meanwhile_the_last_one_is_taken_over_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking one over may last seconds (a tokenizer that does not answer is waited for); a storm of SIGHUP brings ten
    of them a second."""
    file = tmp_path / "fleet.yaml"
    file.write_text(PLAIN.format(interval=1))
    before = asyncio.all_tasks()
    app = App(load(file, {}, {}), config_file=file, environ={}, flags={})
    taken: list[float] = []
    free = asyncio.Event()

    async def update(settings: Settings) -> None:
        taken.append(settings.events.condition_interval)
        await free.wait()

    monkeypatch.setattr(app.kv_sync, "update", update)
    await app.start()
    try:
        await until(lambda: taken == [1])
        for interval in range(2, 6):
            file.write_text(PLAIN.format(interval=interval))
            app.reload()
            await until(lambda: app._source.settings.events.condition_interval == interval)  # noqa: B023
        free.set()
        await until(lambda: taken == [1, 5])
        free.clear()
        app.reload()
        await until(lambda: len(taken) == 3)
    finally:
        await app.stop()
    assert asyncio.all_tasks() == before, "stopped in the middle of one as well"


async def test_a_fault_in_one_change_does_not_end_the_following_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(PLAIN.format(interval=1))
    monkeypatch.setattr(module, "TICK", 0.01)
    app = App(load(file, {}, {}), config_file=file, environ={}, flags={})
    await app.start()
    followed: list[str] = []

    async def apply(change: Change) -> None:
        if change.engine.name == "bad":
            raise RuntimeError("a fault of ours")
        followed.append(change.engine.name)

    monkeypatch.setattr(app.kv_sync, "apply", apply)
    try:
        for name in ("bad", "good"):
            app._changed(Change("added", Engine(uid=name, name=name, url="http://127.0.0.1:9", model="tiny")))
        await until(lambda: followed == ["good"])
    finally:
        await app.stop()
    assert "seeing to changes of the fleet failed, and goes on: RuntimeError('a fault of ours')" in caplog.text
