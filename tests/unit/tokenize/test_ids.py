"""Prompts of token ids taken out of JSON: what is found is what decoding finds."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.tokenize import ids
from kvsync.tokenize.ids import PackedIds, lift
from kvsync.tokenize.request import Reading, read_request
from tests.unit.tokenize.support import pack

COMPLETIONS = "/v1/completions"
native = pytest.mark.skipif(ids._native is None, reason="the native core (kvsync-core) is not installed")

IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["prompt", "tokens", "", "a", '"', "\\", "é", "{", "]"])
LAYOUTS: list[dict[str, Any]] = [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]


def written(members: list[tuple[str, Any]], layout: dict[str, Any]) -> bytes:
    """An object with these members, names that come twice included."""
    return b"{%b}" % b",".join(
        json.dumps(name).encode() + b":" + json.dumps(value, **layout).encode("utf-8", "surrogatepass")
        for name, value in members
    )


@native
@given(st.lists(st.tuples(NAMES, JSON | IDS | st.lists(IDS, max_size=3)), max_size=4), st.sampled_from(LAYOUTS))
def test_what_is_lifted_is_what_a_parser_finds(members: list[tuple[str, Any]], layout: dict[str, Any]) -> None:
    text = written(members, layout)
    lifted = lift(text, "prompt", 2)
    if lifted is not None:
        rest, prompts = lifted
        value = json.loads(text)["prompt"]
        assert [list(array("I", prompt)) for prompt in prompts] == (value if isinstance(value[0], list) else [value])
        assert json.loads(rest) == {**json.loads(text), "prompt": []}


@native
@given(IDS | st.lists(IDS, min_size=1, max_size=3), st.dictionaries(st.sampled_from(["a", "é", "{"]), JSON, max_size=3))
def test_plain_prompts_are_found(prompt: list[Any], others: dict[str, Any]) -> None:
    lifted = lift(
        json.dumps({**others, "prompt": prompt}, ensure_ascii=False).encode("utf-8", "surrogatepass"), "prompt", 3
    )
    assert lifted is not None
    assert lifted[1] == [pack(*one) for one in (prompt if isinstance(prompt[0], list) else [prompt])]


@native
@given(st.binary(max_size=40), st.integers(0, 40))
def test_a_broken_text_stays_one(noise: bytes, at: int) -> None:
    """What is no JSON with the prompt in it is none without it."""
    text = b'{"a": ["x"], "prompt": [1, 2], "b": {}}'
    text = text[:at] + noise + text[at:]
    lifted = lift(text, "prompt")
    if lifted is not None:
        try:
            json.loads(lifted[0])
        except ValueError:
            with pytest.raises(ValueError):
                json.loads(text)
        else:
            json.loads(text)


@native
def test_a_long_text() -> None:
    """Read without the GIL."""
    prompt = list(range(100_000))
    lifted = lift(json.dumps({"prompt": prompt}).encode(), "prompt")
    assert lifted == (b'{"prompt": []}', [array("I", prompt).tobytes()])


def test_without_the_core_nothing_is_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_native", None)
    assert lift(b'{"prompt":[1]}', "prompt") is None


def test_packed_ids_are_read_as_lists_are() -> None:
    for prompt, packed in (([1, 2], [pack(1, 2)]), ([[1, 2], [3]], [pack(1, 2), pack(3)])):
        body = {"prompt": prompt, "cache_salt": "s", "truncate_prompt_tokens": 1}
        reading = read_request(COMPLETIONS, body)
        assert isinstance(reading, Reading)
        assert read_request(COMPLETIONS, {**body, "prompt": PackedIds(packed)}) == reading
