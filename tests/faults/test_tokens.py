"""Prompts whose tokens are easily got wrong. The judge is the engine: its events carry the token ids that it saw, so a
prompt that is asked again gets credit only if the gateway's ids equal them, and its answer says how much it had."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvsync.engine_sim.config import TINY_LLAMA

from .client import until
from .engine import BLOCK, Engine, words
from .fleet import Listed, sim
from .gateway import Gateway
from .http import Received, Talk, reply
from .serving import Serving, serving
from .words import assistant, text, tokens, user

pytestmark = pytest.mark.faults

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
THINKING = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|> ' }}{%- endfor %}"
    "{{ '/think ' + (reasoning_effort or 'default') if enable_thinking else '/no_think' }}"
)
"""A template whose prompt differs by how the model shall reason."""
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "description": text(30), "parameters": {"type": "object"}}},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def credited_as_held(gateway: Gateway, path: str, body: Mapping[str, Any], least: int = 1) -> int:
    """Ask twice: the second time the gateway has to have credited exactly what the engine had, which is not nothing.

    Returns that figure.
    """
    first, _ = await gateway.ask(path, body)
    assert first.cached < least * BLOCK

    async def look() -> tuple[int, int] | None:
        answer, decision = await gateway.ask(path, body)
        return (decision.credited, answer.cached) if decision.credited else None

    credit, cached = await until(look, "credit")
    assert credit == cached
    assert credit == (first.prompt_tokens - 1) // BLOCK * BLOCK >= least * BLOCK
    return credit


@pytest_asyncio.fixture
async def tiny(tmp_path: Path) -> AsyncIterator[Serving]:
    """A gateway before an engine with a real tokenizer and chat template."""
    async with sim("tiny") as engine, serving(tmp_path, Listed("a", engine).entry) as gateway:
        yield gateway


async def test_text_is_the_same_prompt_in_whatever_form(tiny: Serving) -> None:
    """(T1) A string, one text part and several: the engine's ids each time, and the first two are one prompt."""

    def asking(content: object) -> dict[str, object]:
        return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}

    whole = text(60)
    await credited_as_held(tiny, CHAT, asking(whole))
    answer, decision = await tiny.ask(CHAT, asking([{"type": "text", "text": whole}]))
    assert decision.credited == answer.cached == (answer.prompt_tokens - 1) // BLOCK * BLOCK
    await credited_as_held(tiny, CHAT, asking([{"type": "text", "text": text(30)}, {"type": "text", "text": text(30)}]))


async def test_an_image_ends_credit_where_it_stands(tmp_path: Path) -> None:
    """(T1) Text and an image: what comes before the message with the image is credited, as the engine's ids."""

    def placeholders(body: Mapping[str, Any]) -> Sequence[int]:
        ids: list[int] = []
        for message in body.get("messages", ()):
            parts = [message["content"]] if isinstance(message["content"], str) else message["content"]
            for part in parts:
                said = part if isinstance(part, str) else part.get("text")
                ids += [9] * 40 if said is None else words({"prompt": said})
        return ids

    async with Engine("a", tokenizes=placeholders) as engine, serving(tmp_path, engine) as gateway:
        engine.caches = True
        before = {"role": "system", "content": text(70)}
        seen = {"role": "user", "content": [{"type": "text", "text": text(20)}, IMAGE]}
        body = {"model": "tiny", "messages": [before, seen], "max_tokens": 1}
        await gateway.ask(CHAT, body)

        async def look() -> int:
            return (await gateway.ask(CHAT, body))[1].credited

        credit = await until(look, "credit")
        assert credit == 64
        assert engine.holds(placeholders(body)) == 128


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": text(60)}),
        (COMPLETIONS, {"prompt": text(60), "add_special_tokens": False}),
        (COMPLETIONS, {"prompt": tokens()}),
        *(
            (CHAT, {"messages": [user(text(60)), *more], **tools, **ending})
            for tools in ({}, {"tools": TOOLS})
            for more, ending in (
                ([], {}),
                ([], {"add_special_tokens": True}),
                ([assistant(text(20))], {"add_generation_prompt": False}),
                ([assistant(text(20))], {"add_generation_prompt": False, "continue_final_message": True}),
            )
        ),
    ],
    ids=lambda value: value.rsplit("/", 1)[-1] if isinstance(value, str) else "+".join(value),
)
async def test_special_tokens_tools_and_endings_are_the_engines(
    tiny: Serving, path: str, fields: Mapping[str, Any]
) -> None:
    """(T2) Each endpoint × tools × how the conversation ends, with and without a beginning-of-text token."""
    await credited_as_held(tiny, path, {"model": "tiny", "max_tokens": 1, **fields})


@pytest.mark.parametrize(
    "ending",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids="+".join,
)
async def test_a_prompts_last_tokens_are_the_engines(tiny: Serving, ending: Mapping[str, Any]) -> None:
    """(T2) What follows the last message is a few tokens, which show where they fill a block: at each length."""
    for length in range(BLOCK):
        messages = [user(text(30)), assistant("go on" + " a" * length)]
        await credited_as_held(tiny, CHAT, {"model": "tiny", "messages": messages, "max_tokens": 1, **ending})


