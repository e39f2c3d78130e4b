"""The admin port: health, metrics, and what the gateway knows and decided.

It has a port of its own, which clients of the data port cannot reach by any path. Everything it shows is handed in as
:class:`AdminPorts`; nothing but ``forget`` changes anything, and no answer holds a prompt's text or tokens.

    GET  /healthz                  200 while the process serves its event loop
    GET  /readyz                   200 or 503, and which mode serves
    GET  /metrics                  Prometheus
    GET  /v1/workers               state, trust, last sequence, blocks of every worker
    POST /v1/match                 what each worker holds of a prompt
    GET  /v1/decisions/{id}        why a request went where it went
    POST /v1/workers/{name}/forget drop all that is known of a worker's cache
    GET  /openapi.json             all of this (:mod:`.openapi`)
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvsync.config import AdminSettings
from kvsync.gateway.openapi import document
from kvsync.gateway.tls import PortTls
from kvsync.requests import errors
from kvsync.requests.body import decode
from kvsync.requests.errors import Problem
from kvsync.requests.ports import Fleet, JsonObject, Tokenizing
from kvsync.routing.lookup import Lookup, match_prompt
from kvsync.telemetry.metrics import CONTENT_TYPE
from kvsync.tokenize.types import Prompt, TokenizedRequest

MAX_BODY = 32 << 20
PATIENCE = 60.0
"""Seconds in which a connection has to begin another request. No request here takes as long."""
STOP = 2.0
"""Seconds that open answers of this port get when the gateway stops."""
_encode = msgspec.json.Encoder(enc_hook=str).encode


@dataclass(frozen=True, slots=True)
class AdminPorts:
    """What the admin port shows."""

    metrics: Callable[[], Callable[[], bytes]]
    """Takes the figures of this moment; what makes the text of ``/metrics`` of them, in any thread."""
    ready: Callable[[], tuple[bool, Mapping[str, object]]]
    """Whether requests can be served, and details (the mode, unmet conditions)."""
    workers: Callable[[], Sequence[Mapping[str, object]]]
    decision: Callable[[str], Mapping[str, object] | None]
    """The decision record of a request id, in its JSON form."""
    forget: Callable[[str], bool]
    """Drop all that is known of a worker's cache; ``False`` when there is no such worker."""
    fleet: Fleet
    tokenizing: Tokenizing
    index: Lookup


class MatchQuestion(msgspec.Struct):
    """The body of ``POST /v1/match``: one of ``tokens``, ``prompt`` and ``messages``.

    Further fields are those of the request that is asked about (``tools``, ``chat_template_kwargs``, …), which may be
    pasted as it is.
    """

    model: str
    tokens: list[int] | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    adapter: str | None = None
    cache_salt: str | None = None


