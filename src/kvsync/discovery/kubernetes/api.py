"""The Kubernetes API server: where it is, what it is shown, and what comes back, within bounds.

What must always hold: a request waits no longer than it was given; an answer is read no further than its bound; the
token is sent to the configured server only (no redirect is followed) and stands in no error. Whatever goes wrong is a
:class:`Trouble` that says what to mend, never another exception.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import aiohttp
import msgspec

from kvsync.config.access import EngineTlsSettings
from kvsync.config.addresses import Address, BadAddress, http_address
from kvsync.config.credentials import BadFile, client_context
from kvsync.config.discovery import KubernetesSettings
from kvsync.config.live import Live
from kvsync.discovery.access import in_a_line

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's token, the cluster's authorities and the pod's namespace."""
MAX_ERROR_BYTES: Final = 16 << 10
MAX_TOKEN_BYTES: Final = 64 << 10
LONGEST_RETRY_AFTER: Final = 60.0

Reason: TypeAlias = Literal[
    "credentials",
    "unreachable",
    "timeout",
    "cut",
    "unauthorized",
    "forbidden",
    "throttled",
    "server_error",
    "status",
    "too_large",
    "too_many",
    "garbage",
]


class Trouble(Exception):
    """What was asked for could not be had; ``reason`` is for counting.

    Args:
        after: seconds that the server asked to wait, if it did.
    """

    def __init__(self, reason: Reason, text: str, after: float = 0.0) -> None:
        super().__init__(text)
        self.reason: Reason = reason
        self.after = after


class Expired(Exception):
    """The place in the history that was asked for is not kept any more (410)."""


class _Status(msgspec.Struct):
    message: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """An API server, and what belongs to it."""

    url: str
    """Without a slash at the end."""
    token_file: Path | None
    ca_file: Path | None
    namespaces: tuple[str, ...]
    """Of the settings, the own one filled in."""


