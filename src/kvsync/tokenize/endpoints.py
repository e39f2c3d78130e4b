"""Servers that answer one kind of question about requests: one service, or the engines of the model themselves.

Endpoints are shared evenly (fewest calls under way first) and each has a breaker. A call that fails by the endpoint's
fault is tried again, elsewhere where there is an elsewhere, until the tries or the caller's patience end; a refusal
(another status below 500) is final and says nothing about the endpoint. Answers are foreign input: their size is
bounded by the question's, and whoever reads them checks them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import aiohttp

from kvsync.breaker import Breaker
from kvsync.config import RemoteTokenizerSettings
from kvsync.discovery.access import EngineAccess
from kvsync.tokenize.errors import RemoteFailed
from kvsync.tokenize.pool import BoundedPool

T = TypeVar("T")

LARGE: Final = 256 << 10
"""JSON beyond this many bytes is read and written in the pool."""
_RETRIED: Final = frozenset({408, 429, 500, 502, 503, 504})
_KEEPALIVE: Final = 4.0
"""Idle connections are dropped before the engines drop them (at 5 s)."""
_BACKOFF: Final = 0.05
"""Before a second try of the same endpoint; doubled each time."""
_LARGEST_TOKEN: Final = 32
"""Bytes of JSON that one byte of a question may become in the answer: a token has at most 10 digits and a comma, and
templates add to a text rather than multiply it."""


class BadAnswer(Exception):
    """An answer that can't be: it counts as the endpoint's failure."""


class Retried(Exception):
    """A failure by the endpoint's fault: it counts for the breaker, and is tried again."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Route(Generic[T]):
    """One kind of question."""

    path: str
    decode: Callable[[bytes], T]
    """Reads an answer. Raises BadAnswer."""
    smallest_limit: int
    """Bytes of an answer that are read however short the question was."""
    missing: frozenset[int] = frozenset()
    """Statuses by which a server says that it does not serve this route: it rests at once."""


class Endpoint:
    """One server."""

    __slots__ = ("breaker", "url", "waiting")

    def __init__(self, url: str, breaker: Breaker) -> None:
        self.url = url
        self.breaker = breaker
        self.waiting = 0