async def test_a_template_of_the_models_own(tmp_path: Path) -> None:
    """(T2) Another chat template: what the engine renders counts."""
    folder = _with_template(tmp_path, THINKING)
    async with sim("tiny", tokenizer=folder) as engine, serving(tmp_path, Listed("a", engine).entry) as gateway:
        body = {"model": "tiny", "messages": [user(text(60))], "max_tokens": 1}
        await credited_as_held(gateway, CHAT, body)


async def test_a_template_sent_along_is_the_engines_to_refuse(tiny: Serving) -> None:
    """(T2) vLLM refuses it unless told to trust clients; the gateway passes that on."""
    body = {"model": "tiny", "messages": [user(text(60))], "chat_template": "{{ messages }}", "max_tokens": 1}
    answer = await tiny.post(CHAT, body)
    assert answer.status == 400
    assert "trust-request-chat-template" in answer.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        *({"reasoning_effort": effort} for effort in ("none", "low", "high")),
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
    ],
    ids=lambda value: json.dumps(value),
)
async def test_reasoning_effort_reaches_the_template(tmp_path: Path, fields: Mapping[str, Any]) -> None:
    """(T3) The chat route makes template switches of the effort; ``/tokenize`` knows switches only."""

    def render(body: Mapping[str, Any]) -> Sequence[int]:
        switches = dict(body.get("chat_template_kwargs") or {})
        if "reasoning_effort" in body:  # never in a question to /tokenize: vLLM's has no such field
            switches.setdefault("enable_thinking", body["reasoning_effort"] != "none")
            switches["reasoning_effort"] = body["reasoning_effort"]
        ids = words({"prompt": "begin " + json.dumps(switches, sort_keys=True)})
        return [*ids, *words(body)]

    async with Engine("a", tokenizes=render) as engine, serving(tmp_path, engine) as gateway:
        engine.caches = True
        body = {"model": "tiny", "messages": [user(text(60))], "max_tokens": 1}
        # The same conversation without any of it: another prompt, unless nothing is said.
        await credited_as_held(gateway, CHAT, {**body, "messages": [user(text(60))]})
        await credited_as_held(gateway, CHAT, {**body, **fields})


@pytest.mark.parametrize("side", ["left", "right"])
async def test_only_what_truncation_leaves_is_scored(tmp_path: Path, side: str) -> None:
    """(T5) 2,048 tokens cut to 1,024: the engine that holds the other half has no credit."""
    first, second = tokens(1024), tokens(1024)
    kept, dropped = (second, first) if side == "left" else (first, second)
    async with Engine("kept") as a, Engine("dropped") as b, serving(tmp_path, a, b) as gateway:
        a.store(kept)
        b.store(dropped)
        b.store(first + second)
        await gateway.credited("kept", kept, 1008)
        await gateway.credited("dropped", first + second, 2032)
        body = {"model": "tiny", "prompt": first + second, "truncate_prompt_tokens": 1024, "truncation_side": side}
        _, decision = await gateway.ask(COMPLETIONS, body)
        # A prompt that is cut on its right is one that "dropped" holds, too: it has the whole of it.
        assert decision.credit["kept"] == 1008
        assert decision.credit["dropped"] == (0 if side == "left" else 1008)
        assert decision.record["prompt_tokens"] == 1024


async def test_an_engine_that_an_image_question_breaks_is_never_asked_one(tmp_path: Path) -> None:
    """(T6) Older engines fail a chat whose image ``/tokenize`` saw before: it never does, and the chat succeeds."""
    poisoned = False

    def tokenize(body: Mapping[str, Any]) -> Sequence[int]:
        nonlocal poisoned
        poisoned = poisoned or "image_url" in json.dumps(body)
        return words(body)

    async def fails_if_poisoned(request: Received, talk: Talk) -> None:
        answer = (b'{"error":{"message":"poisoned"}}', b"500 Oh") if poisoned else (b'{"choices":[]}', b"200 OK")
        await talk.send(reply(*answer, b"content-type: application/json"))

    async with Engine("a", tokenizes=tokenize) as engine, serving(tmp_path, engine) as gateway:
        engine.always = fails_if_poisoned
        messages = [
            user(text(40)),
            assistant("yes"),
            {"role": "user", "content": [{"type": "text", "text": "what is it?"}, IMAGE]},
        ]
        for _ in range(2):
            _, decision = await gateway.ask(CHAT, {"model": "tiny", "messages": messages, "max_tokens": 1})
            assert decision.record["tokens"]["source"] != "none"
    assert not poisoned


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
async def test_an_api_without_tokens_is_routed_and_counted(tmp_path: Path, path: str) -> None:
    """(T7) Nothing falls through quietly: the reason is a label."""
    body = {"model": "tiny", "input": text(), "messages": [user(text())], "max_tokens": 1}
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        answer, decision = await gateway.ask(path, body)
        assert answer.engine == "a"
        assert engine.served == [path]
        assert decision.record["tokens"]["reason"] == "unsupported_api"
        page = await gateway.metrics()
        assert page.total("kvsync_tokenized_total", source="none", reason="unsupported_api") == 1


def _with_template(folder: Path, template: str) -> Path:
    """The tiny tokenizer with another chat template."""
    made = folder / hashlib.blake2b(template.encode(), digest_size=4).hexdigest()
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((TINY_LLAMA / name).read_bytes())
    (made / "chat_template.jinja").write_text(template)
    return made
