"""Finding usage in what passes by."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsync.requests.usage import TAIL, UsageTail

USAGE = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8}, "note": "a"}


def find(*pieces: bytes) -> dict[str, object] | None:
    tail = UsageTail()
    for piece in pieces:
        tail.add(piece)
    return tail.find()


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b"", None),
        (b"null", None),
        (b'{"usage":null}', None),
        (b'{"usage":{}}', {}),
        (b'{"usage" : { "a" : 1 } , "x":2}', {"a": 1}),
        (b'{"usage":{"a":1}}{"usage":null}', {"a": 1}),
        (b'{"usage":{"a":1}} {"usage":{"a":2}}', {"a": 2}),
        (b'{"text":"\\"usage\\":{\\"a\\":1}"}', None),
        (b'{"usage":{"a":', None),
        (b'{"usage":{"a":nonsense}}', None),
        (b'{"usage":[1]}', None),
        (b'{"usage":{"a":{"b":{"c":1}}}}', {"a": {"b": {"c": 1}}}),
        (b'{"usage":{"a":"}{"}}', {"a": "}{"}),
        (b'{"usage":{"a":1}}{"usage":{"a":{"b":{"c":2}}}}', {"a": {"b": {"c": 2}}}),
        (b'{"usage":{"a":1}}{"usage":{"a":', None),
        (b'{"usage":{"a":1}}{"usage":{"a":nonsense}}', None),
        (b'data: {"type":"response.completed","response":{"usage":{"input_tokens":3}}}\n\n', {"input_tokens": 3}),
        (b"\xff\xfe" + json.dumps({"usage": USAGE}).encode(), USAGE),
    ],
)
def test_bodies(body: bytes, usage: dict[str, object] | None) -> None:
    assert find(body) == usage
    assert find(*(body[at : at + 1] for at in range(len(body)))) == usage


@pytest.mark.parametrize("value", [b"[" * 30_000 + b"]" * 30_000, b"9" * 30_000, b'"' + b"\\" * 30_001], ids=len)
def test_what_no_parser_takes_is_no_usage(value: bytes) -> None:
    assert find(b'{"usage":{"prompt_tokens":' + value + b"}}") is None


@pytest.mark.parametrize("key", [b'"usage":{', b'"usage":{{}', b'"usage":{"a":"', b'"usage"', b'"usage":null,'])
def test_of_many_keys_one_is_read_at_most(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer full of them costs one look at its end, not one at each."""
    read: list[int] = []

    def counting(text: str) -> tuple[object, int]:
        read.append(len(text))
        return json.JSONDecoder().raw_decode(text)

    monkeypatch.setattr("kvsync.requests.usage._read", counting)
    assert find(key * (TAIL // len(key))) is None
    assert sum(read) < 2 * len(key)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 3 * TAIL), st.integers(0, TAIL - 200), st.integers(500, 50_000))
def test_only_the_end_is_looked_at_however_it_was_cut(before: int, after: int, size: int) -> None:
    body = b"x" * before + b'"usage":' + json.dumps(USAGE).encode() + b"y" * after
    assert find(*(body[at : at + size] for at in range(0, len(body), size))) == USAGE


def test_memory_is_bounded() -> None:
    """Whatever the pieces are: a thousand long streams of small ones once grew by three times what was in them."""
    for size, count in ((1, 300_000), (45, 10_000), (1000, 1000), (10 * TAIL, 3)):
        tracemalloc.start()
        try:
            tail = UsageTail()
            tail.add(b'"usage":{"a":1}')
            for _ in range(count):
                tail.add(b"z" * size)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 3 * TAIL
        assert tail.find() is None


def test_text_of_a_model_cannot_pretend() -> None:
    """Whatever a model says, inside JSON its quotes are escaped."""
    body = json.dumps({"usage": USAGE, "choices": [{"text": '"usage": {"prompt_tokens": 1}'}]}).encode()
    assert find(body) == USAGE
