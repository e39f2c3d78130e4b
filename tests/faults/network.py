"""Ways in which a network fails: a proxy that can be cut or turned into a black hole, and ports that are no engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Passes bytes between whoever connects and an endpoint."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._pairs: list[_Pair] = []
        self.pieces = 0
        """Pieces passed, in both directions."""
        self.connections = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Close all connections; new ones are taken."""
        for pair in self._pairs:
            pair.close()
        self._pairs.clear()

    def swallow(self) -> None:
        """Connections made until now stay open, and nothing passes any more; new ones work."""
        for pair in self._pairs:
            pair.swallows = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self.connections += 1
        pair = _Pair([writer, other_writer])
        self._pairs.append(pair)
        await asyncio.gather(self._pass(pair, reader, other_writer), self._pass(pair, other_reader, writer))
        pair.close()

    async def _pass(self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if not pair.swallows:
                    self.pieces += 1
                    writer.write(data)
                    await writer.drain()
            writer.close()


class _Pair:
    def __init__(self, writers: list[asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.swallows = False

    def close(self) -> None:
        for writer in self.writers:
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
