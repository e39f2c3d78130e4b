"""Chat templates, in the environment that transformers gives them.

That environment is part of the tokens: ``trim_blocks``, ``lstrip_blocks``, loop controls, a ``tojson`` that neither
sorts nor escapes, ``raise_exception``, ``strftime_now``, the ``generation`` tag. Templates are sandboxed code of
whoever made the model: anything they raise is a :class:`~kvsync.tokenize.errors.LocalFailed`.

Needs jinja2 (the extra ``tokenizers``): import this module only where its absence is handled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvsync.tokenize.errors import LocalFailed
from kvsync.tokenize.messages import ContentFormat, conversation, tool_list
from kvsync.tokenize.request import Chat

_MARK: Final = "KVSYNC-FINAL-MESSAGE-ENDS-HERE "
"""Marks where ``continue_final_message`` cuts. It ends in a space, which shows whether a template trims."""


class ChatTemplate:
    """One compiled template of a model. Safe to use from several threads.

    Raises:
        LocalFailed: the source is no template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self.content_format: ContentFormat = _content_format(environment.parse(source))
        except jinja2.TemplateError as error:
            raise LocalFailed("bad_template", str(error)) from error
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat) -> str:
        """The prompt text of a conversation.

        Raises:
            LocalFailed: the template refuses the conversation, or breaks on it.
        """
        messages = conversation(chat.messages, self.content_format)
        tools = tool_list(chat.tools)
        # The engine drops nulls and "auto" where it merges the request's kwargs with its own.
        kwargs = {key: value for key, value in (chat.kwargs or {}).items() if value is not None and value != "auto"}
        final = _mark_end(messages) if chat.continue_final_message else None
        seen = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            text = self._template.render(seen)
        except Exception as error:  # a template is foreign code and may raise anything
            raise LocalFailed("template_error", f"{type(error).__name__}: {error}") from error
        return text if final is None else _cut_at_mark(text, final)


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put the mark behind the text that the answer shall continue, and return that text."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return content
    for part in reversed(content):
        text: str = part["text"]
        part["text"] = text + _MARK
        return text
    raise LocalFailed("nothing_to_continue", "the final message has no text")


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise LocalFailed("nothing_to_continue", "the template does not show the final message")
    kept = text[:at]
    return kept if text.startswith(_MARK, at) else kept.rstrip()


# --- the environment


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks what an assistant wrote; rendering shows its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# --- which form of content a template wants


def _content_format(template: nodes.Template) -> ContentFormat:
    """``openai`` when the template loops over a message's content, directly or through a macro's parameter.

    vLLM decides by the same question, and so the same source must get the same answer here.
    """
    histories = _aliases(template, "messages")
    messages = {name for name, source in _loops(template) if any(_reads(source, history) for history in histories)}
    inside_macros: set[int] = set()
    for macro in template.find_all(nodes.Macro):
        given = _content_parameters(template, macro, messages)
        for loop in macro.find_all(nodes.For):
            inside_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                return "openai"
    for loop in template.find_all(nodes.For):
        if any(_reads(loop.iter, message, "content") for message in messages):
            return "openai"
        if isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and id(loop) not in inside_macros:
            return "openai"
    return "string"


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """The parameters of ``macro`` that some call fills with a message's content."""
    names = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        arguments = [*zip(names, call.args, strict=False), *((k.key, k.value) for k in call.kwargs if k.key in names)]
        for name, value in arguments:
            if any(_reads(value, message, "content") for message in messages):
                given.add(name)
    return given


def _aliases(template: nodes.Template, name: str) -> set[str]:
    """``name`` and every variable that is set from it, or from a slice or filter of it."""
    known = {name}
    assignments = [a for a in template.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)]
    while True:
        found = {a.target.name for a in assignments if any(_reads(a.node, k) for k in known)}  # type: ignore[attr-defined]
        if found <= known:
            return known
        known |= found


def _loops(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield loop.target.name, loop.iter


def _reads(node: nodes.Node | None, name: str, attribute: str | None = None) -> bool:
    """Whether an expression is the variable ``name`` (or its ``attribute``), seen through filters, tests and slices."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
            continue
        break
    if attribute is not None:
        if isinstance(node, nodes.Getattr):
            if node.attr != attribute:
                return False
        elif not (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == attribute
        ):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


__all__ = ["ChatTemplate"]
