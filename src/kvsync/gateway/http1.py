"""One client connection: HTTP/1.0 and 1.1 requests in, answers out, in order.

What must always hold:

- One answer at a time, in the order of the requests; what a client pipelines meanwhile waits in a bounded buffer.
- Framing is unambiguous or the request is refused and the connection closed: no second reading of the bytes exists.
- The head, the URL and the body are bounded before they are kept, and nothing waits for a client for ever.
- An answer is framed anew; its body bytes are passed as they come. An answer that breaks off never looks finished.
- A client that leaves is noticed in every phase. Its end-of-stream alone does not say that it left (it may have closed
  only its sending side), so the connection is probed with bytes that mean nothing (see :meth:`_probe`).

The connection knows no routes and no engines: those are the :class:`Application`'s.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Protocol, cast

import httptools

from kvsync.config import GatewaySettings
from kvsync.gateway import errors
from kvsync.gateway.errors import Problem
from kvsync.gateway.headers import Field
from kvsync.gateway.paths import Route
from kvsync.gateway.ports import Outcome, Telemetry

MAX_URL = 8 << 10
PIPELINE_BYTES = 1 << 20
"""Bytes that a client may send ahead while an earlier answer runs. Beyond, the connection closes after that answer."""
WRITE_HIGH_WATER = 64 << 10
LINGER = 5.0
"""Seconds in which a refused client may go on sending (to nobody) and read why it was refused."""
PROBE_EVERY = 0.1
GONE_AFTER = 0.5
"""Seconds after a client's end-of-stream when one that cannot be probed counts as gone."""


class Request:
    """One request, whole."""

    __slots__ = ("body", "fields", "http11", "keep_alive", "method", "problem", "query", "route")

    def __init__(self, method: bytes, http11: bool, keep_alive: bool, fields: list[Field]) -> None:
        self.method = method
        self.http11 = http11
        self.keep_alive = keep_alive
        self.fields = fields
        self.route: Route | None = None
        self.query = b""
        self.body = b""
        self.problem: Problem | None = None
        """Why it is refused, when its head was enough to know."""


class Running(Protocol):
    """An answer under way."""

    def stop(self, outcome: Outcome) -> None:
        """The client left, or the gateway must: stop everything, at once."""

    def pause(self) -> None:
        """The client reads slower than the engine writes: stop reading from the engine."""

    def resume(self) -> None: ...

    def check(self, now: float) -> None:
        """Called every now and then: enforce deadlines."""


class Application(Protocol):
    draining: bool
    """Say ``Connection: close`` with every answer."""

    def admit(self, method: bytes, target: bytes) -> tuple[Route, bytes]:
        """Route and query string, before the body is wanted. Raises ``Problem``."""

    def begin(self, request: Request, connection: ClientConnection) -> Running | None:
        """Answer through ``connection``: now (``None``), or by and by."""


class Register(Protocol):
    """Who keeps the list of open connections."""

    def opened(self, connection: ClientConnection) -> None: ...

    def closed(self, connection: ClientConnection) -> None: ...


class _Refused(Exception):
    """Stops the parser from inside a callback; the reason is in ``_broken``."""


