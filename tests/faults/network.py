"""Ways in which a network fails: a proxy at TCP level, and ports that are no engine.

What TCP can do, the proxy can do: refuse, delay, hold back one direction while the other goes on, cut with FIN or RST,
and drop without either (a half-open connection). It can't reorder bytes within a connection, as TCP can't; what comes
over two connections (live events and replays) is reordered by holding one of them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal, Self, TypeAlias

Direction: TypeAlias = Literal["to", "from"]
"""Seen from whoever connects: bytes to the endpoint behind the proxy, or from it."""


class Proxy:
    """Passes bytes between whoever connects and an endpoint: ``tcp://host:port`` or ``http://host:port``."""

    def __init__(self, endpoint: str) -> None:
        self._scheme = endpoint.partition("://")[0]
        self._target = "", 0
        self.towards(endpoint)
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gates: dict[Direction, asyncio.Event] = {"to": asyncio.Event(), "from": asyncio.Event()}
        for gate in self._gates.values():
            gate.set()
        self._port = 0
        self._server: asyncio.Server | None = None
        self.delay = 0.0
        """Seconds that each piece waits before it is passed on, in both directions."""
        self.pieces = 0
        """Pieces passed, in both directions."""
        self.connections = 0
        """Connections passed on, all in all."""

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.refuse()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        """What to connect to instead."""
        return f"{self._scheme}://127.0.0.1:{self._port}"

    @property
    def open(self) -> int:
        """Connections that pass bytes now."""
        return len(self._pairs)

    def towards(self, endpoint: str) -> None:
        """Pass new connections on to another endpoint; those that are open stay where they are."""
        host, _, port = endpoint.partition("://")[2].rpartition(":")
        self._target = host, int(port)

    async def refuse(self) -> None:
        """Refuse new connections; those that are open go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def accept(self) -> None:
        """Take connections again, at the same address."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=1024)
            self._port = self._server.sockets[0].getsockname()[1]

    def cut(self, *, reset: bool = False) -> None:
        """Close all connections, with FIN or with RST; new ones are taken."""
        for pair in list(self._pairs):
            pair.close(reset)
        self._pairs.clear()

    def swallow(self) -> None:
        """Connections made until now stay open, and nothing passes any more, nor does their end; new ones work."""
        for pair in self._pairs:
            pair.swallows = True

    def hold(self, *directions: Direction) -> None:
        """Keep back what comes (both directions if none is named), so that it piles up at its sender."""
        for direction in directions or self._gates:
            self._gates[direction].clear()

    def release(self, *directions: Direction) -> None:
        """Let pass what was held."""
        for direction in directions or self._gates:
            self._gates[direction].set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(asyncio.CancelledError):  # the test is over
            await self._connect(reader, writer)
        self._tasks.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self.connections += 1
        pair = _Pair([writer, other_writer])
        self._pairs.add(pair)
        await asyncio.gather(
            self._pass(pair, reader, other_writer, self._gates["to"]),
            self._pass(pair, other_reader, writer, self._gates["from"]),
        )
        pair.close()
        self._pairs.discard(pair)

    async def _pass(
        self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await gate.wait()
                if not pair.swallows:
                    self.pieces += 1
                    writer.write(data)
                    await writer.drain()
            if not pair.swallows:
                writer.close()


class _Pair:
    def __init__(self, writers: list[asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.swallows = False

    def close(self, reset: bool = False) -> None:
        for writer in self.writers:
            if reset:
                with suppress(OSError):  # it was closed just now
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            else:
                writer.close()


@asynccontextmanager
async def bad_port(kind: str) -> AsyncIterator[int]:
    """A port where no engine is: nobody listens, a web server, or one that takes connections and says nothing."""
    if kind == "refused":
        with socket.socket() as taken:  # bound and not listening: nobody else gets it meanwhile
            taken.bind(("127.0.0.1", 0))
            yield taken.getsockname()[1]
        return

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(1)
            if kind == "http":
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            else:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
