"""What requests need from the other rooms: the doors in the walls.

This room and those that carry bytes import no index, no tokenizer and no policy: they are handed objects that
satisfy these protocols. All calls are made on the event loop and none may block it; only :meth:`Tokenizing.begin` may
take time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from kvsync.routing.decision import Decision, Query
from kvsync.tokenize.types import TokenizedRequest

JsonObject: TypeAlias = dict[str, object]

Outcome: TypeAlias = Literal[
    "ok",
    "engine_error",
    "request_error",
    "client_gone",
    "connect_refused",
    "connect_timeout",
    "connect_failed",
    "tls_failed",
    "no_resources",
    "send_timeout",
    "reset",
    "bad_answer",
    "first_byte_timeout",
    "idle_timeout",
    "upstream_died",
    "shutdown",
]
"""How one try at one worker ended. ``ok``, ``request_error`` (4xx) and ``engine_error`` (5xx) are whole answers;
``no_resources``: this process has no file or port left for a connection, which says nothing of the engine.
``upstream_died`` and ``idle_timeout`` cut an answer short; ``send_timeout`` (the engine does not read the request),
``reset`` and ``bad_answer`` come before the status line."""


class Fleet(Protocol):
    """Which models there are."""

    def resolve(self, name: str) -> tuple[str, str | None] | None:
        """The base model and the adapter that a request's ``model`` means, or ``None`` when nobody serves it."""

    def models(self) -> Sequence[tuple[str, str | None]]:
        """Every name that can be asked for, with its base model where the name is an adapter's, else ``None``."""


class Tokenizing(Protocol):
    def begin(
        self, path: str, body: JsonObject, model: str, adapter: str | None
    ) -> TokenizedRequest | Awaitable[TokenizedRequest]:
        """The request's tokens. What is known at once (token ids, a cached request, an API whose tokens nobody knows)
        may be returned as it is, which saves a task; everything else is awaited. Never raises for a bad tokenizer:
        unknown tokens are an answer too. Cancelled when the client leaves."""


class Ticket(Protocol):
    """The load that one choice counts, from the choice on."""

    def first_byte(self) -> None:
        """The answer's first byte came: the prompt is computed."""

    def end(self, outcome: Outcome) -> None:
        """The load is gone. Called at least once; calls after the first change nothing."""


class Routing(Protocol):
    def choose(self, query: Query) -> tuple[Decision, Ticket]:
        """Pick a worker and count its load. Raises a ``kvsync.routing.errors.RoutingError``."""

    def may_retry(self) -> bool:
        """Whether a request may be sent to another engine now; ``True`` takes it from the budget of retries."""


class OnAnswer(Protocol):
    def __call__(
        self, decision: Decision, tokenized: TokenizedRequest, status: int, usage: Mapping[str, object] | None
    ) -> None:
        """A whole answer went through. ``tokenized`` is the request with its prompts (the decision's has none);
        ``usage`` is the last usage object in the answer, where one was found."""


class Verdict(Protocol):
    """What limits say of one request."""

    @property
    def refused(self) -> Literal["rpm", "tpm", "model_rps"] | None:
        """The limit that it is beyond: a user's requests or tokens in a minute, a model's requests in a second."""

    @property
    def subject(self) -> str:
        """The user or model."""

    @property
    def allowed(self) -> int:
        """The limit's figure."""

    @property
    def retry_after(self) -> int:
        """Whole seconds until there is room again."""

    @property
    def fields(self) -> Sequence[bytes]:
        """For the answer, each as ``name: value CRLF``."""

    @property
    def wants_usage(self) -> bool:
        """The answer has to say what it took."""

    @property
    def spent(self) -> Callable[[Mapping[str, object] | None, int], None]:
        """To be told once, of an answer that took something: its usage, and its prompt's tokens as far as they are
        known without it."""


class Gate(Protocol):
    """Who may have how much."""

    @property
    def users(self) -> bool:
        """Whether it wants to know who asks."""

    def begin(self, user: bytes, model: str) -> Awaitable[Verdict] | None:
        """Count one request of a user (``b""``: of nobody) for a base model; ``None`` when nothing limits it. Waits for
        a bounded time and never raises."""


class Telemetry(Protocol):
    """What the gateway counts. Every request ends in exactly one of :meth:`answered` and :meth:`cut`."""

    def answered(self, path: str, status: int, seconds: float, reason: str) -> None:
        """A whole answer was given. ``path`` is one of the allow-list or ``other``; ``reason`` is ``engine``, or the
        short name of the gateway's own answer (``model_not_found``, ``body_too_large``, …)."""

    def cut(self, path: str, outcome: Outcome) -> None:
        """No whole answer was given."""

    def first_byte(self, path: str, seconds: float) -> None:
        """From the request's last byte to the answer's first body byte."""

    def retried(self, reason: Outcome) -> None:
        """The request was sent again because of this."""

    def retry_refused(self, reason: str) -> None:
        """The request was not sent again, although another engine might have answered: ``retry_budget``."""

    def connection(self, event: str) -> None:
        """A client connection was ``opened``, ``turned_away`` because there are too many, or ended early:
        ``idle_timeout``, ``request_timeout``, ``write_timeout``, ``pipeline_overflow``, ``incomplete_request``."""


__all__ = [
    "Fleet",
    "Gate",
    "JsonObject",
    "OnAnswer",
    "Outcome",
    "Routing",
    "Telemetry",
    "Ticket",
    "Tokenizing",
    "Verdict",
]
