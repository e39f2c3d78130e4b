"""A gateway in this process: the real application on real ports, with waits as short as a test wants them.

Nothing is replaced, so a fault test shows what a deployment shows; only a process's start is saved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import yaml

from kvsync.app import App
from kvsync.config import load
from kvsync.discovery.model import Change
from kvsync.discovery.model import Engine as Discovered

from .client import DEADLINE, Client, until
from .engine import Engine
from .gateway import Gateway

SECTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gateway": {"host": "127.0.0.1", "port": 0, "connect_timeout": 0.5, "drain_timeout": 0.2},
    "admin": {"port": 0},
    "events": {
        "enabled": True,
        "condition_interval": 0.1,
        "connect_timeout": 1.0,
        "heartbeat_interval": 0.2,
        "heartbeat_timeout": 0.5,
        "replay_timeout": 0.3,
        "poll_timeout": 0.02,
    },
    "tokenizer": {"remote": {"enabled": True, "endpoint": "engines", "connect_timeout": 0.5, "timeout": 0.5}},
}
"""Waits of half a second where the default is several; what is proportional to another stays so."""


class Serving(Gateway):
    """The ports of an application in this process."""

    def __init__(self, app: App, file: Path, data: Client, admin: Client, url: str) -> None:
        super().__init__(data, admin, url)
        self.app = app
        self._file = file

    def list(self, *entries: Mapping[str, object], model: str = "tiny") -> None:
        """Have the configuration list these engines, and the gateway read it now."""
        content = yaml.safe_load(self._file.read_text())
        content["models"] = [{"name": model, "engines": [dict(entry) for entry in entries]}]
        self._file.write_text(yaml.safe_dump(content))
        self.app.reload()

    def deliver(self, kind: Literal["added", "changed", "gone"], engine: Discovered) -> None:
        """What a source of discovery says: for changes that a file can't tell of (readiness, another uid)."""
        self.app._discovered(Change(kind, engine))

    def discovered(self, name: str) -> Discovered:
        """An engine as the gateway has it now."""
        return next(engine for engine in self.app.fleet if engine.name == name)

    async def credited(self, worker: str, tokens: Sequence[int], credit: int, model: str = "tiny") -> None:
        """Return once that worker is credited with exactly so many tokens of a prompt."""

        async def look() -> bool:
            return await self.credit(worker, model=model, tokens=list(tokens)) == credit

        await until(look, f"{credit} tokens credited to {worker}")

    async def trusted(self, worker: str, trust: str) -> None:
        """Return once that is how far the index can be trusted about that worker."""

        async def look() -> bool:
            return bool((await self.workers())[worker]["trust"] == trust)

        await until(look, f"{worker} {trust}")


@asynccontextmanager
async def serving(
    folder: Path,
    *engines: Engine | Mapping[str, object],
    model: str = "tiny",
    followed: bool = True,
    **sections: Mapping[str, Any],
) -> AsyncIterator[Serving]:
    """A gateway before these engines (or entries for them); ``sections`` are put over :data:`SECTIONS`, setting by
    setting. With ``followed``, it is there once every stream is live."""
    entries = [engine.entry if isinstance(engine, Engine) else dict(engine) for engine in engines]
    content: dict[str, Any] = _over(SECTIONS, sections) | {"models": [{"name": model, "engines": entries}]}
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(content))
    app = App(load(file, {}, {}), config_file=file, environ={}, flags={})
    await app.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2 * DEADLINE)) as session:
            url = f"http://127.0.0.1:{app.gateway.port}"
            admin = Client(session, f"http://127.0.0.1:{app.admin.port}")
            gateway = Serving(app, file, Client(session, url), admin, url)
            if followed and content["events"]["enabled"]:
                await gateway.live(*(str(e["name"]) for e in entries if "events" in e and e.get("kv_events", True)))
                for engine in engines:
                    if isinstance(engine, Engine):
                        await engine.subscribed()
            yield gateway
    finally:
        await app.stop()


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(below)
    for name, value in above.items():
        old = found.get(name)
        found[name] = _over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found
