"""One client connection: requests in, answers out, in order.

What must always hold:

- One answer at a time, in the order of the requests; what a client pipelines meanwhile waits in a bounded buffer.
- An answer is framed anew, but for chunks that need not be; its body bytes are passed as they come. An answer that
  breaks off never looks finished.
- A client that leaves is noticed in every phase. Its end-of-stream alone does not say that it left (it may have closed
  only its sending side), so the connection is probed with bytes that mean nothing (see :meth:`_probe`).
- Nothing waits for a client for ever.
- However finely a client cuts its bytes and however many requests it sends ahead, one turn of the event loop does a
  bounded part of the work.

The connection knows no routes and no engines: those are the :class:`Application`'s. What may come in, and how it is
framed, is :mod:`kvsync.gateway.reader`'s business.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol, cast

from kvsync.config import GatewaySettings
from kvsync.gateway.reader import Request, RequestReader
from kvsync.requests import errors
from kvsync.requests.admission import Admitted
from kvsync.requests.errors import Problem
from kvsync.requests.headers import Field, Wishes
from kvsync.requests.ports import Outcome, Telemetry

PIPELINE_BYTES = 1 << 20
"""Bytes that a client may send ahead while an earlier answer runs. Beyond, the connection closes after that answer."""
WRITE_HIGH_WATER = 64 << 10
LINGER = 5.0
"""Seconds in which a refused client may go on sending (to nobody) and read why it was refused."""
PIECES_PER_TURN = 4096
"""Pieces of messages (chunks, heads, ends) after which other connections have their turn."""
ANSWERS_PER_TURN = 64
"""The same for answers that are given at once."""
SLOWEST = 500
"""Bytes per second of a body, on average, beyond what the client's patience covers: one that trickles its body to hold
a connection must at least keep sending."""
PROBE_EVERY = 0.1
GONE_AFTER = 0.5
"""Seconds after a client's end-of-stream when one that cannot be probed counts as gone."""


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

    def admit(self, method: bytes, target: bytes, fields: list[Field]) -> Admitted:
        """What a request asks for, before its body is wanted. Raises ``Problem``."""

    def begin(self, request: Request, connection: ClientConnection) -> Running | None:
        """Answer through ``connection``: now (``None``), or by and by."""


