"""The model's real tokenizer and chat template: text and messages to token ids, exactly as vLLM makes them, and back.

The template environment is the one of ``transformers`` (sandboxed, trim_blocks, lstrip_blocks, loop controls, a
``tojson`` that neither sorts keys nor escapes HTML); messages and tools are put into the shape that vLLM gives them
before it renders (text parts joined by newlines, tool arguments parsed, absent tool fields as nulls).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class BadPrompt(ValueError):
    """A prompt or conversation that the model can't take; the text is for the client."""


class ModelTokenizer:
    """One model's tokenizer and chat template; see the module.

    Args:
        folder: holds ``tokenizer.json``, ``chat_template.jinja`` and (for special tokens) ``tokenizer_config.json``.

    Raises:
        OSError, ValueError: a file is missing or can't be used.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # The library raises bare Exception, whatever is wrong.
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
        config = folder / "tokenizer_config.json"
        settings = json.loads(config.read_text()) if config.exists() else {}
        self._special = {
            name: settings[name]
            for name in ("bos_token", "eos_token", "pad_token")
            if isinstance(settings.get(name), str)
        }
        source = (folder / "chat_template.jinja").read_text()
        environment = _environment()
        self._template = environment.from_string(source)
        self._wants_parts = _loops_over_content(environment.parse(source))
        self.vocabulary = self._tokenizer.get_vocab_size()
        eos = self._special.get("eos_token")
        self.eos = self._tokenizer.token_to_id(eos) if eos else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_last(self, text: str, keep: int, *, add_special_tokens: bool) -> list[int]:
        """At most ``keep`` tokens, special ones included: they stay, and the text loses its beginning."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        special = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(keep - special, 0), direction="left")
        ids: list[int] = self._tokenizer.post_process(encoding, None, add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def strings(self, tokens: Sequence[int]) -> list[str]:
        """Each token as it stands in the vocabulary."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def words(self) -> list[int]:
        """Tokens that are a space and ASCII letters: text made of them tokenizes to themselves again."""
        found = []
        for token in range(self.vocabulary):
            text = self.decode([token], skip_special=True)
            if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and self._again(text) == [token]:
                found.append(token)
        return found

    def _again(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model sees it.

        Raises:
            BadPrompt: a message has the wrong shape, or the template refuses the conversation.
        """
        conversation = [self._message(message) for message in messages]
        if not conversation:
            raise BadPrompt("messages must not be empty")
        try:
            text = self._template.render(
                self._special
                | dict(template_kwargs or {})
                | {
                    "messages": conversation,
                    "tools": [_tool(tool) for tool in tools] if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise BadPrompt(f"the chat template refused the conversation: {error}") from error
        except TypeError as error:
            raise BadPrompt(f"the chat template can't use a message: {error}") from error
        if continue_final_message:
            return _cut_after(text, conversation[-1]["content"])
        return text

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadPrompt("each message must be an object with a role")
        shaped: dict[str, Any] = {"role": message["role"], "content": self._content(message.get("content"))}
        if message["role"] == "assistant":
            if calls := message.get("tool_calls"):
                shaped["tool_calls"] = [_tool_call(call) for call in calls]
            if (reasoning := message.get("reasoning")) is not None:
                shaped["reasoning"] = shaped["reasoning_content"] = reasoning
        if message["role"] == "tool" and "tool_call_id" in message:
            shaped["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            shaped["name"] = message["name"]
        return shaped

    def _content(self, content: object) -> str | list[dict[str, str]]:
        if content is None:
            parts: list[str] = []
        elif isinstance(content, str):
            parts = [content]
        elif isinstance(content, list):
            parts = [_text_part(part) for part in content]
        else:
            raise BadPrompt("content must be a string or a list of parts")
        if self._wants_parts:
            return [{"type": "text", "text": part} for part in parts]
        return "\n".join(parts)


class Detokenizer:
    """Turns growing output into text pieces that join to the whole: a piece never ends inside a character."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0
        """Tokens before this no longer influence new text."""
        self._done = 0
        """Tokens whose text was given out."""

    def push(self, token: int, *, last: bool = False) -> str:
        """The text that became certain with this token; with ``last``, all that is left."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._done])
        after = self._decode(self._tokens[self._context :])
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not last):
            return ""
        self._context, self._done = self._done, len(self._tokens)
        return after[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    return environment


def _loops_over_content(template: jinja2.nodes.Template) -> bool:
    """Whether the template takes content as a list of parts: it loops over something's ``content``."""
    for loop in template.find_all(jinja2.nodes.For):
        target = loop.iter
        if isinstance(target, jinja2.nodes.Getattr) and target.attr == "content":
            return True
        if isinstance(target, jinja2.nodes.Getitem) and target.arg == jinja2.nodes.Const("content"):
            return True
    return False


def _text_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadPrompt("each content part must be a string or an object")
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text"):
        raise BadPrompt(f"this model takes text only, not {kind!r} parts")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadPrompt("a text part needs a text")
    return text


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadPrompt("each tool must be an object with a function that has a name")
    shaped = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shaped["strict"] = function["strict"]
    return {"type": "function", "function": shaped}


def _tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise BadPrompt("each tool call must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            # As the engine: what is broken in the history must not break every later turn.
            arguments = {}
    return dict(call) | {"function": dict(function) | {"arguments": arguments or {}}}


def _cut_after(text: str, content: str | list[dict[str, str]]) -> str:
    """The rendered text up to the end of the final message's content, for the model to go on from there."""
    final = content if isinstance(content, str) else (content[-1]["text"] if content else "")
    found = text.rfind(final.strip())
    if not final.strip() or found < 0:
        raise BadPrompt("the final message can't be continued: its content is not in the rendered text")
    # Trailing white space belongs to the message where the template kept it.
    kept = final.lstrip() if text.startswith(final.lstrip(), found) else final.strip()
    return text[: found + len(kept)]
