"""Chunks that pass as they came: only what has one meaning, and the same as the parser's; however they are cut."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsync.gateway.chunks import MOST, plain_chunks
from kvsync.gateway.upstream import MAX_ANSWER_HEAD, Target, UpstreamConnection, Upstreams
from kvsync.requests.headers import Field
from kvsync.requests.ports import Outcome

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


class Bodies:
    """What httptools makes of bytes that follow a head."""

    def __init__(self, wire: bytes) -> None:
        self.body = b""
        self.ended = False
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(HEAD + wire)

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.ended = True


@pytest.mark.parametrize("size", [1, 9, 10, 15, 16, 255, 256, 2047, 2048, 4095, 70_000])
def test_whole_chunks_are_taken(size: int) -> None:
    body = bytes(at % 251 for at in range(size))
    assert plain_chunks(chunk(body)) == body
    assert plain_chunks(chunk(b"\r\n") + chunk(body) + chunk(b"0\r\n\r\n")) == b"\r\n" + body + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"\r\n\r\n",
        b"0\r\n\r\n",
        b"0\r\n",
        b"-2\r\n",
        b"-1\r\n\r",
        b"+1\r\na\r\n",
        b"01\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1 \r\na\r\n",
        b" 1\r\na\r\n",
        b"1_0\r\n" + 16 * b"a" + b"\r\n",
        b"A\r\n0123456789\r\n",
        b"1;a=b\r\na\r\n",
        b"1;\r\na\r\n",
        b"1\na\r\n",
        b"1\r\na\n",
        b"1\r\na\r",
        b"1\r\naXX",
        b"1\r\na\r\n\r\n",
        b"1\r\na\r\n0",
        b"1\r\na\r\n0\r\n\r\n",
        b"1\r\na\r\n1\r\n",
        b"2\r\na\r\n",
        b"1\r\nab\r\n",
        b"ffffffffffffffff\r\na\r\n",
        b"fffffffffffffffffffffffff\r\na\r\n",
        b"8000000000000000\r\na\r\n",
        b"\xb9\r\na\r\n",
        b"x\r\na\r\n",
    ],
)
@pytest.mark.parametrize("before", [b"", chunk(b"good")])
def test_anything_else_is_the_parsers(data: bytes, before: bytes) -> None:
    if data or not before:
        assert plain_chunks(before + data) is None


def test_one_turn_takes_a_bounded_number() -> None:
    assert plain_chunks(MOST * chunk(b"x")) == MOST * b"x"
    assert plain_chunks((MOST + 1) * chunk(b"x")) is None


PARTS = st.lists(
    st.one_of(
        st.binary(max_size=20).map(chunk),
        st.sampled_from(
            [b"\r\n", b"\n", b"\r", b"0", b"1", b"5\r\n", b";x=y", b"a", b"A", b"-1", b"+", b" ", b"hello"]
        ),
    ),
    max_size=5,
).map(b"".join)


@settings(deadline=None, max_examples=500)
@given(PARTS)
def test_what_is_taken_means_the_same_to_the_parser_and_leaves_it_between_chunks(data: bytes) -> None:
    body = plain_chunks(data)
    if body is not None:
        read = Bodies(data + b"0\r\n\r\n")
        assert (read.body, read.ended) == (body, True)


# ---- a connection that takes them, beside one whose parser reads all


class Wire:
    """A transport to nowhere."""

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class Heard:
    def __init__(self) -> None:
        self.body = b""
        self.passed = 0
        self.ends: list[str] = []

    def on_head(
        self, status: int, phrase: bytes, fields: list[Field], length: int | None, *, until_close: bool
    ) -> None: ...

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_pause(self) -> None: ...

    def on_chunks(self, chunks: bytes, body: bytes) -> None:
        assert self.body, "never the first piece"
        assert Bodies(chunks + b"0\r\n\r\n").body == body
        self.passed += 1
        self.body += body

    def on_end(self) -> None:
        self.ends.append("end")

    def on_lost(self, outcome: Outcome) -> None:
        self.ends.append(outcome)


def receive(pieces: list[bytes]) -> Heard:
    """What a listener hears of an answer that comes in these pieces."""
    loop = asyncio.new_event_loop()
    try:
        pool = Upstreams(cast(Any, None), loop, cast(Any, None))
        connection = UpstreamConnection("http://e", Target.of("http://e"), pool)
        heard = Heard()
        connection.connection_made(cast(Any, Wire()))
        connection.send(b"", b"", heard)
        for piece in pieces:
            if not heard.ends:
                connection.data_received(piece)
        return heard
    finally:
        loop.close()


def parsed(wire: bytes) -> tuple[bytes, list[str]]:
    """The same by the parser alone: all comes at once, so nothing begins between two chunks."""
    heard = receive([wire])
    assert not heard.passed
    return heard.body, heard.ends


HOSTILE = [
    chunk(b"hello\r\nb\r\n01234567890"),  # 15…: without its 1 it is plain too, as two others
    b'5;ext="a\r\n"\r\nhello\r\n',
    b"005\r\nhello\r\n",
    b"5\r\nhelloXX",
    b"5\nhello\r\n",
    b"-5\r\nhello\r\n",
    b"\r\nhello\r\n",
    b"ffffffffffffffff\r\nhello\r\n",
    b"fffffffffffffffff\r\nhello\r\n",
    b"5\r\nhello\r\n\r\n",
    b"0\r\n\r\nsurplus",
    b"0\r\nX-Trailer: 5\r\n\r\n",
    b"0\r\n" + b"a: b\r\n" * 3,
    b"5;ext\r\nhello\r\n",
    b"A\r\n0123456789\r\n",
]


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\na: b\r\n\r\n", b"", b"0\r\n\r\nmore"])
@pytest.mark.parametrize("bad", [b"", *HOSTILE])
def test_cut_at_every_byte_an_answer_is_what_the_parser_says(bad: bytes, end: bytes) -> None:
    first = HEAD + chunk(b"one")
    rest = chunk(b"\r\n\r\n") + bad + chunk(b"last") + end
    expected = parsed(first + rest)
    for at in range(1, len(rest)):
        heard = receive([first, rest[:at], rest[at:]])
        assert (heard.body, heard.ends) == expected, at


@settings(deadline=None, max_examples=500)
@given(PARTS, st.lists(st.integers(0, 120), max_size=6), st.booleans())
def test_any_cut_of_anything(data: bytes, cuts: list[int], ended: bool) -> None:
    first = HEAD + chunk(b"first")
    wire = first + data + (b"0\r\n\r\n" if ended else b"")
    places = sorted({0, len(first), len(wire), *(min(len(HEAD) + cut, len(wire)) for cut in cuts)})
    heard = receive([wire[a:b] for a, b in pairwise(places)])
    assert (heard.body, heard.ends) == parsed(wire)


def test_pieces_of_a_stream_pass_from_the_second_on() -> None:
    """And the parser takes them up again wherever one is not plain."""
    pieces = [HEAD, chunk(b"1"), chunk(b"2"), b"1;e\r\n3\r\n", chunk(b"4"), chunk(b"5")[:4], chunk(b"5")[4:]]
    heard = receive([*pieces, chunk(b"6"), b"0\r\n\r\n"])
    assert (heard.body, heard.passed, heard.ends) == (b"123456", 3, ["end"])


def test_what_only_frames_is_counted_from_the_last_piece() -> None:
    extension = b"1;" + b"e" * (MAX_ANSWER_HEAD // 2)
    heard = receive([HEAD, chunk(b"1"), extension[:-1], b"\r\n2\r\n", chunk(b"3"), extension])
    assert (heard.body, heard.ends) == (b"123", [])
    heard = receive([HEAD, chunk(b"1"), chunk(b"2"), extension, extension])
    assert (heard.body, heard.ends) == (b"12", ["upstream_died"])