def place(settings: KubernetesSettings, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> Place:
    """Where the API server is: as configured, else that of the cluster that this process runs in.

    Raises:
        BadFile: neither is there; or the pod's own files, where they are needed, are not.
    """
    configured = Place(settings.api_server or "", settings.token_file, settings.ca_file, settings.namespaces)
    if settings.api_server is not None:
        return configured
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise BadFile(
            "api_server",
            "kubernetes.enabled is set, and this is no pod (there is no KUBERNETES_SERVICE_HOST)",
            "run it in the cluster, or set kubernetes.api_server with token_file, ca_file and namespaces",
        )
    try:
        url = str(http_address(str(Address("https", host.strip("[]"), int(port)))))
    except (BadAddress, ValueError) as bad:
        mend = "set kubernetes.api_server"
        raise BadFile("api_server", f"KUBERNETES_SERVICE_HOST and _PORT are no address: {bad}", mend) from None
    found = replace(
        configured,
        url=url,
        token_file=settings.token_file or account / "token",
        ca_file=settings.ca_file or account / "ca.crt",
    )
    return found if found.namespaces else replace(found, namespaces=(_own_namespace(account / "namespace"),))


def _own_namespace(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(
            "namespaces",
            f"the pod's own namespace is not known: {file}: {error}",
            "name the namespaces (kubernetes.namespaces), or let the pod have its service account's token",
        ) from None


class ApiServer:
    """Asks one API server. Use it as an asynchronous context manager.

    Args:
        connect_timeout: seconds for a connection.
        answer_timeout: seconds until an answer begins, and for all of an answer that :meth:`get` reads.
        connections: open at once.

    Raises:
        BadFile: the authorities can't be read.
    """

    def __init__(
        self, where: Place, connect_timeout: float, answer_timeout: float, connections: int, agent: str = "kvsync"
    ) -> None:
        self._base = where.url
        self._token_file = where.token_file
        self._timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=connect_timeout)
        self._answer_timeout = answer_timeout
        self._connections = connections
        self._agent = agent
        self.authorities: Live[ssl.SSLContext] | None = None
        """Of ``https``; whoever has the time has it look at its file."""
        if where.url.startswith("https://"):
            tls = EngineTlsSettings(ca=where.ca_file)
            self.authorities = Live("the API server's authorities", lambda: _context(tls), [where.ca_file])
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return self._base

    async def __aenter__(self) -> ApiServer:
        # What comes back is not kept to be sent again, nor unpacked: a small body could become a huge one.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "Accept": "application/json", "User-Agent": self._agent},
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, query: Mapping[str, str], limit: int) -> bytes:
        """The body of a 200, of at most ``limit`` bytes.

        Raises:
            Expired: status 410.
            Trouble: no such body.
        """
        try:
            async with asyncio.timeout(self._answer_timeout), self._open(path, query, None) as response:
                return await _read(response, limit)
        except TimeoutError:
            raise Trouble("timeout", f"{self._base} does not answer in {self._answer_timeout:g} s") from None

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """The pieces of a 200's body as they come. How long that may last is for the caller to say.

        Raises:
            Expired: status 410.
            Trouble: no such answer, or one that broke off.
        """
        async with self._open(path, query, self._answer_timeout) as response:
            yield response.content.iter_any()

    @asynccontextmanager
    async def _open(
        self, path: str, query: Mapping[str, str], patience: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        headers = await self._authorization()
        ssl_context = self.authorities.value if self.authorities is not None else True
        try:
            async with asyncio.timeout(patience):
                response = await self._session.get(
                    self._base + path,
                    params=query,
                    headers=headers,
                    ssl=ssl_context,
                    timeout=self._timeout,
                    allow_redirects=False,
                )
        except TimeoutError:
            raise Trouble("timeout", f"{self._base} does not answer in time") from None
        except aiohttp.ClientConnectorCertificateError as error:
            text = f"{self._base} shows a certificate that kubernetes.ca_file does not vouch for: {in_a_line(error)}"
            raise Trouble("credentials", text) from None
        except aiohttp.ClientResponseError as error:
            raise Trouble("garbage", f"what answers at {self._base} is no HTTP: {in_a_line(error.message)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Trouble("unreachable", f"{self._base} can't be reached: {in_a_line(error)}") from None
        try:
            if response.status != 200:
                raise await _refusal(response)
            yield response
        except (aiohttp.ClientError, OSError) as error:
            raise Trouble("cut", f"an answer of {self._base} broke off: {in_a_line(error)}") from None
        finally:
            response.close()

    async def _authorization(self) -> Mapping[str, str]:
        file = self._token_file
        if file is None:
            return {}
        return {"Authorization": f"Bearer {await asyncio.to_thread(_token, file)}"}


def _token(file: Path) -> str:
    try:
        with open(file, "rb", opener=_without_waiting) as stream:
            token = (stream.read(MAX_TOKEN_BYTES + 1) or b"").strip()
    except OSError as error:
        raise Trouble(
            "credentials", f"kubernetes.token_file: {file} can't be read: {error.strerror or error}"
        ) from None
    if not token or len(token) > MAX_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):
        raise Trouble("credentials", f"kubernetes.token_file: {file} holds no token")
    return token.decode()


def _without_waiting(file: str, flags: int) -> int:
    """A pipe that nobody writes to would keep a thread for good."""
    return os.open(file, flags | os.O_NONBLOCK)


def _context(tls: EngineTlsSettings) -> ssl.SSLContext:
    try:
        return client_context(tls)
    except BadFile as bad:
        raise BadFile("ca_file", f"kubernetes.ca_file: {bad}", bad.mend) from None


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            raise Trouble("too_large", f"an answer has more than {limit} bytes")
    return bytes(body)


_REFUSALS: Final[Mapping[int, tuple[Reason, str]]] = {
    401: ("unauthorized", "the token is not accepted"),
    403: ("forbidden", "its account needs a Role with list and watch of pods"),
    429: ("throttled", "it asks for fewer requests"),
}


async def _refusal(response: aiohttp.ClientResponse) -> Exception:
    status = response.status
    if status == 410:
        return Expired()
    try:
        async with asyncio.timeout(2.0):
            said = msgspec.json.decode(await _read(response, MAX_ERROR_BYTES), type=_Status).message
    except (Trouble, TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, ValueError, RecursionError):
        said = ""
    reason, mend = _REFUSALS.get(status, ("server_error" if status >= 500 else "status", ""))
    parts = [f"the API server answers {status}", *([in_a_line(said)] if said else []), *([f"({mend})"] if mend else [])]
    return Trouble(reason, ": ".join(parts[:2]) + "".join(f" {part}" for part in parts[2:]), _after(response))


def _after(response: aiohttp.ClientResponse) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER) if text.isascii() and text.isdecimal() and len(text) < 6 else 0.0


__all__ = ["SERVICE_ACCOUNT", "ApiServer", "Expired", "Place", "Reason", "Trouble", "place"]
