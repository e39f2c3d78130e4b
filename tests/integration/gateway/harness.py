"""Real sockets on both sides of a real gateway: engines that send exactly the bytes a test tells them to, a client that
sees exactly the bytes that come back, and simple rooms (fleet, tokenizer, router) behind the gateway's ports."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET

from kvsync.config import GatewaySettings
from kvsync.discovery.access import EngineAccess
from kvsync.discovery.model import Engine
from kvsync.gateway.counters import Counters
from kvsync.gateway.server import Gateway
from kvsync.gateway.tls import PortTls
from kvsync.index.match import Match
from kvsync.requests.auth import Tenants
from kvsync.requests.ports import JsonObject, Outcome, Tokenizing
from kvsync.requests.rooms import Rooms
from kvsync.routing.decision import Candidate, Decision, Load, Query
from kvsync.routing.errors import BadFilter, BadPolicy, NoReadyEngine, NoSuchModel
from kvsync.tokenize.types import TokenizedRequest
from tests.faults.http import SSE_HEAD as SSE_HEAD
from tests.faults.http import FakeEngine as FakeEngine
from tests.faults.http import Received as Received
from tests.faults.http import Script as Script
from tests.faults.http import Talk as Talk
from tests.faults.http import always as always
from tests.faults.http import chunk as chunk
from tests.faults.http import reply as reply

DEADLINE = 10.0
"""No test waits longer for one thing."""
MODEL = "m"
ADAPTER = "m-adapter"


async def eventually(condition: Callable[[], bool], within: float = DEADLINE) -> float:
    """Wait for a condition; returns the seconds that it took."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        if loop.time() - start > within:
            raise AssertionError(f"not within {within} s")
        await asyncio.sleep(0.002)
    return loop.time() - start


GOOD = always(reply(b"good"))


async def stall(engine: FakeEngine, talk: Talk) -> None:
    """Take the request and never answer."""
    request = await talk.request()
    assert request is not None
    engine.requests.append(request)
    await talk.closed()
    engine.left.set()


# ---- the other rooms


class Models:
    def __init__(self) -> None:
        self.served: list[tuple[str, str | None]] = [(MODEL, None), (ADAPTER, MODEL), ("org/big-model", None)]

    def resolve(self, name: str) -> tuple[str, str | None] | None:
        for served, base in self.served:
            if served == name:
                return (served, None) if base is None else (base, served)
        return None

    def models(self) -> Sequence[tuple[str, str | None]]:
        return self.served


class AtOnce:
    """Tokens are never known, and that is known at once."""

    def begin(self, path: str, body: JsonObject, model: str, adapter: str | None) -> TokenizedRequest:
        return TokenizedRequest((), "none", "unsupported_api")


class Slow:
    """Tokens take until ``go`` is set."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.cancelled = 0
        self.seen: list[tuple[str, JsonObject, str, str | None]] = []

    async def begin(self, path: str, body: JsonObject, model: str, adapter: str | None) -> TokenizedRequest:
        self.seen.append((path, body, model, adapter))
        self.started.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return TokenizedRequest((), "remote")


class CountedTicket:
    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.first = 0
        self.ends: list[Outcome] = []

    def first_byte(self) -> None:
        self.first += 1

    def end(self, outcome: Outcome) -> None:
        self.ends.append(outcome)


class InOrder:
    """Always the first engine that is not excluded."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.rank = 0
        self.match = Match(0, trust="none")
        self.queries: list[Query] = []
        self.tickets: list[CountedTicket] = []
        self.budget = 100
        """Retries that may still be asked for."""

    def may_retry(self) -> bool:
        self.budget -= 1
        return self.budget >= 0

    def choose(self, query: Query) -> tuple[Decision, CountedTicket]:
        self.queries.append(query)
        if query.policy == "nonsense":
            raise BadPolicy(query.policy)
        if query.label_filter == "((":
            raise BadFilter("no label selector")
        if query.model == "org/big-model":
            raise NoReadyEngine(query.model)
        if query.adapter == "gone":
            raise NoSuchModel(query.model)
        for engine in self.engines:
            worker = engine.worker(min(self.rank, engine.data_parallel_size - 1))
            if worker in query.exclude:
                continue
            ticket = CountedTicket(worker)
            self.tickets.append(ticket)
            chosen = Candidate(worker, engine, self.rank, self.match, self.match.expected, Load())
            decision = Decision(
                request_id=query.request_id,
                model=query.model,
                adapter=query.adapter,
                policy=query.policy or "kv-aware",
                chosen=chosen,
                candidates=(chosen,),
                scores={worker: 0.0},
                why="the first",
                prompt_tokens=0,
                mode="load-only",
                tokenized=query.tokenized,
                time=0.0,
            )
            return decision, ticket
        raise NoReadyEngine(query.model)


@dataclass
class House:
    """A gateway with everything around it."""

    gateway: Gateway
    engines: list[FakeEngine]
    routing: InOrder
    counters: Counters
    answers: list[tuple[Decision, int, Mapping[str, object] | None]]
    clients: list[Client] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    def reading(self) -> int:
        """Clients in the middle of a request."""
        return sum(connection._reader.in_message for connection in self.gateway._connections)

    async def client(self, tls: ssl.SSLContext | None = None, name: str | None = None) -> Client:
        client = await Client.open(self.gateway.port, tls, name)
        self.clients.append(client)
        return client


