"""The gateway benchmarks' own parts: what counts an answer as right must also see a wrong one."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import uvloop
from bench.asked import FAMILIES, HIT, MISS, chat_body, chat_start, family_start, ids_bodies, request, text_bodies
from bench.process import Subject
from bench.subjects.clients import Load, WrongAnswer
from bench.subjects.engines import HIT_ANSWER, MISS_ANSWER, Connection, Engines
from bench.vocabularies import _from_ranks
from tokenizers import Tokenizer


class Written:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def connected(families: set[bytes]) -> tuple[Connection, Written]:
    connection, written = Connection(Engines(cast(Any, None)), families), Written()
    connection.connection_made(cast(Any, written))
    return connection, written


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_an_engine_answers_each_request_once_however_it_is_cut(piece: int) -> None:
    bodies = ids_bodies(40, 1)
    held = {family_start(family) for family in range(0, FAMILIES, 2)}
    connection, written = connected(held)
    data = b"".join(request("/v1/completions", body) for body in bodies)
    for at in range(0, len(data), piece):
        connection.data_received(data[at : at + piece])
    hits = [any(b'"prompt":' + start + b"," in body for start in held) for body in bodies]
    assert written.data == b"".join(HIT_ANSWER if hit else MISS_ANSWER for hit in hits)
    assert True in hits
    assert False in hits


def test_an_engine_knows_the_family_of_a_chat() -> None:
    connection, written = connected({chat_start(3)})
    bodies = text_bodies(100, 1)
    for body in bodies:
        connection.data_received(request("/v1/chat/completions", body))
    assert written.data.count(HIT) == sum(b'"case03,' in body for body in bodies) > 0
    assert written.data.count(MISS) == len(bodies) - written.data.count(HIT)


def test_answers_differ_only_in_what_was_cached() -> None:
    hit, miss = json.loads(HIT), json.loads(MISS)
    assert len(HIT) == len(MISS)
    assert hit["usage"].pop("prompt_tokens_details") != miss["usage"].pop("prompt_tokens_details")
    assert hit == miss


def test_prompts_are_distinct_and_the_same_each_time() -> None:
    for make in (ids_bodies, text_bodies):
        bodies = make(200, 5)
        assert len(set(bodies)) == 200
        assert bodies == make(200, 5)
        assert not set(bodies) & set(make(200, 6))


def clients(port: int, kind: str, count: int) -> dict[str, float]:
    loop = uvloop.new_event_loop()
    try:
        load = Load(loop)
        load.make("all", "stream" if kind == "stream" else "ids", count, seed=1, size=500)
        load.open(port, kind, 4)
        went = load.run("all")
        load.close()
        return went
    finally:
        loop.close()


def test_clients_count_what_engines_answered() -> None:
    held = json.dumps([[family_start(family).decode() for family in range(FAMILIES)]])
    with Subject("engines", held, python=sys.executable) as engines:
        (port,) = engines.ask("opened")
        went = clients(port, "json", 50)
        assert (went["requests"], went["hits"]) == (50, 50)
        went = clients(port, "stream", 5)
        assert went["requests"] == 5
        assert engines.ask("counts") == {"requests": 55, "hits": 50}


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that answers everything with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.recv(65536)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@pytest.mark.parametrize(
    "answer",
    [
        HIT_ANSWER.replace(b"200", b"500", 1),
        HIT_ANSWER.replace(b"word", b"work", 1),
        MISS_ANSWER + b" ",
    ],
    ids=["status", "body", "more than the body"],
)
def test_a_wrong_answer_fails_a_run(answer: bytes) -> None:
    with answering(answer) as port, pytest.raises(WrongAnswer):
        clients(port, "json", 1)


def test_a_stream_that_lacks_a_chunk_fails_a_run() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 14\r\n\r\ndata: [DONE]\n\n"
    with answering(answer) as port, pytest.raises(WrongAnswer):
        clients(port, "stream", 1)


def test_a_chat_has_its_size() -> None:
    assert abs(len(chat_body(2_000)) - 2_000) < 50
    assert json.loads(chat_body(2_000, stream=True))["stream"] is True


def test_ranks_become_the_same_tokenizer() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    for merged in (b"he", b"ll", b"llo", b"hello", b" w", b"or", "ö".encode()):
        ranks[merged] = len(ranks)
    tokenizer = Tokenizer.from_str(json.dumps(_from_ranks(ranks)))
    ids = tokenizer.encode("hello wor ö<|im_end|>hell", add_special_tokens=False).ids
    expected = [b"hello", b" w", b"or", b" ", "ö".encode(), None, b"he", b"ll"]
    assert ids == [len(ranks) + 2 if part is None else ranks[part] for part in expected]
