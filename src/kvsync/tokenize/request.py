"""From a request's path and body to what has to be tokenized, and to what the engine will do with its cache.

Pure: no tokenizer, no clock, no I/O. :func:`read_request` takes whatever JSON object a client sent and never raises.
It reads strictly: where an engine would coerce a value (``"16"`` for 16) or refuse it, the request has no tokens and a
reason, so it is routed by load. Wrong tokens would be worse than none.

The flags (salt, re-announcing, hidden keys) are read first and survive every later refusal: the index must hear of
them even when the tokens stay unknown.

Facts about fields and their defaults are those of vLLM 0.32's completion and chat protocols.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from kvsync.tokenize.ids import PackedIds

Side: TypeAlias = Literal["left", "right"]

MAX_PROMPTS: Final = 128
"""Prompts of one request that are looked up, texts or token ids; a longer list is routed by load."""

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
_TEXT_FIELDS: Final = ("text", "refusal", "thinking")
_MEDIA_KEYS: Final = frozenset(
    {"image_url", "image_pil", "image_embeds", "input_image", "audio_url", "input_audio", "audio_embeds", "video_url"}
    | {"video_embeds"}
)
_MEDIA_WORDS: Final = ("image", "audio", "video", "file", "document")
_WALK_LIMIT: Final = 10_000
_TOKENS_PER_MEDIA: Final = 512
"""An order of magnitude for the estimated length of a prompt with media: images cost some 250 to 1,500 tokens."""
_CHARACTERS_PER_TOKEN: Final = 4
_STAND_INS: Final = ("0", "A")
"""Two texts that stand for the content of the first message with media; they share no first character."""


@dataclass(frozen=True, slots=True)
class Text:
    """A plain prompt of ``/v1/completions``."""

    text: str
    add_special_tokens: bool = True

    @property
    def shape(self) -> str:
        return "text" if self.add_special_tokens else "text+bare"

    @property
    def size(self) -> int:
        """Characters, roughly: decides which thread does the work."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, before the chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    template: str | None = None
    """A template sent with the request. Only engines started with ``--trust-request-chat-template`` take it."""
    kwargs: Mapping[str, Any] | None = None
    """Everything further that the template sees: ``chat_template_kwargs``, ``documents``, ``reasoning_effort``."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    size: int = 0

    @property
    def shape(self) -> str:
        """What of the template's and the engine's code this request exercises; equal answers prove one shape only.

        ``plain``, or the features joined with ``+``: ``tools``, ``kwargs``, ``continue``, ``parts``, ``calls``
        (tool calls or results in the history), ``reasoning``, ``closed`` (no generation prompt), ``special``.
        """
        features = []
        if self.tools is not None:
            features.append("tools")
        if self.kwargs:
            features.append("kwargs")
        if self.continue_final_message:
            features.append("continue")
        if any(isinstance(m.get("content"), list) for m in self.messages):
            features.append("parts")
        if any(m["role"] == "tool" or m.get("tool_calls") for m in self.messages):
            features.append("calls")
        if any(m.get("reasoning") is not None for m in self.messages):
            features.append("reasoning")
        if not self.add_generation_prompt and not self.continue_final_message:
            features.append("closed")
        if self.add_special_tokens:
            features.append("special")
        return "+".join(features) or "plain"


Work: TypeAlias = Text | Chat


@dataclass(frozen=True, slots=True)
class Truncation:
    """``truncate_prompt_tokens``: how many tokens the engine keeps."""

    keep: int | None
    """``None`` for −1: as many as the model's context allows, less ``reserve``."""
    side: Side | None
    """``None``: the engine's default. Generating engines keep the last tokens, and special tokens around a text."""
    reserve: int = 0
    """Tokens that the engine holds back for its answer when it keeps as many as it can (one, if it may answer)."""


class Reading(Struct, frozen=True):
    """What one request asks. Exactly one of ``ids``, ``works`` and ``reason`` says how to go on."""

    ids: tuple[bytes, ...] = ()
    """Prompts that came as token ids, packed native-endian uint32."""
    works: tuple[Work, ...] = ()
    """Prompts to be tokenized; with ``media``, two variants of one chat whose common beginning is the prompt's."""
    reason: str | None = None
    truncation: Truncation | None = None
    media: bool = False
    rest: int = 0
    """With ``media``: an estimate of the tokens behind the common beginning."""
    cache_salt: str | None = None
    reads_cache: bool = True
    hides_keys: bool = False
    reannounces: bool = False
    single: bool = True
    """One sample of the answer, no beam search, nothing loaded from another engine: the engine's ``cached_tokens`` is
    that of the prompt in its own cache."""


