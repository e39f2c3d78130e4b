"""Whatever is cancelled ends, also when what it waited for comes at that very moment.

``asyncio.wait_for`` of Python 3.11 loses a cancellation in that case: a task that should end goes on for ever, and
whoever waits for its end with it (a fleet that no longer changes, a gateway that does not stop).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsync.config import read
from kvsync.config.addresses import Address
from kvsync.config.model import EventsSettings, RemoteTokenizerSettings, Settings, TokenizerSettings
from kvsync.discovery.model import Engine
from kvsync.discovery.static import StaticSource
from kvsync.events.contracts import Located
from kvsync.events.manager import EventManager
from kvsync.events.sources import numeric
from kvsync.events.sync import KVSync
from kvsync.index import PrefixIndex

TURNS = range(8)
"""Turns of the event loop between what a task waits for and its end: one of them is the bad one."""
DEADLINE = 5.0


async def turn(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def ended(task: asyncio.Task[Any]) -> None:
    done, _ = await asyncio.wait([task], timeout=DEADLINE)
    assert done, "it did not end"


@pytest.mark.parametrize("turns", TURNS)
async def test_a_name_that_is_resolved_just_then(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    async def look_up(*_: Any, **__: Any) -> Any:
        return await found

    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    task = asyncio.create_task(numeric(Address("tcp", "engine", 5557), DEADLINE))
    await turn(3)
    found.set_result([(socket.AF_INET, 0, 0, "", ("127.0.0.1", 5557))])
    await turn(turns)
    if task.cancel():
        await ended(task)
        assert task.cancelled()
    else:
        assert task.result().host == "127.0.0.1"


@pytest.mark.parametrize("turns", TURNS)
async def test_a_configuration_that_changes_just_then(turns: int, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("models: []\n")
    looked = asyncio.Event()
    source = StaticSource(
        file, {}, {}, read(file, {}, {}).settings, lambda _: None, reloaded=lambda _: looked.set(), interval=DEADLINE
    )
    task = asyncio.create_task(source.run())
    await looked.wait()
    await turn(3)
    source.trigger()
    await turn(turns)
    task.cancel()
    await ended(task)


class NotKnownYet:
    """Engines that did not tell all about themselves: they are asked again after a while, or when told."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def locate(self, engine: Engine) -> Located:
        self.asked.set()
        return Located((), complete=False)


@pytest.mark.parametrize("end", [lambda manager: manager.remove("e"), lambda manager: manager.stop()])
@pytest.mark.parametrize("turns", TURNS)
async def test_an_engine_that_is_looked_for_again_just_then(turns: int, end: Callable[[EventManager], Any]) -> None:
    locator = NotKnownYet()
    manager = EventManager(PrefixIndex(), EventsSettings(), locator=locator)
    await manager.start()
    await manager.add(Engine(uid="e", name="e", url="http://127.0.0.1:1", model="m"))
    await locator.asked.wait()
    await turn(3)
    manager._relocate("e")
    await turn(turns)
    await ended(asyncio.ensure_future(end(manager)))
    await manager.stop()


@pytest.mark.parametrize("turns", TURNS)
async def test_a_tokenizer_that_answers_just_then(turns: int) -> None:
    answers: asyncio.Queue[asyncio.Future[str | None]] = asyncio.Queue()

    async def probe(_: Settings) -> str | None:
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        answers.put_nowait(answer)
        return await answer

    settings = Settings(
        events=EventsSettings(enabled=True, condition_interval=0.01),
        tokenizer=TokenizerSettings(remote=RemoteTokenizerSettings(enabled=True, endpoint="http://127.0.0.1:1")),
    )
    sync = KVSync(settings, lambda events: EventManager(PrefixIndex(), events), probe, zmq_installed=lambda: True)
    starting = asyncio.create_task(sync.start())
    (await answers.get()).set_result("not yet")
    await starting
    answer = await answers.get()
    await turn(3)
    answer.set_result("not yet")
    await turn(turns)
    await ended(asyncio.create_task(sync.stop()))
