"""The harness itself, without engines: it must be sure of what it says before it judges anything."""

from __future__ import annotations

import base64
import gzip
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
import zmq

from kvsync.config.loading import read

from .client import Answer, BadAnswer, get, post, read_answer, sse
from .engines import DATA, Spec
from .gateway import live_up_to, settings
from .oracle import Cache
from .processes import Server, free_ports
from .run import Decision, Figures, judge, table
from .streams import Stream, catch_up
from .workload import Turn, Workload


def captured(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(DATA / "vllm" / name, "rt") as lines:
        yield from map(json.loads, lines)


@pytest.mark.parametrize(("name", "answers", "hits"), [("long", 414, 391), ("hybrid_long", 230, 196)])
def test_the_oracle_reproduces_every_answer_of_a_real_engine(name: str, answers: int, hits: int) -> None:
    cache, salt, judged, above = Cache(32), None, 0, 0
    batches: list[list[dict[str, Any]]] = []
    for record in captured(f"v0.32_{name}.jsonl.gz"):
        if record["kind"] == "sub":
            batches.append(msgspec.msgpack.decode(base64.b64decode(record["frames"][-1]))[1])
        elif record["kind"] == "req":
            cache.apply(batches)
            batches.clear()
            salt = record["body"].get("cache_salt")
        elif record["kind"] == "resp":
            assert cache.cached(record["prompt_token_ids"], salt) == record["cached_tokens"], record["id"]
            judged += 1
            above += record["cached_tokens"] > 0
    assert (judged, above) == (answers, hits)


STORED = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "extra_keys": [None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [7], "group_idx": 0}


def test_the_oracle_counts_copies_and_never_the_last_tokens_block() -> None:
    cache = Cache(2)
    cache.apply([[STORED], [STORED, REMOVED]])
    assert cache.cached([1, 2, 3], None) == 2
    assert cache.cached([1, 2], None) == 0
    assert cache.cached([1, 2, 3], "salt") == 0
    cache.apply([[REMOVED]])
    assert cache.cached([1, 2, 3], None) == 0


@pytest.mark.parametrize(
    "event", [{"type": "AllBlocksCleared"}, STORED | {"block_size": 4}, STORED | {"kv_cache_spec_kind": "mamba"}]
)
def test_the_oracle_refuses_what_it_has_no_rule_for(event: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        Cache(2).apply([[event]])


def played(workload: Workload, turns: int) -> list[Turn]:
    """Turns answered by a stand-in whose every token is one byte of text, the worst case for the length."""
    sent = []
    for _ in range(turns):
        turn = workload.next_turn()
        sent.append(turn)
        count = turn.body["max_tokens"]
        assert isinstance(count, int)
        workload.answered(turn, "x" * count, [300] * count, prompt_bytes(turn))
    return sent


def prompt_bytes(turn: Turn) -> int:
    """An upper bound of a prompt's tokens, as long as markers cost no more than 20 a message."""
    match turn.body:
        case {"messages": list() as messages}:
            return sum(len(message["content"]) + 20 for message in messages) + 20
        case {"prompt": str() | list() as prompt}:
            return len(prompt)
        case body:
            raise AssertionError(body)


def test_a_workload_is_the_same_for_the_same_seed_and_name() -> None:
    bodies = [[turn.body for turn in played(Workload(3, "one"), 60)] for _ in range(2)]
    assert bodies[0] == bodies[1]


def test_workloads_of_one_seed_have_one_shape_and_no_common_prompt() -> None:
    one, two = (played(Workload(3, name), 60) for name in ("one", "two"))
    assert [turn.path for turn in one] == [turn.path for turn in two]
    assert [turn.body["max_tokens"] for turn in one] == [turn.body["max_tokens"] for turn in two]
    starts = [{json.dumps(turn.body.get("messages") or turn.body["prompt"])[:60] for turn in t} for t in (one, two)]
    assert starts[0].isdisjoint(starts[1])


def test_prompts_and_answers_fit_the_model_and_conversations_grow_and_end() -> None:
    turns = played(Workload(5, "length"), 400)
    for turn in turns:
        count = turn.body["max_tokens"]
        assert isinstance(count, int)
        assert prompt_bytes(turn) + count <= 1024
    by_conversation: dict[int, list[int]] = {}
    for turn in turns:
        by_conversation.setdefault(id(turn.conversation), []).append(prompt_bytes(turn))
    assert len(by_conversation) > 8
    assert all(lengths == sorted(lengths) for lengths in by_conversation.values())
    assert max(map(len, by_conversation.values())) >= 4


def test_a_workload_has_every_kind_of_request() -> None:
    turns = played(Workload(20, "kinds"), 150)
    for kind in (
        [turn for turn in turns if "messages" in turn.body],
        [turn for turn in turns if isinstance(turn.body.get("prompt"), str)],
        [turn for turn in turns if isinstance(turn.body.get("prompt"), list)],
        [turn for turn in turns if turn.body.get("stream")],
        [turn for turn in turns if turn.salt is not None and turn.body["cache_salt"] == turn.salt],
    ):
        assert len(kind) >= 10


# --- answers ----------------------------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}}
PLAIN: dict[str, Any] = {
    "usage": USAGE,
    "choices": [{"index": 0, "text": "hi", "token_ids": [8, 9], "prompt_token_ids": [1, 2, 3]}],
}


def streamed(*pieces: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces)


def test_a_plain_and_a_streamed_answer_say_the_same() -> None:
    chunks = streamed(
        {"prompt_token_ids": [1, 2, 3], "choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "h"}, "token_ids": [8]}]},
        {"choices": [{"delta": {"content": "i"}, "token_ids": [9]}]},
        {"choices": [], "usage": USAGE},
    )
    answers = [
        read_answer(iter([PLAIN]), {}),
        read_answer(sse(io.BytesIO(chunks + b"data: [DONE]\n\n")), {}),
    ]
    assert answers[0] == answers[1] == Answer({}, (1, 2, 3), (8, 9), "hi", 2)


@pytest.mark.parametrize(
    "piece",
    [
        PLAIN | {"usage": None},
        PLAIN | {"usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        PLAIN | {"usage": USAGE | {"prompt_tokens": 4}},
        PLAIN | {"usage": USAGE | {"completion_tokens": 1}},
        PLAIN | {"choices": [{"text": "hi", "token_ids": [8, 9]}]},
        {"error": {"message": "no"}},
    ],
)
def test_an_answer_that_cannot_be_judged_is_an_error(piece: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        read_answer(iter([piece]), {})


@pytest.mark.parametrize("stream", [streamed(PLAIN), b"oops\n\n", b""])
def test_a_stream_that_is_cut_or_broken_is_an_error(stream: bytes) -> None:
    with pytest.raises(BadAnswer):
        list(sse(io.BytesIO(stream)))


class Fixed(BaseHTTPRequestHandler):
    """Answers every request with the server's ``status``, ``kind`` and ``content``."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def do_GET(self) -> None:
        status, kind, content = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("request-id", "abc")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(status: int, kind: str, content: bytes) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Fixed) as server:
        server.answer = (status, kind, content)  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_post_reads_an_answer_and_its_headers() -> None:
    with serving(200, "application/json", json.dumps(PLAIN).encode()) as base:
        answer = post(base, "/v1/completions", {}, {}, timeout=10)
    assert (answer.headers["request-id"], answer.cached_tokens) == ("abc", 2)


@pytest.mark.parametrize(
    ("status", "kind", "stream"),
    [(500, "application/json", False), (200, "application/json", True), (200, "text/event-stream", False)],
)
def test_post_refuses_another_status_or_form_than_asked_for(status: int, kind: str, stream: bool) -> None:
    with serving(status, kind, json.dumps(PLAIN).encode()) as base, pytest.raises(BadAnswer):
        post(base, "/v1/completions", {"stream": stream}, {}, timeout=10)


def test_get_gives_json_or_an_error() -> None:
    with serving(200, "application/json", b"[1]") as base:
        assert get(base, "/", timeout=10) == [1]
    with serving(404, "application/json", b"{}") as base, pytest.raises(BadAnswer, match="404"):
        get(base, "/", timeout=10)


# --- processes --------------------------------------------------------------------------------------------------

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
else:
    print("parent", os.getpid(), flush=True)
time.sleep(600)
"""


def test_stop_ends_the_whole_group_even_where_sigterm_is_ignored(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Server("stubborn", [sys.executable, "-c", STUBBORN], log, patience=0.2) as server:
        server.wait_until(lambda: len(log.read_text().splitlines()) == 2, 30, "not both up")
    end = time.monotonic() + 10  # a process that was killed takes a moment to be gone
    left = [int(line.split()[1]) for line in log.read_text().splitlines()]
    while left and time.monotonic() < end:
        left = [pid for pid in left if runs(pid)]
    assert not left


def runs(pid: int) -> bool:
    """Whether the process is there and not a zombie that its new parent has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_waiting_ends_at_once_when_the_server_died_and_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        Server("dying", command, tmp_path / "log") as server,
        pytest.raises(AssertionError, match=r"(?s)dying ended with 1.*no such model"),
    ):
        server.wait_until(lambda: False, 600, "never")


def test_waiting_ends_at_its_deadline(tmp_path: Path) -> None:
    def refused() -> bool:
        raise ConnectionRefusedError

    with (
        Server("slow", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log") as server,
        pytest.raises(AssertionError, match="not up not within 0 s"),
    ):
        server.wait_until(refused, 0.1, "not up")


def test_free_ports_are_free_and_in_a_row() -> None:
    first, second = free_ports(3), free_ports(2)
    with ExitStack() as stack:
        for port in (*range(first, first + 3), *range(second, second + 2)):
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))


# --- streams ----------------------------------------------------------------------------------------------------

END = [b"", b"", b"\xff" * 8, b""]


class Publisher:
    """A ROUTER that serves replays as vLLM's publisher thread does: between two, it takes one batch off its queue."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], queued: int, first: int = 0) -> None:
        self._router = context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._queued, self._sent, self._first = queued, 0, first
        self._thread = threading.Thread(target=self._serve)
        self._stop = threading.Event()
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            client, _, start = self._router.recv_multipart()
            for number in range(max(int.from_bytes(start, "big"), self._first), self._first + self._sent):
                payload = msgspec.msgpack.encode([0.0, [{"type": "n", "n": number}], 0])
                self._router.send_multipart([client, b"", b"topic", number.to_bytes(8, "big"), payload])
            self._router.send_multipart([client, *END])
            self._sent = min(self._sent + 1, self._queued)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._router.close()


@pytest.mark.parametrize("queued", [0, 1, 3])
def test_catch_up_sees_what_was_still_queued_when_it_began(queued: int) -> None:
    with (
        zmq.Context() as context,
        Publisher(context, queued) as publisher,
        Publisher(context, 0) as idle,
        Stream(context, publisher.endpoint) as stream,
        Stream(context, idle.endpoint) as other,
    ):
        news = catch_up({"busy": stream, "idle": other})
        assert [event["n"] for batch in news["busy"] for event in batch] == list(range(queued))
        assert (stream.last, news["idle"], other.last) == (queued - 1, [], -1)
        assert catch_up({"busy": stream}) == {"busy": []}


def test_a_number_that_was_left_out_is_an_error() -> None:
    with (
        zmq.Context() as context,
        Publisher(context, 1, first=2) as publisher,
        Stream(context, publisher.endpoint) as stream,
        pytest.raises(AssertionError, match="batch 2 follows -1"),
    ):
        catch_up({"gap": stream})


def judged(credit: int, cached: int, held: Mapping[str, int]) -> Figures:
    figures = Figures("s", "p")
    turn = played(Workload(1, "judge"), 1)[0]
    judge(
        figures, 1, turn, Answer({}, tuple(range(100)), (1,), "x", cached), Decision("a", credit, "exact", "ids"), held
    )
    return figures


def test_an_exact_answer_of_the_best_worker_counts_everywhere() -> None:
    figures = judged(64, 64, {"a": 64, "b": 32})
    assert (figures.credit_equal, figures.events_equal, figures.followed, figures.followable) == (1, 1, 1, 1)
    assert (figures.by_worker, figures.trusts, figures.sources) == ({"a": 1}, {"exact": 1}, {"ids": 1})
    assert (figures.hits, figures.hit_rate, figures.longest_tokens, figures.differences) == (1, 0.64, 64, [])


def test_each_kind_of_difference_shows() -> None:
    assert judged(96, 64, {"a": 64}).credit_equal == 0
    assert judged(64, 64, {"a": 96}).events_equal == 0
    lost = judged(0, 0, {"a": 0, "b": 64})
    assert (lost.followed, lost.followable, lost.credit_equal) == (0, 1, 1)
    cold = judged(0, 0, {"a": 0, "b": 0})
    assert (cold.followed, cold.followable) == (0, 0)
    assert "credited 96" in judged(96, 64, {"a": 64}).differences[0]


def test_the_table_has_a_line_for_each_run() -> None:
    heading, line = table([judged(64, 64, {"a": 64, "b": 32})])
    assert line.split() == ["s", "p", "1", "0", "1", "1/1", "1/1", "1/1", "64.0%", "64.0%", "0", "ids:1"]
    assert len(heading.split()) == len(line.split())


@dataclass
class Listening:
    """Where an engine listens, without the engine."""

    spec: Spec
    url: str
    events_port: int
    replay_port: int


def test_the_gateway_is_given_a_configuration_without_a_fault_or_warning(tmp_path: Path) -> None:
    engines = [
        Listening(Spec("one", "tiny-llama", 96), "http://127.0.0.1:8100", 5557, 6557),
        Listening(Spec("two", "tiny-llama", 96, ranks=2), "http://127.0.0.1:8101", 5567, 6567),
    ]
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings(engines, 8000, 8001)))
    loaded = read(file, {}, {})
    assert not loaded.warnings
    assert loaded.settings.events.enabled
    assert [engine.data_parallel_size for engine in loaded.settings.models[0].engines] == [1, 2]


def test_a_worker_counts_as_caught_up_only_when_live_and_at_the_number() -> None:
    assert live_up_to({"state": "live", "last_sequence": 0}, 0)
    assert live_up_to({"state": "live", "last_sequence": None}, -1)
    assert not live_up_to({"state": "live", "last_sequence": None}, 0)
    assert not live_up_to({"state": "live", "last_sequence": 4}, 5)
    assert not live_up_to({"state": "repairing", "last_sequence": 5}, 5)
