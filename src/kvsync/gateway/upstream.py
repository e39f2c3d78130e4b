"""Connections to engines: one answer at a time on each, kept alive and used again while they are fresh.

What must always hold:

- Bytes after a whole answer, bytes on an idle connection, or an answer whose length is doubtful end the connection: an
  answer is never given to a request that it is not for.
- A connection is used again only when request and answer went through whole and both sides agree to go on.
- Targets are URLs from discovery; nothing here looks at what a client sent.
- However finely an engine cuts its answer, one turn of the event loop takes a bounded number of pieces.
- The parser sees every byte but whole plain chunks between two chunks, where it is as it would be had it read them.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from kvsync.config import GatewaySettings
from kvsync.discovery.access import EngineAccess
from kvsync.gateway.chunks import plain_chunks
from kvsync.requests.headers import Field
from kvsync.requests.ports import Outcome

MAX_ANSWER_HEAD = 256 << 10
"""Bytes of a head with all interim answers before it; and, later, bytes on end that are no body but frame it."""
JOIN_BELOW = 64 << 10
"""Bodies up to this are sent together with their head."""
PIECES_PER_TURN = 4096
"""Pieces of a body after which other connections have their turn."""


_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class ConnectFailed(Exception):
    """No connection could be made; :attr:`outcome` says why."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome


class Listener(Protocol):
    """Who gets an answer. Called in this order: head, body…, then exactly one of end and lost, unless detached."""

    def on_head(
        self, status: int, phrase: bytes, fields: list[Field], length: int | None, *, until_close: bool
    ) -> None:
        """``length`` of the body in bytes; ``None`` when only its end will tell. With ``until_close`` that is the
        connection's end: the engine does not say whether its answer is whole."""

    def on_body(self, piece: bytes) -> None:
        """All bytes of the body that came together."""

    def on_pause(self) -> None:
        """A head, or a piece of the body, and all that came together with it were handed over."""

    def on_chunks(self, chunks: bytes, body: bytes) -> None:
        """Instead of ``on_body`` and ``on_pause``, never for the first piece: ``body``, and the whole plain chunks as
        which it came."""

    def on_end(self) -> None: ...

    def on_lost(self, outcome: Outcome) -> None:
        """The answer will not be whole: ``reset`` (before its first byte), ``bad_answer`` (before its head was
        whole, or not HTTP), ``upstream_died`` (after its head)."""


@dataclass(frozen=True, slots=True)
class Target:
    """An engine's URL, taken apart once."""

    host: str
    port: int
    tls: bool
    host_field: bytes

    @classmethod
    def of(cls, url: str) -> Target:
        """Raises ValueError for what is no ``http(s)://host[:port]``."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an engine's URL: {url!r}")
        tls = parts.scheme == "https"
        authority = parts.netloc.rpartition("@")[2].encode()
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, authority)


class UpstreamConnection(asyncio.Protocol):
    """One TCP (or TLS) connection to one engine."""

    def __init__(self, url: str, target: Target, pool: Upstreams) -> None:
        self.url = url
        self.target = target
        self.reused = False
        """It carried an answer before: the engine may have closed it just as the request went out."""
        self.idle_since = 0.0
        self.peer = b""
        """``ip:port`` of the engine."""
        self._pool = pool
        self._transport: asyncio.Transport
        self._listener: Listener | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._paused = False
        """By the listener; else reading may only wait for the next turn."""
        self._reset()

    def _reset(self) -> None:
        self._received = False
        self._head_done = False
        self._done = False
        self._surplus = False
        self._refused = False
        self._framing = 0
        """Bytes since the answer began or since its last piece of body: the parser may keep them to itself."""
        self._phrase = b""
        self._fields: list[Field] = []
        self._length: int | None = None
        self._chunked = False
        self._chunk_ended = False
        """The last that the parser told was the end of a chunk."""
        self._between = False
        """It is between two chunks, and keeps nothing of the next one to itself."""
        self._keep = False
        self._until_close = False
        self._pieces: list[bytes] = []

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    @property
    def unsent(self) -> int:
        """Bytes of the request that the engine did not take yet."""
        return self._transport.get_write_buffer_size()

    # ---- for the exchange

    def send(self, head: bytes, body: bytes, listener: Listener) -> None:
        """Send a request; ``listener`` gets the answer."""
        self._reset()
        self._listener = listener
        if len(body) <= JOIN_BELOW:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def pause(self) -> None:
        self._paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        self._read_on()

    def _read_on(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Drop the connection; the listener hears nothing more."""
        self._listener = None
        self._transport.abort()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        host, port = transport.get_extra_info("peername")[:2]
        self.peer = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None:  # nobody asked
            self._pool.forget(self)
            self._transport.abort()
            return
        if self._between and (body := plain_chunks(data)) is not None:
            listener.on_chunks(data, body)
            return
        begun = self._head_done
        self._received = True
        self._framing += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and not self._refused:
                raise  # a fault of ours, not of the engine
            self._surplus = True
            if not self._done:
                self._hand_over(listener)
                self._fail("upstream_died" if self._head_done else "bad_answer")
                return
        # Did it keep a part of the next size line, that would not end so: a line's end is told.
        self._between = self._chunk_ended and data.endswith(b"\r\n")
        handed_over = self._hand_over(listener)
        if self._listener is not listener:  # aborted meanwhile
            return
        if self._done:
            self._finish(listener)
        elif self._framing > MAX_ANSWER_HEAD:
            self._fail("upstream_died" if self._head_done else "bad_answer")
        elif handed_over or self._head_done != begun:  # what only frames an answer does not bring it on
            listener.on_pause()

    def _hand_over(self, listener: Listener) -> bool:
        pieces = self._pieces
        if not pieces or self._listener is not listener:
            return False
        self._pieces = []
        if len(pieces) > PIECES_PER_TURN and not self._done:
            self._transport.pause_reading()
            self._pool.loop.call_soon(self._read_on)
        listener.on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        return True

    def eof_received(self) -> bool:
        if self._listener is not None and self._head_done and self._until_close:
            self._done = True
            self._finish(self._listener)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self._listener is not None:
            self._fail("upstream_died" if self._head_done else "bad_answer" if self._received else "reset")

    def _fail(self, outcome: Outcome) -> None:
        listener, self._listener = self._listener, None
        self._transport.abort()
        if listener is not None:
            listener.on_lost(outcome)

    def _finish(self, listener: Listener) -> None:
        self._listener = None
        keep = self._keep and not self._surplus and not self._transport.get_write_buffer_size()
        if keep and self.usable:
            self.reused = True
            if self._paused:
                self.resume()  # what came in the same moment as a pause was the end
            self._pool.keep(self)
        else:
            self._transport.abort()  # an engine that answered early may never read the rest of the request
        listener.on_end()

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        if self._done:
            self._surplus = True

    def on_status(self, phrase: bytes) -> None:
        self._phrase += phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer (dropped, as an intermediary may), or surplus
        lower = name.lower()
        if lower == b"content-length":
            if len(value) > 20:
                self._refuse()
            self._length = int(value)
        elif lower == b"transfer-encoding":
            self._chunked = True
            if value.strip().lower() != b"chunked":
                self._refuse()
        self._fields.append((lower, name, value))

    def on_headers_complete(self) -> None:
        if self._head_done or self._listener is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101 or status < 100:
                self._refuse()
            self._phrase = b""
            self._fields = []
            self._length = None
            self._chunked = False
            return
        self._head_done = True
        self._framing = 0
        self._keep = self._parser.should_keep_alive()
        bodyless = status in (204, 304)
        self._until_close = not (bodyless or self._chunked or self._length is not None)
        length = None if bodyless else self._length
        self._listener.on_head(status, self._phrase, self._fields, length, until_close=self._until_close)

    def on_body(self, piece: bytes) -> None:
        self._framing = 0
        if not self._done and self._listener is not None:
            self._pieces.append(piece)

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        self._chunk_ended = False
        if self._head_done:
            self._done = True

    def _refuse(self) -> None:
        """The answer has a form that cannot be passed on."""
        self._refused = True
        raise httptools.HttpParserError("not forwardable")