class Register(Protocol):
    """Who keeps the list of open connections."""

    def opened(self, connection: ClientConnection) -> None:
        """A new one; it may be turned away."""

    def closed(self, connection: ClientConnection) -> None: ...


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
        self._patience = settings.client_timeout
        self._telemetry = telemetry
        self._register = register
        self._loop = loop
        self._transport: asyncio.Transport
        # What comes in.
        self._reader = RequestReader(
            app.admit, max_header_bytes=settings.max_header_bytes, max_body_bytes=settings.max_body_bytes
        )
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        # What goes out.
        self._answering: Request | None = None
        self._running: Running | None = None
        self._out: list[bytes] = []
        self._started = False
        self._chunking = False
        self._delimited = True
        self._bodyless = False
        self._closing = False
        self._stepping = False
        # Time, flow and the peer.
        self.paused = False
        """More is waiting to be sent than should be."""
        self._since = loop.time()
        """Of the last progress: a piece read, an answer ended, bytes gone out of a full write buffer."""
        self._unsent = 0
        self._eof_at: float | None = None
        self._probed = False
        """Something was sent since the client's end-of-stream."""
        self._linger_until: float | None = None

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(WRITE_HIGH_WATER)
        self._register.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._register.closed(self)
        self._reader.stop()
        self._reader.requests.clear()
        self._pending.clear()
        self._leave("client_gone")

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader.deaf:
            reader.unread = True
            return
        if not reader.in_message:
            self._since = self._loop.time()
        elif not reader.in_head:  # a head has its time as a whole, however it trickles in
            self._since = min(self._loop.time(), self._since + len(data) / SLOWEST)
        if self._answering is None and not self.paused and not reader.requests:
            place = reader.place
            reader.feed(data)
            self._step()
            if reader.place - place > PIECES_PER_TURN:
                self._give_way()
            return
        self._pending_bytes += len(data)
        if self._pending_bytes <= PIPELINE_BYTES:
            self._pending.append(data)
            return
        # A client must be ready to ask again for what was not answered when a connection closes (RFC 9112, 9.3.2).
        self._telemetry.connection("pipeline_overflow")
        self._pending.clear()
        reader.stop()

    def eof_received(self) -> bool:
        reader = self._reader
        if self._answering is None and not reader.requests and not self._pending:
            if reader.in_message and not reader.deaf:
                self._telemetry.connection("incomplete_request")
            return False  # close, after what is still to be sent
        if not self._transport.can_write_eof():
            return False  # TLS knows no half of a connection
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
        self._since = self._loop.time()
        if self._running is not None:
            self._running.resume()
        self._step()

    # ---- one after the other

    def _step(self) -> None:
        """Answer what waits, as far as it can be answered now."""
        if self._stepping:
            return
        self._stepping = True
        reader = self._reader
        answers = 0
        try:
            while self._answering is None and not self.paused and self._linger_until is None:
                if answers == ANSWERS_PER_TURN:
                    self._give_way()
                    break
                answers += 1
                if reader.requests:
                    self._begin(reader.requests.popleft())
                elif reader.problem is not None:
                    problem, reader.problem = reader.problem, None
                    self._telemetry.answered("other", problem.status, 0.0, problem.reason)
                    self._answering = Request(b"", http11=True, keep_alive=False, fields=reader.fields)
                    self.refuse(problem)
                elif self._pending:
                    data, self._pending, self._pending_bytes = b"".join(self._pending), [], 0
                    reader.feed(data)
                else:
                    if reader.continue_due:
                        reader.continue_due = False
                        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    if reader.deaf or self._eof_at is not None or (self._app.draining and not reader.in_message):
                        self._finish()
                    break
        finally:
            self._stepping = False

    def _give_way(self) -> None:
        """Go on in the next turn of the event loop."""
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._step()

    def _begin(self, request: Request) -> None:
        self._answering = request
        self._started = False
        running = self._app.begin(request, self)
        if self._answering is request:
            self._running = running

    # ---- answering

    def start(
        self, status: int, phrase: bytes, fields: list[bytes], length: int | None, *, until_close: bool = False
    ) -> None:
        """Begin the answer. ``fields`` are whole lines; framing is chosen here: ``length`` where it is known; with
        ``until_close`` nobody knows whether the end will be one, so the client gets no word of it either."""
        request = self._answering
        assert request is not None
        self._started = True
        self._chunking = False
        self._delimited = True
        reader = self._reader
        last = reader.deaf and not reader.requests and reader.problem is None
        self._closing = not request.keep_alive or self._app.draining or last
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
        elif request.http11 and not until_close:
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

    def chunks(self, chunks: bytes, body: bytes) -> None:
        """Go on with ``body`` and send it with all that was kept. ``chunks`` is the same, framed whole and plainly."""
        if not self._chunking:
            self.body(body)
        elif self._out or self._eof_at is not None:
            self._out.append(chunks)
        else:
            self._transport.write(chunks)
            return
        self.flush()

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
            self._reader.requests.clear()
            self._finish()
        else:
            self._step()

    def answer(self, status: int, phrase: bytes, fields: list[bytes], body: bytes) -> None:
        """A whole answer at once."""
        self.start(status, phrase, fields, len(body))
        if body:
            self.body(body)
        self.end()

    def refuse(self, problem: Problem, request_id: bytes | None = None) -> None:
        """Answer with a problem. ``request_id`` as it was told before; without it that of the request, or a new one."""
        assert self._answering is not None
        name = request_id or Wishes(self._answering.fields).request_id
        lines = [b"content-type: application/json\r\n", b"request-id: %b\r\n" % name]
        lines += [b"%b: %b\r\n" % field for field in problem.headers]
        self.answer(problem.status, problem.phrase, lines, problem.body())

    def cut(self) -> None:
        """The answer breaks off here, and the client must be able to see it: no final chunk, no full length."""
        self._answering = self._running = None
        self.flush()
        self._reader.stop()
        if self._delimited:
            self._transport.close()
        else:
            # The end of this body is the end of the connection: only a reset tells a broken answer from a whole one.
            peer = self._transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def _finish(self) -> None:
        """Close after the last answer, without a reset that would destroy it while the client still sends."""
        reader = self._reader
        waits = self._eof_at is None and (reader.unread or reader.in_message)
        if not waits or not self._transport.can_write_eof():  # TLS says by itself that it ends
            self._transport.close()
        elif not self._transport.is_closing():
            reader.stop()
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
        if self._linger_until is not None:
            if now >= self._linger_until:
                self._transport.abort()
        elif self.paused or self._transport.is_closing():
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._since = now
            self._unsent = unsent
            if now - self._since > self._patience:
                self._telemetry.connection("write_timeout")
                self.abort("client_gone")
        elif self._running is not None:
            self._running.check(now)
        elif self._answering is None and now - self._since > self._patience:
            if not self._reader.in_message:
                self._telemetry.connection("idle_timeout")
                self._transport.close()
            else:
                self._telemetry.connection("request_timeout")
                self._reader.problem = errors.request_timeout()
                self._reader.stop()
                self._step()

    def drain(self) -> None:
        """Close when nothing is under way; an open request may still end (``Application.draining`` closes after it)."""
        reader = self._reader
        waiting = self._answering is not None or reader.in_message or reader.requests or self._pending
        if not waiting and self._linger_until is None:
            self._transport.close()

    def turn_away(self, problem: Problem) -> None:
        """Answer before anything is read, and close."""
        self._reader.problem = problem
        self._reader.stop()
        self._step()

    def abort(self, outcome: Outcome) -> None:
        """Close at once, whatever runs."""
        self._leave(outcome)
        self._transport.abort()


__all__ = ["Application", "ClientConnection", "Register", "Running"]
