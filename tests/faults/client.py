"""A client of the gateway: one answer in all its parts, streamed or not; and waiting for a condition."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiohttp

DEADLINE: Final = 20.0
"""Seconds. No test waits longer for one thing."""
_PAUSE: Final = 0.01

Body = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request."""

    status: int
    headers: Mapping[str, str]
    """Names in any letter case."""
    pieces: Sequence[dict[str, Any]]
    """The events of a stream, which ended with ``[DONE]``; or the one document."""

    @property
    def engine(self) -> str:
        """The engine that answered, by name."""
        return self.headers["target-pod"]

    @property
    def request_id(self) -> str:
        return self.headers["request-id"]

    @property
    def error(self) -> dict[str, Any]:
        """The object in OpenAI's error envelope."""
        error: dict[str, Any] = self.pieces[0]["error"]
        return error

    @property
    def cached(self) -> int:
        """``cached_tokens``, as the engine reports them."""
        return int(self._usage()["prompt_tokens_details"]["cached_tokens"])

    @property
    def prompt_tokens(self) -> int:
        return int(self._usage()["prompt_tokens"])

    @property
    def text(self) -> str:
        said = ""
        for piece in self.pieces:
            for choice in piece["choices"]:
                part = choice.get("message") or choice.get("delta") or choice
                said += part.get("content") or part.get("text") or ""
        return said

    @property
    def token_ids(self) -> list[int]:
        """Of the output; the request has to ask for them."""
        return [
            token for piece in self.pieces for choice in piece["choices"] for token in choice.get("token_ids") or ()
        ]

    def _usage(self) -> dict[str, Any]:
        (usage,) = (piece["usage"] for piece in self.pieces if piece.get("usage"))
        assert isinstance(usage, dict)
        return usage


class Client:
    """Sends requests to one base URL over kept connections."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self._session = session
        self._base = base

    async def post(self, path: str, body: Body | bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """
        Raises:
            aiohttp.ClientError: the connection failed, or the answer was cut.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        async with self._session.post(self._base + path, data=data, headers=sent) as response:
            content = await response.read()
            if response.content_type == "text/event-stream":
                return Answer(response.status, response.headers, events(content))
            return Answer(response.status, response.headers, [json.loads(content)])

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(self._base + path) as response:
            return response.status, await response.read()

    async def json(self, path: str, status: int = 200) -> Any:
        """The document at ``path``, which has to come with ``status``."""
        found, content = await self.get(path)
        assert found == status, (path, found, content)
        return json.loads(content)


def events(content: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream."""
    *lines, last, end = content.split(b"\n\n")
    assert (last, end) == (b"data: [DONE]", b""), content[-200:]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def streamed(body: Body) -> dict[str, Any]:
    """The same request, its answer streamed, with usage at the end."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


async def until(look: Callable[[], Awaitable[T | None]], what: str, deadline: float = DEADLINE) -> T:
    """The first answer of ``look`` that is true.

    Raises:
        AssertionError: there is none in time; it says what was seen last.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    while not (seen := await look()):
        if loop.time() > end:
            raise AssertionError(f"{what}: not within {deadline:g} s; last seen: {seen!r}")
        await asyncio.sleep(_PAUSE)
    return seen
