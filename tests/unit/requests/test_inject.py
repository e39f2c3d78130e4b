"""Usage that is asked for in a client's name, and the one chunk that is taken out again."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.requests.inject import MAX_EVENT, UsageChunk, ask_for_usage

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"stream":true}', b'{"stream_options":{"include_usage":true},"stream":true}'),
        (
            b'{ "stream": true, "stream_options": null }',
            b'{ "stream": true, "stream_options": {"include_usage":true} }',
        ),
        (
            b'{"stream":true,"stream_options":{"x":1e400}}',
            b'{"stream":true,"stream_options":{"include_usage":true,"x":1e400}}',
        ),
        (
            b'{"stream":true,"stream_options":{"include_usage" : false}}',
            b'{"stream":true,"stream_options":{"include_usage" : true}}',
        ),
        (
            b'{"stream":true,"stream_options":{"continuous_usage_stats":false}}',
            b'{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":false}}',
        ),
        (
            b'{"stream_options":{"include_usage":true},"stream\\u005foptions":null,"stream":true}',
            b'{"stream_options":{"include_usage":true},"stream\\u005foptions":{"include_usage":true},"stream":true}',
        ),
    ],
)
def test_usage_is_asked_for_and_every_other_byte_stays(text: bytes, expected: bytes) -> None:
    found = ask_for_usage(CHAT, json.loads(text), text)
    assert found == expected
    assert ask_for_usage("/v1/completions", json.loads(text), text) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"stream":false}',
        b'{"stream":1}',
        b'{"stream":"true"}',
        b'{"stream":true,"stream_options":{"include_usage":true}}',
        b'{"stream":true,"stream_options":{"include_usage":"yes"}}',
        b'{"stream":true,"stream_options":{"continuous_usage_stats":true}}',
        b'{"stream":true,"stream_options":[]}',
        b'{"stream":true,"stream_options":"x"}',
    ],
)
def test_requests_that_speak_for_themselves_or_have_no_stream_are_not_touched(text: bytes) -> None:
    assert ask_for_usage(CHAT, json.loads(text), text) is None


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank"])
def test_other_apis_are_not_touched(path: str) -> None:
    assert ask_for_usage(path, {"stream": True}, b'{"stream":true}') is None


USAGE = b'{"id":"c","choices":[],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}'
ASIDE = [
    b'data: {"choices":[{"delta":{"content":"\\n\\n\\"usage\\":{}"}}]}',
    b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":7}}',
    b'data: {"choices":[],"usage":null}',
    b'data: {"choices":[],"prompt_filter_results":[]}',
    b'data: {"choices":[],"usage":',
    b'data: "usage"',
    b'event: x\nid: 1\ndata: {"choices":[]',
    b": keep-alive",
    b"data: " + "日本語🙂".encode(),
    b"",
    b"data",
    b"data: " + b"[" * 2000 + b'"usage"',
    b"data: [DONE]",
]
"""Events that stay."""
TAKEN = [
    b"data: " + USAGE,
    b"data:" + USAGE,
    b"event: message\nid: 9\ndata: " + USAGE + b"\nretry: 5",
    b'data: {"choices":\ndata: [],\ndata: "usage":\ndata:   {}}',
]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:stop] for start, stop in pairwise(edges)]


@given(
    before=st.lists(st.sampled_from(ASIDE), max_size=4),
    taken=st.sampled_from(TAKEN),
    after=st.lists(st.sampled_from([*ASIDE, *TAKEN]), max_size=4),
    crlf=st.booleans(),
    places=st.lists(st.integers(0, 10_000), max_size=12),
    bytewise=st.booleans(),
    end=st.sampled_from([b"", b"data: unfinished", b"\r", b": x\n"]),
)
def test_exactly_that_chunk_is_taken_out_however_the_stream_is_cut(
    before: list[bytes], taken: bytes, after: list[bytes], crlf: bool, places: list[int], bytewise: bool, end: bytes
) -> None:
    def wire(events: list[bytes]) -> bytes:
        text = b"".join(event + b"\n\n" for event in events)
        return text.replace(b"\n", b"\r\n") if crlf else text

    stream = wire([*before, taken, *after]) + end
    chunk = UsageChunk()
    pieces = [bytes([byte]) for byte in stream] if bytewise else cut(stream, places)
    assert b"".join([chunk.feed(piece) for piece in pieces] + [chunk.rest()]) == wire([*before, *after]) + end


@given(st.lists(st.sampled_from([*ASIDE, b"\n", b"\r\n", b"\r"]) | st.binary(max_size=9), max_size=9))
def test_a_stream_without_it_passes_byte_for_byte(pieces: list[bytes]) -> None:
    chunk = UsageChunk()
    assert b"".join([chunk.feed(piece) for piece in pieces] + [chunk.rest()]) == b"".join(pieces)


def test_whole_events_and_comments_are_not_held_back() -> None:
    chunk = UsageChunk()
    for piece in (b"data: 1\n\n", b": ping\n", b"\n", b"data: 2\r\n\r\n", b": a\r\n: b\n\n", b'data: "usage"\n\n'):
        assert chunk.feed(piece) == piece
    assert chunk.feed(b": ping\n: pong\ndata: 3") == b": ping\n: pong\n"
    assert chunk.feed(b"\n\nda") == b"data: 3\n\n"
    assert chunk.rest() == b"da"


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n"])
def test_an_endless_event_is_not_kept(ending: bytes) -> None:
    chunk = UsageChunk()
    long = b"data: " + b"x" * MAX_EVENT
    out = chunk.feed(long)
    assert len(out) >= MAX_EVENT
    for _ in range(100):
        piece = b'"usage"' * 1000
        assert len(chunk.feed(piece)) == len(piece)
    # The event after it is looked at again, even when its beginning is cut from it in the middle of the blank line.
    for byte in ending[:-1]:
        out = chunk.feed(bytes([byte]))
    out = chunk.feed(ending[-1:] + b"data: " + USAGE + b"\n\ndata: [DONE]\n\n")
    assert out.endswith(b"\ndata: [DONE]\n\n")
    assert b"prompt_tokens" not in out
