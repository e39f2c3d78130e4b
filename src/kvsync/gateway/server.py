"""The data port: listening, the clock of all deadlines, and a shutdown that lets open answers end.

What must always hold: client connections are bounded, and shutdown ends within ``drain_timeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from kvsync.gateway.http1 import ClientConnection
from kvsync.gateway.proxy import Proxy
from kvsync.gateway.tls import PortTls
from kvsync.gateway.upstream import Upstreams
from kvsync.requests import errors
from kvsync.requests.rooms import Rooms

_log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two looks at the deadlines; a quarter of the shortest timeout where that is less."""
BACKLOG = 2048
HANDSHAKE = 10.0
"""Seconds for a handshake of TLS. Connections are counted from its end on."""
SHUTDOWN = 5.0
"""Seconds that a client of TLS has for saying that it heard the end."""
TURNED_AWAY = 256
"""Connections beyond the limit that are told so; further ones are closed without a word."""


class Gateway:
    """The built-in proxy. Create and use it on one event loop (uvloop where speed matters).

    Args:
        rooms: what serves; closed by whoever made it.
        tls: of the data port; by default it speaks plain HTTP.
    """

    def __init__(self, rooms: Rooms, tls: PortTls | None = None) -> None:
        settings = rooms.settings
        self._settings = settings
        self._telemetry = rooms.telemetry
        self._loop = rooms.loop
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._closed = False
        """No connection is taken any more, and those that idle are closed."""
        self._hurried = False
        self._empty = asyncio.Event()
        """The last connection closed; looked at only once no new ones come."""
        self._tick: asyncio.TimerHandle | None = None
        self._tls = tls
        self._upstreams = Upstreams(settings, self._loop, rooms.engines)
        self._proxy = Proxy(rooms, self._upstreams)
        shortest = min(
            settings.client_timeout,
            settings.send_timeout,
            settings.first_byte_timeout,
            settings.idle_timeout,
            settings.upstream_idle,
        )
        self._every = min(TICK, shortest / 4)
        self.max_connections = settings.max_connections
        """Lowered by whoever finds that the process may open too few files for as many."""

    @property
    def draining(self) -> bool:
        """Shutdown has begun: report not ready."""
        return self._proxy.draining

    @property
    def port(self) -> int:
        """The port that is listened on. Raises RuntimeError before :meth:`start`."""
        if self._server is None or not self._server.sockets:
            raise RuntimeError("the gateway does not listen")
        return int(self._server.sockets[0].getsockname()[1])

    def open_connections(self) -> int:
        return len(self._connections)

    def idle_upstreams(self) -> int:
        return self._upstreams.idle()

    async def start(self) -> None:
        """Listen. Raises OSError when the address is taken."""
        self._server = await self._loop.create_server(
            self._accept,
            self._settings.host,
            self._settings.port,
            backlog=BACKLOG,
            reuse_address=True,
            **self._tls_arguments(),
        )
        self._sweep()

    def leave(self) -> None:
        """Go on as before, but have each connection end with its next answer: who asks again finds another gateway."""
        self._proxy.draining = True

    async def stop(self) -> None:
        """Listen no more, let open requests end for up to ``drain_timeout``, then end what is left."""
        self.leave()
        self._closed = True
        if not self._hurried:
            self._empty.clear()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drain()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.drain_timeout):
                    await self._empty.wait()
        for connection in list(self._connections):
            connection.abort("shutdown")
        if self._tick is not None:
            self._tick.cancel()
        self._upstreams.close()
        if self._server is not None:
            await self._server.wait_closed()

    def hurry(self) -> None:
        """Let :meth:`stop` wait no longer for open answers."""
        self._hurried = True
        self._empty.set()

    def _tls_arguments(self) -> dict[str, Any]:
        if self._tls is None:
            return {}
        return {
            "ssl": self._tls.context,
            "ssl_handshake_timeout": min(HANDSHAKE, self._settings.client_timeout),
            "ssl_shutdown_timeout": min(SHUTDOWN, self._settings.client_timeout),
        }

    def opened(self, connection: ClientConnection) -> None:
        beyond = len(self._connections) - self.max_connections
        self._connections.add(connection)
        if beyond < 0:
            self._telemetry.connection("opened")
        else:
            self._telemetry.connection("turned_away")
            if beyond < TURNED_AWAY:
                connection.turn_away(errors.too_many_connections())
            else:
                connection.abort("shutdown")

    def closed(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def _accept(self) -> ClientConnection:
        return ClientConnection(self._proxy, self._settings, self._telemetry, self, self._loop)

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in list(self._connections):
            try:
                connection.check(now)
                if self._closed:
                    connection.drain()
            except Exception:
                # All deadlines of all connections come from here: a fault in one must not end them.
                _log.exception("looking after a connection failed with an exception; it is closed")
                connection.abort("shutdown")
        self._upstreams.sweep(now)
        self._tick = self._loop.call_later(self._every, self._sweep)


__all__ = ["Gateway"]