class Endpoints(Generic[T]):
    """Those that answer one route. Used from one event loop, between :meth:`start` and :meth:`close`.

    ``engines`` gives the base URLs of the engines that serve a (base) model now; ``access`` is how they and the service
    are spoken to (the name in the engines' certificates apart, which is not that of a service).
    """

    def __init__(
        self,
        route: Route[T],
        settings: RemoteTokenizerSettings,
        engines: Callable[[str], Sequence[str]],
        pool: BoundedPool,
        *,
        access: EngineAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._route = route
        self._settings = settings
        self._access = access or EngineAccess()
        self._engines = engines
        self._pool = pool
        self._clock = clock
        self._endpoints: dict[str, dict[str, Endpoint]] = {}
        self._turn = 0
        self._session: aiohttp.ClientSession | None = None
        self._failures: Counter[str] = Counter()
        self._calls = self._retries = self._answers = 0
        self._gone_openings = 0

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._settings.connections, keepalive_timeout=_KEEPALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, body: bytes, model: str) -> T:
        """The answer to one question, by any endpoint for ``model``.

        Raises:
            RemoteFailed: nobody answered; the last failure's cause. ``reason`` is ``invalid_request`` when an endpoint
                refused the question.
            QueueFull: a large answer found no thread.
        """
        tried: set[str] = set()
        failed: RemoteFailed | None = None
        for attempt in range(self._settings.retries + 1):
            endpoint = self._pick(model, tried)
            if endpoint is None:
                raise failed or self._count(RemoteFailed("no_endpoint", "none is known, or all rest after failures"))
            if attempt:
                self._retries += 1
                if endpoint.url in tried:
                    await asyncio.sleep(_BACKOFF * 2 ** (attempt - 1))
            tried.add(endpoint.url)
            try:
                return await self._call(endpoint, body)
            except Retried as error:
                failed = self._count(RemoteFailed(error.cause, error.detail))
        assert failed is not None
        raise failed

    async def _call(self, endpoint: Endpoint, body: bytes) -> T:
        """One try, with the endpoint's breaker told how it went."""
        self._calls += 1
        endpoint.breaker.begin()
        endpoint.waiting += 1
        try:
            answer = await self._exchange(endpoint.url, body)
        except _Missing:
            endpoint.breaker.trip()
            raise
        except Retried:
            endpoint.breaker.failure()
            raise
        except BaseException:
            endpoint.breaker.release()
            raise
        else:
            endpoint.breaker.success()
            self._answers += 1
            return answer
        finally:
            endpoint.waiting -= 1

    async def _exchange(self, url: str, body: bytes) -> T:
        assert self._session is not None, "start() comes first"
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout, sock_connect=self._settings.connect_timeout)
        try:
            async with self._session.post(
                url + self._route.path,
                data=body,
                timeout=timeout,
                allow_redirects=False,
                **self._access.arguments(url, named=self._settings.endpoint == "engines"),
            ) as response:
                if response.status != 200:
                    await self._refuse(response)
                raw = await _read(response, max(self._route.smallest_limit, len(body) * _LARGEST_TOKEN))
        except TimeoutError as error:
            raise Retried("timeout", url) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Retried("connect", f"{url}: {error}") from error
        decode = self._route.decode
        try:
            return await self._pool.run(decode, raw) if len(raw) > LARGE else decode(raw)
        except BadAnswer as error:
            raise Retried("bad_answer", str(error)) from error

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        cause = f"status_{status}"
        if status in self._route.missing:
            raise _Missing(cause, str(response.url))
        if status in _RETRIED or not 400 <= status < 500:
            raise Retried(cause, str(response.url))
        text = (await response.content.read(1024)).decode("utf-8", "replace")
        reason = "invalid_request" if status in (400, 422) else "tokenizer_failed"
        raise self._count(RemoteFailed(cause, text, reason=reason))

    def _count(self, failed: RemoteFailed) -> RemoteFailed:
        self._failures[failed.cause] += 1
        return failed

    # --- endpoints

    def _pick(self, model: str, tried: set[str]) -> Endpoint | None:
        ready = [endpoint for endpoint in self._known(model) if endpoint.breaker.permits]
        ready = [endpoint for endpoint in ready if endpoint.url not in tried] or ready
        if not ready:
            return None
        self._turn += 1
        fewest = min(endpoint.waiting for endpoint in ready)
        idle = [endpoint for endpoint in ready if endpoint.waiting == fewest]
        return idle[self._turn % len(idle)]

    def _known(self, model: str) -> Sequence[Endpoint]:
        if self._settings.endpoint == "engines":
            urls: Sequence[str] = self._engines(model)
        else:
            urls = [self._settings.endpoint.rstrip("/")] if self._settings.endpoint else []
            model = ""
        known = self._endpoints.get(model, {})
        if known.keys() != set(urls):
            self._gone_openings += sum(gone.breaker.openings for url, gone in known.items() if url not in urls)
            known = {url: known.get(url) or self._new(url) for url in urls}
            self._endpoints[model] = known
        return list(known.values())

    def _new(self, url: str) -> Endpoint:
        return Endpoint(url, Breaker(self._settings.breaker_failures, self._settings.breaker_rest, self._clock))

    def stats(self) -> dict[str, Any]:
        endpoints = [endpoint for known in self._endpoints.values() for endpoint in known.values()]
        return {
            "calls": self._calls,
            "answers": self._answers,
            "retries": self._retries,
            "failures": dict(self._failures),
            "endpoints": {
                endpoint.url: {
                    "breaker": endpoint.breaker.state,
                    "openings": endpoint.breaker.openings,
                    "waiting": endpoint.waiting,
                }
                for endpoint in endpoints
            },
            "active": sum(endpoint.breaker.state == "closed" for endpoint in endpoints),
            "taken_out": self._gone_openings + sum(endpoint.breaker.openings for endpoint in endpoints),
        }


class _Missing(Retried):
    """The endpoint has no such route."""


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, whatever length it declares; a longer one than ``limit`` is not read on."""
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > limit:
            response.close()
            raise Retried("too_large", f"more than {limit} bytes")
    return bytes(raw)


__all__ = ["LARGE", "BadAnswer", "Endpoint", "Endpoints", "Retried", "Route"]
