"""Tokenizing by a vLLM server's ``/tokenize``: one service, or the engines of the model themselves.

Endpoints are shared evenly (fewest calls under way first) and each has a breaker. A call that fails by the endpoint's
fault is tried again, elsewhere where there is an elsewhere, until the tries or the caller's patience end; a refusal
(another status below 500) is final and says nothing about the endpoint. Answers are foreign input: their size is
bounded by the question's, their types are checked, and a count that differs from the tokens is a failure.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from kvsync.config import RemoteTokenizerSettings
from kvsync.tokenize.breaker import Breaker
from kvsync.tokenize.errors import RemoteFailed, Untokenized
from kvsync.tokenize.pool import BoundedPool
from kvsync.tokenize.request import Chat, Text, Work

LARGE: Final = 256 << 10
"""JSON beyond this many bytes is read and written in the pool."""
_RETRIED: Final = frozenset({408, 429, 500, 502, 503, 504})
_KEEPALIVE: Final = 4.0
"""Idle connections are dropped before the engines drop them (at 5 s)."""
_PROBED: Final = 8
"""Endpoints that one probe asks."""
_BACKOFF: Final = 0.05
"""Before a second try of the same endpoint; doubled each time."""
_LARGEST_TOKEN: Final = 32
"""Bytes of JSON that one byte of a question may become in the answer: a token has at most 10 digits and a comma, and
templates add to a text rather than multiply it."""
_SMALLEST_LIMIT: Final = 1 << 20


class _Answer(msgspec.Struct):
    tokens: list[int]
    count: int | None = None
    max_model_len: int | None = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class RemoteTokens:
    tokens: bytes
    """Packed native-endian uint32."""
    max_model_len: int | None


def question(work: Work, name: str) -> bytes:
    """The body of the ``/tokenize`` request that stands for ``work``, asked for the model or adapter ``name``.

    It holds every field that affects the tokens, so it is their key, too.

    Raises:
        Untokenized: the request can't be written as JSON (lone surrogates, nested too deep).
    """
    body: dict[str, Any]
    if isinstance(work, Text):
        body = {"model": name, "prompt": work.text, "add_special_tokens": work.add_special_tokens}
    else:
        body = _chat_body(work, name)
    try:
        return msgspec.json.encode(body)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Untokenized("invalid_request", type(error).__name__) from error


def _chat_body(chat: Chat, name: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": name,
        "messages": chat.messages,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "add_special_tokens": chat.add_special_tokens,
    }
    if chat.tools is not None:
        body["tools"] = chat.tools
    if chat.template is not None:
        body["chat_template"] = chat.template
    if chat.kwargs:
        body["chat_template_kwargs"] = chat.kwargs
    return body


class _Endpoint:
    __slots__ = ("breaker", "url", "waiting")

    def __init__(self, url: str, breaker: Breaker) -> None:
        self.url = url
        self.breaker = breaker
        self.waiting = 0


class RemoteTokenizer:
    """The pool of tokenizing endpoints. Used from one event loop, between :meth:`start` and :meth:`close`."""

    def __init__(
        self,
        settings: RemoteTokenizerSettings,
        engines: Callable[[str], Sequence[str]],
        pool: BoundedPool,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._pool = pool
        self._clock = clock
        self._endpoints: dict[str, dict[str, _Endpoint]] = {}
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

    async def ask(self, body: bytes, model: str) -> RemoteTokens:
        """The tokens of one question, by any endpoint that tokenizes for ``model``.

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
            except _Retried as error:
                failed = self._count(RemoteFailed(error.cause, error.detail))
        assert failed is not None
        raise failed

    async def _call(self, endpoint: _Endpoint, body: bytes) -> RemoteTokens:
        """One try, with the endpoint's breaker told how it went."""
        self._calls += 1
        endpoint.breaker.begin()
        endpoint.waiting += 1
        try:
            answer = await self._exchange(endpoint.url, body)
        except _Retried:
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

    async def _exchange(self, url: str, body: bytes) -> RemoteTokens:
        assert self._session is not None, "start() comes first"
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout, sock_connect=self._settings.connect_timeout)
        try:
            async with self._session.post(
                f"{url}/tokenize", data=body, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    await self._refuse(response)
                raw = await _read(response, max(_SMALLEST_LIMIT, len(body) * _LARGEST_TOKEN))
        except TimeoutError as error:
            raise _Retried("timeout", url) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Retried("connect", f"{url}: {error}") from error
        return await self._pool.run(_decode, raw) if len(raw) > LARGE else _decode(raw)

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        cause = f"status_{status}"
        if status in _RETRIED or not 400 <= status < 500:
            raise _Retried(cause, str(response.url))
        text = (await response.content.read(1024)).decode("utf-8", "replace")
        reason = "invalid_request" if status in (400, 422) else "tokenizer_failed"
        raise self._count(RemoteFailed(cause, text, reason=reason))

    def _count(self, failed: RemoteFailed) -> RemoteFailed:
        self._failures[failed.cause] += 1
        return failed

    # --- endpoints

    def _pick(self, model: str, tried: set[str]) -> _Endpoint | None:
        ready = [endpoint for endpoint in self._known(model) if endpoint.breaker.permits]
        ready = [endpoint for endpoint in ready if endpoint.url not in tried] or ready
        if not ready:
            return None
        self._turn += 1
        fewest = min(endpoint.waiting for endpoint in ready)
        idle = [endpoint for endpoint in ready if endpoint.waiting == fewest]
        return idle[self._turn % len(idle)]

    def _known(self, model: str) -> Sequence[_Endpoint]:
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

    def _new(self, url: str) -> _Endpoint:
        return _Endpoint(url, Breaker(self._settings.breaker_failures, self._settings.breaker_rest, self._clock))

    async def probe(self, model: str) -> str | None:
        """``None`` when some endpoint for ``model`` tokenizes, else a sentence. Asks even those that rest, and an
        answer ends their rest."""
        endpoints = self._known(model)
        if not endpoints:
            return f"no engine of model {model!r} is known that could tokenize"
        self._turn += 1
        first = self._turn % len(endpoints)
        chosen = [*endpoints[first:], *endpoints[:first]][:_PROBED]
        faults = await asyncio.gather(*map(self._probe, chosen))
        return None if None in faults else faults[0]

    async def _probe(self, endpoint: _Endpoint) -> str | None:
        try:
            await self._call(endpoint, b'{"prompt":""}')
        except _Retried as error:
            self._failures[error.cause] += 1
            return f"the remote tokenizer {endpoint.url}/tokenize does not answer ({error.cause}: {error.detail})"
        except Untokenized as error:
            return f"the remote tokenizer {endpoint.url}/tokenize refuses to tokenize ({error})"
        return None

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


class _Retried(Exception):
    """A failure by the endpoint's fault: it counts for the breaker, and is tried again."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, whatever length it declares; a longer one than ``limit`` is not read on."""
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > limit:
            response.close()
            raise _Retried("too_large", f"more than {limit} bytes")
    return bytes(raw)


def _decode(raw: bytes) -> RemoteTokens:
    try:
        answer = _DECODER.decode(raw)
        tokens = array("I", answer.tokens).tobytes()
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise _Retried("bad_answer", str(error)) from error
    if answer.count is not None and answer.count != len(answer.tokens):
        raise _Retried("bad_answer", f"{len(answer.tokens)} tokens, said to be {answer.count}")
    limit = answer.max_model_len
    return RemoteTokens(tokens, limit if limit is not None and limit > 0 else None)


__all__ = ["LARGE", "RemoteTokenizer", "RemoteTokens", "question"]
