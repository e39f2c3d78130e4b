"""Messages and tools as vLLM hands them to a chat template.

Pure. What is here follows vLLM 0.32; where versions differ (the ``developer`` role, tool references, Claude Code's
billing line) the request is left to the remote tokenizer, because a guess that is right for one version disables a
whole request shape on another. :func:`unsupported` says so beforehand; :func:`conversation` may then assume it.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from kvsync.tokenize.errors import LocalFailed
from kvsync.tokenize.request import Chat

ContentFormat: TypeAlias = Literal["string", "openai"]
"""``openai``: the template loops over a message's content and gets a list of parts; ``string``: it gets one text."""

_TEXT_FIELD: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_PART_FIELDS: Final = frozenset(
    {"type", "text", "refusal", "thinking", "uuid", "name", "file", "data", "detail", "closed"}
)
"""Fields of a part that the engine knows; all others travel with the part to the template."""
_RESERVED: Final = frozenset(
    {"messages", "conversation", "tools", "chat_template", "tokenize", "return_dict", "return_assistant_tokens_mask"}
    | {"sanitize_control_tokens", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors"}
    | {"add_generation_prompt", "continue_final_message"}
)
"""Template kwargs that mean something else to the engine than to the template."""
_BILLING_HEADER: Final = "x-anthropic-billing-header"
_CALL: Final = ("id", "function", "type")
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict", "defer_loading")


def unsupported(chat: Chat) -> str | None:
    """Why this process should not render ``chat`` itself, as a short word; ``None`` when it may."""
    if chat.template is not None:
        return "own_template"
    if chat.kwargs and not _RESERVED.isdisjoint(chat.kwargs):
        return "reserved_kwargs"
    for message in chat.messages:
        if message["role"] == "developer":
            return "developer_role"
        if "task" in message:
            return "task"
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (part.get("type", "text") not in _TEXT_FIELD or "uuid" in part):
                return "part_type"
        if message["role"] == "system" and any(text.startswith(_BILLING_HEADER) for text in _texts(content)):
            return "billing_header"
    return None


def conversation(messages: Sequence[Mapping[str, Any]], content_format: ContentFormat) -> list[dict[str, Any]]:
    """The messages that the template sees. New objects: nothing of the request is changed or shared for writing.

    Raises:
        LocalFailed: the engine would refuse them.
    """
    return [_message(message, content_format) for message in messages]


def tool_list(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools that the template sees: known fields in the engine's order, with its nulls filled in.

    ``description`` and ``parameters`` are there even when the client left them out; ``strict`` and ``defer_loading``
    only when set.

    Raises:
        LocalFailed: the engine would refuse them.
    """
    return None if tools is None else [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise LocalFailed("bad_tool", "no function with a name")
    defer = tool.get("defer_loading")
    seen = {field: function.get(field) for field in _FUNCTION_FIELDS}
    if seen["defer_loading"] is None:
        seen["defer_loading"] = defer
    for field in ("strict", "defer_loading"):
        if seen[field] is None:
            del seen[field]
    rendered: dict[str, Any] = {"type": tool.get("type", "function"), "function": seen}
    if defer is not None:
        rendered["defer_loading"] = defer
    return rendered


def _message(message: Mapping[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    role = message["role"]
    content = message.get("content")
    shown: str | list[dict[str, Any]] = "\n".join(_texts(content)) if content_format == "string" else _parts(content)
    if role == "tool" and isinstance(shown, list):
        # A tool's answer is text for every template: few of them loop over its parts.
        shown = "\n".join(part["text"] for part in shown)
    seen: dict[str, Any] = {"role": role, "content": shown}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls and not isinstance(calls, list):
            raise LocalFailed("bad_tool_call", "no list")
        if calls:
            seen["tool_calls"] = [_tool_call(call) for call in calls]
        if message.get("reasoning") is not None:
            seen["reasoning"] = seen["reasoning_content"] = message["reasoning"]
    elif role == "tool" and message.get("tool_call_id") is not None:
        seen["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        seen["name"] = message["name"]
    return seen


def _texts(content: object) -> list[str]:
    """The texts of a message's content; empty parts count as none."""
    if isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        return []
    texts = (part if isinstance(part, str) else _part_text(part) for part in content)
    return [text for text in texts if text]


def _parts(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return []
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif (text := _part_text(part)) is not None:
            extra = {key: value for key, value in part.items() if key not in _PART_FIELDS}
            parts.append({"type": "text", "text": text, **extra})
    return parts


def _part_text(part: Mapping[str, Any]) -> str | None:
    text: str | None = part.get(_TEXT_FIELD[part.get("type", "text")])
    return text


def _tool_call(call: object) -> dict[str, Any]:
    """A call of the history as the engine's types rebuild it: their order of fields, then the client's further ones.

    Templates that print a whole call show that order. The arguments become an object, which templates expect.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(call.get("id"), str)
        or call.get("type") != "function"
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise LocalFailed("bad_tool_call", "not an id, a type and a function with name and arguments")
    seen = {"arguments": _arguments(function["arguments"]), "name": function["name"]}
    return {
        "id": call["id"],
        "function": {**seen, **_without(function, seen)},
        "type": "function",
        **_without(call, _CALL),
    }


def _arguments(text: str) -> dict[str, Any]:
    """What is no JSON object stands for none: it lies in the history, where nobody can mend it."""
    try:
        parsed = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _without(fields: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in known}


__all__ = ["ContentFormat", "conversation", "tool_list", "unsupported"]
