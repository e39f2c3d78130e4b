"""Sending one request and reading what came back, streamed or not, with nothing but the standard library.

An answer that lacks what the comparison needs (usage, cached tokens, prompt token ids) is an error, never a zero.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit


class BadAnswer(AssertionError):
    """The answer's status, form or fields are not what an OpenAI-compatible engine sends."""


@dataclass(frozen=True, slots=True)
class Answer:
    headers: Mapping[str, str]
    """Names in lower case."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    cached_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


def post(base: str, path: str, body: Mapping[str, object], headers: Mapping[str, str], *, timeout: float) -> Answer:
    """Send one completion request and wait for the whole answer.

    Raises:
        BadAnswer: see the class.
        OSError: the connection failed, or ``timeout`` seconds passed without a byte.
    """
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        response = connection.getresponse()
        if response.status != 200:
            raise BadAnswer(f"{path}: {response.status} {response.read(2000).decode(errors='replace')}")
        streamed = response.headers.get_content_type() == "text/event-stream"
        if streamed != bool(body.get("stream", False)):
            raise BadAnswer(f"{path}: streamed is {streamed}, asked for {body.get('stream', False)}")
        pieces = sse(cast(BinaryIO, response)) if streamed else iter((json.load(response),))
        return read_answer(pieces, {name.lower(): value for name, value in response.getheaders()})
    finally:
        connection.close()


def get(base: str, path: str, *, timeout: float) -> Any:
    """The JSON of a 200 answer.

    Raises:
        BadAnswer: another status.
        OSError: the connection failed, or ``timeout`` seconds passed without a byte.
    """
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise BadAnswer(f"{path}: {response.status} {content[:2000].decode(errors='replace')}")
        return json.loads(content) if content else None
    finally:
        connection.close()


def sse(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream, which must end with ``[DONE]``."""
    for line in stream:
        data = line.strip()
        if data == b"data: [DONE]":
            return
        if data.startswith(b"data: "):
            yield json.loads(data.removeprefix(b"data: "))
        elif data:
            raise BadAnswer(f"a line that is no event: {data[:200]!r}")
    raise BadAnswer("the stream ended without [DONE]")


def read_answer(pieces: Iterator[dict[str, Any]], headers: Mapping[str, str]) -> Answer:
    """One answer out of its pieces: the chunks of a stream, or the one object of a plain answer."""
    text, token_ids = "", list[int]()
    prompt_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    for piece in pieces:
        if "error" in piece:
            raise BadAnswer(f"an error in the stream: {piece}")
        usage = piece.get("usage") or usage
        prompt_ids = piece.get("prompt_token_ids") or prompt_ids
        for choice in piece["choices"]:
            said = choice.get("message") or choice.get("delta") or choice
            text += said.get("content") or said.get("text") or ""
            token_ids += choice.get("token_ids") or []
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
    if usage is None or prompt_ids is None or not usage.get("prompt_tokens_details"):
        raise BadAnswer(f"usage {usage}, prompt_token_ids {'present' if prompt_ids else 'missing'}")
    if usage["prompt_tokens"] != len(prompt_ids) or usage["completion_tokens"] != len(token_ids):
        raise BadAnswer(f"usage {usage} of {len(prompt_ids)} prompt and {len(token_ids)} answered tokens")
    cached = usage["prompt_tokens_details"]["cached_tokens"] or 0
    return Answer(headers, tuple(prompt_ids), tuple(token_ids), text, cached)