@asynccontextmanager
async def house(
    *scripts: Script,
    tokenizing: Tokenizing | None = None,
    urls: Sequence[str] | None = None,
    data_parallel_size: int = 1,
    engine_tls: ssl.SSLContext | None = None,
    gateway_tls: ssl.SSLContext | None = None,
    access: EngineAccess | None = None,
    tenants: Tenants | None = None,
    port_tls: PortTls | None = None,
    inject_usage: bool = False,
    **settings: object,
) -> AsyncIterator[House]:
    """A gateway before one engine per script, and before each of ``urls`` first."""
    fakes = [FakeEngine(f"engine-{number}", script) for number, script in enumerate(scripts)]
    for fake in fakes:
        await fake.start(engine_tls)
    engines = [Engine(uid=url, name=url, url=url, model=MODEL) for url in urls or ()]
    scheme, host = ("https", "localhost") if engine_tls else ("http", "127.0.0.1")
    engines += [
        Engine(
            uid=fake.name,
            name=fake.name,
            url=f"{scheme}://{host}:{fake.port}",
            model=MODEL,
            data_parallel_size=data_parallel_size,
        )
        for fake in fakes
    ]
    routing = InOrder(engines)
    counters = Counters()
    answers: list[tuple[Decision, int, Mapping[str, object] | None]] = []
    rooms = Rooms.furnish(
        GatewaySettings.model_validate({"host": "127.0.0.1", "port": 0, "drain_timeout": 0.2, **settings}),
        fleet=Models(),
        tokenizing=tokenizing or AtOnce(),
        routing=routing,
        telemetry=counters,
        on_answer=lambda decision, _, status, usage: answers.append((decision, status, usage)),
        inject_usage=inject_usage,
        engines=access or EngineAccess(tls=None if gateway_tls is None else lambda: gateway_tls),
        tenants=tenants,
    )
    gateway = Gateway(rooms, port_tls)
    await gateway.start()
    home = House(gateway, fakes, routing, counters, answers)
    try:
        yield home
    finally:
        for client in home.clients:
            client.close()
        await gateway.stop()
        rooms.close()
        for fake in fakes:
            await fake.stop()


def ends(home: House) -> list[tuple[str, list[str]]]:
    """Per try, its worker and how it ended."""
    return [(ticket.worker, list(ticket.ends)) for ticket in home.routing.tickets]


# ---- clients


@dataclass
class Answer:
    status: int
    phrase: bytes
    fields: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool
    """False when the connection ended before the body did."""

    def get(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]

    def one(self, name: bytes) -> bytes:
        (value,) = self.get(name)
        return value

    @property
    def json(self) -> JsonObject:
        decoded: JsonObject = json.loads(self.body)
        return decoded

    @property
    def message(self) -> str:
        error = self.json["error"]
        assert isinstance(error, dict)
        assert sorted(error) == ["code", "message", "param", "type"]
        return str(error["message"])


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.deadline = DEADLINE
        """Seconds for one part of an answer, and for its whole body."""
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, tls: ssl.SSLContext | None = None, name: str | None = None) -> Client:
        """``name``: what the client of TLS takes the gateway for."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 26, ssl=tls, server_hostname=name))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ask(self, *args: object, **kwargs: object) -> Answer:
        """Send :func:`post` of the arguments and read the answer."""
        await self.send(post(*args, **kwargs))  # type: ignore[arg-type]
        return await self.answer()

    async def head(self) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        async with asyncio.timeout(self.deadline):
            head = await self.reader.readuntil(b"\r\n\r\n")
        line, *rest = head[:-4].split(b"\r\n")
        found = re.fullmatch(rb"HTTP/1\.1 (\d{3}) ?(.*)", line)
        assert found, line
        fields = [(name, value[1:]) for name, _, value in (row.partition(b":") for row in rest)]
        return int(found[1]), found[2], fields

    async def answer(self, *, to_head: bool = False) -> Answer:
        """The next answer; interim ones (1xx) are returned as answers without a body."""
        status, phrase, fields = await self.head()
        answer = Answer(status, phrase, fields, b"", True)
        if to_head or status < 200 or status in (204, 304):
            return answer
        try:
            async with asyncio.timeout(self.deadline):
                if answer.get(b"content-length"):
                    assert not answer.get(b"transfer-encoding")
                    answer.body = await self.reader.readexactly(int(answer.one(b"content-length")))
                elif answer.get(b"transfer-encoding"):
                    while True:
                        piece = await self.chunk()
                        if not piece:
                            break
                        answer.body += piece
                else:
                    answer.body = await self.reader.read()
        except asyncio.IncompleteReadError as error:
            if answer.get(b"content-length"):
                answer.body += error.partial
            answer.whole = False
        except ConnectionError:
            answer.whole = False
        return answer

    async def chunk(self) -> bytes:
        async with asyncio.timeout(self.deadline):
            size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def chunk_after_head(self) -> bytes:
        await self.head()
        return await self.chunk()

    async def ended(self) -> bytes:
        """Wait for the gateway to close; returns what came before that."""
        async with asyncio.timeout(self.deadline):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def half_close(self) -> None:
        self.writer.write_eof()

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


BODY = b'{"model": "m", "prompt": "hello"}'


def post(
    body: bytes = BODY,
    path: bytes = b"/v1/completions",
    *fields: bytes,
    version: bytes = b"1.1",
    framing: bytes | None = None,
) -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"Host: gateway", *fields]
    lines.append(b"Content-Length: %d" % len(body) if framing is None else framing)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
