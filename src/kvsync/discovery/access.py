"""How engines are spoken to over HTTP: with which key and which TLS. The same for requests that are proxied and for
every question of the gateway's own (tokens, event sources, metrics).

What must always hold: a client's credentials have no part in it. Engines are foreign: whatever a page of theirs holds,
fetching it raises nothing but :class:`NoPage`, follows no redirect, and takes a bounded time and space.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, TypeAlias

import aiohttp

from kvsync.config import GatewaySettings
from kvsync.config.credentials import client_context, secret
from kvsync.config.live import Live


class EngineAccess:
    """What an engine is shown, and what it must show.

    Args:
        key: the engines' API key now, or ``None``.
        tls: the context for ``https`` URLs now.
        server_name: the name in the engines' certificates where it is not their URL's host.
    """

    def __init__(
        self,
        *,
        key: Callable[[], str | None] = lambda: None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        server_name: str | None = None,
    ) -> None:
        self._key = key
        self._tls = tls
        self.server_name = server_name

    @property
    def authorization(self) -> str | None:
        """The value of the ``Authorization`` header, or ``None``: none is sent."""
        key = self._key()
        return None if key is None else f"Bearer {key}"

    @property
    def tls(self) -> ssl.SSLContext:
        return self._tls() if self._tls is not None else self._system

    @cached_property
    def _system(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def arguments(self, url: str, *, named: bool = True) -> dict[str, Any]:
        """Keyword arguments for a request by aiohttp. ``named``: ``server_name`` is true of this server."""
        authorization = self.authorization
        arguments: dict[str, Any] = {} if authorization is None else {"headers": {"Authorization": authorization}}
        if url.startswith("https://"):
            arguments["ssl"] = self.tls
            if named and self.server_name is not None:
                arguments["server_hostname"] = self.server_name
        return arguments


def live_access(settings: GatewaySettings) -> tuple[EngineAccess, tuple[Live[Any], ...]]:
    """The access that the settings describe, and what has to be looked at for it to follow changed files.

    Raises:
        BadFile: a file can't be used.
    """
    given, file, tls = settings.engine_api_key, settings.engine_api_key_file, settings.engine_tls
    key = Live("the engines' API key", lambda: secret(given, file, "engine_api_key_file"), [file])
    context = Live("TLS towards engines", lambda: client_context(tls), [tls.ca, tls.cert, tls.key])
    access = EngineAccess(key=lambda: key.value, tls=lambda: context.value, server_name=tls.server_name)
    return access, (key, context)


Reason: TypeAlias = Literal["unreachable", "timeout", "status", "too_large"]


class NoPage(Exception):
    """A page that should be there could not be had; ``reason`` is for counting."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


async def fetch(
    session: aiohttp.ClientSession, access: EngineAccess, base: str, path: str, limit: int, patience: float
) -> bytes | None:
    """The body of a page of at most ``limit`` bytes, within ``patience`` seconds; ``None``: there is no such page.

    Raises:
        NoPage: no answer, a server error, no admittance, or too much.
    """
    try:
        timeout = aiohttp.ClientTimeout(total=patience)
        arguments = access.arguments(base)
        async with session.get(base + path, timeout=timeout, allow_redirects=False, **arguments) as response:
            if response.status in (401, 403):
                raise NoPage("status", f"GET {path}: status {response.status} (see gateway.engine_api_key)")
            if response.status >= 500:
                raise NoPage("status", f"GET {path}: status {response.status}")
            if response.status != 200:
                return None
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > limit:
                    raise NoPage("too_large", f"GET {path}: more than {limit} bytes")
            return bytes(body)
    except TimeoutError:
        raise NoPage("timeout", f"GET {path}: no answer in {patience:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise NoPage("unreachable", f"GET {path}: {in_a_line(error)}") from None


def in_a_line(said: object) -> str:
    """What may hold anything that a foreign server sent, for a log or a page: one line, no longer than a sentence."""
    text = "".join(c if c.isprintable() else " " for c in str(said)[:300])
    return " ".join(text.split()) or type(said).__name__


__all__ = ["EngineAccess", "NoPage", "Reason", "fetch", "in_a_line", "live_access"]
