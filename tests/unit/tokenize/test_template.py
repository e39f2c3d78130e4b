"""The template environment, the form of contents, and messages and tools as the engine hands them over."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from kvsync.tokenize.errors import LocalFailed
from kvsync.tokenize.messages import conversation, tool_list, unsupported
from kvsync.tokenize.request import Chat
from kvsync.tokenize.template import ChatTemplate

NOON = datetime(2026, 3, 4, 12, 30)
SHOW = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
LOOP = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"


def user(content: Any = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def render(source: str, *messages: dict[str, Any], **fields: Any) -> str:
    special = {"bos_token": "<s>"}
    template = ChatTemplate(source, special, now=lambda: NOON)
    return template.render(Chat(messages=messages or (user(),), **fields))


class TestEnvironment:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            pytest.param("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc", id="trim and lstrip blocks"),
            pytest.param("{{ bos_token }}|{{ eos_token }}", "<s>|", id="special tokens, undefined ones empty"),
            pytest.param(
                "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1", id="break"
            ),
            pytest.param("{% generation %}x{% endgeneration %}y", "xy", id="generation tag"),
            pytest.param("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026", id="date"),
            pytest.param("{{ documents is none }} {{ tools is none }}", "True True", id="absent is none"),
            pytest.param("{{ add_generation_prompt }}", "True", id="generation prompt"),
        ],
    )
    def test_source(self, source: str, text: str) -> None:
        assert render(source) == text

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ("", '{"b": "<é&\'>", "a": [1, null]}'),
            ("ensure_ascii=true", '{"b": "<\\u00e9&\'>", "a": [1, null]}'),
            ("indent=1", '{\n "b": "<é&\'>",\n "a": [\n  1,\n  null\n ]\n}'),
            ("separators=(',', ':')", '{"b":"<é&\'>","a":[1,null]}'),
            ("sort_keys=true", '{"a": [1, null], "b": "<é&\'>"}'),
        ],
    )
    def test_tojson_neither_sorts_nor_escapes(self, arguments: str, text: str) -> None:
        assert (
            render(f"{{{{ value | tojson({arguments}) }}}}", kwargs={"value": {"b": "<é&'>", "a": [1, None]}}) == text
        )

    @pytest.mark.parametrize(
        "source",
        [
            "{{ raise_exception('only user messages') }}",
            "{{ 1 // 0 }}",
            "{{ messages[9].content }}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ undefined_function() }}",
            "{% for i in range(10 ** 9) %}{% endfor %}",
        ],
    )
    def test_what_a_template_raises_is_a_failure(self, source: str) -> None:
        with pytest.raises(LocalFailed) as failed:
            render(source)
        assert failed.value.cause == "template_error"

    def test_a_source_that_is_none(self) -> None:
        with pytest.raises(LocalFailed, match="bad_template"):
            ChatTemplate("{% if %}", {})


class TestKwargs:
    def test_are_seen_by_the_template_and_win_over_special_tokens(self) -> None:
        assert render("{{ a }}{{ bos_token }}", kwargs={"a": 1, "bos_token": "B"}) == "1B"

    def test_null_and_auto_are_dropped(self) -> None:
        assert render("{{ a is defined }}{{ b is defined }}", kwargs={"a": None, "b": "auto"}) == "FalseFalse"

    def test_documents(self) -> None:
        assert render("{{ documents[0].text }}", kwargs={"documents": [{"text": "d"}]}) == "d"


class TestContinueFinalMessage:
    def go(self, source: str, *messages: dict[str, Any]) -> str:
        return render(source, *messages, continue_final_message=True, add_generation_prompt=False)

    def test_cuts_behind_the_final_message(self) -> None:
        assert self.go(SHOW, user(), {"role": "assistant", "content": "The "}) == "[user:hi][assistant:The "

    def test_a_template_that_trims(self) -> None:
        source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
        assert self.go(source, user(" The ")) == "[The"

    def test_parts(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert self.go(LOOP, user(parts)) == "<a><b"

    @pytest.mark.parametrize(
        ("source", "message"),
        [(SHOW[:-12] + "{% break %}{% endfor %}", user()), ("fixed", user()), (LOOP, user([])), (LOOP, user(None))],
    )
    def test_nothing_to_continue(self, source: str, message: dict[str, Any]) -> None:
        messages = (user("other"), message)
        with pytest.raises(LocalFailed, match="nothing_to_continue"):
            self.go(source, *messages)

    def test_the_request_is_left_alone(self) -> None:
        message = user([{"type": "text", "text": "a"}])
        before = copy.deepcopy(message)
        self.go(LOOP, message)
        assert message == before


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (SHOW, "string"),
        (LOOP, "openai"),
        ("{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages[1:] %}{% for c in m.content[:1] %}{% endfor %}{% endfor %}", "openai"),
        (
            "{% set l = messages[1:] %}{% set k = l %}{% for m in k %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m['parts'] %}{% endfor %}{% endfor %}", "string"),
        ("{% for m in others %}{% for c in m.content %}{% endfor %}{% endfor %}", "string"),
        (
            "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(it) %}{% for c in it %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(a, it) %}{% for c in it %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(1, it=m['content']) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.role) }}{% endfor %}",
            "string",
        ),
        ("{% for a, b in pairs %}{% endfor %}{{ messages }}", "string"),
    ],
)
def test_the_form_of_content_is_read_off_the_template(source: str, form: str) -> None:
    assert ChatTemplate(source, {}).content_format == form


class TestMessages:
    @pytest.mark.parametrize(
        ("content", "text", "parts"),
        [
            ("hi", "hi", ["hi"]),
            ("", "", [""]),
            (None, "", []),
            ([], "", []),
            ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb", ["a", "b"]),
            ([{"type": "text", "text": ""}, {"type": "text", "text": "b"}], "b", ["", "b"]),
            ([{"type": "text", "text": None}, "plain"], "plain", ["plain"]),
            ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb", ["a", "b"]),
            ([{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}], "no\nhm", ["no", "hm"]),
        ],
    )
    def test_contents(self, content: Any, text: str, parts: Sequence[str]) -> None:
        assert conversation([user(content)], "string") == [{"role": "user", "content": text}]
        (message,) = conversation([user(content)], "openai")
        assert message["content"] == [{"type": "text", "text": part} for part in parts]

    def test_further_fields_of_a_part_reach_the_template(self) -> None:
        part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
        assert conversation([user([part])], "openai")[0]["content"] == [part]

    def test_a_tools_answer_is_text_in_either_form(self) -> None:
        message = {"role": "tool", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "b"}]}
        for form, text in (("string", "b"), ("openai", "\nb")):
            assert conversation([message | {"tool_call_id": "c"}], form) == [  # type: ignore[arg-type]
                {"role": "tool", "content": text, "tool_call_id": "c"}
            ]

    @pytest.mark.parametrize(
        ("arguments", "parsed"),
        [('{"b": 1, "a": 2}', {"b": 1, "a": 2}), ("", {}), ("{", {}), ("[1]", {}), ("5", {}), ("[" * 100_000, {})],
    )
    def test_arguments_of_calls_become_objects(self, arguments: str, parsed: dict[str, Any]) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        (message,) = conversation([{"role": "assistant", "content": None, "tool_calls": [call]}], "string")
        assert repr(message["tool_calls"][0]["function"]["arguments"]) == repr(parsed), "in the client's order"

    def test_calls_are_in_the_engines_order_of_fields(self) -> None:
        call = {"type": "function", "index": 0, "function": {"x": 1, "name": "f", "arguments": "{}"}, "id": "c"}
        (message,) = conversation([{"role": "assistant", "tool_calls": [call]}], "string")
        expected = {"id": "c", "function": {"arguments": {}, "name": "f", "x": 1}, "type": "function", "index": 0}
        assert repr(message["tool_calls"]) == repr([expected])

    @pytest.mark.parametrize("calls", [None, []])
    def test_no_calls_are_no_field(self, calls: Any) -> None:
        (message,) = conversation([{"role": "assistant", "content": "a", "tool_calls": calls}], "string")
        assert message == {"role": "assistant", "content": "a"}

    @pytest.mark.parametrize(
        "calls",
        [
            [5],
            [{}],
            [{"function": 5}],
            5,
            "c",
            {"a": 1},
            [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
            [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
            [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}],
            [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
            [{"id": "c", "type": "function", "function": {"arguments": "{}"}}],
        ],
    )
    def test_calls_that_are_none_fail(self, calls: Any) -> None:
        with pytest.raises(LocalFailed, match="bad_tool_call"):
            conversation([{"role": "assistant", "tool_calls": calls}], "string")

    def test_reasoning_has_both_names(self) -> None:
        (message,) = conversation([{"role": "assistant", "content": "a", "reasoning": "r"}], "string")
        assert message == {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}

    def test_names_and_nothing_else_pass(self) -> None:
        (message,) = conversation([user() | {"name": "bob", "x": 1, "refusal": None}], "string")
        assert message == {"role": "user", "content": "hi", "name": "bob"}


class TestTools:
    def test_nulls_are_filled_in_and_the_order_is_the_engines(self) -> None:
        (tool,) = tool_list([{"function": {"parameters": {"z": 1, "a": 2}, "name": "f", "extra": 1}, "x": 1}]) or []
        assert repr(tool) == repr(
            {"type": "function", "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": 2}}}
        )

    def test_strict_and_defer_loading_only_where_set(self) -> None:
        (tool,) = tool_list([{"function": {"name": "f", "strict": False}, "defer_loading": True}]) or []
        assert tool["function"] == {
            "name": "f",
            "description": None,
            "parameters": None,
            "strict": False,
            "defer_loading": True,
        }
        assert tool["defer_loading"] is True

    def test_none(self) -> None:
        assert tool_list(None) is None
        assert tool_list([]) == []

    @pytest.mark.parametrize("tool", [{}, {"function": 1}, {"function": {}}, {"function": {"name": 5}}])
    def test_tools_that_are_none_fail(self, tool: dict[str, Any]) -> None:
        with pytest.raises(LocalFailed, match="bad_tool"):
            tool_list([tool])


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        (Chat(messages=[user()]), None),
        (Chat(messages=[user()], template="{{ 1 }}"), "own_template"),
        (Chat(messages=[user()], kwargs={"a": 1}), None),
        (Chat(messages=[user()], kwargs={"messages": []}), "reserved_kwargs"),
        (Chat(messages=[user()], kwargs={"tools": []}), "reserved_kwargs"),
        (Chat(messages=[{"role": "developer", "content": "d"}]), "developer_role"),
        (Chat(messages=[user() | {"task": "t"}]), "task"),
        (Chat(messages=[user([{"type": "tool_reference", "name": "f"}])]), "part_type"),
        (Chat(messages=[user([{"type": "text", "text": "a", "uuid": "u"}])]), "part_type"),
        (Chat(messages=[{"role": "system", "content": "x-anthropic-billing-header: a\nb"}]), "billing_header"),
        (Chat(messages=[user("x-anthropic-billing-header: a")]), None),
    ],
)
def test_what_is_left_to_the_remote_tokenizer(chat: Chat, why: str | None) -> None:
    assert unsupported(chat) == why
