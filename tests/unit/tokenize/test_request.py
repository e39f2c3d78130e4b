"""Bodies → what is to be tokenized."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsync.tokenize.request import MAX_PROMPTS, Chat, Text, Truncation, pack_ids, read_request
from tests.unit.tokenize.support import pack

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(**fields: Any) -> Chat:
    (work,) = read_request(CHAT, {"messages": HI, **fields}).works
    assert isinstance(work, Chat)
    return work


class TestCompletions:
    def test_token_ids_need_no_tokenizer(self) -> None:
        assert read_request(COMPLETIONS, {"prompt": [1, 2, 4_294_967_295]}).ids == (pack(1, 2, 4_294_967_295),)

    def test_lists_of_token_ids(self) -> None:
        assert read_request(COMPLETIONS, {"prompt": [[1, 2], [3]]}).ids == (pack(1, 2), pack(3))

    def test_texts_get_special_tokens_unless_told_otherwise(self) -> None:
        assert read_request(COMPLETIONS, {"prompt": "a"}).works == (Text("a", True),)
        assert read_request(COMPLETIONS, {"prompt": ["a", "b"], "add_special_tokens": False}).works == (
            Text("a", False),
            Text("b", False),
        )

    @pytest.mark.parametrize(
        "prompt",
        [
            None,
            "",
            [],
            [[]],
            [[1], []],
            ["a", 1],
            [1, "a"],
            [1, [2]],
            [[1], 2],
            [1.0],
            [-1],
            [2**32],
            {},
            7,
            [["a"]],
            [None],
        ],
    )
    def test_what_the_engine_refuses_is_routed_by_load(self, prompt: object) -> None:
        reading = read_request(COMPLETIONS, {"prompt": prompt})
        assert (reading.reason, reading.ids, reading.works) == ("invalid_request", (), ())

    def test_embeddings_win_over_a_prompt_and_hide_keys(self) -> None:
        reading = read_request(COMPLETIONS, {"prompt": "a", "prompt_embeds": "AAAA"})
        assert (reading.reason, reading.works, reading.hides_keys) == ("prompt_embeds", (), True)
        assert read_request(COMPLETIONS, {"prompt": "a", "prompt_embeds": []}).reason is None

    def test_very_many_texts_are_routed_by_load(self) -> None:
        assert len(read_request(COMPLETIONS, {"prompt": ["a"] * MAX_PROMPTS}).works) == MAX_PROMPTS
        assert read_request(COMPLETIONS, {"prompt": ["a"] * (MAX_PROMPTS + 1)}).reason == "too_many_prompts"
        assert len(read_request(COMPLETIONS, {"prompt": [[1]] * MAX_PROMPTS}).ids) == MAX_PROMPTS
        assert read_request(COMPLETIONS, {"prompt": [[1]] * (MAX_PROMPTS + 1)}).reason == "too_many_prompts"


class TestChat:
    def test_defaults(self) -> None:
        work = chat()
        assert (work.add_generation_prompt, work.continue_final_message, work.add_special_tokens) == (
            True,
            False,
            False,
        )

    @pytest.mark.parametrize(
        ("fields", "shape"),
        [
            ({}, "plain"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"tools": []}, "tools"),
            ({"chat_template_kwargs": {"a": 1}}, "kwargs"),
            ({"chat_template_kwargs": {}}, "plain"),
            ({"documents": [{"text": "d"}]}, "kwargs"),
            ({"reasoning_effort": "low"}, "kwargs"),
            ({"continue_final_message": True, "add_generation_prompt": False}, "continue"),
            ({"add_generation_prompt": False}, "closed"),
            ({"add_special_tokens": True}, "special"),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "parts"),
            ({"messages": [{"role": "tool", "content": "1"}]}, "calls"),
            ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "calls"),
            ({"messages": [{"role": "assistant", "content": "a", "reasoning": "r"}]}, "reasoning"),
            ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "r"}]}, "reasoning"),
            ({"tools": [{}], "messages": [{"role": "user", "content": ["hi"]}]}, "tools+parts"),
        ],
    )
    def test_shapes(self, fields: dict[str, Any], shape: str) -> None:
        assert chat(**fields).shape == shape

    def test_everything_for_the_template_travels_as_kwargs(self) -> None:
        work = chat(documents=[{"text": "d"}], reasoning_effort="low", chat_template_kwargs={"a": 1})
        assert work.kwargs == {"a": 1, "documents": [{"text": "d"}], "reasoning_effort": "low", "enable_thinking": True}

    @pytest.mark.parametrize(
        ("effort", "given", "expected"), [("none", {}, False), ("high", {}, True), ("none", {"enable_thinking": 1}, 1)]
    )
    def test_reasoning_effort_switches_thinking_unless_the_request_does(
        self, effort: str, given: dict[str, Any], expected: object
    ) -> None:
        work = chat(reasoning_effort=effort, chat_template_kwargs=given)
        assert work.kwargs is not None
        assert work.kwargs["enable_thinking"] == expected

    def test_reasoning_content_is_renamed_and_the_body_is_left_alone(self) -> None:
        messages = [
            {"role": "assistant", "content": "a", "reasoning_content": "old"},
            {"role": "assistant", "content": "a", "reasoning_content": "old", "reasoning": "new"},
        ]
        before = json.dumps(messages)
        work = chat(messages=messages)
        assert [m["reasoning"] for m in work.messages] == ["old", "new"]
        assert not any("reasoning_content" in m for m in work.messages)
        assert json.dumps(messages) == before

    @pytest.mark.parametrize(
        "fields",
        [
            {"messages": None},
            {"messages": []},
            {"messages": "hi"},
            {"messages": ["hi"]},
            {"messages": [{"content": "no role"}]},
            {"messages": [{"role": 1, "content": "hi"}]},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": [5]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            {"tools": "t"},
            {"tools": ["t"]},
            {"chat_template": 1},
            {"chat_template_kwargs": [1]},
            {"documents": "d"},
            {"reasoning_effort": 1},
            {"add_generation_prompt": "false"},
            {"add_special_tokens": None},
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": True},
            {"continue_final_message": 1, "add_generation_prompt": False},
        ],
    )
    def test_what_the_engine_refuses_is_routed_by_load(self, fields: dict[str, Any]) -> None:
        reading = read_request(CHAT, {"messages": HI, **fields})
        assert (reading.reason, reading.works) == ("invalid_request", ())

    def test_prompt_embeds_parts(self) -> None:
        body = {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": "AAAA"}]}]}
        reading = read_request(CHAT, body)
        assert (reading.reason, reading.hides_keys) == ("prompt_embeds", True)


class TestMedia:
    def test_two_variants_stand_for_what_comes_before_the_image(self) -> None:
        messages = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}, IMAGE]},
        ]
        reading = read_request(CHAT, {"messages": [*messages, *HI]})
        one, other = reading.works
        assert isinstance(one, Chat)
        assert isinstance(other, Chat)
        assert one.messages[0] == other.messages[0] == messages[0]
        assert len(one.messages) == 2
        assert one.messages[1]["role"] == other.messages[1]["role"] == "user"
        assert one.messages[1]["content"][0] != other.messages[1]["content"][0]
        assert reading.media
        assert reading.hides_keys
        assert reading.rest > 0

    def test_no_image_ever_leaves(self) -> None:
        reading = read_request(CHAT, {"messages": [{"role": "user", "content": [IMAGE]}, *HI]})
        assert "base64" not in repr(reading.works)

    @pytest.mark.parametrize(
        "part",
        [
            IMAGE,
            {"type": "input_audio", "input_audio": {}},
            {"type": "video_url"},
            {"image_url": "u"},
            {"type": "later"},
            {"type": None, "text": "t"},
            {"type": ["text"]},
        ],
    )
    def test_every_part_that_is_no_text_counts(self, part: object) -> None:
        assert read_request(CHAT, {"messages": [{"role": "user", "content": [part]}]}).media

    def test_cut_prompts_with_images_are_routed_by_load(self) -> None:
        reading = read_request(CHAT, {"messages": [{"role": "user", "content": [IMAGE]}], "truncate_prompt_tokens": 5})
        assert (reading.reason, reading.hides_keys) == ("truncated_media", True)


class TestTruncation:
    @pytest.mark.parametrize(
        ("path", "fields", "expected"),
        [
            (COMPLETIONS, {}, None),
            (COMPLETIONS, {"truncation_side": "left"}, None),
            (COMPLETIONS, {"truncate_prompt_tokens": 5}, Truncation(5, None)),
            (COMPLETIONS, {"truncate_prompt_tokens": 5, "truncation_side": "right"}, Truncation(5, "right")),
            (COMPLETIONS, {"truncate_prompt_tokens": -1}, Truncation(None, None, reserve=1)),
            (COMPLETIONS, {"truncate_prompt_tokens": -1, "max_tokens": 0}, Truncation(None, None)),
            (CHAT, {"truncate_prompt_tokens": -1}, Truncation(None, None)),
            (CHAT, {"truncate_prompt_tokens": -1, "max_completion_tokens": 9}, Truncation(None, None, reserve=1)),
            (CHAT, {"truncate_prompt_tokens": -1, "max_tokens": 9}, Truncation(None, None, reserve=1)),
        ],
    )
    def test_fields(self, path: str, fields: dict[str, Any], expected: Truncation | None) -> None:
        assert read_request(path, {"prompt": "a", "messages": HI, **fields}).truncation == expected

    @pytest.mark.parametrize(
        "fields",
        [{"truncate_prompt_tokens": v} for v in (0, -2, "5", 5.0, True, [5])]
        + [{"truncation_side": v} for v in ("middle", 1, ["left"])],
    )
    def test_refused_values(self, fields: dict[str, Any]) -> None:
        assert read_request(COMPLETIONS, {"prompt": [1], **fields}).reason == "invalid_request"


class TestFlags:
    @pytest.mark.parametrize(
        ("path", "fields", "reads"),
        [
            (COMPLETIONS, {}, True),
            (COMPLETIONS, {"prompt_logprobs": 0}, False),
            (CHAT, {"prompt_logprobs": 1}, False),
            (COMPLETIONS, {"logprobs": 1}, True),
            (COMPLETIONS, {"echo": True}, True),
            (COMPLETIONS, {"echo": True, "logprobs": 0}, False),
            (CHAT, {"echo": True}, False),
            (CHAT, {"echo": True, "top_logprobs": None}, False),
            (CHAT, {"echo": False, "top_logprobs": 2}, True),
        ],
    )
    def test_reads_cache(self, path: str, fields: dict[str, Any], reads: bool) -> None:
        assert read_request(path, {"prompt": "a", "messages": HI, **fields}).reads_cache is reads

    @pytest.mark.parametrize(
        ("fields", "single"),
        [
            ({}, True),
            ({"n": 1}, True),
            ({"n": None}, True),
            ({"n": 2}, False),
            ({"best_of": 3}, False),
            ({"use_beam_search": True}, False),
            ({"n": [1]}, False),
        ],
    )
    def test_single(self, fields: dict[str, Any], single: bool) -> None:
        assert read_request(COMPLETIONS, {"prompt": "a", **fields}).single is single

    def test_salt(self) -> None:
        reading = read_request(COMPLETIONS, {"prompt": [1], "cache_salt": "s"})
        assert (reading.cache_salt, reading.hides_keys) == ("s", True)

    @pytest.mark.parametrize("salt", ["", "s" * 1025, 5, ["s"]])
    def test_a_refused_salt(self, salt: object) -> None:
        reading = read_request(COMPLETIONS, {"prompt": [1], "cache_salt": salt})
        assert (reading.reason, reading.hides_keys) == ("invalid_request", True)

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
    def test_reannouncing_is_seen_on_every_path(self, path: str) -> None:
        body = {"prompt": "a", "messages": HI, "vllm_xargs": {"kv_cache_report_mode": "full"}}
        assert read_request(path, body).reannounces
        assert not read_request(path, {**body, "vllm_xargs": {"kv_cache_report_mode": "diff"}}).reannounces
        assert not read_request(path, {**body, "vllm_xargs": ["full"]}).reannounces


class TestOtherApis:
    @pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/chat/completions", ""])
    def test_are_routed_by_load_with_a_reason(self, path: str) -> None:
        reading = read_request(path, {"prompt": [1], "messages": HI, "input": "x"})
        assert (reading.reason, reading.ids, reading.works, reading.hides_keys) == ("unsupported_api", (), (), False)

    @pytest.mark.parametrize(
        "body",
        [
            {"cache_salt": "s"},
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            {"previous_response_id": "r"},
            {"input": [{} for _ in range(10_001)]},
        ],
    )
    def test_say_when_they_may_hide_keys(self, body: dict[str, Any]) -> None:
        assert read_request("/v1/responses", body).hides_keys


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "tools",
        "prompt_embeds",
        "cache_salt",
        "truncate_prompt_tokens",
        "truncation_side",
        "n",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "vllm_xargs",
        "echo",
        "prompt_logprobs",
        "max_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "reasoning_effort",
        "model",
    ]
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "reasoning_content", "name"]), JSON)
BODY = st.dictionaries(FIELDS, JSON | st.lists(MESSAGE, max_size=3))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([COMPLETIONS, CHAT, "/v1/messages"]), BODY)
def test_no_body_raises(path: str, body: dict[str, Any]) -> None:
    reading = read_request(path, body)
    assert sum((bool(reading.ids), bool(reading.works), reading.reason is not None)) == 1
    for work in reading.works:
        assert work.shape


@given(st.lists(st.integers(-2, 2**33) | st.booleans() | st.floats() | st.text(max_size=1), max_size=5))
def test_packed_ids_are_uint32_or_nothing(ids: list[Any]) -> None:
    valid = all(isinstance(i, int) and 0 <= i < 2**32 for i in ids)
    assert pack_ids(ids) == (pack(*ids) if valid else None)


class TestTransfers:
    """Requests of disaggregated serving, where they pass: what an engine had cached is not all its own."""

    def test_carried_tokens_may_be_the_prompt_whatever_the_messages_say(self) -> None:
        """Their ``cached_tokens`` held against the messages' tokens would be wrong credit, or wrong contradictions."""
        body = {"messages": HI, "kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}}
        reading = read_request(CHAT, body)
        assert (reading.reason, reading.works, reading.ids) == ("carried_tokens", (), ())
        body["kv_transfer_params"] = {"prompt_token_ids": None}
        assert read_request(CHAT, body).works

    @pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {}, "odd"])
    def test_an_answer_that_may_rest_on_another_engine_s_cache_is_not_compared(self, params: object) -> None:
        for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": [1, 2, 3]})):
            assert read_request(path, {**body, "kv_transfer_params": None}).single
            assert not read_request(path, {**body, "kv_transfer_params": params}).single
