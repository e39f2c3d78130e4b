"""Which header fields pass, in which direction, and which are the gateway's own.

What must always hold: a client can neither choose its target nor its data-parallel rank, no hop-by-hop field crosses,
and the gateway's own fields appear once. Values are those that the parser let through: no CR, LF or NUL is in them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from random import getrandbits
from typing import TypeAlias

Field: TypeAlias = tuple[bytes, bytes, bytes]
"""A header field: its name in lower case, its name as sent, its value."""

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
_TARGETING = frozenset({b"target-pod", b"target-pod-ip", b"x-gateway-destination-endpoint", b"x-data-parallel-rank"})
_REWRITTEN = frozenset({b"host", b"content-length", b"expect", b"x-request-id", b"request-id"})
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect"})
_REQUEST_DROPPED = _HOP_BY_HOP | _TARGETING | _REWRITTEN
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
"""Fields in which clients send keys."""
_ANSWER_DROPPED = _HOP_BY_HOP | _TARGETING | {b"content-length", b"request-id", b"routing-strategy", b"x-kvsync-match"}
_ALONE = frozenset({b"close", b"keep-alive", b"upgrade"})
"""Values of ``Connection`` that name no field that would pass otherwise."""
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._-]{1,128}\Z")
_LONGEST = 64
"""No name that means something is longer; such names are not remembered, for they come from clients."""
_PASSES, _DROPPED, _CREDENTIAL, _WISH, _REQUEST_ID, _CONNECTION = range(6)


@lru_cache(4096)
def _kind(lower: bytes) -> int:
    """What becomes of a request's field of this name."""
    # To some servers (those on CGI's variables) an underscore is a dash, but here it is no way to say anything.
    dashed = lower.replace(b"_", b"-")
    if dashed in CREDENTIALS:
        return _CREDENTIAL
    if dashed != lower:
        return _DROPPED if dashed in _REQUEST_DROPPED else _PASSES
    if lower == b"request-id":
        return _REQUEST_ID
    if lower == b"connection":
        return _CONNECTION
    if lower in _REQUEST_DROPPED:
        return _DROPPED
    return _WISH if lower in (b"routing-strategy", b"external-filter") else _PASSES


class Wishes:
    """What a client's header fields ask of the gateway, and what of them an engine may see.

    ``credentials_pass`` is for gateways that neither check keys nor have one for the engines.
    """

    __slots__ = ("forwarded", "label_filter", "policy", "request_id")

    forwarded: list[bytes]
    """The fields that pass, each as ``name: value CRLF``."""
    request_id: bytes
    """The client's own where it is well-formed and single, else a new one."""
    policy: str | None
    """The first ``routing-strategy``."""
    label_filter: str | None
    """The first ``external-filter``."""

    def __init__(self, fields: list[Field], *, credentials_pass: bool = True) -> None:
        self.policy = self.label_filter = None
        request_ids: list[bytes] = []
        passing: list[Field] = []
        named: set[bytes] = set()
        for field in fields:
            kind = _kind(field[0]) if len(field[0]) <= _LONGEST else _PASSES
            if kind == _PASSES or (kind == _CREDENTIAL and credentials_pass):
                passing.append(field)
            elif kind == _WISH:
                passing.append(field)
                if field[0] == b"routing-strategy":
                    self.policy = self.policy or _text(field[2])
                else:
                    self.label_filter = self.label_filter or _text(field[2])
            elif kind == _REQUEST_ID:
                request_ids.append(field[2].strip())
            elif kind == _CONNECTION:
                named |= _named(field[2])
        self.forwarded = [b"%b: %b\r\n" % (name, value) for lower, name, value in passing if lower not in named]
        if len(request_ids) == 1 and _WELL_FORMED.match(request_ids[0]):
            self.request_id = request_ids[0]
            self.forwarded.append(b"request-id: %b\r\n" % self.request_id)
        else:
            self.request_id = _new_request_id()

    def take_plain(self) -> None:
        """Let the engine not compress its answer."""
        self.forwarded = [line for line in self.forwarded if not line.lower().startswith(b"accept-encoding:")]


def withheld(fields: list[Field], *, credentials_pass: bool = True) -> list[str]:
    """The names, in lower case, that an engine must not see, for whom somebody else frames and forwards the request:
    what is about that one's own connections is its own business."""
    return [
        lower.decode("latin-1")
        for lower, _, _ in fields
        if len(lower) <= _LONGEST
        and lower not in _FRAMING
        and ((kind := _kind(lower)) == _DROPPED or (kind == _CREDENTIAL and not credentials_pass))
    ]


def answer_fields(fields: list[Field]) -> list[bytes]:
    """An engine's fields that pass to the client, each as ``name: value CRLF``; framing is left to the connection."""
    named: set[bytes] = set()
    passing = []
    for field in fields:
        if field[0] not in _ANSWER_DROPPED:
            passing.append(field)
        elif field[0] == b"connection":
            named |= _named(field[2])
    return [b"%b: %b\r\n" % (name, value) for lower, name, value in passing if lower not in named]


@lru_cache(1024)
def printable(name: str) -> bytes:
    """A name as a header value: what is not printable ASCII becomes ``?``."""
    return bytes(ord(char) if " " <= char <= "~" else 0x3F for char in name)


def is_event_stream(fields: list[Field]) -> bool:
    """Whether an answer's body is a stream of server-sent events, as it stands (not compressed)."""
    stream = False
    for lower, _, value in fields:
        if lower == b"content-type":
            stream = value.partition(b";")[0].strip().lower() == b"text/event-stream"
        elif lower == b"content-encoding" and value.strip().lower() != b"identity":
            return False
    return stream


def _new_request_id() -> bytes:
    """A version 4 UUID. Nobody's safety rests on it, so it need not cost a call of the kernel."""
    bits = b"%032x" % (getrandbits(128) & ~(0xF << 76 | 0x3 << 62) | (0x4 << 76 | 0x2 << 62))
    return b"%b-%b-%b-%b-%b" % (bits[:8], bits[8:12], bits[12:16], bits[16:20], bits[20:])


def _named(connection: bytes) -> set[bytes]:
    """The fields that a ``Connection`` value names, in lower case: they are hop-by-hop like it."""
    lower = connection.strip().lower()
    return set() if lower in _ALONE else {token.strip() for token in lower.split(b",")}


def _text(value: bytes) -> str | None:
    return value.decode("latin-1").strip() or None


__all__ = ["CREDENTIALS", "Field", "Wishes", "answer_fields", "is_event_stream", "printable", "withheld"]
