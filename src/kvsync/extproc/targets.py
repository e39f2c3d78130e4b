"""Where engines are, as Envoy's original-destination cluster wants to be told: ``address:port``, IPv6 in brackets.

What must always hold: targets come from discovery, never from a request. A host that is an address already costs
nothing; a name is looked up when it is first needed, within ``gateway.connect_timeout``, and then again in the
background every :data:`FRESH` seconds while it is used: who asks meanwhile gets what was found last.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

FRESH: Final = 5.0
MOST: Final = 4096
"""Names that are remembered."""


@dataclass(slots=True)
class _Named:
    address: str
    until: float


class Targets:
    """
    Args:
        timeout: seconds for one look-up.
        clock: monotonic seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._timeout = timeout
        self._clock = clock
        self._fixed: dict[str, str] = {}
        self._named: dict[str, _Named] = {}
        self._looking: dict[str, asyncio.Task[str]] = {}

    def known(self, url: str) -> str | None:
        """The address, unless it has to be looked up."""
        fixed = self._fixed.get(url)
        if fixed is not None:
            return fixed
        named = self._named.get(url)
        if named is not None:
            if named.until <= self._clock():
                self._look(url)
            return named.address
        host, port = _parts(url)
        try:
            address = ip_address(host)
        except ValueError:
            return None
        if len(self._fixed) >= MOST:  # engines of long ago
            self._fixed.clear()
        found = self._fixed[url] = _joined(str(address), port)
        return found

    async def find(self, url: str) -> str:
        """
        Raises:
            OSError: nobody knows the name, or not in time.
        """
        return await asyncio.shield(self._look(url))

    def close(self) -> None:
        for task in self._looking.values():
            task.cancel()

    def _look(self, url: str) -> asyncio.Task[str]:
        task = self._looking.get(url)
        if task is None:
            task = self._looking[url] = self._loop.create_task(self._resolve(url))
            task.add_done_callback(lambda done: self._looked(url, done))
        return task

    def _looked(self, url: str, done: asyncio.Task[str]) -> None:
        del self._looking[url]
        if done.cancelled():
            return
        if done.exception() is None:
            if len(self._named) >= MOST:
                self._named.clear()
            self._named[url] = _Named(done.result(), self._clock() + FRESH)
        elif url in self._named:  # a name server that fails does not move an engine
            self._named[url].until = self._clock() + FRESH

    async def _resolve(self, url: str) -> str:
        host, port = _parts(url)
        async with asyncio.timeout(self._timeout):
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Engines listen on IPv4 unless told otherwise, and "localhost" has both.
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        return _joined(str(found[0][4][0]), port)


def _parts(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


__all__ = ["FRESH", "Targets"]