class _Refused(Exception):
    """The engine will refuse this body, or it can't be known what the engine makes of it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_request(path: str, body: Mapping[str, Any]) -> Reading:
    """What is to be tokenized for a request to ``path``. Never raises; see :class:`Reading`."""
    xargs = body.get("vllm_xargs")
    salt = body.get("cache_salt")
    flags: dict[str, Any] = {
        "cache_salt": salt if isinstance(salt, str) else None,
        "hides_keys": salt is not None,
        "reannounces": isinstance(xargs, dict) and xargs.get("kv_cache_report_mode") == "full",
    }
    if path not in ("/v1/completions", "/v1/chat/completions"):
        flags["hides_keys"] = flags["hides_keys"] or _may_carry_media(body)
        return Reading(reason="unsupported_api", **flags)
    chat = path == "/v1/chat/completions"
    try:
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= 1024):
            raise _Refused("invalid_request")
        flags["reads_cache"] = _reads_cache(body, chat)
        flags["single"] = (
            body.get("n") in (None, 1)
            and body.get("best_of") in (None, 1)
            and not body.get("use_beam_search")
            and body.get("kv_transfer_params") is None
        )
        flags["truncation"] = _truncation(body, chat)
        return _read_chat(body, flags) if chat else _read_completion(body, flags)
    except _Refused as refused:
        if refused.reason == "prompt_embeds" or (chat and _may_carry_media(body)):
            flags["hides_keys"] = True
        return Reading(reason=refused.reason, **flags)


def pack_ids(ids: Sequence[Any]) -> bytes | None:
    """Token ids as native-endian uint32, or ``None`` when one of them is no such number.

    A bool is the number 0 or 1, as it is to the engine.
    """
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError):
        return None


# --- completions


def _read_completion(body: Mapping[str, Any], flags: dict[str, Any]) -> Reading:
    embeds = body.get("prompt_embeds")
    if embeds is not None and embeds != []:
        raise _Refused("prompt_embeds")
    prompt = body.get("prompt")
    special = _boolean(body, "add_special_tokens", True)
    if isinstance(prompt, PackedIds):
        return Reading(ids=prompt.prompts, **flags)
    if isinstance(prompt, str) and prompt:
        return Reading(works=(Text(prompt, special),), **flags)
    if not isinstance(prompt, list) or not prompt:
        raise _Refused("invalid_request")
    if isinstance(prompt[0], str | list) and len(prompt) > MAX_PROMPTS:
        raise _Refused("too_many_prompts")
    if isinstance(prompt[0], str):
        if not all(isinstance(p, str) for p in prompt):
            raise _Refused("invalid_request")
        return Reading(works=tuple(Text(p, special) for p in prompt), **flags)
    lists = prompt if isinstance(prompt[0], list) else [prompt]
    if not all(isinstance(p, list) and p for p in lists):
        raise _Refused("invalid_request")
    packed = tuple(filter(None, map(pack_ids, lists)))
    if len(packed) != len(lists):
        raise _Refused("invalid_request")
    return Reading(ids=packed, **flags)


# --- chat


def _read_chat(body: Mapping[str, Any], flags: dict[str, Any]) -> Reading:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _Refused("invalid_request")
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        # Since 0.32 an engine takes these for the prompt, whatever the messages say; an earlier one does not.
        raise _Refused("carried_tokens")
    first_media: int | None = None
    media = 0
    sizes = []
    read: list[Mapping[str, Any]] = []
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Refused("invalid_request")
        size, items = _content_size(message.get("content"))
        sizes.append(size)
        media += items
        if items and first_media is None:
            first_media = position
        read.append(_with_reasoning(message))
    chat = Chat(
        messages=read,
        tools=_list(body, "tools"),
        template=_optional(body, "chat_template", str) or None,
        kwargs=_kwargs(body),
        add_generation_prompt=_boolean(body, "add_generation_prompt", True),
        continue_final_message=_boolean(body, "continue_final_message", False),
        add_special_tokens=_boolean(body, "add_special_tokens", False),
        size=sum(sizes),
    )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise _Refused("invalid_request")
    if first_media is None:
        return Reading(works=(chat,), **flags)
    if flags["truncation"] is not None:
        raise _Refused("truncated_media")
    # What stands before the message with the first image is the same whatever that message holds. Some templates and
    # engines move an image to its message's front, so not even text before it in that message is safe ground.
    before, after = read[:first_media], sum(sizes[first_media:])
    works = tuple(
        replace(
            chat,
            messages=[*before, {"role": read[first_media]["role"], "content": text}],
            add_generation_prompt=True,
            continue_final_message=False,
            size=sum(sizes[:first_media]),
        )
        for text in _STAND_INS
    )
    rest = after // _CHARACTERS_PER_TOKEN + media * _TOKENS_PER_MEDIA
    flags["hides_keys"] = True
    return Reading(works=works, media=True, rest=rest, **flags)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """``reasoning_content`` under its present name. The chat route renames it; ``/tokenize`` does not."""
    if "reasoning_content" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if renamed.get("reasoning") is None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


def _content_size(content: Any) -> tuple[int, int]:
    """Characters and media items of a message's content."""
    if content is None:
        return 0, 0
    if isinstance(content, str):
        return len(content), 0
    if not isinstance(content, list):
        raise _Refused("invalid_request")
    size = media = 0
    for part in content:
        if isinstance(part, str):
            size += len(part)
            continue
        if not isinstance(part, dict):
            raise _Refused("invalid_request")
        kind = part.get("type", "text")
        if kind == "prompt_embeds" or "prompt_embeds" in part:
            raise _Refused("prompt_embeds")
        if not isinstance(kind, str) or kind not in _TEXT_PARTS or not _MEDIA_KEYS.isdisjoint(part):
            media += 1
        else:
            texts = [text for text in map(part.get, _TEXT_FIELDS) if text is not None]
            if not all(isinstance(text, str) for text in texts):
                raise _Refused("invalid_request")
            size += sum(map(len, texts))
    return size, media