class ClientConnection(asyncio.Protocol):
    """The server's side of one TCP connection."""

    def __init__(
        self,
        app: Application,
        settings: GatewaySettings,
        telemetry: Telemetry,
        register: Register,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._app = app
        self._settings = settings
        self._telemetry = telemetry
        self._register = register
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        # The message that is being parsed.
        self._in_message = False
        self._in_head = True
        self._head_bytes = 0
        """Of the fields that the parser handed over."""
        self._head_fed = 0
        """Of pieces that held nothing but a part of this head."""
        self._target = b""
        self._fields: list[Field] = []
        self._length: int | None = None
        self._chunked = False
        self._hosts = 0
        self._expects = False
        self._request: Request | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._priming = False
        # What was parsed and not yet answered, and what is not yet parsed.
        self._queue: deque[Request] = deque()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._continue_due = False
        self._broken: Problem | None = None
        self._deaf = False
        """Nothing more is read as a request: the last one was seen, or the framing is lost."""
        # The answer.
        self._answering: Request | None = None
        self._running: Running | None = None
        self._out: list[bytes] = []
        self._started = False
        self._chunking = False
        self._delimited = True
        self._bodyless = False
        self._closing = False
        self._stepping = False
        # Time and flow.
        self.paused = False
        """More is waiting to be sent than should be."""
        self._unread = False
        """Bytes of the client were, or will be, thrown away."""
        self._eof_at: float | None = None
        self._probed = False
        """Something was sent since the client's end-of-stream."""
        self._linger_until: float | None = None
        self._since = loop.time()
        """Of the last progress: a piece read, an answer ended, bytes gone out of a full write buffer."""
        self._unsent = 0

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(WRITE_HIGH_WATER)
        self._register.opened(self)
        self._telemetry.connection("opened")

    def connection_lost(self, exc: Exception | None) -> None:
        self._register.closed(self)
        self._deaf = True
        self._queue.clear()
        self._pending.clear()
        self._leave("client_gone")

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if not (self._in_message and self._in_head):  # a head has its time as a whole, however it trickles
            self._since = self._loop.time()
        if self._answering is None and not self.paused:
            self._feed(data)
            self._step()
            return
        self._pending_bytes += len(data)
        if self._pending_bytes <= PIPELINE_BYTES:
            self._pending.append(data)
            return
        # A client must be ready to ask again for what was not answered when a connection closes (RFC 9112, 9.3.2).
        self._telemetry.connection("pipeline_overflow")
        self._pending.clear()
        self._unread = self._deaf = True

    def eof_received(self) -> bool:
        if self._answering is None and not self._queue and not self._pending:
            if self._in_message and not self._deaf:
                self._telemetry.connection("incomplete_request")
            return False  # close, after what is still to be sent
        self._eof_at = self._loop.time()
        self._probe()
        self._loop.call_later(PROBE_EVERY, self._check_peer)
        return True

    def pause_writing(self) -> None:
        self.paused = True
        self._since = self._loop.time()
        self._unsent = self._transport.get_write_buffer_size()
        if self._running is not None:
            self._running.pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._running is not None:
            self._running.resume()
        self._step()

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        if self._priming:
            return
        self._in_message = self._in_head = True
        self._since = self._loop.time()
        self._head_bytes = self._head_fed = self._body_bytes = self._hosts = 0
        self._target = b""
        self._fields = []
        self._body = []
        self._length = None
        self._chunked = self._expects = False
        self._request = None

    def on_url(self, url: bytes) -> None:
        if self._priming:
            return
        self._target += url
        if len(self._target) > MAX_URL:
            self._refuse(errors.url_too_long(MAX_URL))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head or self._priming:
            return  # a trailer: dropped, as an intermediary may
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._settings.max_header_bytes:
            self._refuse(errors.header_too_large(self._settings.max_header_bytes))
        lower = name.lower()
        if lower == b"content-length":
            if len(value) > 20:
                self._refuse(errors.bad_request("malformed Content-Length"))
            self._length = int(value)  # the parser has seen to it that these are digits
        elif lower == b"transfer-encoding":
            self._chunked = True
        elif lower == b"host":
            self._hosts += 1
        self._fields.append((lower, name, value))

    def on_headers_complete(self) -> None:
        if self._priming:
            return
        self._in_head = False
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(errors.bad_request("only HTTP/1.0 and HTTP/1.1 are spoken here"))
        method = parser.get_method()
        request = Request(method, version == "1.1", parser.should_keep_alive(), self._fields)
        try:
            self._look_at(request)
            request.route, request.query = self._app.admit(method, self._target)
        except Problem as problem:
            if self._has_body or problem.status == 400 or method == b"CONNECT":
                self._refuse(problem)  # what follows is not wanted, or not to be trusted
            request.problem = problem
        self._request = request
        if self._expects:
            self._continue_due = True

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._settings.max_body_bytes:
            self._refuse(errors.body_too_large(self._settings.max_body_bytes))
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or (self._parser.should_upgrade() and self._has_body):
            return  # see _feed: the body follows
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._in_message = False
        self._request = None
        self._body = []
        self._continue_due = False
        if not self._deaf:
            self._queue.append(request)
            self._deaf = not request.keep_alive

    @property
    def _has_body(self) -> bool:
        return self._chunked or bool(self._length)

    def _look_at(self, request: Request) -> None:
        """Refuse what cannot be framed or forwarded safely, beyond what the parser refuses."""
        encoded = expects = False
        for lower, _, value in self._fields:
            if lower == b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    raise errors.transfer_encoding()
            elif lower == b"content-encoding":
                encoded = encoded or value.strip().lower() not in (b"", b"identity")
            elif lower == b"expect":
                if value.strip().lower() != b"100-continue":
                    raise errors.expectation()
                expects = True
        if self._hosts != 1 and (request.http11 or self._hosts > 1):
            raise errors.bad_request("one Host header is required")
        if self._chunked and not request.http11:
            raise errors.bad_request("HTTP/1.0 knows no transfer-encoding")
        if self._length is not None and self._length > self._settings.max_body_bytes:
            raise errors.body_too_large(self._settings.max_body_bytes)
        if encoded and self._has_body:
            raise errors.compressed_body()
        self._expects = expects and request.http11 and self._has_body

    def _refuse(self, problem: Problem) -> None:
        self._broken = problem
        raise _Refused

    # ---- reading

    def _feed(self, data: bytes) -> None:
        while data:
            head = self._fields if self._in_message and self._in_head else None
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
                continue
            except httptools.HttpParserError as error:
                if self._broken is None:
                    if isinstance(error, httptools.HttpParserCallbackError):
                        raise  # a fault of ours, not of the client
                    if not self._deaf:  # else: bytes after the last request, which nobody answers
                        self._broken = errors.bad_request(f"malformed HTTP: {error}")
                self._unread = self._deaf = True
                return
            if head is not None and head is self._fields and self._in_head:
                # The parser keeps an unfinished field to itself, so pieces are counted as they go in.
                self._head_fed += len(data)
                if self._head_fed > self._settings.max_header_bytes:
                    self._broken = errors.header_too_large(self._settings.max_header_bytes)
                    self._unread = self._deaf = True
            return

    def _ignore_upgrade(self) -> None:
        """The client offers another protocol, and a server may ignore that. The parser stopped before the body, and
        a new one is set to where it stood."""
        self._parser = httptools.HttpRequestParser(self)
        if self._request is not None:
            framing = b"Transfer-Encoding: chunked" if self._chunked else b"Content-Length: %d" % (self._length or 0)
            self._priming = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
            self._priming = False

    def _step(self) -> None:
        """Answer what waits, as far as it can be answered now."""
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._answering is None and not self.paused and self._linger_until is None:
                if self._queue:
                    self._begin(self._queue.popleft())
                elif self._broken is not None:
                    problem, self._broken = self._broken, None
                    self._telemetry.answered("other", problem.status, 0.0, problem.reason)
                    self._answering = Request(b"", http11=True, keep_alive=False, fields=[])
                    self.refuse(problem)
                elif self._pending:
                    data, self._pending, self._pending_bytes = b"".join(self._pending), [], 0
                    self._feed(data)
                else:
                    if self._continue_due and not self._deaf:
                        self._continue_due = False
                        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    if self._deaf or self._eof_at is not None or (self._app.draining and not self._in_message):
                        self._finish()
                    break
        finally:
            self._stepping = False

    def _begin(self, request: Request) -> None:
        self._answering = request
        self._started = False
        running = self._app.begin(request, self)
        if self._answering is request:
            self._running = running

    # ---- answering

    def start(self, status: int, phrase: bytes, fields: list[bytes], length: int | None) -> None:
        """Begin the answer. ``fields`` are whole lines; framing is chosen here: ``length`` where it is known."""
        request = self._answering
        assert request is not None
        self._started = True
        self._chunking = False
        self._delimited = True
        self._closing = not request.keep_alive or self._app.draining or (self._deaf and not self._queue)
        # An answer to HEAD carries the length of what GET would have got; 204 and 304 have no body.
        self._bodyless = request.method == b"HEAD" or status in (204, 304)
        out = self._out
        out.append(b"HTTP/1.1 %d %b\r\n" % (status, phrase))
        out += fields
        if length is not None:
            if status != 204:
                out.append(b"content-length: %d\r\n" % length)
        elif self._bodyless:
            pass
        elif request.http11:
            self._chunking = True
            out.append(b"transfer-encoding: chunked\r\n")
        else:
            self._delimited = False
            self._closing = True
        if self._closing:
            out.append(b"connection: close\r\n\r\n")
        elif request.http11:
            out.append(b"\r\n")
        else:
            out.append(b"connection: keep-alive\r\n\r\n")

    def body(self, piece: bytes) -> None:
        """Go on with the answer. Kept until :meth:`flush` or :meth:`end`."""
        if self._bodyless:
            return
        if self._chunking:
            self._out += (b"%x\r\n" % len(piece), piece, b"\r\n")
        else:
            self._out.append(piece)

    def flush(self) -> None:
        """Send what was kept."""
        out = self._out
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            self._probed = self._eof_at is not None
            self._transport.write(data)

    def end(self) -> None:
        """The answer is whole."""
        if self._chunking:
            self._out.append(b"0\r\n\r\n")
        self.flush()
        self._answering = self._running = None
        self._since = self._loop.time()
        if self._closing:
            self._queue.clear()
            self._finish()
        else:
            self._step()

    def answer(self, status: int, phrase: bytes, fields: list[bytes], body: bytes) -> None:
        """A whole answer at once."""
        self.start(status, phrase, fields, len(body))
        if body:
            self.body(body)
        self.end()

    def refuse(self, problem: Problem, fields: tuple[bytes, ...] = ()) -> None:
        """Answer with a problem."""
        lines = [b"content-type: application/json\r\n", *fields]
        lines += [b"%b: %b\r\n" % field for field in problem.headers]
        self.answer(problem.status, problem.phrase, lines, problem.body())

    def cut(self) -> None:
        """The answer breaks off here, and the client must be able to see it: no final chunk, no full length."""
        self._answering = self._running = None
        self.flush()
        self._deaf = True
        if not self._delimited:
            # The end of this body is the end of the connection: only a reset tells a broken answer from a whole one.
            peer = self._transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    def _finish(self) -> None:
        """Close after the last answer, without a reset that would destroy it while the client still sends."""
        if self._eof_at is not None or not (self._unread or self._in_message):
            self._transport.close()
        elif not self._transport.is_closing():
            self._deaf = True
            self._linger_until = self._loop.time() + LINGER
            self._transport.write_eof()

    # ---- leaving

    def _leave(self, outcome: Outcome) -> None:
        running, self._running, self._answering = self._running, None, None
        self._out.clear()
        if running is not None:
            running.stop(outcome)

    def _probe(self) -> None:
        """Send bytes that mean nothing, so that a client that closed its socket answers with a reset.

        Before the status line that is an interim answer, which every HTTP/1.1 client must skip; inside a chunked body
        a leading zero of the next chunk's size. Elsewhere nothing can be said, and time decides.
        """
        if self._answering is None or not self._answering.http11:
            return
        if not self._started:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._probed = True
        elif self._chunking:
            self._transport.write(b"0")
            self._probed = True

    def _check_peer(self) -> None:
        """After the client's end-of-stream, until its last answer is whole: did it really leave?"""
        if self._eof_at is None or self._transport.is_closing():
            return
        peer = self._transport.get_extra_info("socket")
        gone: bool = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if not gone and not self._probed:
            gone = self._loop.time() - self._eof_at > GONE_AFTER
        if gone:
            self.abort("client_gone")
        else:
            self._loop.call_later(PROBE_EVERY, self._check_peer)

    # ---- time

    def check(self, now: float) -> None:
        """Enforce deadlines; called every now and then."""
        patience = self._settings.client_timeout
        if self._linger_until is not None:
            if now >= self._linger_until:
                self._transport.abort()
        elif self.paused or self._transport.is_closing():
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._since = now
            self._unsent = unsent
            if now - self._since > patience:
                self._telemetry.connection("write_timeout")
                self.abort("client_gone")
        elif self._running is not None:
            self._running.check(now)
        elif self._answering is None and now - self._since > patience:
            if not self._in_message:
                self._telemetry.connection("idle_timeout")
                self._transport.close()
            else:
                self._telemetry.connection("request_timeout")
                self._broken = errors.request_timeout()
                self._deaf = True
                self._step()

    def drain(self) -> None:
        """Close when nothing is under way; an open request may still end (``Application.draining`` closes after it)."""
        if self._answering is None and not self._in_message and self._linger_until is None:
            self._transport.close()

    def abort(self, outcome: Outcome) -> None:
        """Close at once, whatever runs."""
        self._leave(outcome)
        self._transport.abort()


__all__ = ["Application", "ClientConnection", "Register", "Request", "Running"]