class Upstreams:
    """All connections to engines, and how new ones are made."""

    def __init__(self, settings: GatewaySettings, loop: asyncio.AbstractEventLoop, engines: EngineAccess) -> None:
        self.loop = loop
        self._settings = settings
        self._engines = engines
        self._targets: dict[str, Target] = {}
        self._idle: dict[str, dict[UpstreamConnection, None]] = {}

    def take(self, url: str) -> UpstreamConnection | None:
        """The most recently used idle connection that is still fresh."""
        idle = self._idle.get(url)
        oldest = self.loop.time() - self._settings.upstream_idle
        while idle:
            connection, _ = idle.popitem()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def connect(self, url: str) -> UpstreamConnection:
        """A fresh connection. Raises :class:`ConnectFailed`."""
        try:
            target = self._targets.get(url) or self._targets.setdefault(url, Target.of(url))
            async with asyncio.timeout(self._settings.connect_timeout):
                _, connection = await self.loop.create_connection(
                    lambda: UpstreamConnection(url, target, self),
                    target.host,
                    target.port,
                    ssl=self._engines.tls if target.tls else None,
                    server_hostname=self._engines.server_name if target.tls else None,
                )
        except TimeoutError as error:
            raise ConnectFailed("connect_timeout", str(error)) from error
        except ConnectionRefusedError as error:
            raise ConnectFailed("connect_refused", str(error)) from error
        except ssl.SSLError as error:
            raise ConnectFailed("tls_failed", str(error)) from error
        except (OSError, ValueError) as error:
            own = isinstance(error, OSError) and error.errno in _OWN_LIMITS
            raise ConnectFailed("no_resources" if own else "connect_failed", str(error)) from error
        return connection

    def keep(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose answer was whole, or that nobody needs any more."""
        if not connection.usable:  # it is forgotten already, and would stay for ever
            return
        connection.idle_since = self.loop.time()
        self._idle.setdefault(connection.url, {})[connection] = None

    def forget(self, connection: UpstreamConnection) -> None:
        idle = self._idle.get(connection.url)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.url]
                self._targets.pop(connection.url, None)

    def sweep(self, now: float) -> None:
        """Drop what was idle for too long."""
        oldest = now - self._settings.upstream_idle
        for idle in list(self._idle.values()):
            for connection in [c for c in idle if c.idle_since <= oldest]:
                connection.abort()

    def idle(self) -> int:
        """Idle connections, over all engines."""
        return sum(map(len, self._idle.values()))

    def close(self) -> None:
        for idle in list(self._idle.values()):
            for connection in list(idle):
                connection.abort()


__all__ = ["ConnectFailed", "Listener", "Target", "UpstreamConnection", "Upstreams"]
