"""What tokenizing hands to routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image, or another media item, stands in a prompt."""

    identifier: str
    """The engine's name for its content."""
    offset: int
    """Of its first placeholder token, in tokens from the prompt's beginning."""
    length: int
    """In tokens, at least 1."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt as the engine will see it."""

    tokens: bytes
    """Packed native-endian uint32. Cut before the first image where nobody told what it is and where it stands."""
    length: int
    """Tokens of the whole prompt, the part that was cut away included (an estimate then)."""
    images: tuple[ImageSpan, ...] = ()
    """In the order in which they stand, none over another, where a render endpoint told them."""


class TokenizedRequest(msgspec.Struct, frozen=True):
    """A request's prompts, and what of them may be compared with what the engine reports."""

    prompts: tuple[Prompt, ...]
    """Empty when the tokens are unknown: then the request is routed by load, and ``reason`` says why."""
    source: Literal["ids", "remote", "local", "cache", "none"]
    reason: str | None = None
    """Why tokens are unknown, their credit counts nothing (``skips_cache``), or they end before the first image though
    a render endpoint is configured (``not_rendered``); a short word for a metric label.

    Of the request: ``unsupported_api``, ``invalid_request`` (the engine will refuse it), ``prompt_embeds``,
    ``too_many_prompts``, ``truncated_media``, ``truncated_special``, ``unknown_limit`` (``truncate_prompt_tokens`` that
    can't be followed). Of the tokenizer: ``no_tokenizer``, ``tokenizer_failed``, ``tokenizer_timeout``, ``queue_full``.
    """
    cache_salt: str | None = None
    reads_cache: bool = True
    """False for ``prompt_logprobs`` and echo + logprobs: the engine does not read its cache, so credit is nothing."""
    hides_keys: bool = False
    """True when the request carries a salt or an image, which old engines hide (see the index's hidden keys)."""
    reannounces: bool = False
    """True when it asks for ``kv_cache_report_mode=full``: the worker it goes to re-announces its hits."""
    comparable: bool = False
    """One prompt, n = 1, reads the cache: the engine's ``cached_tokens`` may be compared with the credit."""
    sample: int | None = None
    """The tokenizer's number for it, where it wants to hear that an engine answered (see its ``answered``)."""


__all__ = ["ImageSpan", "Prompt", "TokenizedRequest"]
