"""One request's course: read → resolve → salt → usage → limits → tokens → choose → carry → release.

:class:`Course` is all of it but for the bytes: those are for who carries them, a subclass. Nothing that is decided of a
request is decided anywhere else, so whoever carries it, the same request goes the same way.

What must always hold:

- A choice's load is released exactly once per try, however the try ends.
- A request is sent again only while no engine has given a byte of an answer, and only as often as ``retries`` and the
  fleet's budget allow.
- The body goes out as it came in, but for the salt that a tenant's policy sets or removes and the usage that
  ``audit.inject_usage`` asks for.
- Every request is counted once, as answered or as cut. What it took of a user's tokens is told once: what its usage
  says, or its prompt where an engine had it and no usage came.
- When the client leaves, nothing of its request goes on.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, Final

from kvsync.requests import body, errors
from kvsync.requests.admission import Admitted
from kvsync.requests.errors import Problem
from kvsync.requests.headers import Field, Wishes, printable
from kvsync.requests.inject import ask_for_usage, must_ask_for_usage
from kvsync.requests.ports import JsonObject, Outcome, Ticket, Verdict
from kvsync.requests.refusals import refuse_beyond_tenant
from kvsync.requests.rooms import Rooms
from kvsync.routing.decision import Decision, Query
from kvsync.routing.errors import RoutingError
from kvsync.tokenize.types import TokenizedRequest

_log = logging.getLogger(__name__)

_BUDGETED: Final[frozenset[Outcome]] = frozenset({"reset", "send_timeout"})
"""An engine has had the request, or a part of it. Where none could be connected to, trying the next one multiplies no
work, however many requests do it; ``retries`` bounds that."""


class Course(ABC):
    """One request, from its last byte to the end of its answer.

    A small machine of callbacks rather than a coroutine: with token ids at hand, it comes to its choice without a task
    or a turn of the event loop. What its carrier has to say stands at the end of the class.

    Args:
        raw: the body.
        may_inject: the carrier can take usage out of the answer again that the client did not ask for.
    """

    __slots__ = (
        "_authorization",
        "_closed",
        "_decision",
        "_exclude",
        "_lifted",
        "_may_inject",
        "_model",
        "_over",
        "_query",
        "_raw",
        "_retries",
        "_rooms",
        "_route",
        "_since",
        "_task",
        "_tenant",
        "_ticket",
        "_tokenized",
        "_usage_comes",
        "_user",
        "_verdict",
        "_wishes",
    )

    def __init__(
        self, rooms: Rooms, admitted: Admitted, fields: list[Field], raw: bytes, *, may_inject: bool = True
    ) -> None:
        self._rooms = rooms
        self._route, self._query, self._tenant = admitted
        self._raw = raw
        self._authorization = authorization = rooms.engines.authorization
        """What engines want to be shown; ``None``: nothing."""
        self._closed = closed = rooms.tenants.closed
        self._wishes = Wishes(fields, credentials_pass=authorization is None and not closed)
        self._may_inject = may_inject and rooms.inject_usage
        self._user = self._asker(fields) if rooms.gate is not None and rooms.gate.users else b""
        self._verdict: Verdict | None = None
        self._usage_comes = False
        """It was asked for in the client's name."""
        self._since = rooms.loop.time()
        self._model: tuple[str, str | None]
        self._tokenized: TokenizedRequest
        self._decision: Decision
        self._ticket: Ticket | None = None
        self._lifted: body.Lifted | None = None
        self._exclude: frozenset[str] = frozenset()
        self._retries = rooms.settings.retries
        self._task: asyncio.Future[Any] | None = None
        """What is waited for."""
        self._over = False

    # ---- read, tokenize, choose

    def begin(self) -> None:
        """Start. Whatever is known at once is done at once."""
        if len(self._raw) > body.LARGE:
            self._rooms.turns.add(self._read, self._lift if body.may_hold_ids(self._route.path) else None)
        else:
            self._lift()
            self._read()

    def _lift(self) -> None:
        self._lifted = body.lift_ids(self._raw, self._route.path)

    def _read(self) -> None:
        if self._over:  # the client left before its turn came
            return
        try:
            asked, name = body.read_body(self._raw, self._lifted)
            self._lifted = None
            model = self._rooms.fleet.resolve(name)
            if model is None:
                raise errors.no_such_model(name)
            if self._closed:
                refuse_beyond_tenant(asked)
            self._raw = self._rooms.salts.apply(self._tenant, self._route.path, asked, self._raw)
            if self._may_inject:
                self._inject_usage(asked)
        except Problem as problem:
            self._refuse(problem)
            return
        self._model = model
        gate = self._rooms.gate
        judging = gate.begin(self._user, model[0]) if gate is not None else None
        if judging is None:
            self._tokenize(asked)
        else:
            self._await_verdict(judging, asked)

    # ---- limits

    def _asker(self, fields: list[Field]) -> bytes:
        """Whose limits count: the tenant's, where a key says who that is. A header can say anything."""
        if self._closed:
            return self._tenant.name.encode()
        named = [value for lower, _, value in fields if lower == b"user"]
        return named[-1].strip() if named else b""

    def _await_verdict(self, judging: Awaitable[Verdict], asked: JsonObject) -> None:
        task = asyncio.ensure_future(judging, loop=self._rooms.loop)
        task.add_done_callback(partial(self._on_verdict, asked))
        self._task = task

    def _on_verdict(self, asked: JsonObject, task: asyncio.Future[Verdict]) -> None:
        self._task = None
        if self._over:
            return
        try:
            verdict = task.result()
        except (Exception, asyncio.CancelledError):
            # Against its contract, so it is told; but a fault in counting is no reason to refuse anybody.
            _log.exception("judging a request's limits failed with an exception; it passes")
            self._tokenize(asked)
            return
        if verdict.refused is not None:
            subject, allowed, retry_after = verdict.subject, verdict.allowed, verdict.retry_after
            self._refuse(errors.limit_exceeded(verdict.refused, subject, allowed, retry_after))
        elif verdict.wants_usage and not self._usage_comes and must_ask_for_usage(self._route.path, asked):
            self._refuse(errors.usage_not_asked_for())
        else:
            self._verdict = verdict
            self._tokenize(asked)

    def _spend(self, usage: Mapping[str, object] | None) -> None:
        """An engine had the request; what it took is told."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None:
            verdict.spent(usage, self._decision.prompt_tokens)

    # ---- tokens

    def _tokenize(self, asked: JsonObject) -> None:
        try:
            tokenized = self._rooms.tokenizing.begin(self._route.path, asked, *self._model)
        except Exception:
            tokenized = _untokenized()
        if isinstance(tokenized, TokenizedRequest):
            self._tokenized = tokenized
            self._choose()
        else:
            self._await_tokens(tokenized)

    def _inject_usage(self, asked: JsonObject) -> None:
        with_usage = ask_for_usage(self._route.path, asked, self._raw)
        if with_usage is not None:
            self._raw = with_usage
            self._usage_comes = True
            self._wishes.take_plain()  # a compressed stream could not be looked into
            self._expect_usage()

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
        self._carry()

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

    # ---- what is told of it

    def _told(self, address: bytes) -> bytes:
        """The gateway's own fields of the answer, each as ``name: value CRLF``; ``address`` is the engine's."""
        decision = self._decision
        chosen = decision.chosen
        told = b"request-id: %b\r\nrouting-strategy: %b\r\ntarget-pod: %b\r\ntarget-pod-ip: %b\r\n" % (
            self._wishes.request_id,
            printable(decision.policy),
            printable(chosen.engine.name),
            address,
        )
        if self._rooms.settings.reveal_match:
            match = (chosen.match.credit, chosen.expected, chosen.match.trust.encode())
            told += b"x-kvsync-match: credit=%d;expected=%d;trust=%b\r\n" % match
        return told if self._verdict is None else told + b"".join(self._verdict.fields)

    # ---- ends

    def _answered(self, status: int, usage: Mapping[str, object] | None) -> None:
        """The whole answer went through, and the load is released."""
        rooms = self._rooms
        if status == 200:
            self._spend(usage)
        rooms.telemetry.answered(self._route.path, status, rooms.loop.time() - self._since, "engine")
        rooms.on_answer(self._decision, self._tokenized, status, usage)

    def _fail(self, outcome: Outcome, problem: Problem) -> None:
        self._release(outcome)
        self._refuse(problem)

    def _refuse(self, problem: Problem) -> None:
        self._over = True
        seconds = self._rooms.loop.time() - self._since
        self._rooms.telemetry.answered(self._route.path, problem.status, seconds, problem.reason)
        self._turn_down(problem)

    def _release(self, outcome: Outcome) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.end(outcome)

    def _release_answered(self, status: int) -> None:
        self._release("ok" if status < 400 else "request_error" if status < 500 else "engine_error")

    def stop(self, outcome: Outcome) -> None:
        """Nothing of it goes on."""
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()
        if self._ticket is not None:
            self._spend(None)
        self._release(outcome)
        self._rooms.telemetry.cut(self._route.path, outcome)

    # ---- who carries it

    @abstractmethod
    def _carry(self) -> None:
        """``_decision`` says where ``_raw`` goes, and ``_wishes`` with what fields."""

    @abstractmethod
    def _turn_down(self, problem: Problem) -> None:
        """The answer is this problem."""

    @abstractmethod
    def _expect_usage(self) -> None:
        """The answer will hold usage that the client did not ask for."""


def _untokenized() -> TokenizedRequest:
    """Of a tokenizer that raised. That is against its contract, so it is told; but its fault costs routing quality,
    never the request."""
    _log.exception("tokenizing failed with an exception; the request is routed by load")
    return TokenizedRequest((), "none", "tokenizer_failed")


__all__ = ["Course"]
