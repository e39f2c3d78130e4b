"""How many requests and tokens a user may have in a minute, and how many requests a model in a second.

Keys, windows and defaults are AIBrix's, so that both count alike while one takes over from the other:

    aibrix-users/NAME                                      {"name": …, "rpm": …, "tpm": …}; 0 or absent: the default
    aibrix:NAME_RPM_CURRENT:BIN   aibrix:NAME_TPM_CURRENT:BIN        BIN: minutes since 1970, modulo 64
    aibrix_model:MODEL_MODEL_RPS_CURRENT:BIN                         BIN: seconds since 1970, modulo 64

A request is counted and judged in one exchange. Counting comes first, so of two that are the last together one is
refused; one that is refused counts too, which in a window that is used up anyway changes nothing. Tokens are told
after the answer, some tenths of a second's together.

What must always hold:

- No request waits longer than ``redis.budget`` for all of this together, and none is refused because of Redis: without
  an answer this replica's own window decides, which begins at what was last heard of the shared one.
- What is counted by itself is bounded: the users least lately seen are forgotten first.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, TypeGuard

import msgspec

from kvsync.config.limits import LimitsSettings
from kvsync.store.connection import Command, Store
from kvsync.store.replies import UNDONE, Unanswered

MINUTE: Final = 60
BINS: Final = 64
MOST_USERS: Final = 10_000
"""Whose windows are kept here."""
LONGEST_NAME: Final = 256
"""Bytes of a user's name that count."""
TELL_EVERY: Final = 0.2
"""Seconds between two times that tokens are told."""
_AT_ONCE: Final = 500
_LARGEST: Final = 1 << 62
"""Redis counts to 2^63."""

_Figure = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Limit = Literal["rpm", "tpm", "model_rps"]


class _Record(msgspec.Struct):
    rpm: _Figure = 0
    tpm: _Figure = 0


_read_record = msgspec.json.Decoder(_Record).decode


class Telemetry(Protocol):
    def limited(self, kind: str, result: str, counted: str) -> None:
        """A request of a ``user`` or for a ``model`` was ``allowed``, or refused for a reason; ``counted`` together
        (``shared``) or by this replica ``alone``."""

    def limit_fault(self, reason: str) -> None:
        """Something could not be counted as it should: ``bad_record``, ``no_usage``, ``untold``."""


@dataclass(slots=True)
class _Window:
    """One user's minute, as this replica knows it."""

    number: int
    requests: int = 0
    tokens: int = 0
    """As last heard, with those of ours that came since."""
    own: int = 0
    """Those of ours: the shared count is no less, once it has them all."""
    untold: int = 0
    """Of them, those that the shared count certainly does not have. On their way they are in neither: it is better to
    count them late than to refuse somebody because they were counted twice."""
    record: _Record | None = None
    """The last that was read; it outlives the window."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one request."""

    refused: Limit | None
    """The limit that it is beyond."""
    subject: str
    """The user or model that is limited."""
    allowed: int
    """The limit's figure."""
    retry_after: int
    """Whole seconds until its window is over."""
    fields: tuple[bytes, ...] = ()
    """For the answer, each as ``name: value CRLF``."""
    wants_usage: bool = False
    """This user's tokens are limited by a record of their own."""
    spent: Callable[[Mapping[str, object] | None, int], None] = lambda usage, prompt_tokens: None
    """Tell what the answer took: its usage, and the prompt's tokens as far as they are known without it."""


