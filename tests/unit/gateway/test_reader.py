"""Requests out of bytes: the same ones, however the bytes are cut."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsync.gateway.reader import RequestReader
from kvsync.requests.admission import Admitted
from kvsync.requests.auth import STRANGER
from kvsync.requests.errors import Problem
from kvsync.requests.headers import Field
from kvsync.requests.paths import MAX_URL, Route

ROUTE = Route("/p", (b"POST",))


def admit(method: bytes, target: bytes, fields: list[Field]) -> Admitted:
    if target.startswith(b"/no"):
        raise Problem(501, "no", reason="no")
    return Admitted(ROUTE, target.partition(b"?")[2], STRANGER)


def reader() -> RequestReader:
    return RequestReader(admit, max_header_bytes=2000, max_body_bytes=5000)


Seen = tuple[list[tuple[bytes, bytes, bytes, bool, bool]], int | None, bool]


def seen(read: RequestReader) -> Seen:
    requests = [
        (r.method, r.admitted.query if r.admitted else b"", r.body, r.keep_alive, r.problem is not None)
        for r in read.requests
    ]
    return requests, read.problem.status if read.problem else None, read.deaf


MESSAGES = [
    b"POST /p?1 HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /p?2 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;e\r\nde\r\n0\r\nT: t\r\n\r\n",
    b"GET /p?3 HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /no HTTP/1.1\r\nHost: h\r\n\r\n",
    b"POST /p?4 HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n",
    b"POST /p?5 HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /p?6 HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"1\r\nx\r\n0\r\n\r\n",
    b"GET /p?7 HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"POST /p?8 HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 1900 + b"\r\nContent-Length: 5000\r\n\r\n" + b"z" * 5000,
]
LAST = [
    b"",
    b"GET /p?9 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\nafter the last",
    b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5001\r\n\r\n",
    b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /no HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nGET ",
    b"\x00",
    b"POST /p HTTP/1.1\r\nHost",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(MESSAGES), max_size=4), st.sampled_from(LAST), st.data())
def test_the_same_requests_however_they_are_cut(messages: list[bytes], last: bytes, data: st.DataObject) -> None:
    wire = b"".join(messages) + last
    whole = reader()
    whole.feed(wire)
    assert len(whole.requests) >= len(messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    pieces = reader()
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        pieces.feed(wire[start:end])
    assert seen(pieces) == seen(whole)
    assert pieces.in_message == whole.in_message


@given(st.binary(max_size=300))
def test_noise_is_refused_or_waited_for(noise: bytes) -> None:
    read = reader()
    read.feed(noise)
    assert read.deaf == (read.problem is not None) or read.requests


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"GET /" + b"a" * (MAX_URL - 1) + b" HTTP/1.1\r\nHost: h\r\n\r\n", None),
        (b"GET /" + b"a" * MAX_URL + b" HTTP/1.1\r\nHost: h\r\n\r\n", 414),
        (b"GET /p HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 1986 + b"\r\n\r\n", None),
        (b"GET /p HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 1987 + b"\r\n\r\n", 431),
        (b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1388\r\n" + b"x" * 5000 + b"\r\n", None),
        (b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1389\r\n" + b"x" * 5001 + b"\r\n", 413),
        (b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5000\r\n\r\n", None),
        (b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5001\r\n\r\n", 413),
    ],
)
def test_either_side_of_each_limit(wire: bytes, status: int | None) -> None:
    read = reader()
    read.feed(wire)
    assert (read.problem.status if read.problem else None) == status


def test_an_unfinished_field_is_bounded_however_slowly_it_grows() -> None:
    read = reader()
    read.feed(b"GET /p HTTP/1.1\r\nHost: h\r\nX: ")
    fed = 0
    while not read.deaf:
        read.feed(b"y" * 7)
        fed += 7
        assert fed <= 2007
    assert read.problem is not None
    assert read.problem.status == 431


CHUNKED = b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"1\r\nx\r\n0\r\nT: ", b"yyyyyyy"),
        (b"1\r\nx\r\n0\r\n", b"T: y\r\n"),
        (b"0\r\n", b"T"),
        (b"1;e=", b"yyyyyyy"),
        (b"", b"0000000"),
    ],
    ids=["trailer", "trailers", "trailer-name", "chunk-extension", "chunk-size"],
)
def test_what_frames_a_body_is_bounded_as_a_head_is(start: bytes, piece: bytes) -> None:
    """The parser keeps a trailer to itself until it is whole, and none of this is body."""
    read = reader()
    read.feed(CHUNKED + start)
    fed = 0
    while not read.deaf:
        read.feed(piece)
        fed += len(piece)
        assert fed <= 2000 + len(piece)
    assert read.problem is not None
    assert read.problem.status == 431
    assert not read.requests


def test_framing_of_many_chunks_does_not_add_up() -> None:
    read = reader()
    read.feed(CHUNKED)
    for _ in range(1000):
        read.feed(b"1;extension=some")
        read.feed(b"\r\nx\r\n")
    read.feed(b"0\r\n\r\n")
    assert read.problem is None
    assert [request.body for request in read.requests] == [b"x" * 1000]


def test_a_body_in_tiny_pieces_takes_no_more_memory_than_in_one() -> None:
    size = 200_000
    read = RequestReader(admit, max_header_bytes=2000, max_body_bytes=size)
    pieces = b"2\r\nxy\r\n" * 10_000
    read.feed(CHUNKED)
    tracemalloc.start()
    try:
        for _ in range(size // 20_000):
            read.feed(pieces)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * size
    read.feed(b"0\r\n\r\n")
    assert read.requests[0].body == b"xy" * (size // 2)


def test_a_body_before_a_head_does_not_count_as_head() -> None:
    read = reader()
    body = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 4000\r\n\r\n"
    read.feed(body + b"z" * 100)
    read.feed(b"z" * 3900 + b"GET /p HT")
    read.feed(b"TP/1.1\r\nHost: h\r\n\r\n" + body + b"z" * 4000 + b"GET /")
    assert read.problem is None
    assert len(read.requests) == 3


def test_continue_is_due_between_head_and_body_only() -> None:
    read = reader()
    read.feed(b"POST /p HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert read.continue_due
    read.feed(b"ok")
    assert not read.continue_due
    for head in (
        b"POST /p HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
        b"POST /p HTTP/1.0\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
        b"POST /no HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
    ):
        read = reader()
        read.feed(head)
        assert not read.continue_due


def test_a_fault_of_ours_is_not_blamed_on_the_client() -> None:
    def broken(method: bytes, target: bytes, fields: list[Field]) -> Admitted:
        raise RuntimeError("ours")

    read = RequestReader(broken, max_header_bytes=2000, max_body_bytes=5000)
    with pytest.raises(Exception, match="callback error") as caught:
        read.feed(MESSAGES[0])
    assert isinstance(caught.value.__context__, RuntimeError)
    assert read.problem is None
