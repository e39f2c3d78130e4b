"""Local tokens against those of real vLLM 0.32, for every text request of the captures."""

from __future__ import annotations

from typing import Any

import pytest

from kvsync.tokenize.cache import TokenCache
from kvsync.tokenize.local import LocalTokenizer
from kvsync.tokenize.request import read_request
from tests.unit.tokenize.support import TINY, engine_answers, unpack

ANSWERS = list(engine_answers())


@pytest.fixture(scope="module")
def local() -> LocalTokenizer:
    return LocalTokenizer.load(TINY, TokenCache(1 << 20))


@pytest.mark.parametrize(("path", "body", "ids"), [a[1:] for a in ANSWERS], ids=[a[0] for a in ANSWERS])
def test_local_tokens_are_the_engines(local: LocalTokenizer, path: str, body: dict[str, Any], ids: list[int]) -> None:
    (work,) = read_request(path, body).works
    assert local.unsupported(work) is None
    assert unpack(local.tokens(work)) == ids
    assert unpack(local.tokens(work)) == ids, "from the cache"


def test_the_captures_cover_the_request_shapes() -> None:
    shapes = {read_request(path, body).works[0].shape for _, path, body, _ in ANSWERS}
    assert shapes >= {"text", "text+bare", "plain", "tools", "continue", "closed", "parts", "kwargs"}
    assert len(ANSWERS) >= 18