class Limits:
    """The limits of one process. Its calls belong to the event loop.

    Args:
        settings: the defaults, and whether users are limited at all.
        models: requests a second, by model.
        store: where is counted together.
        telemetry: where is told what came of it.
        wall: seconds since the epoch: windows are those of the hosts' clocks, as AIBrix has them.
    """

    def __init__(
        self,
        settings: LimitsSettings,
        models: Mapping[str, int],
        store: Store,
        telemetry: Telemetry,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._models = models
        self._store = store
        self._telemetry = telemetry
        self._wall = wall
        self._users: OrderedDict[bytes, _Window] = OrderedDict()
        self._seconds: dict[str, tuple[int, int]] = {}
        """By model, the second that is counted here and its requests."""
        self._untold: dict[tuple[bytes, int], int] = {}
        """Tokens by user and minute."""

    @property
    def users(self) -> bool:
        """Whether users are limited."""
        return self._settings.users

    def update(self, models: Mapping[str, int]) -> None:
        """Take new limits of models."""
        self._models = models
        self._seconds = {model: count for model, count in self._seconds.items() if model in models}

    def begin(self, user: bytes, model: str) -> Awaitable[Verdict] | None:
        """Count and judge one request; ``None`` when nothing limits it.

        Args:
            user: their name, or ``b""``.
            model: the base model.
        """
        limited = user and self._settings.users
        if not limited and model not in self._models:
            return None
        return self._judge(user[:LONGEST_NAME] if limited else b"", model)

    async def step(self) -> None:
        """Wait for the next time, then tell the tokens that answers took."""
        await asyncio.sleep(TELL_EVERY)
        await self.tell()

    async def tell(self) -> None:
        """Tell the tokens that answers took."""
        untold, self._untold = self._untold, {}
        waiting = list(untold.items())
        for begin in range(0, len(waiting), _AT_ONCE):
            part = waiting[begin : begin + _AT_ONCE]
            commands: list[Command] = []
            for (user, minute), tokens in part:
                commands += _count(_key(user, "TPM", minute), tokens, MINUTE)
                self._add_untold(user, minute, -tokens)
            try:
                await self._store.ask("limits_tell", *commands, budget=self._store.settings.timeout)
            except Unanswered as unanswered:  # they stay in this replica's own windows
                for (user, minute), tokens in part:
                    self._telemetry.limit_fault("untold")
                    if unanswered.reason in UNDONE:
                        self._add_untold(user, minute, tokens)

    def _add_untold(self, user: bytes, minute: int, tokens: int) -> None:
        window = self._users.get(user)
        if window is not None and window.number == minute:
            window.untold = max(0, window.untold + tokens)

    async def _judge(self, user: bytes, model: str) -> Verdict:
        begun = time.monotonic()
        verdict = await self._judge_user(user, self._store.settings.budget) if user else None
        if verdict is not None and verdict.refused:
            return verdict
        limit = self._models.get(model)
        if limit is not None:
            left = self._store.settings.budget - (time.monotonic() - begun)
            refusal = await self._judge_model(model, limit, left)
            if refusal is not None:
                return refusal
        return verdict if verdict is not None else Verdict(None, model, 0, 0)

    # ---- a user's minute

    async def _judge_user(self, user: bytes, budget: float) -> Verdict:
        now = self._wall()
        minute = int(now) // MINUTE
        window = self._window(user, minute)
        requests, tokens = _key(user, "RPM", minute), _key(user, "TPM", minute)
        commands: list[Command] = [("GET", b"aibrix-users/" + user), *_count(requests, 1, MINUTE), ("GET", tokens)]
        try:
            record, count, _, spent = await self._store.ask("limits", *commands, budget=budget)
        except Unanswered:
            counted = "alone"
            if window.number != minute:  # that of the request is over, and nobody knows more of it
                window = _Window(minute, record=window.record)
            window.requests += 1
        else:
            counted = "shared"
            window.record = self._record(record)
            if window.number != minute:
                window = _Window(minute, record=window.record)
            window.requests = count
            window.tokens = max(_figure(spent) + window.untold, window.own)
        allowed_requests, allowed_tokens = self._allowed(window.record)
        refused: Limit | None = None
        if window.requests > allowed_requests:
            refused = "rpm"
        elif window.tokens >= allowed_tokens:
            refused = "tpm"
        self._telemetry.limited("user", f"{refused}_exceeded" if refused else "allowed", counted)

        def told(usage: Mapping[str, object] | None, prompt_tokens: int) -> None:
            self._spent(user, usage, prompt_tokens)

        return Verdict(
            refused,
            user.decode("utf-8", "replace"),
            allowed_tokens if refused == "tpm" else allowed_requests,
            max(1, math.ceil((minute + 1) * MINUTE - now)),
            (b"x-update-rpm: %d\r\n" % window.requests, b"x-update-tpm: %d\r\n" % window.tokens),
            window.record is not None and window.record.tpm > 0,
            told,
        )

    def _spent(self, user: bytes, usage: Mapping[str, object] | None, prompt_tokens: int) -> None:
        tokens = _total(usage)
        if tokens is None:
            self._telemetry.limit_fault("no_usage")
            tokens = prompt_tokens
        minute = int(self._wall()) // MINUTE
        window = self._window(user, minute)
        window.tokens += tokens
        window.own += tokens
        if not self._store.configured:
            return
        window.untold += tokens
        key = (user, minute)
        if tokens and (key in self._untold or len(self._untold) < MOST_USERS):
            self._untold[key] = min(_LARGEST, self._untold.get(key, 0) + tokens)
        elif tokens:
            self._telemetry.limit_fault("untold")

    def _window(self, user: bytes, minute: int) -> _Window:
        window = self._users.get(user)
        if window is None:
            window = self._users[user] = _Window(minute)
            if len(self._users) > MOST_USERS:
                self._users.popitem(last=False)
        else:
            self._users.move_to_end(user)
            if window.number != minute:
                window.number, window.requests, window.tokens, window.own, window.untold = minute, 0, 0, 0, 0
        return window

    def _record(self, text: bytes | None) -> _Record | None:
        if text is None:
            return None
        try:
            return _read_record(text)
        except (msgspec.DecodeError, RecursionError):
            self._telemetry.limit_fault("bad_record")
            return None

    def _allowed(self, record: _Record | None) -> tuple[int, int]:
        settings = self._settings
        requests = (record.rpm if record is not None else 0) or settings.requests_per_minute
        tokens = (record.tpm if record is not None else 0) or settings.tokens_per_minute or 1000 * requests
        return requests, tokens

    # ---- a model's second

    async def _judge_model(self, model: str, limit: int, budget: float) -> Verdict | None:
        second = int(self._wall())
        count: int | None = None
        if budget > 0:
            key = f"aibrix_model:{model}_MODEL_RPS_CURRENT:{second % BINS}".encode()
            with suppress(Unanswered):
                count, _ = await self._store.ask("limits", *_count(key, 1, 1), budget=budget)
        counted = "alone" if count is None else "shared"
        known, so_far = self._seconds.get(model, (second, 0))  # as it is now: others may have counted meanwhile
        own = count if count is not None else so_far + 1 if known == second else 1
        if known <= second:
            self._seconds[model] = second, own
        refused = own > limit
        self._telemetry.limited("model", "rps_exceeded" if refused else "allowed", counted)
        return Verdict("model_rps", model, limit, 1) if refused else None


def requests_per_second(models: Iterable[Any]) -> dict[str, int]:
    """Of settings of models, by name, those that have a limit."""
    return {model.name: model.requests_per_second for model in models if model.requests_per_second is not None}


def _key(user: bytes, what: Literal["RPM", "TPM"], minute: int) -> bytes:
    return b"aibrix:%b_%b_CURRENT:%d" % (user, what.encode(), minute % BINS)


def _count(key: bytes, amount: int, life: int) -> tuple[Command, Command]:
    return ("INCRBY", key, amount), ("EXPIRE", key, life)


def _figure(text: object) -> int:
    """A count as Redis has it. What is none counts as nothing: a key that somebody spoilt goes with its window."""
    try:
        return max(0, int(text)) if isinstance(text, bytes) else 0
    except ValueError:
        return 0


def _total(usage: Mapping[str, object] | None) -> int | None:
    """All tokens of an answer, whatever its dialect calls them."""
    if usage is None:
        return None
    total = usage.get("total_tokens")
    if _is_count(total):
        return total
    for prompt, answer in (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")):
        first, second = usage.get(prompt), usage.get(answer)
        if _is_count(first) or _is_count(second):
            return (first if _is_count(first) else 0) + (second if _is_count(second) else 0)
    return None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= 1 << 40


__all__ = [
    "BINS",
    "LONGEST_NAME",
    "MINUTE",
    "MOST_USERS",
    "TELL_EVERY",
    "Limit",
    "Limits",
    "Telemetry",
    "Verdict",
    "requests_per_second",
]
