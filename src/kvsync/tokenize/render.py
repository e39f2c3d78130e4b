"""Chats with images, by a vLLM server's ``/v1/chat/completions/render``.

Only an engine's own processor knows how many placeholder tokens an image becomes and what the engine calls it. The
route (vLLM 0.32, served with ``--enable-scale-out``) answers with the tokens of the whole prompt, and for each modality
the items' hashes and placeholder ranges. The images travel to that server and are processed there: this costs what it
costs an engine.

Always holds: what comes out are items inside the prompt, in order, none over another (engines name the blocks under
overlapping items otherwise). Answers are not remembered: what stands behind an image's URL may change.

An engine whose adapters have image towers of their own calls an image otherwise than this route does. Then credit ends
before the first image, as it does without the route.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvsync.config import RemoteTokenizerSettings
from kvsync.discovery.access import EngineAccess
from kvsync.tokenize.endpoints import BadAnswer, Endpoints, Route
from kvsync.tokenize.errors import RemoteFailed, Untokenized
from kvsync.tokenize.ids import lift
from kvsync.tokenize.pool import BoundedPool
from kvsync.tokenize.types import ImageSpan, Prompt

log = logging.getLogger(__name__)

_SHARE: Final = 0.75
"""Of the budget of one request that the route may take; in the rest the part before the images is tokenized."""
_SMALLEST_LIMIT: Final = 16 << 20
"""A question of a hundred bytes may name a video of a million tokens."""
_LONGEST_IDENTIFIER: Final = 1024


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Answer(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


def render_question(body: Mapping[str, Any], model: str) -> bytes:
    """The body of the render request for a chat request's ``body``.

    Raises:
        Untokenized: the request can't be written as JSON (lone surrogates, nested too deep).
    """
    # The answer shall not bring the processed images along, which are many times larger than what was sent.
    asked = {**body, "model": model, "mm_payload": "none"}
    try:
        return msgspec.json.encode(asked)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Untokenized("invalid_request", type(error).__name__) from error


def read_rendering(raw: bytes) -> Prompt:
    """The prompt that an answer describes.

    Raises:
        BadAnswer: it is no rendering of a prompt with media, or one that can't be.
    """
    lifted = lift(raw, "token_ids")
    try:
        answer = _DECODER.decode(raw if lifted is None else lifted[0])
        tokens = array("I", answer.token_ids).tobytes() if lifted is None else lifted[1][0]
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise BadAnswer(str(error)) from error
    if answer.features is None:
        raise BadAnswer("no features: the media are not in it")
    length = len(tokens) // 4
    spans = sorted(_spans(answer.features), key=lambda span: span.offset)
    end = 0
    for span in spans:
        if span.length < 1 or span.offset < end or span.offset + span.length > length:
            raise BadAnswer(
                f"an item of {span.length} tokens at {span.offset} of {length}, behind one that ends at {end}"
            )
        end = span.offset + span.length
    if not spans:
        raise BadAnswer("features without an item")
    return Prompt(tokens, length, tuple(spans))


def _spans(features: _Features) -> Iterator[ImageSpan]:
    hashes, ranges = features.mm_hashes, features.mm_placeholders
    if hashes.keys() != ranges.keys():
        raise BadAnswer("hashes and placeholders of different modalities")
    for modality, names in hashes.items():
        places = ranges[modality]
        if len(names) != len(places):
            raise BadAnswer(f"{len(names)} hashes and {len(places)} placeholders")
        for name, place in zip(names, places, strict=True):
            if not 1 <= len(name) <= _LONGEST_IDENTIFIER:
                raise BadAnswer(f"a hash of {len(name)} characters")
            yield ImageSpan(name, place.offset, place.length)


_RENDER: Final = Route("/v1/chat/completions/render", read_rendering, _SMALLEST_LIMIT, missing=frozenset({403, 405}))
_NO_ROUTE: Final = frozenset({"status_403", "status_404", "status_405"})
"""404 says as well that a server does not know the model, so it does not rest for it."""


class Renderer(Endpoints[Prompt]):
    """The servers that render.

    One try for a request, which sends its images, in a share of the budget. Breakers are its own: an image behind a
    slow URL says nothing about tokenizing.
    """

    def __init__(
        self,
        settings: RemoteTokenizerSettings,
        engines: Callable[[str], Sequence[str]],
        pool: BoundedPool,
        *,
        access: EngineAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        timeout = min(settings.timeout, settings.budget * _SHARE)
        once = settings.model_copy(update={"retries": 0, "timeout": timeout})
        super().__init__(_RENDER, once, engines, pool, access=access, clock=clock)
        self._prompts: Counter[str] = Counter()
        self._told = False

    async def prompt(self, body: Mapping[str, Any], model: str) -> Prompt | None:
        """The whole prompt of a chat request with media, or ``None`` when it can't be had; counted by why."""
        try:
            prompt = await self.ask(await self._pool.run(render_question, body, model), model)
        except Untokenized as error:
            cause = error.cause if isinstance(error, RemoteFailed) else error.reason
            self._prompts[cause] += 1
            if cause in _NO_ROUTE and not self._told:
                self._told = True
                log.warning(
                    "prompts with images are not rendered (%s): vLLM serves %s if run with --enable-scale-out; "
                    "without it credit for such a prompt ends before its first image",
                    cause,
                    _RENDER.path,
                )
            return None
        self._prompts["rendered"] += 1
        return prompt

    def stats(self) -> dict[str, Any]:
        return {"prompts": dict(self._prompts), **super().stats()}


__all__ = ["Renderer", "read_rendering", "render_question"]