class Admin:
    """The admin server. ``start`` raises OSError when the address is taken.

    Args:
        tls: of the port; by default it speaks plain HTTP.
        patience: seconds; see :data:`PATIENCE`.
    """

    def __init__(
        self, settings: AdminSettings, ports: AdminPorts, *, tls: PortTls | None = None, patience: float = PATIENCE
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._tls = tls
        self._patience = patience
        self._begun: dict[object, float] = {}
        """By connection: when its last request began, or it was first seen."""
        self._sweeping: asyncio.Task[None] | None = None
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._noted, _problems])
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/workers", self._workers)
        app.router.add_post("/v1/match", self._match)
        app.router.add_get("/v1/decisions/{request_id}", self._decision)
        app.router.add_post("/v1/workers/{worker}/forget", self._forget)
        app.router.add_get("/openapi.json", self._openapi)
        # A body is read as it came: what a few bytes are unpacked to is nobody's to choose.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP, auto_decompress=False)

    @property
    def port(self) -> int:
        """The port that is listened on. Raises RuntimeError before :meth:`start`."""
        if not self._runner.addresses:
            raise RuntimeError("the admin server does not listen")
        return int(self._runner.addresses[0][1])

    async def start(self) -> None:
        await self._runner.setup()
        context = None if self._tls is None else self._tls.context
        await web.TCPSite(self._runner, self._settings.host, self._settings.port, ssl_context=context).start()
        self._sweeping = asyncio.create_task(self._sweep(), name="admin connections")

    async def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._runner.cleanup()

    @web.middleware
    async def _noted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._begun[request.protocol] = asyncio.get_running_loop().time()
        return await handler(request)

    async def _sweep(self) -> None:
        """Close connections on which no request began for too long: those that trickle, stall or only wait."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._patience / 4))
            server, now = self._runner.server, loop.time()
            connections = [] if server is None else server.connections
            self._begun = {connection: self._begun.get(connection, now) for connection in connections}
            for connection in connections:
                if now - self._begun[connection] > self._patience:
                    connection.force_close()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        ready, details = self._ports.ready()
        return _json({"ready": ready, **details}, status=200 if ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._ports.metrics())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _workers(self, request: web.Request) -> web.Response:
        return _json({"workers": self._ports.workers()})

    async def _decision(self, request: web.Request) -> web.Response:
        found = self._ports.decision(request.match_info["request_id"])
        if found is None:
            raise Problem(404, "no decision is kept for this request id", reason="no_decision")
        return _json(found)

    async def _forget(self, request: web.Request) -> web.Response:
        worker = request.match_info["worker"]
        if not self._ports.forget(worker):
            raise Problem(404, "there is no such worker: GET /v1/workers lists them", reason="no_worker")
        return _json({"worker": worker, "forgotten": True})

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(document())

    async def _match(self, request: web.Request) -> web.Response:
        if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise errors.compressed_body()
        body = decode(await request.read())
        try:
            asked = msgspec.convert(body, MatchQuestion)
        except msgspec.ValidationError as error:
            raise Problem(400, str(error), reason="bad_question") from None
        model, adapter = self._served(asked)
        tokenized = await self._tokens(asked, cast(JsonObject, body), model, adapter)
        if len(tokenized.prompts) != 1:
            raise Problem(503, f"the tokens are unknown: {tokenized.reason or 'no tokenizer'}", reason="tokens_unknown")
        prompt = tokenized.prompts[0]
        salt = tokenized.cache_salt if asked.cache_salt is None else asked.cache_salt
        matches = match_prompt(self._ports.index, prompt, model, adapter=adapter, cache_salt=salt)
        return _json(
            {
                "model": model,
                "adapter": adapter,
                "tokens": prompt.length,
                "source": tokenized.source,
                "workers": {
                    worker: {
                        "credit": match.credit,
                        "by_tier": match.by_tier,
                        "expected": match.expected,
                        "trust": match.trust,
                    }
                    for worker, match in matches.items()
                },
            }
        )

    def _served(self, asked: MatchQuestion) -> tuple[str, str | None]:
        """Base model and adapter: named apart, or the adapter by its own name as in a request."""
        found = self._ports.fleet.resolve(asked.adapter or asked.model)
        if found is None:
            raise errors.no_such_model(asked.adapter or asked.model, status=404)
        if asked.adapter is not None and found != (asked.model, asked.adapter):
            raise Problem(400, "adapter is no adapter of model", reason="bad_adapter", param="adapter")
        return found

    async def _tokens(
        self, asked: MatchQuestion, body: JsonObject, model: str, adapter: str | None
    ) -> TokenizedRequest:
        given = [asked.tokens, asked.prompt, asked.messages]
        if sum(value is not None for value in given) != 1:
            raise Problem(400, "one of tokens, prompt and messages is required", reason="bad_question")
        if asked.tokens is not None:
            try:
                packed = array("I", asked.tokens).tobytes()
            except OverflowError:
                raise Problem(400, "token ids are 32 bit", reason="bad_question", param="tokens") from None
            return TokenizedRequest((Prompt(packed, len(asked.tokens)),), "ids")
        path = "/v1/completions" if asked.prompt is not None else "/v1/chat/completions"
        begun = self._ports.tokenizing.begin(path, body | {"model": adapter or model}, model, adapter)
        return begun if isinstance(begun, TokenizedRequest) else await begun


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is JSON in the envelope of the data port."""
    try:
        if request.method == "POST":
            _same_origin(request)
        return await handler(request)
    except Problem as problem:
        return _refusal(problem)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return _refusal(Problem(error.status, error.reason, reason="http"), allow)


def _same_origin(request: web.Request) -> None:
    """Raises ``Problem`` where a page of another site has somebody's browser, which may reach this port, ask for more
    than to look. Browsers say where a page is from; other clients say nothing."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise Problem(403, "a page of another site may not do this", reason="cross_origin")


def _refusal(problem: Problem, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=problem.body(), status=problem.status, headers=headers, content_type="application/json")


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


__all__ = ["Admin", "AdminPorts", "MatchQuestion"]
