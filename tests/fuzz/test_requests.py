"""Requests of every shape: reading one never raises anything but a refusal, and tokens never lie about their length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.config import LocalTokenizerSettings, ModelSettings, RemoteTokenizerSettings, TokenizerSettings
from kvsync.requests.body import read_body
from kvsync.requests.errors import Problem
from kvsync.requests.usage import UsageTail
from kvsync.tokenize.service import TokenizerService
from kvsync.tokenize.types import TokenizedRequest
from tests.fuzz.values import ANYTHING, ODD_TEXTS, SCALARS, mostly, objects
from tests.unit.tokenize.support import TINY

TEXTS = st.text(max_size=40) | ODD_TEXTS
IDS = st.lists(st.integers(0, 500), max_size=40)
PARTS = objects(
    type=st.sampled_from(["text", "image_url", "input_text", "input_image", "audio_url", "refusal"]),
    text=TEXTS,
    image_url=objects(url=TEXTS, detail=TEXTS),
    uuid=TEXTS,
)
TOOL_CALLS = objects(id=TEXTS, type=st.just("function"), function=objects(name=TEXTS, arguments=TEXTS))
MESSAGES = objects(
    role=st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
    content=TEXTS | st.lists(mostly(PARTS), max_size=3),
    name=TEXTS,
    tool_calls=st.lists(mostly(TOOL_CALLS), max_size=2),
)
TOOLS = objects(type=st.just("function"), function=objects(name=TEXTS, description=TEXTS, parameters=ANYTHING))
BODIES = objects(
    model=st.just("tiny"),
    prompt=TEXTS | IDS | st.lists(TEXTS, max_size=3) | st.lists(IDS, max_size=3),
    input=TEXTS | IDS | st.lists(TEXTS, max_size=3) | st.lists(mostly(MESSAGES), max_size=3),
    instructions=TEXTS,
    system=TEXTS,
    messages=st.lists(mostly(MESSAGES), max_size=4),
    tools=st.lists(mostly(TOOLS), max_size=2),
    tool_choice=st.sampled_from(["auto", "none", "required"]),
    chat_template_kwargs=st.dictionaries(TEXTS, SCALARS, max_size=2),
    chat_template=TEXTS,
    add_generation_prompt=st.booleans(),
    continue_final_message=st.booleans(),
    add_special_tokens=st.booleans(),
    documents=st.lists(ANYTHING, max_size=1),
    reasoning_effort=st.sampled_from(["none", "low", "high"]),
    truncate_prompt_tokens=st.integers(-2, 64),
    truncation_side=st.sampled_from(["left", "right"]),
    cache_salt=TEXTS,
    kv_cache_report_mode=st.sampled_from(["full", "none"]),
    echo=st.booleans(),
    n=st.integers(0, 4),
    best_of=st.integers(0, 4),
    prompt_logprobs=st.integers(0, 4),
    stream=st.booleans(),
    stream_options=objects(include_usage=st.booleans()),
    prompt_embeds=TEXTS,
    mm_processor_kwargs=ANYTHING,
)
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/tokenize",
    "/v1/score",
    "/unheard/of",
]


class Tokenizing:
    """A tokenizer service on a loop of its own."""

    def __init__(self) -> None:
        settings = TokenizerSettings(
            remote=RemoteTokenizerSettings(enabled=False), local=LocalTokenizerSettings(prove=1, threads=1)
        )
        models = [ModelSettings(name="tiny", tokenizer=TINY)]
        self.runner = asyncio.Runner()
        self.service = TokenizerService(settings, models, lambda _: [], held=lambda *_: None)
        self.runner.run(self.service.start())

    def tokens(self, path: str, body: dict[str, Any]) -> TokenizedRequest:
        async def ask() -> TokenizedRequest:
            begun = self.service.begin(path, body, "tiny", None)
            return begun if isinstance(begun, TokenizedRequest) else await begun

        return self.runner.run(ask())

    def close(self) -> None:
        self.runner.run(self.service.close())
        self.runner.close()


@pytest.fixture(scope="module")
def tokenizing() -> Iterator[Tokenizing]:
    opened = Tokenizing()
    yield opened
    opened.close()


@pytest.mark.parametrize("path", PATHS)
@given(body=BODIES)
def test_any_request_is_read_or_goes_by_load(tokenizing: Tokenizing, path: str, body: dict[str, Any]) -> None:
    found = tokenizing.tokens(path, body)
    assert found.prompts or found.reason or found.source == "ids"
    for prompt in found.prompts:
        # Fewer tokens than the length only where the prompt is cut before an image that nobody told of.
        assert len(prompt.tokens) % 4 == 0
        assert len(prompt.tokens) <= 4 * prompt.length
        assert len(prompt.tokens) == 4 * prompt.length or found.hides_keys
        ends = [0]
        for span in prompt.images:
            assert ends[-1] <= span.offset < span.offset + span.length <= prompt.length
            ends.append(span.offset + span.length)


JSON_LIKE = st.one_of(
    st.binary(max_size=60),
    BODIES.map(lambda body: json.dumps(body).encode()),
    st.builds(
        lambda body, at, junk: (raw := json.dumps(body).encode())[: at % (len(raw) + 1)] + junk,
        BODIES,
        st.integers(0, 2000),
        st.binary(max_size=4),
    ),
    st.integers(1, 200_000).map(lambda depth: b"[" * depth),
    st.integers(1, 100_000).map(lambda depth: b'{"model":' * depth),
)


def _read(raw: bytes) -> Problem | tuple[dict[str, object], str]:
    try:
        return read_body(raw)
    except Problem as problem:
        return problem


@given(raw=JSON_LIKE)
def test_any_bytes_are_a_request_or_a_refusal(raw: bytes) -> None:
    found = _read(raw)
    if isinstance(found, Problem):
        assert 400 <= found.status < 500
        assert json.loads(found.body())["error"]["message"]
    else:
        body, model = found
        assert body["model"] == model


@given(
    pieces=st.lists(
        st.binary(max_size=20)
        | st.sampled_from([b'"usage"', b":", b"{", b"}", b'{"a":{}}', b"null", b'"', b"\\", b"{" * 300]),
        max_size=30,
    )
)
def test_usage_is_found_or_not(pieces: list[bytes]) -> None:
    tail = UsageTail()
    for piece in pieces:
        tail.add(piece)
    found = tail.find()
    assert found is None or b'"usage"' in b"".join(pieces)
