"""Which header fields pass."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.requests.headers import Field, Wishes, answer_fields


def fields(*lines: str) -> list[Field]:
    made = []
    for line in lines:
        name, _, value = line.partition(": ")
        made.append((name.lower().encode(), name.encode(), value.encode("latin-1")))
    return made


def test_what_passes_keeps_its_spelling_and_order() -> None:
    wishes = Wishes(fields("Accept: a", "X-B: 1", "accept: c", "HOST: h", "Content-Length: 3"))
    assert wishes.forwarded == [b"Accept: a\r\n", b"X-B: 1\r\n", b"accept: c\r\n"]


def test_named_in_connection_means_hop_by_hop_wherever_it_stands() -> None:
    lines = fields("X-One: 1", "Connection: close , X-One", "X-Two: 2", "connection: x-two,,", "X-Three: 3")
    assert Wishes(lines).forwarded == [b"X-Three: 3\r\n"]
    assert answer_fields(lines) == [b"X-Three: 3\r\n"]


@pytest.mark.parametrize(
    "name", ["target-pod", "TARGET-POD-IP", "X-Gateway-Destination-Endpoint", "X-data-parallel-Rank"]
)
def test_nobody_chooses_the_target_but_the_gateway(name: str) -> None:
    lines = fields(f"{name}: 1", f"{name.upper()}: 2", f"{name.lower()}: 3")
    assert Wishes(lines).forwarded == []
    assert answer_fields(lines) == []


def test_the_first_wish_that_says_something_counts() -> None:
    wishes = Wishes(fields("routing-strategy:  ", "Routing-Strategy: random", "routing-strategy: x"))
    assert wishes.policy == "random"
    assert wishes.label_filter is None
    assert Wishes(fields("External-Filter: zone=\xe9")).label_filter == "zone=\xe9"


@given(st.lists(st.binary(max_size=140), max_size=3))
def test_a_request_id_is_well_formed_whatever_comes(values: list[bytes]) -> None:
    wishes = Wishes([(b"request-id", b"Request-ID", value) for value in values])
    assert re.fullmatch(rb"[A-Za-z0-9._-]{1,128}", wishes.request_id)
    passed = [line for line in wishes.forwarded if line.startswith(b"request-id")]
    kept = len(values) == 1 and re.fullmatch(rb"[A-Za-z0-9._-]{1,128}", values[0].strip()) is not None
    assert passed == ([b"request-id: %b\r\n" % wishes.request_id] if kept else [])
