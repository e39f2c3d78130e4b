"""Engines as cheap as can be, for what stands in front of them: one process, a port for each.

What must always hold: every request that came whole gets one whole answer, JSON or a stream. Its bytes are
:mod:`bench.asked`'s.

    opened    → the ports, one for each item of the command line's JSON: what the prompts of an engine's families begin
              with (``family_start``, ``chat_start``)
    tokenizer  a model's folder, which ``/tokenize`` goes by
    counts    → requests and hits so far
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, cast

import uvloop

from bench.asked import CHUNK_EVERY, CHUNKS, EVENT, HIT, LAST_EVENT, MISS, MODEL
from bench.subjects import answer

KEYS: Final = {b"/v1/completions": b'"prompt":', b"/v1/chat/completions": b'"content":'}
"""What stands before a prompt's beginning."""


def _response(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HIT_ANSWER: Final = _response(HIT)
MISS_ANSWER: Final = _response(MISS)
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
CHUNK: Final = _chunk(EVENT)
END: Final = _chunk(LAST_EVENT) + b"0\r\n\r\n"
NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def _pages() -> dict[bytes, bytes]:
    """What routers ask before and while they send requests."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "root": MODEL, "max_model_len": 1 << 20}
    info = {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "is_generation": True}
    metrics = (
        b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000001"} 1.0\n'
        b'vllm:num_requests_running{engine="0",model_name="bench"} 0.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="bench"} 0.0\n'
    )
    pages: dict[bytes, object] = {
        b"/v1/models": {"object": "list", "data": [model]},
        b"/get_server_info": info | {"tp_size": 1, "dp_size": 1, "max_total_num_tokens": 1 << 24},
        b"/get_model_info": info,
    }
    made = {path: _response(json.dumps(page).encode()) for path, page in pages.items()}
    return made | {b"/health": _response(b""), b"/metrics": _response(metrics, b"text/plain; version=0.0.4")}


class Engines:
    """All engines of the process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.requests = 0
        self.hits = 0
        self.pages = _pages()
        self.tokenize: Callable[[dict[str, Any]], list[int]] = lambda asked: []

    async def open(self, held: Sequence[Collection[bytes]]) -> list[int]:
        ports = []
        for families in held:
            server = await self.loop.create_server(
                lambda families=families: Connection(self, families),  # type: ignore[misc]
                "127.0.0.1",
                0,
                backlog=1024,
            )
            ports.append(server.sockets[0].getsockname()[1])
        return ports


class Connection(asyncio.Protocol):
    """One connection to one engine."""

    def __init__(self, engines: Engines, families: Collection[bytes]) -> None:
        self._engines = engines
        self._families = families
        self._waiting = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._waiting + data
        while data:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                break
            head = data[:end].lower() + b"\r\n"
            if b"\r\ntransfer-encoding:" in head:
                self._transport.abort()
                raise RuntimeError("a request without a length")
            at = head.find(b"\r\ncontent-length:")
            whole = end + 4 + (int(head[at + 17 : head.index(b"\r\n", at + 2)]) if at >= 0 else 0)
            if len(data) < whole:
                break
            self._answer(data[:end].split(b" ", 2)[1], data[end + 4 : whole])
            data = data[whole:]
        self._waiting = data

    def _answer(self, path: bytes, body: bytes) -> None:
        engines = self._engines
        key = KEYS.get(path)
        if key is not None:
            engines.requests += 1
            if b'"stream":true' in body:
                self._transport.write(STREAM_HEAD + CHUNK)
                engines.loop.call_later(CHUNK_EVERY, self._next, CHUNKS - 1)
                return
            at = body.find(key) + len(key)
            hit = body[at : body.find(b",", at)] in self._families
            engines.hits += hit
            self._transport.write(HIT_ANSWER if hit else MISS_ANSWER)
        elif path == b"/tokenize":
            ids = engines.tokenize(json.loads(body))
            told = {"count": len(ids), "max_model_len": 1 << 20, "tokens": ids}
            self._transport.write(_response(json.dumps(told).encode()))
        else:
            self._transport.write(engines.pages.get(path, NOT_FOUND))

    def _next(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(CHUNK)
            self._engines.loop.call_later(CHUNK_EVERY, self._next, left - 1)
        else:
            self._transport.write(END)


async def main() -> None:
    loop = asyncio.get_running_loop()
    engines = Engines(loop)
    opened: list[int] = []

    def counts() -> dict[str, int]:
        return {"requests": engines.requests, "hits": engines.hits}

    def tokenizer(folder: str) -> None:
        import jinja2
        from tokenizers import Tokenizer

        loaded = Tokenizer.from_file(f"{folder}/tokenizer.json")
        template = jinja2.Template(Path(folder, "chat_template.jinja").read_text(encoding="utf-8"))

        def tokenize(asked: dict[str, Any]) -> list[int]:
            if "messages" not in asked:
                return list(loaded.encode(asked["prompt"]).ids)
            text = template.render(messages=asked["messages"], add_generation_prompt=True)
            return list(loaded.encode(text, add_special_tokens=False).ids)

        engines.tokenize = tokenize

    handlers: dict[str, Callable[..., Any]] = {"counts": counts, "tokenizer": tokenizer, "opened": lambda: opened}
    held = [{start.encode() for start in starts} for starts in json.loads(sys.argv[1])]
    opened += await engines.open(held)
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer(handlers, line)


if __name__ == "__main__":
    uvloop.run(main())
