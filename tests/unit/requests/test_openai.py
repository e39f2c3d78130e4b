"""The model list, the errors' envelope, engines' URLs."""

from __future__ import annotations

import json

import pytest

from kvsync.gateway.upstream import Target
from kvsync.requests import errors
from kvsync.requests.errors import Problem
from kvsync.requests.openai import model_list, one_model


def test_models() -> None:
    served = [("m", None), ("a", "m")]
    assert [model["id"] for model in json.loads(model_list(served))["data"]] == ["m", "a"]
    assert json.loads(model_list([])) == {"object": "list", "data": []}
    assert json.loads(one_model(served, "a"))["parent"] == "m"
    with pytest.raises(Problem) as caught:
        one_model(served, "x")
    assert (caught.value.status, caught.value.headers) == (404, ())


def test_the_envelope() -> None:
    assert json.loads(errors.no_such_model("x").body()) == {
        "error": {
            "message": "model x does not exist",
            "type": "invalid_request_error",
            "code": "model_not_found",
            "param": "model",
        }
    }
    assert json.loads(errors.no_ready_engine("x").body())["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "field"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1", 8000, False, b"10.0.0.1:8000"),
        ("https://engine", "engine", 443, True, b"engine"),
        ("http://[fd00::1]:8000", "fd00::1", 8000, False, b"[fd00::1]:8000"),
        ("http://user:pass@h:1", "h", 1, False, b"h:1"),
    ],
)
def test_targets(url: str, host: str, port: int, tls: bool, field: bytes) -> None:
    target = Target.of(url)
    assert (target.host, target.port, target.tls, target.host_field) == (host, port, tls, field)


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:99999", "h:80", "http://:80"])
def test_what_is_no_target(url: str) -> None:
    with pytest.raises(ValueError):
        Target.of(url)
