"""The HTTP side of an engine, byte by byte: a server that does with each connection what its script says.

A script gets the connection (:class:`Talk`) and may answer, stall, break off, reset or lie in any way that bytes can.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from socket import SO_LINGER, SOL_SOCKET
from typing import TypeAlias


@dataclass
class Received:
    """A request as an engine got it."""

    line: bytes
    fields: list[tuple[bytes, bytes]]
    body: bytes

    def get(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]


class Talk:
    """One connection, seen from the engine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number
        """The engine's how-manieth connection this is, from 0."""

    async def request(self) -> Received | None:
        """The next request, or None when the gateway closed."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        line, *rest = head[:-4].split(b"\r\n")
        fields = [(name, value.strip()) for name, _, value in (row.partition(b":") for row in rest)]
        length = sum(int(value) for name, value in fields if name.lower() == b"content-length")
        if any(name.lower() == b"transfer-encoding" for name, _ in fields):
            return Received(line, fields, b"".join([piece async for piece in self._chunks()]))
        return Received(line, fields, await self.reader.readexactly(length))

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self.reader.readuntil(b"\r\n"))[:-2], 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readuntil(b"\r\n")

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def closed(self) -> None:
        """Until the gateway closes this connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass

    def reset(self) -> None:
        self.writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script: TypeAlias = Callable[["FakeEngine", Talk], Awaitable[None]]


def reply(body: bytes, status: bytes = b"200 OK", *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def always(answer: bytes) -> Script:
    """Give the same bytes to every request, keeping the connection."""

    async def script(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            engine.requests.append(request)
            await talk.send(answer)

    return script


class FakeEngine:
    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script
        self.requests: list[Received] = []
        self.connections = 0
        self.open = 0
        self.left = asyncio.Event()
        """The gateway closed a connection while the script waited in ``closed``."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.server: asyncio.Server

    @property
    def port(self) -> int:
        return int(self.server.sockets[0].getsockname()[1])

    async def start(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self.server = await asyncio.start_server(self._talk, host, 0, ssl=tls, backlog=1024)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = Talk(reader, writer, self.connections)
        self.connections += 1
        self.open += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            await self.script(self, talk)
        except (ConnectionError, asyncio.CancelledError):  # the test is over, or about to see what it wanted
            pass
        finally:
            self.open -= 1
            self.tasks.discard(task)
            writer.close()

    async def stop(self) -> None:
        self.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
