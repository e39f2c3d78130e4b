"""Addresses as people write them, checked and brought into the one form that the other rooms rely on.

An address says which machine to talk to and nothing else: user names, paths and "any interface" hosts are refused,
since each of them is a sign that something else was meant.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

_HOST = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?"
)
_DEFAULT_PORT = {"http": 80, "https": 443, "tcp": None}


class Address(NamedTuple):
    scheme: str
    host: str
    """Lower case, without brackets."""
    port: int
    path: str = ""

    @property
    def numeric(self) -> bool:
        """Whether the host is an IP address, which no name server needs to be asked for."""
        return _ip(self.host) is not None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


class RedisAddress(NamedTuple):
    tls: bool
    nodes: tuple[tuple[str, int], ...]
    """Hosts (without brackets) and ports."""
    db: int

    def __str__(self) -> str:
        nodes = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        return f"{'rediss' if self.tls else 'redis'}://{nodes}" + (f"/{self.db}" if self.db else "")


class BadAddress(ValueError):
    """An address that can't be used; ``mend`` says what to write instead."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


class BadPath(ValueError):
    """A request path that can't be used; ``mend`` says what to write instead."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


def api_path(text: str) -> str:
    """A request path in the one spelling that it has once its slashes and dots are resolved.

    Raises:
        BadPath: it has another one, or is none.
    """
    spelt = "/" + "/".join(part for part in text.split("/") if part)
    if not text.startswith("/") or text != spelt or text == "/" or {".", ".."} & set(text.split("/")):
        mend = "write it like /v1/score: no empty part, no . and .., no / at the end"
        raise BadPath(f"{text!r} is not a path as it arrives", mend)
    return text


def http_address(text: str, *, path_allowed: bool = False) -> Address:
    """``http[s]://host[:port]``, with the scheme's port filled in and no trailing slash.

    Raises:
        BadAddress: anything else.
    """
    return _parse(text, ("http", "https"), path_allowed)


def tcp_address(text: str) -> Address:
    """``tcp://host:port``, the form of ZMQ endpoints; IPv6 in brackets.

    Raises:
        BadAddress: anything else.
    """
    return _parse(text, ("tcp",), False)


def redis_address(text: str) -> RedisAddress:
    """``redis[s]://host[:port][,host[:port]…][/db]``, with the port 6379 filled in.

    Raises:
        BadAddress: anything else. The text never holds what stands before an @.
    """
    mend = "write redis://host:6379, or rediss://host:6379 for TLS; several host:port with commas between"
    scheme, separator, rest = text.partition("://")
    if "@" in text:
        raise BadAddress(
            "the address carries a user name or password",
            "remove everything up to the @: redis.username, redis.password_file and redis.password have their place",
        )
    if not separator or scheme not in ("redis", "rediss"):
        raise BadAddress(f"{text!r} does not begin with redis:// or rediss://", mend)
    hosts, slash, db = rest.partition("/")
    if slash and db and not (db.isascii() and db.isdigit() and len(db) <= 5):
        raise BadAddress(f"{text!r} does not end with the number of a database", "write redis://host:6379/0")
    nodes = []
    for each in hosts.split(","):
        # Judged as an endpoint: the rules for hosts are the same.
        port = "" if ":" in each.rpartition("]")[2] else ":6379"
        found = _parse(f"tcp://{each}{port}", ("tcp",), False)
        nodes.append((found.host, found.port))
    return RedisAddress(scheme == "rediss", tuple(nodes), int(db or 0))


def _parse(text: str, schemes: tuple[str, ...], path_allowed: bool) -> Address:
    example = f"{schemes[0]}://host:{'5557' if schemes == ('tcp',) else '8000'}"
    mend = f"write {example}; an IPv6 address stands in brackets"
    # urlsplit silently drops tabs and newlines and accepts blanks: "what you see" would not be "what is dialled".
    if not text or any(c.isspace() or not c.isprintable() for c in text):
        raise BadAddress(f"{text!r} is not an address", mend)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadAddress(f"{text!r} is not an address: {error}", mend) from None
    if parts.scheme not in schemes or not text[len(parts.scheme) :].startswith("://"):
        raise BadAddress(f"{text!r} does not begin with {' or '.join(s + '://' for s in schemes)}", mend)
    if "@" in parts.netloc:
        raise BadAddress("the address carries a user name or password", "remove everything up to the @")
    if not host:
        raise BadAddress(f"{text!r} names no host", mend)
    if "?" in text or "#" in text:
        raise BadAddress(f"{text!r} carries a query or fragment", mend)
    path = parts.path.rstrip("/")
    if path and not path_allowed:
        raise BadAddress(f"{text!r} carries a path", f"remove {path!r}: paths are added by the gateway")
    if port is None:
        port = _DEFAULT_PORT[parts.scheme]
    if not port:
        raise BadAddress(f"{text!r} names no port", mend)
    return Address(parts.scheme, _host(host, text), port, path)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _host(host: str, text: str) -> str:
    """The host, known to be one that can be dialled."""
    if host == "*":
        raise BadAddress(
            f"{text!r} is what an engine listens on, not where it can be reached",
            "give the engine's own host name or address",
        )
    address = _ip(host)
    if address is None:
        if not _HOST.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
            raise BadAddress(f"{host!r} is neither a host name nor an IP address", "correct the host")
        return host.lower()
    if address.is_unspecified:
        raise BadAddress(
            f"{host!r} means any address and can't be dialled", "give the engine's own host name or address"
        )
    if address.is_multicast:
        raise BadAddress(f"{host!r} is a multicast address", "give the engine's own host name or address")
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        raise BadAddress(f"{host!r} has a zone", "use an address that needs no zone")
    return str(address)


def loopback(host: str) -> bool:
    """Whether a host (without brackets) is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


__all__ = [
    "Address",
    "BadAddress",
    "BadPath",
    "RedisAddress",
    "api_path",
    "http_address",
    "loopback",
    "redis_address",
    "tcp_address",
]
