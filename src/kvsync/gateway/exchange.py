"""One request's way through the gateway: read → tokenize → choose → send → relay → release.

What must always hold:

- A choice's load is released exactly once per try, however the try ends.
- A request is sent again only while no engine has given a byte of an answer, and only as often as ``retries`` and the
  fleet's budget allow.
- The body goes out as it came in, but for the salt that a tenant's policy sets or removes and the usage that
  ``audit.inject_usage`` asks for. What comes back is :mod:`.relay`'s business.
- Every wait has a deadline of its own: tokens, connection, sending, first byte, next byte. There is none on the total.
- When the client leaves, nothing of its request goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

from kvsync.config import GatewaySettings
from kvsync.discovery.access import EngineAccess
from kvsync.gateway import body, errors
from kvsync.gateway.auth import Tenants
from kvsync.gateway.errors import Problem
from kvsync.gateway.headers import Field, Wishes, printable
from kvsync.gateway.http1 import ClientConnection, Running
from kvsync.gateway.inject import ask_for_usage
from kvsync.gateway.ports import Fleet, JsonObject, OnAnswer, Outcome, Routing, Telemetry, Ticket, Tokenizing
from kvsync.gateway.reader import Admitted, Request
from kvsync.gateway.refusals import refuse_beyond_tenant
from kvsync.gateway.relay import Relay
from kvsync.gateway.salts import Salts
from kvsync.gateway.turns import Turns
from kvsync.gateway.upstream import JOIN_BELOW, ConnectFailed, UpstreamConnection, Upstreams
from kvsync.routing.decision import Decision, Query
from kvsync.routing.errors import RoutingError
from kvsync.tokenize.types import TokenizedRequest

_log = logging.getLogger(__name__)

STALE_WITHIN = 1.0
"""Seconds from a request's sending in which a reset says that an idle connection was closed in the same moment. Later,
the engine may have worked on the request: it may have died of it."""
_BUDGETED: frozenset[Outcome] = frozenset({"reset", "send_timeout"})
"""An engine has had the request, or a part of it. Where none could be connected to, trying the next one multiplies no
work, however many requests do it; ``retries`` bounds that."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """What all exchanges of one gateway share."""

    settings: GatewaySettings
    fleet: Fleet
    tokenizing: Tokenizing
    routing: Routing
    upstreams: Upstreams
    telemetry: Telemetry
    on_answer: OnAnswer
    loop: asyncio.AbstractEventLoop
    turns: Turns
    inject_usage: bool
    engines: EngineAccess
    tenants: Tenants
    salts: Salts


class Exchange:
    """One request, from its last byte to the end of its answer.

    A small machine of callbacks rather than a coroutine: with token ids at hand and an idle connection, a request
    passes through without a task or a turn of the event loop.
    """

    __slots__ = (
        "_answer",
        "_client",
        "_connection",
        "_deadline",
        "_decision",
        "_exclude",
        "_heard",
        "_lifted",
        "_model",
        "_over",
        "_paused",
        "_query",
        "_request",
        "_reset_elsewhere",
        "_retries",
        "_rooms",
        "_route",
        "_since",
        "_taken_at",
        "_task",
        "_tenant",
        "_ticket",
        "_tokenized",
        "_unsent",
        "_wishes",
    )

    def __init__(self, rooms: Rooms, request: Request, admitted: Admitted, client: ClientConnection) -> None:
        self._rooms = rooms
        self._request = request
        self._route, self._query, self._tenant = admitted
        self._client = client
        authorization = rooms.engines.authorization
        self._wishes = Wishes(request.fields, credentials_pass=authorization is None and not rooms.tenants.closed)
        if authorization is not None:
            self._wishes.forwarded.append(b"authorization: %b\r\n" % authorization.encode())
        self._since = rooms.loop.time()
        self._model: tuple[str, str | None]
        self._tokenized: TokenizedRequest
        self._decision: Decision
        self._ticket: Ticket | None = None
        self._lifted: body.Lifted | None = None
        self._exclude: frozenset[str] = frozenset()
        self._retries = rooms.settings.retries
        self._reset_elsewhere = rooms.settings.retry_fresh_reset
        self._task: asyncio.Future[TokenizedRequest] | asyncio.Future[UpstreamConnection] | None = None
        self._connection: UpstreamConnection | None = None
        self._answer = Relay(client)
        self._paused = False
        self._deadline = 0.0
        self._heard = False
        """The answer got on since deadlines were last looked at."""
        self._unsent = 0
        self._taken_at = 0.0
        """When the engine last took some of the request."""
        self._over = False

    # ---- read, tokenize, choose

    def run(self) -> Running | None:
        """Start. ``None`` when the answer was given at once."""
        if len(self._request.body) > body.LARGE:
            self._rooms.turns.add(self._read, self._lift if body.may_hold_ids(self._route.path) else None)
        else:
            self._lift()
            self._read()
        return None if self._over else self

    def _lift(self) -> None:
        self._lifted = body.lift_ids(self._request.body, self._route.path)

    def _read(self) -> None:
        if self._over:  # the client left before its turn came
            return
        try:
            asked, name = body.read_body(self._request.body, self._lifted)
            self._lifted = None
            model = self._rooms.fleet.resolve(name)
            if model is None:
                raise errors.no_such_model(name)
            if self._rooms.tenants.closed:
                refuse_beyond_tenant(asked)
            request = self._request
            request.body = self._rooms.salts.apply(self._tenant, self._route.path, asked, request.body)
            if self._rooms.inject_usage:
                self._inject_usage(asked)
        except Problem as problem:
            self._refuse(problem)
            return
        self._model = model
        try:
            tokenized = self._rooms.tokenizing.begin(self._route.path, asked, *model)
        except Exception:
            tokenized = _untokenized()
        if isinstance(tokenized, TokenizedRequest):
            self._tokenized = tokenized
            self._choose()
        else:
            self._await_tokens(tokenized)

    def _inject_usage(self, asked: JsonObject) -> None:
        with_usage = ask_for_usage(self._route.path, asked, self._request.body)
        if with_usage is not None:
            self._request.body = with_usage
            self._wishes.take_plain()  # a compressed stream could not be looked into
            self._answer.expect_usage()

    def _await_tokens(self, tokens: Awaitable[TokenizedRequest]) -> None:
        task = asyncio.ensure_future(tokens, loop=self._rooms.loop)
        task.add_done_callback(self._on_tokens)
        self._task = task

    def _on_tokens(self, task: asyncio.Future[TokenizedRequest]) -> None:
        self._task = None
        if self._over:
            return
        try:
            self._tokenized = task.result()
        except (Exception, asyncio.CancelledError):
            self._tokenized = _untokenized()
        self._choose()

    def _choose(self, after: Outcome | None = None) -> None:
        wishes = self._wishes
        model, adapter = self._model
        query = Query(
            request_id=wishes.request_id.decode(),
            model=model,
            adapter=adapter,
            tokenized=self._tokenized,
            policy=wishes.policy,
            label_filter=wishes.label_filter,
            exclude=self._exclude,
        )
        try:
            self._decision, self._ticket = self._rooms.routing.choose(query)
        except RoutingError as error:
            self._refuse(errors.engine_unreachable(after) if after else errors.not_routed(error))
            return
        except Exception:
            # A fault in a policy must not leave a client waiting for ever.
            _log.exception("choosing a worker failed with an exception")
            self._refuse(errors.routing_failed("routing_failed"))
            return
        connection = self._rooms.upstreams.take(self._decision.chosen.engine.url)
        if connection is not None:
            self._send(connection)
        else:
            self._connect()

    def _elsewhere(self, outcome: Outcome) -> None:
        """Try another engine, if that is still allowed: this one did not begin to answer."""
        allowed = self._retries > 0
        if allowed and outcome in _BUDGETED and not self._rooms.routing.may_retry():
            self._rooms.telemetry.retry_refused("retry_budget")
            allowed = False
        if not allowed:
            self._fail(outcome, errors.engine_unreachable(outcome))
            return
        self._retries -= 1
        chosen = self._decision.chosen
        self._release(outcome)
        self._exclude |= {chosen.engine.worker(rank) for rank in chosen.engine.ranks}
        self._rooms.telemetry.retried(outcome)
        self._choose(after=outcome)

    # ---- send

    def _connect(self) -> None:
        task = self._rooms.loop.create_task(self._rooms.upstreams.connect(self._decision.chosen.engine.url))
        task.add_done_callback(self._on_connected)
        self._task = task

    def _on_connected(self, task: asyncio.Future[UpstreamConnection]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if self._over:
            if error is None:  # made just as the client left: good for somebody else
                self._rooms.upstreams.keep(task.result())
            return
        if error is None:
            self._send(task.result())
            return
        outcome: Outcome = "connect_failed"
        if isinstance(error, ConnectFailed):
            outcome = error.outcome
        else:
            _log.error("connecting failed with an unforeseen exception", exc_info=error)
        self._elsewhere(outcome)

    def _send(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        chosen = self._decision.chosen
        request = self._request
        rank = b"x-data-parallel-rank: %d\r\n" % chosen.rank if chosen.engine.data_parallel_size > 1 else b""
        head = b"POST %b%b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            self._route.path.encode(),
            self._query,
            connection.target.host_field,
            b"".join(self._wishes.forwarded),
            self._wishes.request_id,
            rank,
            len(request.body),
        )
        now = self._rooms.loop.time()
        self._deadline = now + self._rooms.settings.first_byte_timeout
        self._taken_at = now
        connection.send(head, request.body, self)
        self._unsent = connection.unsent if len(request.body) > JOIN_BELOW else 0  # the kernel takes less
        if self._client.paused:
            self.pause()

    # ---- relay

    def on_head(
        self, status: int, phrase: bytes, fields: list[Field], length: int | None, *, until_close: bool
    ) -> None:
        assert self._connection is not None
        chosen = self._decision.chosen
        own = b"request-id: %b\r\nrouting-strategy: %b\r\ntarget-pod: %b\r\ntarget-pod-ip: %b\r\n" % (
            self._wishes.request_id,
            printable(self._decision.policy),
            printable(chosen.engine.name),
            self._connection.peer,
        )
        if self._rooms.settings.reveal_match:
            told = (chosen.match.credit, chosen.expected, chosen.match.trust.encode())
            own += b"x-kvsync-match: credit=%d;expected=%d;trust=%b\r\n" % told
        self._answer.start(self._route.path, status, phrase, fields, own, length, until_close)

    def on_body(self, piece: bytes) -> None:
        if not self._answer.begun:
            if self._ticket is not None:
                self._ticket.first_byte()
            self._rooms.telemetry.first_byte(self._route.path, self._rooms.loop.time() - self._since)
        self._answer.body(piece)

    def on_pause(self) -> None:
        self._heard = True
        self._client.flush()

    def on_chunks(self, chunks: bytes, body: bytes) -> None:
        self._heard = True
        self._answer.chunks(chunks, body)

    def on_end(self) -> None:
        self._connection = None
        if not self._answer.whole():
            self._cut("upstream_died")
            return
        status = self._answer.status
        self._release("ok" if status < 400 else "request_error" if status < 500 else "engine_error")
        self._over = True
        self._answer.end()
        rooms = self._rooms
        rooms.telemetry.answered(self._route.path, status, rooms.loop.time() - self._since, "engine")
        rooms.on_answer(self._decision, self._tokenized, status, self._answer.usage())

    def on_lost(self, outcome: Outcome) -> None:
        connection, self._connection = self._connection, None
        if self._answer.status:
            self._cut(outcome)
        elif outcome == "reset" and connection is not None and connection.reused and self._just_sent():
            # The engine closed its idle connection just as the request went out: the same engine, once more. It never
            # read the request, so this is no load on a fleet in trouble and takes nothing of the retries.
            self._rooms.telemetry.retried("reset")
            self._connect()
        elif outcome == "reset" and self._reset_elsewhere:
            self._reset_elsewhere = False
            self._elsewhere(outcome)
        else:
            self._fail(outcome, errors.engine_unreachable(outcome))

    def _just_sent(self) -> bool:
        return self._rooms.loop.time() - self._taken_at <= STALE_WITHIN

    # ---- ends

    def _cut(self, outcome: Outcome) -> None:
        """After the status line nothing can be mended: the client must see that the answer is not whole."""
        self._release(outcome)
        self._over = True
        self._rooms.telemetry.cut(self._route.path, outcome)
        self._answer.cut()

    def _fail(self, outcome: Outcome, problem: Problem) -> None:
        self._release(outcome)
        self._refuse(problem)

    def _refuse(self, problem: Problem) -> None:
        self._over = True
        seconds = self._rooms.loop.time() - self._since
        self._rooms.telemetry.answered(self._route.path, problem.status, seconds, problem.reason)
        self._client.refuse(problem, self._wishes.request_id)

    def _release(self, outcome: Outcome) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.end(outcome)

    # ---- kvsync.gateway.http1.Running

    def stop(self, outcome: Outcome) -> None:
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.abort()
        self._release(outcome)
        self._rooms.telemetry.cut(self._route.path, outcome)

    def pause(self) -> None:
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._heard = True
            self._connection.resume()

    def check(self, now: float) -> None:
        connection = self._connection
        if connection is None:
            return
        if self._heard:
            self._heard = False
            deadline = now + self._rooms.settings.idle_timeout
            # Some engines send the head of a stream before they begin with the prompt: the wait for it is still on.
            self._deadline = deadline if self._answer.begun else max(self._deadline, deadline)
        if self._unsent and not self._answer.status and not self._still_sending(connection, now):
            return
        if self._paused or now < self._deadline:
            return
        self._connection = None
        connection.abort()
        if self._answer.status:
            self._cut("idle_timeout")
        else:
            self._fail("first_byte_timeout", errors.first_byte_timeout(self._rooms.settings.first_byte_timeout))

    def _still_sending(self, connection: UpstreamConnection, now: float) -> bool:
        """Look after a request that the engine has not read whole; ``False`` when that took too long."""
        unsent = connection.unsent
        if unsent < self._unsent:
            self._unsent = unsent
            self._taken_at = now
            self._deadline = now + self._rooms.settings.first_byte_timeout
        elif now - self._taken_at > self._rooms.settings.send_timeout:
            self._connection = None
            connection.abort()
            self._elsewhere("send_timeout")
            return False
        return True


def _untokenized() -> TokenizedRequest:
    """Of a tokenizer that raised. That is against its contract, so it is told; but its fault costs routing quality,
    never the request."""
    _log.exception("tokenizing failed with an exception; the request is routed by load")
    return TokenizedRequest((), "none", "tokenizer_failed")


__all__ = ["Exchange", "Rooms"]
