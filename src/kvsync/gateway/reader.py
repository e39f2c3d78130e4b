"""Bytes of one client connection in, whole requests out. No I/O, no clock.

What must always hold:

- Framing is unambiguous or the request is refused and nothing after it is read: no second reading of the bytes exists.
- The URL, the head, the body and what frames it are bounded before they are kept.
- However the bytes are cut into pieces, the same requests come out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import httptools

from kvsync.requests import errors
from kvsync.requests.admission import Admitted
from kvsync.requests.errors import Problem
from kvsync.requests.headers import Field
from kvsync.requests.paths import MAX_URL

_LOOKED_AT = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"})


class Request:
    """One request, whole."""

    __slots__ = ("admitted", "body", "fields", "http11", "keep_alive", "method", "problem")

    def __init__(self, method: bytes, *, http11: bool, keep_alive: bool, fields: list[Field]) -> None:
        self.method = method
        self.http11 = http11
        self.keep_alive = keep_alive
        self.fields = fields
        self.admitted: Admitted | None = None
        self.body = b""
        self.problem: Problem | None = None
        """Why it is refused, when its head was enough to know."""


class _Refused(Exception):
    """Stops the parser from inside a callback; the reason is in ``RequestReader.problem``."""


class RequestReader:
    """Reads requests.

    Args:
        admit: what the method, the target and the header fields of a request mean; raises ``Problem`` for what is not
            served, or not to this client.
        max_header_bytes, max_body_bytes: limits; the first is for all header fields together, and for all trailers.
    """

    def __init__(
        self,
        admit: Callable[[bytes, bytes, list[Field]], Admitted],
        *,
        max_header_bytes: int,
        max_body_bytes: int,
    ) -> None:
        self.requests: deque[Request] = deque()
        """Whole and not yet taken."""
        self.problem: Problem | None = None
        """To be told after all of ``requests`` are answered; then the connection ends."""
        self.deaf = False
        """Nothing more is read: the last request was seen, or one was refused."""
        self.unread = False
        """Bytes were thrown away, and more may come."""
        self.continue_due = False
        """The client waits for ``100 Continue``."""
        self.in_message = False
        self.in_head = False
        self.place = 0
        """Grows with whatever the parser hands on of a message: how much work a piece of bytes was."""
        self._admit = admit
        self._max_header = max_header_bytes
        self._max_body = max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._priming = False
        self._request: Request | None = None
        self._kept = 0
        """Bytes that went in since, and that the parser may keep to itself."""
        self._begin()

    def feed(self, data: bytes) -> None:
        """Read on."""
        while data and not self.deaf:
            place = self.place
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
                continue
            except httptools.HttpParserError as error:
                if self.problem is None:
                    if isinstance(error, httptools.HttpParserCallbackError):
                        raise  # a fault of ours, not of the client
                    if not self.deaf:  # else: bytes after the last request, which nobody answers
                        self.problem = errors.bad_request(f"malformed HTTP: {error}")
                self.stop()
                return
            self._kept = self._kept + len(data) if self.in_message and place == self.place else 0
            if self._kept > self._max_header:
                # An unfinished field or trailer, or a chunk's size and extensions.
                self.problem = errors.header_too_large(self._max_header)
                self.stop()
            return

    @property
    def fields(self) -> list[Field]:
        """The header fields, so far, of the request that is being read."""
        return self._fields

    def stop(self) -> None:
        """Throw away what comes from now on."""
        self.deaf = self.unread = True
        self.continue_due = False

    def _begin(self) -> None:
        self._target = b""
        self._fields: list[Field] = []
        self._head_bytes = 0
        self._hosts = 0
        self._special: list[tuple[bytes, bytes]] = []
        self._length: int | None = None
        self._chunked = False
        self._body: bytes | bytearray = b""

    def _ignore_upgrade(self) -> None:
        """The client offers another protocol, and a server may ignore that. The parser stopped before the body, and
        a new one is set to where it stood."""
        self._parser = httptools.HttpRequestParser(self)
        if self._request is not None:
            framing = b"Transfer-Encoding: chunked" if self._chunked else b"Content-Length: %d" % (self._length or 0)
            self._priming = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
            self._priming = False

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        if not self._priming:
            self.in_message = self.in_head = True
            self.place += 1
            self._begin()

    def on_url(self, url: bytes) -> None:
        if self._priming:
            return
        self._target += url
        if len(self._target) > MAX_URL:
            self._refuse(errors.url_too_long(MAX_URL))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # a trailer, dropped as an intermediary may; or priming
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._max_header:
            self._refuse(errors.header_too_large(self._max_header))
        lower = name.lower()
        if lower in _LOOKED_AT:
            if lower == b"host":
                self._hosts += 1
            elif lower != b"content-length":
                self._special.append((lower, value))
                self._chunked = self._chunked or lower == b"transfer-encoding"
            elif len(value) > 20:
                self._refuse(errors.bad_request("malformed Content-Length"))
            else:
                self._length = int(value)  # the parser has seen to it that these are digits
        self._fields.append((lower, name, value))

    def on_headers_complete(self) -> None:
        if self._priming:
            return
        self.in_head = False
        self.place += 1
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(errors.bad_request("only HTTP/1.0 and HTTP/1.1 are spoken here"))
        method = parser.get_method()
        keep_alive = parser.should_keep_alive()
        request = Request(method, http11=version == "1.1", keep_alive=keep_alive, fields=self._fields)
        try:
            expects = self._look_at(request)
            request.admitted = self._admit(method, self._target, self._fields)
        except Problem as problem:
            if self._has_body or problem.status == 400 or method == b"CONNECT":
                self._refuse(problem)  # what follows is not wanted, or not to be trusted
            request.problem = problem
        else:
            self.continue_due = expects
        self._request = request

    def on_body(self, body: bytes) -> None:
        self.place += 1
        if len(self._body) + len(body) > self._max_body:
            self._refuse(errors.body_too_large(self._max_body))
        if not self._body:
            self._body = body
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)  # a list of pieces would cost many times what tiny pieces hold
        self._body += body

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or (self._parser.should_upgrade() and self._has_body):
            return  # the body follows: see _ignore_upgrade
        request.body = bytes(self._body)
        self._body = b""
        self._request = None
        self.in_message = self.continue_due = False
        if not self.deaf:
            self.requests.append(request)
            self.deaf = not request.keep_alive

    @property
    def _has_body(self) -> bool:
        return self._chunked or bool(self._length)

    def _look_at(self, request: Request) -> bool:
        """Refuse what cannot be framed or forwarded safely, beyond what the parser refuses.

        Returns whether the client waits for ``100 Continue``.
        """
        encoded = expects = False
        for lower, value in self._special:
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
        if self._length is not None and self._length > self._max_body:
            raise errors.body_too_large(self._max_body)
        if encoded and self._has_body:
            raise errors.compressed_body()
        return expects and request.http11 and self._has_body

    def _refuse(self, problem: Problem) -> None:
        self.problem = problem
        raise _Refused


__all__ = ["Request", "RequestReader"]
