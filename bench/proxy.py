"""How fast the gateway's data path is, routing and tokenizing apart: requests/s and its CPU per request.

    python bench/proxy.py [--connections 32] [--seconds 3] [--streams 128]

Four processes on loopback (an engine that answers with fixed bytes, the gateway, a client, and this one), so on a small
machine they share the cores: the CPU per request and the ratio to the direct row are the steady figures. Each row runs
for a fixed time. Prints one line per row:

- ``json direct`` / ``json gateway``: a 1.5 kB prompt, a 400 byte JSON answer, keep-alive;
- ``sse gateway``: that many open streams at once, 64 chunks each, one every 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import cast

import httptools
import uvloop

from kvsync.config import GatewaySettings
from kvsync.discovery.model import Engine
from kvsync.gateway.counters import Counters
from kvsync.gateway.ports import JsonObject, Outcome
from kvsync.gateway.server import Gateway
from kvsync.index.match import Match
from kvsync.routing.decision import Candidate, Decision, Load, Query
from kvsync.tokenize.types import TokenizedRequest

CHUNKS = 64
CHUNK_EVERY = 0.005
BODY = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"word " * 290)
ANSWER_BODY = b'{"id":"x","choices":[{"text":"%b"}],"usage":{"prompt_tokens":290,"completion_tokens":1}}' % (b"w" * 310)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER_BODY)
ANSWER += ANSWER_BODY
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"x","choices":[{"delta":{"content":"word "}}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


def request(path: bytes) -> bytes:
    fields = b"Host: gateway\r\nAccept: */*\r\nUser-Agent: bench\r\nContent-Type: application/json\r\n"
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (path, fields, len(BODY), BODY)


class EngineProtocol(asyncio.Protocol):
    """Fixed bytes for every request: JSON for chat, a stream for completions."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._streams = url == b"/v1/completions"

    def on_message_complete(self) -> None:
        if self._streams:
            self._transport.write(STREAM_HEAD)
            self._next(CHUNKS)
        else:
            self._transport.write(ANSWER)

    def _next(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(CHUNK)
            asyncio.get_running_loop().call_later(CHUNK_EVERY, self._next, left - 1)
        else:
            self._transport.write(b"0\r\n\r\n")


class Rooms:
    """The smallest fleet, tokenizer, router and audit."""

    def __init__(self, url: str) -> None:
        engine = Engine(uid="e", name="e", url=url, model="m")
        self._chosen = Candidate("e", engine, 0, Match(0, trust="none"), 0, Load())

    def resolve(self, name: str) -> tuple[str, str | None] | None:
        return name, None

    def models(self) -> list[tuple[str, str | None]]:
        return [("m", None)]

    def begin(self, path: str, body: JsonObject, model: str, adapter: str | None) -> TokenizedRequest:
        return TokenizedRequest((), "none", "unsupported_api")

    def may_retry(self) -> bool:
        return True

    def choose(self, query: Query) -> tuple[Decision, Rooms]:
        decision = Decision(
            request_id=query.request_id,
            model=query.model,
            adapter=None,
            policy="random",
            chosen=self._chosen,
            candidates=(self._chosen,),
            scores={},
            why="",
            prompt_tokens=0,
            mode="load-only",
            tokenized=query.tokenized,
            time=0.0,
        )
        return decision, self

    def first_byte(self) -> None: ...

    def end(self, outcome: Outcome) -> None: ...

    def answered(
        self, decision: Decision, tokenized: TokenizedRequest, status: int, usage: Mapping[str, object] | None
    ) -> None: ...


class Load1(asyncio.Protocol):
    """One client connection that asks again as soon as it has an answer."""

    def __init__(self, data: bytes, done: Callable[[float], None]) -> None:
        self._data = data
        self._done = done
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self._first = 0.0
        self._start = time.perf_counter()
        self._transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._first = self._first or time.perf_counter() - self._start

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            raise RuntimeError(f"status {self._parser.get_status_code()}")
        self._done(self._first)
        self._ask()


def engine_process(pipe: Connection) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(EngineProtocol, "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


def gateway_process(pipe: Connection, engine: int) -> None:
    async def main() -> None:
        rooms = Rooms(f"http://127.0.0.1:{engine}")
        gateway = Gateway(
            GatewaySettings(host="127.0.0.1", port=0),
            fleet=rooms,
            tokenizing=rooms,
            routing=rooms,
            telemetry=Counters(),
            on_answer=rooms.answered,
        )
        await gateway.start()
        pipe.send(gateway.port)
        while await asyncio.to_thread(pipe.recv):  # each message asks for the CPU used so far
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(used.ru_utime + used.ru_stime)

    uvloop.run(main())


def client_process(pipe: Connection, port: int, path: bytes, connections: int, seconds: float) -> None:
    async def main() -> None:
        firsts: list[float] = []
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            await loop.create_connection(lambda: Load1(request(path), firsts.append), "127.0.0.1", port)
        await asyncio.sleep(seconds / 4)  # warm up
        firsts.clear()
        pipe.send(None)
        await asyncio.sleep(seconds)
        pipe.send(sorted(firsts))

    uvloop.run(main())


def row(name: str, port: int, path: bytes, connections: int, seconds: float, gateway: Connection | None) -> None:
    pipe, end = multiprocessing.Pipe()
    client = multiprocessing.Process(target=client_process, args=(end, port, path, connections, seconds), daemon=True)
    client.start()

    def cpu() -> float:
        if gateway is None:
            return 0.0
        gateway.send(True)
        return float(gateway.recv())

    pipe.recv()
    before = cpu()
    firsts = pipe.recv()
    used = cpu() - before
    client.join()
    count = len(firsts)
    cost = f"{used / count * 1e6:8.1f} µs CPU/request" if gateway else ""
    middle, late = firsts[count // 2] * 1e3, firsts[count * 99 // 100] * 1e3
    print(
        f"{name:14} c={connections:<4} {count / seconds:9.0f}/s  first byte p50 {middle:7.2f} p99 {late:7.2f} ms{cost}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--streams", type=int, default=128)
    options = parser.parse_args()
    engine_pipe, engine_end = multiprocessing.Pipe()
    engine = multiprocessing.Process(target=engine_process, args=(engine_end,), daemon=True)
    engine.start()
    engine_port = engine_pipe.recv()
    gateway_pipe, gateway_end = multiprocessing.Pipe()
    gateway = multiprocessing.Process(target=gateway_process, args=(gateway_end, engine_port), daemon=True)
    gateway.start()
    port = gateway_pipe.recv()
    chat, stream = b"/v1/chat/completions", b"/v1/completions"
    row("json direct", engine_port, chat, options.connections, options.seconds, None)
    row("json gateway", port, chat, 1, options.seconds, gateway_pipe)
    row("json gateway", port, chat, options.connections, options.seconds, gateway_pipe)
    row("sse gateway", port, stream, options.streams, options.seconds, gateway_pipe)
    gateway_pipe.send(False)
    gateway.join()
    engine.terminate()
    engine.join()


if __name__ == "__main__":
    main()
