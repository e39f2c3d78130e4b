"""The allow-list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.requests.errors import Problem
from kvsync.requests.paths import OPENAI_PATHS, Paths, normalise

PATHS = Paths(["/v1/rerank"])
LISTED = {path.encode() for path in (*OPENAI_PATHS, "/v1/rerank", "/v1/models")}


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/v1/completions", "/v1/completions", b""),
        (b"/v1/completions?", "/v1/completions", b"?"),
        (b"/v1/completions?a=%2e&b", "/v1/completions", b"?a=%2e&b"),
        (b"/v1/completions?/../x", "/v1/completions", b"?/../x"),
        (b"/v1/rerank/", "/v1/rerank", b""),
        (b"/a/b/../../v1/./rerank", "/v1/rerank", b""),
        (b"/%2e%2e/v1//rerank", "/v1/rerank", b""),
        (b"https://h:1/v1/rerank?x", "/v1/rerank", b"?x"),
        (b"/v1/models", "/v1/models", b""),
    ],
)
def test_listed(target: bytes, path: str, query: bytes) -> None:
    route, got = PATHS.find(target)
    assert (route.path, got, route.model) == (path, query, None)


@pytest.mark.parametrize(
    ("target", "model"),
    [
        (b"/v1/models/m", "m"),
        (b"/v1/models/org/name", "org/name"),
        (b"/v1/models/org%2Fname", "org/name"),
        (b"/v1/models/%E6%97%A5", "日"),
        (b"/v1/models/a%2525", "a%25"),
    ],
)
def test_one_model(target: bytes, model: str) -> None:
    assert PATHS.find(target)[0].model == model


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"", 501),
        (b"*", 501),
        (b"/v1/completions%252e", 501),
        (b"/v1/modelsx", 501),
        (b"engine:80", 501),
        (b"javascript://x/v1/completions", 501),
        (b"/v1/completions%0d%0aX: y", 400),
        (b"/v1/completions%00", 400),
        (b"/v1%5ccompletions", 400),
        (b"/v1/completions%23", 400),
        (b"/v1/models/%ff", 400),
        (b"/v1/models/a%7f", 400),
    ],
)
def test_refused(target: bytes, status: int) -> None:
    with pytest.raises(Problem) as caught:
        PATHS.find(target)
    assert caught.value.status == status


@given(
    st.lists(st.sampled_from([b"/", b"..", b".", b"%2e", b"%2F", b"%252f", b"v1", b"completions", b"sleep", b"%73"]))
)
def test_whatever_the_spelling_only_listed_paths_come_out(parts: list[bytes]) -> None:
    target = b"/" + b"".join(parts)
    try:
        route, _ = PATHS.find(target)
    except Problem:
        return
    assert route.path.encode() in LISTED
    assert normalise(target) == route.path.encode() or route.model is not None


@given(st.binary())
def test_normalising_is_stable_and_never_climbs(path: bytes) -> None:
    try:
        once = normalise(path)
    except Problem:
        return
    assert once.startswith(b"/")
    assert not {b"..", b"."} & set(once.split(b"/"))
    assert b"//" not in once


@pytest.mark.parametrize("path", ["v1/x", "/v1//x", "/v1/x/", "/v1/../x", "/v1/%78", "/v1/models", "/v1/models/x", ""])
def test_paths_that_configuration_may_not_add(path: str) -> None:
    with pytest.raises(ValueError, match="not a path"):
        Paths([path])


def test_tokenizing_only_where_it_is_switched_on() -> None:
    exposing = Paths(expose_tokenize=True)
    for path in (b"/tokenize", b"/detokenize"):
        assert exposing.find(path)[0].path.encode() == path
        with pytest.raises(Problem):
            PATHS.find(path)
