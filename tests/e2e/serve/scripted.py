"""An engine that does what a test says: real sockets and HTTP, no cache and no model behind them.

It publishes the batches it is given, byte for byte, replays them on request, and answers every request with two tokens
and whatever figure of cached tokens it was told to report.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio
from aiohttp import web

from .captured import Batch, question

_END = b"\xff" * 8


class ScriptedEngine:
    """See the module. All of it belongs to one event loop.

    Args:
        blocks: ``num_gpu_blocks`` of its metrics, or ``None``: they do not tell.
        replay_topic: whether replayed batches carry the topic.
        tokenizes: what ``/tokenize`` answers, by :func:`~tests.e2e.serve.captured.question`.
        already: published before anybody could listen: only a replay brings them.
    """

    def __init__(
        self,
        *,
        blocks: int | None,
        replay_topic: bool,
        tokenizes: Mapping[str, Sequence[int]],
        already: Sequence[Batch] = (),
    ) -> None:
        self.cached = 0
        """What the next answers report as cached tokens."""
        self.served: list[str] = []
        """The paths of the requests it got."""
        self.open = asyncio.Event()
        """While it is not set, answers wait."""
        self.open.set()
        self.published = len(already)
        self._blocks = blocks
        self._replay_topic = replay_topic
        self._tokenizes = tokenizes
        self._buffer = list(already)
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.events, self.replay = (_bind(socket) for socket in (self._pub, self._router))
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def publish(self, batch: Batch) -> None:
        self._buffer.append(batch)
        self.published += 1
        await self._pub.send_multipart([batch.topic, batch.sequence.to_bytes(8, "big"), batch.payload])

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._replays = asyncio.create_task(self._replay())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replays.cancel()
        await asyncio.gather(self._replays, return_exceptions=True)
        self._context.destroy(linger=0)
        await self._runner.cleanup()

    async def _replay(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            assert empty == b""
            for batch in self._buffer:
                if batch.sequence >= int.from_bytes(start, "big"):
                    lead = [batch.topic] if self._replay_topic else []
                    number = batch.sequence.to_bytes(8, "big")
                    await self._router.send_multipart([client, b"", *lead, number, batch.payload])
            await self._router.send_multipart([client, b"", *([b""] if self._replay_topic else []), _END, b""])

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = self._tokenizes.get(question(await request.json()), [])
        return web.json_response({"count": len(tokens), "max_model_len": 1024, "tokens": tokens})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{self._blocks}"}} 1.0\n')

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.served.append(request.path)
        body = await request.json()
        await self.open.wait()
        usage = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": self.cached}}
        chat = request.path == "/v1/chat/completions"
        if not body.get("stream"):
            said = {"message": {"role": "assistant", "content": "o k"}} if chat else {"text": "o k"}
            return web.json_response({"choices": [{"index": 0, **said}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in ("o", " k"):
            part = {"delta": {"content": word}} if chat else {"text": word}
            await response.write(_event({"choices": [{"index": 0, **part}]}))
        await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _bind(socket: zmq.asyncio.Socket) -> str:
    socket.set(zmq.SNDHWM, 0)
    socket.bind("tcp://127.0.0.1:*")
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
