"""The HTTP face: vLLM's routes, answers and errors on aiohttp, and ``POST /sim/fault``.

A client that goes away takes its sequences with it, in whatever state they are. Idle connections are closed after 5 s,
as uvicorn does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Protocol, cast

from aiohttp import web

from kvsync.engine_sim.answers import Answer, Delta
from kvsync.engine_sim.bodies import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeCompletionBody,
    parse,
)
from kvsync.engine_sim.calls import Call, Calls
from kvsync.engine_sim.config import SimConfig
from kvsync.engine_sim.faults import Armed, Fault, FaultBody
from kvsync.engine_sim.metrics import exposition
from kvsync.engine_sim.rank import EngineGone, Rank, Running
from kvsync.engine_sim.request import Request
from kvsync.engine_sim.tokens import Detokenizer, ModelTokenizer

KEEP_ALIVE = 5.0
_MOST_BODY = 64 << 20
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Host(Protocol):
    """The engine behind the server."""

    @property
    def ranks(self) -> Sequence[Rank]: ...

    @property
    def armed(self) -> Armed: ...

    @property
    def thawed(self) -> asyncio.Event: ...

    def choose_rank(self) -> Rank:
        """The rank for a sequence that names none."""

    async def inject(self, fault: Fault, *, spare: asyncio.BaseTransport | None = None) -> None: ...


class Server:
    """Routes of one engine."""

    def __init__(self, config: SimConfig, tokenizer: ModelTokenizer, calls: Calls, host: Host, started: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._calls = calls
        self._host = host
        self._started = started
        self._load = 0
        self._metrics = exposition(config, lambda: host.ranks)
        self._fingerprint = f"vllm-{config.version}-sim"

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MOST_BODY, middlewares=[self._errors])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._empty),
                web.get("/ping", self._empty),
                web.post("/ping", self._empty),
                web.get("/version", self._version),
                web.get("/metrics", self._serve_metrics),
                web.get("/load", self._serve_load),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/sim/fault", self._fault),
            ]
        )
        if self._config.kv_events and self._config.event_sources and self._config.dialect.has_event_sources:
            app.router.add_get("/kv_event_sources", self._event_sources)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if not request.path.startswith("/sim/"):
            await self._host.thawed.wait()
        try:
            return await handler(request)
        except ApiError as error:
            return web.json_response(error.payload, status=error.status)
        except (EngineGone, ConnectionResetError):  # the latter: the client is gone
            return _cut(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return web.json_response({"detail": HTTPStatus(error.status).phrase}, status=error.status)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), CompletionBody)
        return await self._answer(request, lambda: self._calls.completion(body, request.headers))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), ChatBody)
        return await self._answer(request, lambda: self._calls.chat(body, request.headers))

    async def _answer(self, request: web.Request, read: Callable[[], Call]) -> web.StreamResponse:
        if self._host.armed.take_reset():
            return _cut(request)
        if status := self._host.armed.take_status():
            raise ApiError(status, "an injected fault")
        call = read()
        answer = Answer(call, self._tokenizer, fingerprint=self._fingerprint, block_size=self._config.block_size)
        async with self._running(request, call.requests) as deltas:
            if call.stream:
                return await self._stream(request, answer, deltas)
            return web.json_response(answer.document([delta async for delta in deltas]))

    @asynccontextmanager
    async def _running(self, request: web.Request, sequences: Sequence[Request]) -> AsyncIterator[AsyncIterator[Delta]]:
        """Run sequences; what is left of them when the block is left is freed."""
        rank = self._asked_rank(request)
        running: list[tuple[Rank, Running]] = []
        self._load += 1
        try:
            for sequence in sequences:
                chosen = rank or self._host.choose_rank()
                running.append((chosen, chosen.submit(sequence)))
            yield self._deltas([each for _, each in running])
        finally:
            self._load -= 1
            for chosen, each in running:
                chosen.cancel(each)

    async def _deltas(self, running: Sequence[Running]) -> AsyncIterator[Delta]:
        """All output, as it comes."""
        merged: asyncio.Queue[Delta | EngineGone] = asyncio.Queue()

        async def follow(index: int, each: Running) -> None:
            text = Detokenizer(self._tokenizer)
            finish = None
            try:
                while finish is None:
                    token = await each.next()
                    finish = token.finish
                    piece = text.push(token.token, last=finish is not None)
                    merged.put_nowait(Delta(index, token.token, piece, finish))
            except EngineGone as gone:
                merged.put_nowait(gone)

        followers = [asyncio.create_task(follow(index, each)) for index, each in enumerate(running)]
        try:
            alive = len(running)
            while alive:
                delta = await merged.get()
                if isinstance(delta, EngineGone):
                    raise delta
                alive -= delta.finish is not None
                yield delta
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    async def _stream(self, request: web.Request, answer: Answer, deltas: AsyncIterator[Delta]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        left = self._host.armed.take_cut()
        for chunk in answer.opening():
            await response.write(_event(chunk))
        async for delta in deltas:
            if left == 0:
                return _cut(request)
            await response.write(_event(answer.chunk(delta)))
            left = None if left is None else left - 1
        for chunk in answer.closing():
            await response.write(_event(chunk))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _asked_rank(self, request: web.Request) -> Rank | None:
        """The rank that the client asked for; what is no number is ignored, as in vLLM."""
        header = request.headers.get("X-data-parallel-rank", "")
        try:
            number = int(header)
        except ValueError:
            return None
        if not 0 <= number < len(self._host.ranks):
            raise ApiError(400, f"data_parallel_rank {number} is out of range [0, {len(self._host.ranks)}).")
        return self._host.ranks[number]

    async def _models(self, _: web.Request) -> web.Response:
        names = [(self._config.model, None), *((name, self._config.model) for name in self._config.adapters)]
        return web.json_response({"object": "list", "data": [self._card(name, parent) for name, parent in names]})

    def _card(self, name: str, parent: str | None) -> dict[str, object]:
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": self._started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": None if parent else self._config.max_model_len,
            "permission": [permission],
        }

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = cast(
            TokenizeCompletionBody | TokenizeChatBody,
            parse(await request.read(), TokenizeCompletionBody, TokenizeChatBody),
        )
        self._calls.check_model(body.model)
        text = body.prompt if isinstance(body, TokenizeCompletionBody) else self._calls.render(body)
        tokens = self._tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
        return web.json_response(
            {
                "count": len(tokens),
                "max_model_len": self._config.max_model_len,
                "tokens": tokens,
                "token_strs": self._tokenizer.strings(tokens) if body.return_token_strs else None,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), DetokenizeBody)
        self._calls.check_model(body.model)
        if any(token >= self._tokenizer.vocabulary for token in body.tokens):
            raise ApiError(400, "a token id is out of vocabulary", "tokens")
        return web.json_response({"prompt": self._tokenizer.decode(body.tokens, skip_special=False)})

    async def _empty(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self._config.version})

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _serve_load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": self._load})

    async def _event_sources(self, _: web.Request) -> web.Response:
        sources = {}
        for rank in self._host.ranks:
            assert rank.publisher is not None
            sources[str(rank.number)] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{_port(rank.publisher.endpoint)}",
                "replay_endpoint": f"tcp://*:{_port(rank.publisher.replay_endpoint)}",
                "buffer_steps": self._config.buffer_steps,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": self._config.topic,
            }
        return web.json_response(sources)

    async def _reset(self, request: web.Request) -> web.Response:
        preempt = request.query.get("reset_running_requests", "false").lower() in ("true", "1")
        done = [rank.scheduler.reset_cache(preempt=preempt) for rank in self._host.ranks]
        return web.json_response({"success": all(done)})

    async def _fault(self, request: web.Request) -> web.Response:
        fault = parse(await request.read(), FaultBody).root
        try:
            await self._host.inject(fault, spare=request.transport)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return web.json_response({})


def _event(chunk: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _cut(request: web.Request) -> web.Response:
    """Reset the connection: nothing more reaches the client, not even a proper end."""
    transport = request.transport
    if transport is not None:
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return web.Response()


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]
