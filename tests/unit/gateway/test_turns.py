"""However finely the bytes are cut, one turn of the event loop takes a bounded part of the work."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from kvsync.config import GatewaySettings
from kvsync.discovery.access import EngineAccess
from kvsync.gateway import http1
from kvsync.gateway.counters import Counters
from kvsync.gateway.http1 import ClientConnection, Running
from kvsync.gateway.reader import Request
from kvsync.gateway.upstream import PIECES_PER_TURN, Target, UpstreamConnection, Upstreams
from kvsync.requests.admission import Admitted
from kvsync.requests.auth import STRANGER
from kvsync.requests.headers import Field
from kvsync.requests.paths import Route


class Transport:
    """As much of one as is needed, with a memory."""

    def __init__(self) -> None:
        self.reading = True
        self.written = b""

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        raise AssertionError("not expected")


class Answer:
    """A listener."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.events: list[str] = []

    def on_head(self, *args: object, until_close: bool) -> None:
        self.events.append("head")

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_chunks(self, chunks: bytes, body: bytes) -> None:
        self.pieces.append(body)

    def on_pause(self) -> None:
        self.events.append("pause")

    def on_end(self) -> None:
        self.events.append("end")

    def on_lost(self, outcome: str) -> None:
        self.events.append(outcome)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ONE = b"1\r\nx\r\n"


def engine_connection() -> tuple[UpstreamConnection, Transport, Answer]:
    settings, loop = GatewaySettings(), asyncio.get_running_loop()
    upstreams = Upstreams(settings, loop, EngineAccess())
    connection = UpstreamConnection("http://e:1", Target.of("http://e:1"), upstreams)
    transport, answer = Transport(), Answer()
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    connection.send(b"", b"", answer)
    return connection, transport, answer


async def test_an_engine_that_sends_many_pieces_waits_for_the_next_turn() -> None:
    connection, transport, answer = engine_connection()
    connection.data_received(HEAD + ONE * PIECES_PER_TURN)
    assert transport.reading
    connection.data_received(ONE * (PIECES_PER_TURN + 1))
    assert not transport.reading
    assert answer.pieces == [b"x" * PIECES_PER_TURN, b"x" * (PIECES_PER_TURN + 1)]  # handed over at once
    await asyncio.sleep(0)
    assert transport.reading
    connection.data_received(ONE * 9999 + b"0\r\n\r\n")
    assert answer.pieces[2:] == [b"x" * 9999]
    assert answer.events == ["head", "pause", "pause", "end"]


async def test_a_turn_does_not_end_a_pause_of_the_client() -> None:
    connection, transport, _ = engine_connection()
    connection.data_received(HEAD + ONE * (PIECES_PER_TURN + 1))
    connection.pause()
    await asyncio.sleep(0)
    assert not transport.reading
    connection.resume()
    assert transport.reading


async def test_what_came_before_a_fault_is_handed_over_first() -> None:
    connection, transport, answer = engine_connection()
    transport.abort = lambda: answer.events.append("abort")  # type: ignore[method-assign]
    connection.data_received(HEAD + ONE * 3 + b"no chunk\r\n")
    assert (answer.pieces, answer.events) == ([b"xxx"], ["head", "abort", "upstream_died"])


class Application:
    """Answers everything at once."""

    draining = False

    def __init__(self) -> None:
        self.begun = 0

    def admit(self, method: bytes, target: bytes, fields: list[Field]) -> Admitted:
        return Admitted(Route("/", (b"GET", b"POST")), b"", STRANGER)

    def begin(self, request: Request, connection: ClientConnection) -> Running | None:
        self.begun += 1
        connection.answer(200, b"OK", [], b"%d" % len(request.body))
        return None


class Register:
    def opened(self, connection: Any) -> None: ...

    def closed(self, connection: Any) -> None: ...


def client_connection() -> tuple[ClientConnection, Transport, Application]:
    application, transport = Application(), Transport()
    loop = asyncio.get_running_loop()
    connection = ClientConnection(application, GatewaySettings(), Counters(), Register(), loop)
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    return connection, transport, application


async def test_a_client_that_sends_many_pieces_waits_for_the_next_turn() -> None:
    connection, transport, application = client_connection()
    connection.data_received(b"POST / HTTP/1.1\r\nHost: g\r\ntransfer-encoding: chunked\r\n\r\n")
    connection.data_received(ONE * (http1.PIECES_PER_TURN + 1))
    assert not transport.reading
    await asyncio.sleep(0)
    assert transport.reading
    connection.data_received(b"0\r\n\r\n")
    assert application.begun == 1
    assert transport.written.endswith(b"\r\n\r\n%d" % (http1.PIECES_PER_TURN + 1))


async def test_requests_sent_ahead_are_answered_some_at_a_time_and_all_in_the_end() -> None:
    connection, transport, application = client_connection()
    count = 10 * http1.ANSWERS_PER_TURN + 1
    get = b"GET / HTTP/1.1\r\nHost: g\r\n\r\n"
    connection.data_received(get * count)
    turns = [application.begun]
    while application.begun < count:
        assert not transport.reading  # no more comes in while so much waits
        connection.drain()  # and shutdown does not close it
        await asyncio.sleep(0)
        turns.append(application.begun)
    assert turns == [min(count, http1.ANSWERS_PER_TURN * turn) for turn in range(1, 12)]
    assert transport.reading
    assert transport.written.count(b"HTTP/1.1 200 OK") == count
