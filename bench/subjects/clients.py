"""Clients of a gateway, in one process, that check every answer.

What must always hold: a run ends when all its requests are answered, each with status 200 and the bytes that an engine
sends; anything else fails the run. Clients are closed loops: each connection asks again as soon as it has its answer.

    open      connections to a port; ``kind``: ``json`` or ``stream``
    make      the requests of the next runs
    run       ask all of them → how it went
    close     the connections
    one       all of them, one after the other on one connection, blocking → seconds of the middle and of a late one
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import httptools
import uvloop

from bench.asked import HIT, MISS, STREAM, chat_body, ids_bodies, request, text_bodies
from bench.subjects import serve

PATIENCE: Final = 90.0


class WrongAnswer(Exception):
    """An answer that is not what the engine sent."""


class Feed:
    """What all connections of one run share."""

    def __init__(self, requests: Sequence[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._left = iter(requests)
        self._missing = len(requests)
        self.hits = 0
        self.firsts: list[float] = []
        self.ended: asyncio.Future[None] = loop.create_future()

    def next(self) -> bytes | None:
        return next(self._left, None)

    def done(self, first: float) -> None:
        self.firsts.append(first)
        self._missing -= 1
        if not self._missing and not self.ended.done():
            self.ended.set_result(None)

    def failed(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(WrongAnswer(why))


class Client(asyncio.Protocol):
    """One connection."""

    feed: Feed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.feed.failed(f"the connection was lost: {error}")

    def ask(self) -> None:
        data = self.feed.next()
        if data is not None:
            self.begin()
            self.start = time.perf_counter()
            self.transport.write(data)

    def begin(self) -> None: ...


class JsonClient(Client):
    """Answers with a length. Parsed by hand: the client shares the cores with what is measured."""

    def begin(self) -> None:
        self._got = b""

    def data_received(self, data: bytes) -> None:
        got = self._got + data if self._got else data
        end = got.find(b"\r\n\r\n") + 4
        if end < 4 or len(got) - end < len(HIT):
            self._got = got
            return
        body = got[end:]
        if not got.startswith(b"HTTP/1.1 200") or body not in (HIT, MISS):
            self.feed.failed(f"not what an engine sent: {got[:1000]!r}")
            return
        self.feed.hits += body == HIT
        self.feed.done(time.perf_counter() - self.start)
        self.ask()


class StreamClient(Client):
    """Streamed answers, compared as a whole."""

    def begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._first = 0.0
        self._pieces: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._pieces:
            self._first = time.perf_counter() - self.start
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), b"".join(self._pieces)
        if status != 200 or body != STREAM:
            self.feed.failed(f"status {status}, not the stream that was sent: {body[:1000]!r}")
            return
        self.feed.done(self._first)
        self.ask()


KINDS: Final[Mapping[str, type[Client]]] = {"json": JsonClient, "stream": StreamClient}


class Load:
    """See the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._clients: list[Client] = []
        self._made: dict[str, list[bytes]] = {}

    def open(self, port: int, kind: str, connections: int) -> None:
        async def connect() -> None:
            for _ in range(connections):
                _, client = await self._loop.create_connection(KINDS[kind], "127.0.0.1", port)
                client.feed = Feed([], self._loop)
                self._clients.append(client)

        self._loop.run_until_complete(connect())

    def make(self, name: str, kind: str, count: int, seed: int = 0, size: int = 0) -> None:
        match kind:
            case "ids":
                self._made[name] = [request("/v1/completions", body) for body in ids_bodies(count, seed)]
            case "text":  # half of them new, the other half what was new with the seed before
                new, old = (text_bodies(count, one)[::2] for one in (seed, seed - 1))
                bodies = [body for pair in zip(new, old, strict=True) for body in pair]
                self._made[name] = [request("/v1/chat/completions", body) for body in bodies]
            case "chat":
                self._made[name] = count * [request("/v1/chat/completions", chat_body(size))]
            case "stream":
                self._made[name] = count * [request("/v1/chat/completions", chat_body(size, stream=True))]
            case _:
                raise ValueError(kind)

    def run(self, name: str, spread: float = 0.0) -> dict[str, float]:
        """``spread``: seconds over which the connections begin."""
        return self._loop.run_until_complete(self._run(self._made[name], spread))

    async def _run(self, requests: Sequence[bytes], spread: float) -> dict[str, float]:
        feed = Feed(requests, self._loop)
        cpu, begun = time.process_time(), time.perf_counter()
        for number, client in enumerate(self._clients):
            client.feed = feed
            self._loop.call_later(spread * number / len(self._clients), client.ask)
        async with asyncio.timeout(PATIENCE):
            await feed.ended
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        firsts = sorted(feed.firsts)
        return {
            "requests": len(firsts),
            "hits": feed.hits,
            "seconds": seconds,
            "cpu": cpu,
            "p50": firsts[len(firsts) // 2],
            "p99": firsts[len(firsts) * 99 // 100],
        }

    def one(self, port: int, name: str) -> dict[str, float]:
        taken = []
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for data in self._made[name]:
                begun = time.perf_counter()
                connection.sendall(data)
                got = b""
                while (end := got.find(b"\r\n\r\n") + 4) < 4 or len(got) - end < len(MISS):
                    more = connection.recv(65536)
                    if not more:
                        raise WrongAnswer(f"the connection was closed after {got!r}")
                    got += more
                taken.append(time.perf_counter() - begun)
                if not got.startswith(b"HTTP/1.1 200") or got[end:] not in (HIT, MISS):
                    raise WrongAnswer(f"not what an engine sent: {got[:1000]!r}")
        taken.sort()
        return {"p50": taken[len(taken) // 2], "p99": taken[len(taken) * 99 // 100]}

    def close(self) -> None:
        for client in self._clients:
            client.feed.ended.cancel()
            client.transport.abort()
        self._clients = []


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    loop = uvloop.new_event_loop()
    load = Load(loop)
    handlers: dict[str, Any] = {name: getattr(load, name) for name in ("open", "make", "run", "close", "one")}
    serve(handlers)


if __name__ == "__main__":
    main()