def _kwargs(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the chat route hands to the template besides the named arguments.

    ``/tokenize`` has no ``documents`` and no ``reasoning_effort`` of its own, but passes on whatever kwargs it gets.
    """
    kwargs = dict(_optional(body, "chat_template_kwargs", dict) or {})
    documents, effort = _list(body, "documents"), _optional(body, "reasoning_effort", str)
    if documents is not None:
        kwargs["documents"] = documents
    if effort is not None:
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs["reasoning_effort"] = effort
    return kwargs or None


# --- fields of both


def _truncation(body: Mapping[str, Any], chat: bool) -> Truncation | None:
    keep = _optional(body, "truncate_prompt_tokens", int)
    side = _optional(body, "truncation_side", str)
    if side not in (None, "left", "right") or (keep is not None and (keep < -1 or keep == 0)):
        raise _Refused("invalid_request")
    if keep is None:
        return None
    if keep > 0:
        return Truncation(keep, side)
    if chat:
        output = body.get("max_completion_tokens", body.get("max_tokens"))
    else:
        output = 16 if body.get("max_tokens") is None else body["max_tokens"]
    return Truncation(None, side, reserve=1 if output else 0)


def _reads_cache(body: Mapping[str, Any], chat: bool) -> bool:
    """Prompt log probabilities need every prompt token computed. ``echo`` asks for them too: with ``logprobs`` in a
    completion, always in a chat (whose ``top_logprobs`` defaults to 0, which counts as asked)."""
    if body.get("prompt_logprobs") is not None:
        return False
    return not (body.get("echo") and (chat or body.get("logprobs") is not None))


def _optional(body: Mapping[str, Any], field: str, kind: type) -> Any:
    value = body.get(field)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise _Refused("invalid_request")
    return value


def _list(body: Mapping[str, Any], field: str) -> list[Any] | None:
    value = body.get(field)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise _Refused("invalid_request")
    return value


def _boolean(body: Mapping[str, Any], field: str, default: bool) -> bool:
    value = body.get(field, default)
    if not isinstance(value, bool):
        raise _Refused("invalid_request")
    return value


def _may_carry_media(body: Mapping[str, Any]) -> bool:
    """Whether a body of any API may bring an image to the engine. True when it can't be told."""
    return any(_is_media(node) for node in _dicts(body))


def _is_media(node: Mapping[str, Any] | None) -> bool:
    if node is None or "previous_response_id" in node or not _MEDIA_KEYS.isdisjoint(node):
        return True
    kind = node.get("type")
    return isinstance(kind, str) and any(word in kind for word in _MEDIA_WORDS)


def _dicts(root: object) -> Iterator[Mapping[str, Any] | None]:
    """Every object in a JSON value; ``None`` at the end when there were too many to look at."""
    stack, seen = [root], 0
    while stack:
        node = stack.pop()
        seen += 1
        if seen > _WALK_LIMIT:
            yield None
            return
        if isinstance(node, dict):
            yield node
            stack.extend(value for value in node.values() if isinstance(value, dict | list))
        elif isinstance(node, list):
            stack.extend(item for item in node if isinstance(item, dict | list))


__all__ = ["MAX_PROMPTS", "Chat", "Reading", "Side", "Text", "Truncation", "Work", "pack_ids", "read_request"]
