"""Reading what a render endpoint answers: real shapes, tolerated ones, and what is no rendering."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvsync.tokenize.endpoints import BadAnswer
from kvsync.tokenize.errors import Untokenized
from kvsync.tokenize.render import read_rendering, render_question
from kvsync.tokenize.types import ImageSpan
from tests.unit.tokenize.support import DATA, unpack

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def answer(hashes: Any, places: Any, ids: Any = tuple(range(20)), **more: Any) -> bytes:
    features = {"mm_hashes": hashes, "mm_placeholders": places}
    return json.dumps({"token_ids": ids, "features": features, **more}).encode()


def at(offset: Any, length: Any = 1) -> dict[str, Any]:
    return {"offset": offset, "length": length}


def recorded() -> dict[str, Any]:
    """A real answer to a chat without images."""
    samples = json.loads((DATA / "vllm" / "http_samples_v0.32.json").read_text())
    rendered: dict[str, Any] = next(s for s in samples if s["path"] == "/v1/chat/completions/render")["response"]
    return rendered


def test_a_rendering_as_vllm_shapes_it() -> None:
    shaped = recorded()
    shaped["features"] = {
        "mm_hashes": {"image": ["cat", "dog"], "audio": ["bark"]},
        "mm_placeholders": {"image": [at(40, 8), at(4, 16)], "audio": [at(20, 20)]},
        "kwargs_data": None,
        "mm_metadata": None,
    }
    prompt = read_rendering(json.dumps(shaped).encode())
    assert unpack(prompt.tokens) == shaped["token_ids"]
    assert prompt.length == len(shaped["token_ids"])
    assert prompt.images == (ImageSpan("dog", 4, 16), ImageSpan("bark", 20, 20), ImageSpan("cat", 40, 8))


def test_the_last_token_may_be_an_item_s() -> None:
    assert read_rendering(answer({"image": ["i"]}, {"image": [at(19)]})).images == (ImageSpan("i", 19, 1),)


def test_unknown_fields_and_empty_modalities_are_tolerated() -> None:
    place = {**at(1), "is_embed": [True]}
    raw = answer({"image": ["i"], "video": []}, {"image": [place], "video": []}, later={"a": [1]})
    assert read_rendering(raw).images == (ImageSpan("i", 1, 1),)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"token_ids":' + b"[" * 100_000,
        b'\xff{"token_ids":[1]}',
        b'{"token_ids":[1]}',
        b'{"token_ids":[1],"features":null}',
        b'{"token_ids":[1],"features":{}}',
        b'{"token_ids":[1],"features":[]}',
        answer({}, {}),
        answer({"image": []}, {"image": []}),
        answer(None, None),
        answer({"image": ["i"]}, {}),
        answer({}, {"image": [at(1)]}),
        answer({"image": ["i"]}, {"audio": [at(1)]}),
        answer({"image": ["i"]}, {"image": [at(1), at(2)]}),
        answer({"image": ["i", "j"]}, {"image": [at(1)]}),
        answer({"image": "i"}, {"image": [at(1)]}),
        answer({"image": [None]}, {"image": [at(1)]}),
        answer({"image": [7]}, {"image": [at(1)]}),
        answer({"image": [""]}, {"image": [at(1)]}),
        answer({"image": ["i" * 1025]}, {"image": [at(1)]}),
        answer({"image": ["\ud800"]}, {"image": [at(1)]}),
        answer({"image": ["i"]}, {"image": [1]}),
        answer({"image": ["i"]}, {"image": [{"offset": 1}]}),
        answer({"image": ["i"]}, {"image": [at(-1)]}),
        answer({"image": ["i"]}, {"image": [at(1, 0)]}),
        answer({"image": ["i"]}, {"image": [at(1, -1)]}),
        answer({"image": ["i"]}, {"image": [at(1.5)]}),
        answer({"image": ["i"]}, {"image": [at(True)]}),
        answer({"image": ["i"]}, {"image": [at("1")]}),
        answer({"image": ["i"]}, {"image": [at(20)]}),
        answer({"image": ["i"]}, {"image": [at(19, 2)]}),
        answer({"image": ["i"]}, {"image": [at(0, 2**63)]}),
        answer({"image": ["i"]}, {"image": [at(2**64, 1)]}),
        answer({"image": ["i", "j"]}, {"image": [at(1, 3), at(3, 3)]}),
        answer({"image": ["i"], "audio": ["j"]}, {"image": [at(1)], "audio": [at(1)]}),
        answer({"image": ["i"]}, {"image": [at(0)]}, ids=[]),
        answer({"image": ["i"]}, {"image": [at(0)]}, ids=[-1]),
        answer({"image": ["i"]}, {"image": [at(0)]}, ids=[2**32]),
        answer({"image": ["i"]}, {"image": [at(0)]}, ids=["1"]),
        answer({"image": ["i"]}, {"image": [at(0)]}, ids=None),
    ],
)
def test_what_is_no_rendering_of_a_prompt_with_media(raw: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_rendering(raw)


def test_the_question_is_the_request_without_its_answer_s_ballast() -> None:
    body = {"model": "adapter", "messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 5, "stream": True}
    assert json.loads(render_question(body, "m")) == {**body, "model": "m", "mm_payload": "none"}
    assert json.loads(render_question({"mm_payload": "tensors"}, "m"))["mm_payload"] == "none"
    assert body["model"] == "adapter", "the client's own body goes on unchanged"


def test_a_question_that_can_not_be_written() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for body in ({"messages": "\ud800"}, {"messages": nested}):
        with pytest.raises(Untokenized) as failed:
            render_question(body, "m")
        assert failed.value.reason == "invalid_request"
