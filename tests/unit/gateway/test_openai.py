"""Reading a request's model; the model list."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsync.gateway import errors
from kvsync.gateway.errors import Problem
from kvsync.gateway.openai import model_list, one_model, read_body
from kvsync.gateway.upstream import Target


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.text(max_size=5), st.none() | st.text(max_size=20) | st.integers(-(2**63), 2**63), max_size=5)
)
def test_a_body_is_read_as_json_reads_it(body: dict[str, object]) -> None:
    body["model"] = "m"
    assert read_body(json.dumps(body).encode()) == (body, "m")


@given(st.binary())
def test_no_bytes_do_anything_but_parse_or_be_refused(raw: bytes) -> None:
    try:
        body, model = read_body(raw)
    except Problem:
        return
    assert body["model"] == model


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xef\xbb\xbf{}", "bad_json"),
        (b'{"model":"\xff"}', "bad_json"),
        (b'{"model":"m"} x', "bad_json"),
        (b'{"a":NaN}', "bad_json"),
        (b'{"a":' * 50_000, "bad_json"),
        (b'{"a":1' + b"0" * 5000 + b"}", "bad_json"),
        (b'"m"', "body_not_object"),
        (b"7", "body_not_object"),
        (b'{"Model":"m"}', "no_model"),
        (b'{"model":false}', "model_not_string"),
        (b'{"model":{}}', "model_not_string"),
    ],
)
def test_refused_by_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(Problem) as caught:
        read_body(raw)
    assert caught.value.reason == reason


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
