"""Rendering and tokenizing as the real engine does it, and turning tokens back into text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsync.engine_sim.config import TINY_LLAMA
from kvsync.engine_sim.outputs import Outputs
from kvsync.engine_sim.tokens import BadPrompt, Detokenizer, ModelTokenizer

DATA = Path(__file__).parents[2] / "data"
TOKENIZER = ModelTokenizer(TINY_LLAMA)
USER = {"role": "user", "content": "hi"}


def with_template(folder: Path, template: str) -> ModelTokenizer:
    shutil.copy(TINY_LLAMA / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(template)
    return ModelTokenizer(folder)


def samples() -> list[Any]:
    found = json.loads((DATA / "vllm" / "http_samples_v0.32.json").read_text())
    return [each for each in found if each["path"] == "/tokenize" and each["status"] == 200]


@pytest.mark.parametrize("sample", samples())
def test_tokens_equal_the_real_engines(sample: Any) -> None:
    request = sample["request"]
    if "prompt" in request:
        text = request["prompt"]
        special = request.get("add_special_tokens", True)
    else:
        text = TOKENIZER.render(
            request["messages"],
            tools=request.get("tools"),
            add_generation_prompt=request.get("add_generation_prompt", True),
            continue_final_message=request.get("continue_final_message", False),
            template_kwargs=request.get("chat_template_kwargs"),
        )
        special = False
    tokens = TOKENIZER.encode(text, add_special_tokens=special)
    assert tokens == sample["response"]["tokens"]
    if strings := sample["response"]["token_strs"]:
        assert TOKENIZER.strings(tokens) == strings


def test_the_packaged_tokenizer_is_the_captures_one() -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        assert (TINY_LLAMA / name).read_bytes() == (DATA / "tiny-llama" / name).read_bytes()


def test_tools_get_the_nulls_the_engine_fills_in_and_lose_what_it_does_not_know() -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"parameters": {"z": 1, "a": "<é>"}, "name": "f", "unknown": 1}},
        {"type": "function", "function": {"name": "g", "strict": True}, "x": 2},
    ]
    text = TOKENIZER.render([USER], tools=tools)
    start, end = text.index("["), text.index("<|im_end|>")
    assert text[start:end] == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"z": 1, "a": "<é>"}}}, '
        '{"type": "function", "function": {"name": "g", "description": null, "parameters": null, "strict": true}}]'
    )


def test_parts_are_joined_for_a_template_that_takes_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]}
    assert TOKENIZER.render([parts]) == TOKENIZER.render([{"role": "user", "content": "a\nb\nc"}])


def test_parts_stay_parts_for_a_template_that_loops_over_them(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.render([USER]) == "[hi]"
    assert tokenizer.render([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]) == "[a][b]"
    other = with_template(tmp_path, template.replace("m.content", "m['content']"))
    assert other.render([USER]) == "[hi]"


def test_the_template_environment_is_transformers(tmp_path: Path) -> None:
    template = (
        "  {% if messages %}\n"
        "{{ {'b': '<', 'a': 'é'} | tojson }}\n"
        "  {%- for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}\n"
        "  {% endif %}\n"
        "{{ bos_token is defined }}{{ add_generation_prompt }}{{ extra }}"
    )
    text = with_template(tmp_path, template).render([USER], template_kwargs={"extra": 5})
    assert text == '{"b": "<", "a": "é"}01FalseTrue5'


def test_a_template_may_refuse(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadPrompt, match="roles must alternate"):
        tokenizer.render([USER])


def test_a_template_can_not_reach_out(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(BadPrompt, match="refused"):
        tokenizer.render([USER])


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "9" * 5000, "NaN", '"\\ud800"'])
def test_tool_arguments_that_are_no_object_do_no_harm(tmp_path: Path, arguments: str) -> None:
    tokenizer = with_template(tmp_path, "{{ messages[0].tool_calls | length }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert tokenizer.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "1"


def test_history_reaches_the_template_in_the_engines_shape(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ messages | tojson }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{"}}
    empty = {"id": "3", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call, broken, empty], "reasoning": "r"},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "tool", "content": [{"type": "text", "text": "done"}], "tool_call_id": "1", "name": "f"},
    ]
    rendered = json.loads(tokenizer.render(messages))
    assert [call["function"]["arguments"] for call in rendered[0].pop("tool_calls")] == [{"x": 1}, {}, {}]
    assert rendered == [
        {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "done", "tool_call_id": "1", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("<{{ messages[-1].content }}>", "  a b ", "<  a b "),
        ("<{{ messages[-1].content | trim }}>", "  a b ", "<a b"),
        ("a<{{ messages[-1].content }}>", "a", "a<a"),
    ],
)
def test_a_final_message_is_left_open(tmp_path: Path, template: str, content: str, expected: str) -> None:
    tokenizer = with_template(tmp_path, template)
    messages = [{"role": "assistant", "content": content}]
    assert tokenizer.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.parametrize("content", ["", "  ", None])
def test_a_final_message_without_content_can_not_be_continued(content: object) -> None:
    with pytest.raises(BadPrompt, match="can't be continued"):
        TOKENIZER.render([{"role": "assistant", "content": content}], continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([], None),
        (["hi"], None),
        ([{"content": "x"}], None),
        ([{"role": 3, "content": "x"}], None),
        ([{"role": "user", "content": 3}], None),
        ([{"role": "user", "content": [3]}], None),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], None),
        ([{"role": "user", "content": [{"type": "text"}]}], None),
        ([{"role": "assistant", "tool_calls": ["f"]}], None),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], None),
        ([USER], [3]),
        ([USER], [{"type": "function"}]),
        ([USER], [{"type": "function", "function": {"description": "no name"}}]),
    ],
)
def test_conversations_that_are_refused(messages: Any, tools: Any) -> None:
    with pytest.raises(BadPrompt):
        TOKENIZER.render(messages, tools=tools)


def test_content_that_a_template_can_not_use(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ messages[0].content + 1 }}")
    with pytest.raises(BadPrompt, match="can't use"):
        tokenizer.render([USER])


def test_cutting_keeps_special_tokens() -> None:
    whole = TOKENIZER.encode("hello world", add_special_tokens=True)
    assert TOKENIZER.encode_last("hello world", 3, add_special_tokens=True) == [whole[0], *whole[-2:]]
    assert TOKENIZER.encode_last("hello world", 3, add_special_tokens=False) == whole[-3:]
    assert TOKENIZER.encode_last("hello world", 99, add_special_tokens=True) == whole
    assert TOKENIZER.encode_last("hello world", 1, add_special_tokens=True) == whole[:1]


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_text_and_never_split_a_character(text: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token, last=place == len(tokens) - 1) for place, token in enumerate(tokens)]
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special=True)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_a_character_that_never_ends_comes_out_at_the_end() -> None:
    half = TOKENIZER.encode("😀", add_special_tokens=False)[:1]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(half[0]) == ""
    assert detokenizer.push(half[0], last=True) != ""


@pytest.mark.parametrize("broken", ["tokenizer.json", "chat_template.jinja"])
def test_folders_that_can_not_be_used(tmp_path: Path, broken: str) -> None:
    shutil.copytree(TINY_LLAMA, tmp_path / "model")
    (tmp_path / "model" / broken).unlink()
    with pytest.raises((OSError, ValueError)):
        ModelTokenizer(tmp_path / "model")
    with pytest.raises((OSError, ValueError)):
        ModelTokenizer(tmp_path / "nowhere")


def test_outputs_are_the_same_for_a_prompt_and_tokenize_to_themselves() -> None:
    outputs = Outputs(TOKENIZER, 20)
    first, reason = outputs.draw([1, 2, 3], 0, limit=100, least=0, ignore_eos=True)
    assert reason == "length"
    assert len(first) == 100
    assert outputs.draw([1, 2, 3], 0, limit=100, least=0, ignore_eos=True) == (first, reason)
    assert outputs.draw([1, 2, 3], 1, limit=100, least=0, ignore_eos=True)[0] != first
    assert outputs.draw([1, 2, 4], 0, limit=100, least=0, ignore_eos=True)[0] != first
    text = TOKENIZER.decode(first, skip_special=True)
    assert TOKENIZER.encode(text, add_special_tokens=False) == list(first)


@pytest.mark.parametrize("prompt", range(20))
def test_answers_end_by_themselves_within_their_bounds(prompt: int) -> None:
    outputs = Outputs(TOKENIZER, 20)
    tokens, reason = outputs.draw([prompt], 0, limit=100, least=0, ignore_eos=False)
    assert reason == "stop"
    assert tokens[-1] == TOKENIZER.eos
    assert 11 <= len(tokens) <= 31
    longer, reason = outputs.draw([prompt], 0, limit=100, least=60, ignore_eos=False)
    assert (len(longer), reason) == (61, "stop")
    cut, reason = outputs.draw([prompt], 0, limit=5, least=0, ignore_eos=False)
    assert (len(cut), reason) == (5, "length")
