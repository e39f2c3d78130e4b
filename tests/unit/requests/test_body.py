"""Reading a request's JSON body: its model, and what it may cost."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsync.requests import body as bodies
from kvsync.requests.body import LARGE, MAX_TEXTS, MAX_VALUES, lift_ids, read_body
from kvsync.requests.errors import Problem
from kvsync.requests.turns import Turns
from kvsync.tokenize.request import read_request


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


PAD = b" " * LARGE
"""Makes any body a large one."""


@settings(deadline=None, max_examples=50)
@given(st.recursive(st.none() | st.text() | st.integers(0, 9), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))
def test_a_large_body_is_read_as_a_small_one(value: object) -> None:
    body = {"model": "m", "x": value}
    assert read_body(json.dumps(body).encode() + PAD) == (body, "m")


@settings(deadline=None, max_examples=200)
@given(
    value=st.recursive(
        st.text(alphabet='"\\\\[{,x', max_size=20) | st.integers(0, 9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\\\,', max_size=3), inner),
    ),
    size=st.integers(1, 9),
)
def test_texts_and_containers_are_counted_as_they_are(value: object, size: int) -> None:
    """However the body is sliced, and whatever stands in its texts."""

    def count(node: object) -> int:
        if isinstance(node, str):
            return 1
        if isinstance(node, list):
            return 1 + sum(map(count, node))
        if isinstance(node, dict):
            return 1 + sum(1 + count(item) for item in node.values())
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_SLICE", size)
        quotes = containers = 0
        for here, outside in bodies._slices(json.dumps(value).encode()):
            quotes += here
            containers += outside.count(b"[") + outside.count(b"{")
    assert quotes // 2 + containers == count(value)


@pytest.mark.parametrize(
    ("item", "count", "taken"),
    [
        (b"[]", MAX_TEXTS - 5, True),  # the object, two keys, "m" and the array are there already
        (b"[]", MAX_TEXTS - 5 + 1, False),
        (b'""', MAX_TEXTS - 5 + 1, False),
        (b"{}", 5_000_000, False),
        (b"1", MAX_VALUES - 1, True),
        (b"1", MAX_VALUES + 1, False),
    ],
)
def test_what_a_body_may_hold(item: bytes, count: int, taken: bool) -> None:
    raw = b'{"model":"m","prompt":[%b]}' % b",".join([item] * count)
    if taken:
        assert read_body(raw)[1] == "m"
        return
    with pytest.raises(Problem) as caught:
        read_body(raw)
    assert (caught.value.status, caught.value.reason) == (413, "too_many_values")


ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9)


@given(st.one_of(ids, st.lists(ids, min_size=1, max_size=4)), st.booleans())
def test_token_ids_are_the_same_however_they_come(prompt: list[Any], large: bool) -> None:
    """Lifted out of the text, where the native core does that, or decoded."""
    raw = json.dumps({"max_tokens": 1, "prompt": prompt, "model": "m"}).encode() + PAD * large
    asked, model = read_body(raw, lift_ids(raw, "/v1/completions"))
    assert model == "m"
    assert asked["max_tokens"] == 1
    expected = read_request("/v1/completions", read_body(raw)[0])
    assert expected.ids
    assert read_request("/v1/completions", asked) == expected


@pytest.mark.parametrize(
    "prompt", ["[]", "[[]]", "[1.5]", "[-1]", "[4294967296]", "[1,[2]]", '["1"]', "[1", "[1e1]", '"1"']
)
def test_what_is_no_prompt_of_ids_is_read_as_ever(prompt: str) -> None:
    raw = b'{"model":"m","prompt":%b}' % prompt.encode()

    def read(path: str) -> object:
        try:
            return read_request("/v1/completions", read_body(raw, lift_ids(raw, path))[0])
        except Problem as problem:
            return problem.reason

    assert read("/v1/completions") == read("")


def test_ids_count_as_values_however_they_come() -> None:
    raw = b'{"model":"m","prompt":[1%b]}' % (b",1" * (MAX_VALUES + 1))
    with pytest.raises(Problem) as caught:
        read_body(raw, lift_ids(raw, "/v1/completions"))
    assert (caught.value.status, caught.value.reason) == (413, "too_many_values")


@pytest.mark.parametrize("text", [b'\\"', b"\\\\", b",", b"[", b"{", b"\\u005b", "語".encode()])
def test_a_text_of_20_mb_is_one_value_whatever_it_says(text: bytes) -> None:
    raw = b'{"model":"m","prompt":"%b"}' % (text * ((20 << 20) // len(text)))
    assert read_body(raw)[1] == "m"


def test_the_collector_is_left_as_it_was() -> None:
    for raw in (b'{"model":"m"}' + PAD, b"{" + PAD):
        for enabled in (False, True):
            (gc.enable if enabled else gc.disable)()
            try:
                read_body(raw)
            except Problem:
                pass
            finally:
                was = gc.isenabled()
                gc.enable()
            assert was == enabled


async def test_large_work_comes_one_piece_per_turn_and_in_order() -> None:
    loop = asyncio.get_running_loop()
    turns = Turns(loop)
    done: list[object] = []
    enough = asyncio.Event()

    def tick() -> None:
        done.append("tick")
        if len(done) < 12:
            loop.call_soon(tick)
        else:
            enough.set()

    def work(number: int) -> None:
        done.append(number)
        if number == 1:
            raise ValueError("a fault in one piece")

    errors: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    for number in range(3):
        turns.add(lambda number=number: work(number))  # type: ignore[misc]
    loop.call_soon(tick)
    await enough.wait()
    turns.add(lambda: done.append("late"))
    await asyncio.sleep(0)
    assert [item for item in done if item != "tick"] == [0, 1, 2, "late"]
    assert done.index(1) - done.index(0) > 1  # the loop had a turn in between
    assert done.index(2) - done.index(1) > 1
    assert [str(error["exception"]) for error in errors] == ["a fault in one piece"]


async def test_what_needs_no_interpreter_comes_before_in_a_thread_and_its_faults_hold_nothing_up() -> None:
    loop = asyncio.get_running_loop()
    turns = Turns(loop)
    errors: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    here, done, enough = threading.get_ident(), list[tuple[str, int, bool]](), asyncio.Event()

    def before(number: int) -> None:
        done.append(("before", number, threading.get_ident() == here))
        if number == 1:
            raise ValueError("a fault in the thread")

    def work(number: int) -> None:
        done.append(("work", number, threading.get_ident() == here))
        if number == 2:
            enough.set()

    for number in range(3):
        turns.add(partial(work, number), partial(before, number))
    async with asyncio.timeout(10):
        await enough.wait()
    assert [item for item in done if item[0] == "before"] == [("before", number, False) for number in range(3)]
    assert [item for item in done if item[0] == "work"] == [("work", number, True) for number in range(3)]
    assert all(done.index(("before", number, False)) < done.index(("work", number, True)) for number in range(3))
    assert [str(error["exception"]) for error in errors] == ["a fault in the thread"]
    turns.close()
