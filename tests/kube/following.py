"""A source that follows an API server, and the fleet that its changes make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from kvsync.config import KubernetesSettings
from kvsync.discovery.kubernetes.source import KubernetesSource
from kvsync.discovery.model import Change, Engine
from tests.faults.client import until

from .fake import FakeApiServer
from .pods import Kube
from .real import RealApiServer


class Followed:
    """The engines as told. Changes that make no sense (a second ``added``, ``changed`` of what is not there, one uid
    moved elsewhere) are faults."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        """By uid."""
        self.changes: list[Change] = []
        self.source: KubernetesSource

    def take(self, change: Change) -> None:
        engine = change.engine
        self.changes.append(change)
        if change.kind == "added":
            assert engine.uid not in self.engines, f"{engine.name} is added twice"
            urls = {other.url for other in self.engines.values()}
            assert engine.url not in urls, f"{engine.url} is added while another has it"
            names = {other.name for other in self.engines.values()}
            assert engine.name not in names, f"{engine.name} is added while its last life is there"
            self.engines[engine.uid] = engine
        elif change.kind == "changed":
            before = self.engines[engine.uid]
            assert (before.url, before.model) == (engine.url, engine.model), "changed into another engine"
            self.engines[engine.uid] = engine
        else:
            del self.engines[engine.uid]

    def named(self, kube: Kube | None = None) -> dict[str, Engine]:
        """By the pod's name (in that namespace; in any: with the namespace before it)."""
        if kube is None:
            return {engine.name: engine for engine in self.engines.values()}
        before = f"{kube.namespace}/"
        return {
            engine.name.removeprefix(before): engine
            for engine in self.engines.values()
            if engine.name.startswith(before)
        }

    async def has(self, kube: Kube, **ready: bool) -> None:
        """Return once exactly these pods are engines, ready or not (``_`` for ``-`` in names)."""
        wanted = {name.replace("_", "-"): value for name, value in ready.items()}

        async def look() -> bool:
            return {name: engine.ready for name, engine in self.named(kube).items()} == wanted

        try:
            await until(look, f"engines {wanted}")
        except AssertionError as error:
            raise AssertionError(f"{error}; there are {self.named(kube)}; {self.source.status()}") from None

    async def state(self, *states: str) -> None:
        async def look() -> bool:
            return self.source.status().state in states

        await until(look, f"discovery {states}")

    async def counted(self, what: str, at_least: int = 1) -> None:
        """Return once an event, or a reason of failures, was counted so often."""

        async def look() -> bool:
            return self.count(what) >= at_least

        try:
            await until(look, f"{at_least} {what}")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.source.status()}") from None

    def count(self, what: str) -> int:
        scopes = self.source.status().scopes
        return sum(scope.counts.get(what, 0) + scope.failures.get(what, 0) for scope in scopes)


def settings(server: FakeApiServer | RealApiServer, folder: Path, *namespaces: str, **more: Any) -> KubernetesSettings:
    """As administrator, with waits as short as whole seconds allow."""
    token = folder / "token"
    if not token.exists():
        token.write_text(server.token)
    return KubernetesSettings(
        **{
            "enabled": True,
            "api_server": server.url,
            "ca_file": server.ca_file,
            "token_file": token,
            "namespaces": namespaces,
            "connect_timeout": 2.0,
            "list_timeout": 5.0,
            "watch_timeout": 20.0,
            "relist_interval": 60.0,
            "degraded_after": 60.0,
            **more,
        }
    )


@asynccontextmanager
async def following(
    server: FakeApiServer | RealApiServer,
    kube: Kube,
    folder: Path,
    *,
    deliver: Callable[[Change], None] | None = None,
    **more: Any,
) -> AsyncIterator[Followed]:
    """Follow the namespace of ``kube`` (or ``namespaces``); it is there once everything was listed."""
    namespaces = more.pop("namespaces", (kube.namespace,))
    listed = more.pop("listed", True)
    followed = Followed()
    followed.source = KubernetesSource(settings(server, folder, *namespaces, **more), {}, deliver or followed.take)
    task = asyncio.create_task(followed.source.run())
    try:
        if listed:
            await followed.state("synced")
        yield followed
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
