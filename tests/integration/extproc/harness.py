"""A whole application with both of its doors, the real Envoy before one of them, and engines that do as scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsync.app import App
from kvsync.config import Settings
from tests.faults.http import FakeEngine, Received, Script, Talk, reply
from tests.integration.extproc.envoy import Change, Envoy, envoy
from tests.integration.gateway.harness import Answer, Client, post

MODEL = "m"
GOOD = reply(b'{"ok":true}', b"200 OK", b"content-type: application/json")


def note(engine: FakeEngine, request: Received) -> None:
    """Remember a client's request; what the gateway and Envoy ask engines themselves is none."""
    if request.line.startswith(b"POST"):
        engine.requests.append(request)


async def good(engine: FakeEngine, talk: Talk) -> None:
    """Answer everything at once."""
    while (request := await talk.request()) is not None:
        note(engine, request)
        await talk.send(GOOD)


def settings(engines: list[dict[str, Any]], **sections: Mapping[str, Any]) -> Settings:
    """Both doors on ports of the system's choice."""
    content: dict[str, Any] = {
        "gateway": {"host": "127.0.0.1", "port": 0, "drain_timeout": 0.2, "connect_timeout": 0.5},
        "extproc": {"enabled": True, "host": "127.0.0.1", "port": 0, "drain_delay": 0},
        "admin": {"port": 0},
        "models": [{"name": MODEL, "engines": engines}],
    }
    for name, section in sections.items():
        content[name] = {**content[name], **section} if isinstance(section, Mapping) and name in content else section
    return Settings.model_validate(content)


@dataclass
class Street:
    app: App
    envoy: Envoy
    engines: list[FakeEngine]
    clients: list[Client] = field(default_factory=list)

    async def client(self, port: int | None = None) -> Client:
        """Connected to Envoy, or to another port."""
        client = await Client.open(self.envoy.port if port is None else port)
        self.clients.append(client)
        return client

    async def ask(self, *args: Any, port: int | None = None, **kwargs: Any) -> Answer:
        """One request on a connection of its own; the arguments are those of ``post``."""
        client = await self.client(port)
        answer = await client.ask(*args, **kwargs)
        client.close()
        return answer

    async def say(self, raw: bytes, port: int | None = None, *, to_head: bool = False) -> Answer:
        client = await self.client(port)
        await client.send(raw)
        answer = await client.answer(to_head=to_head)
        client.close()
        return answer

    def running(self) -> int:
        """Requests that count as load."""
        return self.app.router._loads.total()

    def figure(self, name: str, **labels: str) -> float:
        """A metric's value; 0 where there is none."""
        self.app.metrics.render()
        return self.app.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def street(
    folder: Path,
    *scripts: Script,
    name: str = "envoy.yaml",
    changes: Change | None = None,
    entry: Mapping[str, Any] | None = None,
    urls: tuple[str, ...] = (),
    ports: list[int] | None = None,
    **sections: Any,
) -> AsyncIterator[Street]:
    """
    Args:
        ports: the engines', for ``changes``, which is called once they are known.
        entry: more of every engine's entry in the configuration.
        urls: of engines that stand before the scripted ones.
    """
    async with AsyncExitStack() as stack:
        engines = [FakeEngine(f"engine-{number}", script) for number, script in enumerate(scripts)]
        entries: list[dict[str, Any]] = [{"name": f"at-{url}", "url": url} for url in urls]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
            entries.append({"name": engine.name, "url": f"http://127.0.0.1:{engine.port}", **(entry or {})})
        if ports is not None:
            ports += [engine.port for engine in engines]
        app = App(settings(entries, **sections))
        await app.start()
        stack.push_async_callback(app.stop)
        assert app.extproc is not None
        fallback = tuple(engine.port for engine in engines) if "open" in name else ()
        made = await stack.enter_async_context(
            envoy(folder, app.extproc.port, name=name, fallback=fallback, changes=changes)
        )
        await made.healthy(processors=1)
        found = Street(app, made, engines)
        try:
            yield found
        finally:
            for client in found.clients:
                client.close()


__all__ = ["GOOD", "MODEL", "Street", "good", "note", "post", "settings", "street"]
