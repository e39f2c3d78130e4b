"""Tokenizing by a vLLM server's ``/tokenize``: the question and its answer.

Answers are foreign input: their types are checked, and a count that differs from the tokens is a failure.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvsync.config import RemoteTokenizerSettings
from kvsync.discovery.access import EngineAccess
from kvsync.tokenize.endpoints import BadAnswer, Endpoint, Endpoints, Retried, Route
from kvsync.tokenize.errors import Untokenized
from kvsync.tokenize.ids import lift
from kvsync.tokenize.pool import BoundedPool
from kvsync.tokenize.request import Chat, Text, Work

_PROBED: Final = 8
"""Endpoints that one probe asks."""
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


def _decode(raw: bytes) -> RemoteTokens:
    lifted = lift(raw, "tokens")
    try:
        answer = _DECODER.decode(raw if lifted is None else lifted[0])
        tokens = array("I", answer.tokens).tobytes() if lifted is None else lifted[1][0]
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise BadAnswer(str(error)) from error
    if answer.count is not None and answer.count != len(tokens) // 4:
        raise BadAnswer(f"{len(tokens) // 4} tokens, said to be {answer.count}")
    limit = answer.max_model_len
    return RemoteTokens(tokens, limit if limit is not None and limit > 0 else None)


TOKENIZE: Final = Route("/tokenize", _decode, _SMALLEST_LIMIT)


class RemoteTokenizer(Endpoints[RemoteTokens]):
    """The pool of tokenizing endpoints."""

    def __init__(
        self,
        settings: RemoteTokenizerSettings,
        engines: Callable[[str], Sequence[str]],
        pool: BoundedPool,
        *,
        access: EngineAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(TOKENIZE, settings, engines, pool, access=access, clock=clock)

    async def probe(self, model: str) -> str | None:
        """``None`` when some endpoint for ``model`` tokenizes, else a sentence. Asks even those that rest, and an
        answer ends their rest."""
        endpoints = self._known(model)
        if not endpoints:
            return f"no engine of model {model!r} is known that could tokenize"
        self._turn += 1
        first = self._turn % len(endpoints)
        chosen = [*endpoints[first:], *endpoints[:first]][:_PROBED]
        return await first_sound(map(self._probe, chosen))

    async def _probe(self, endpoint: Endpoint) -> str | None:
        try:
            await self._call(endpoint, b'{"prompt":""}')
        except Retried as error:
            self._failures[error.cause] += 1
            return f"the remote tokenizer {endpoint.url}/tokenize does not answer ({error.cause}: {error.detail})"
        except Untokenized as error:
            return f"the remote tokenizer {endpoint.url}/tokenize refuses to tokenize ({error})"
        return None


async def first_sound(probes: Iterable[Coroutine[Any, Any, str | None]]) -> str | None:
    """``None`` as soon as one probe finds no fault, whatever the others still wait for; else the first fault found."""
    tasks = [asyncio.ensure_future(probe) for probe in probes]
    fault: str | None = None
    try:
        for done in asyncio.as_completed(tasks):
            found = await done
            if found is None:
                return None
            fault = fault or found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return fault


__all__ = ["RemoteTokenizer", "RemoteTokens", "first_sound", "question"]
