"""The one way to Redis: commands go out, replies come back, and nobody waits longer than a budget.

``await store.ask("limits", ("GET", key), ("INCRBY", key, 1), budget=0.05)`` sends its commands in one go and returns
their replies. Whatever goes wrong is :class:`~kvsync.store.replies.Unanswered` with a reason, at the latest when the
budget is over, and counted by it.

What must always hold:

- Who asks waits no longer than the budget, whatever Redis, the network, a name server or TLS does. Nothing here blocks
  the event loop.
- A call that outlived its budget goes on for ``redis.timeout`` in all: cutting it short would cost its connection, and
  the next one would spend its budget on making a new one. So what is asked may be done although nobody waits for it.
- Calls under way are never more than ``redis.connections``.
- Whether it can be reached is found out by a look of its own, not by requests: while it can't (``down``), they are
  refused without trying. Calls of one kind that keep taking too long rest by themselves, and the others go on.
- Redis is never needed: without a URL, without the package and without a server everything is ``Unanswered`` at once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from kvsync.breaker import Breaker
from kvsync.config.credentials import client_context, password
from kvsync.config.live import Live
from kvsync.config.redis import RedisSettings
from kvsync.extras import how_to_install
from kvsync.store.replies import DEAD, Unanswered, fits, reason_of, refuses
from kvsync.telemetry.logs import Throttle

if TYPE_CHECKING:
    from kvsync.store.client import Client

_log = logging.getLogger(__name__)

Command: TypeAlias = tuple[str | bytes | int | float, ...]
_Kind: TypeAlias = tuple[str, frozenset[str | bytes | int | float]]
"""What a call is for, and the names of its commands."""
State: TypeAlias = Literal["off", "unavailable", "connecting", "up", "down"]
"""``off``: not asked for · ``unavailable``: asked for, and this installation can't."""

LOOK: Final = 5.0
"""Seconds between two looks at a server that answers."""
FIRST_REST: Final = 0.5
LONGEST_REST: Final = 10.0
"""Seconds between two looks at one that does not, doubling from one to the other."""
SLOW: Final = 3
"""Calls of a kind in a row that outlive their budget until the kind rests, for this long:"""
SLOW_REST: Final = 1.0
REMEMBERED: Final = 60.0
"""Seconds for which a refusal is told where nothing of its kind is asked any more."""
MOST_SHOWN: Final = 200
"""Characters of what a server said that are shown."""


class Telemetry(Protocol):
    def redis_called(self, call: str, result: str, seconds: float) -> None:
        """Somebody asked. ``result``: ``ok``, or the reason why not."""

    def redis_state(self, state: str) -> None: ...


class Store:
    """Redis, as one fleet's gateways share it. Create it anywhere; start, use and stop it on one event loop.

    Args:
        settings: where it is.
        telemetry: where calls are counted.
        installed: whether redis-py is there.
        clock: monotonic seconds.

    Raises:
        BadFile: a secret or a certificate can't be read.
    """

    def __init__(
        self,
        settings: RedisSettings,
        telemetry: Telemetry,
        *,
        installed: Callable[[], bool] = lambda: importlib.util.find_spec("redis") is not None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._client: Client | None = None
        self._state: State = "off"
        self._problem: str | None = None
        self._secret: Live[str | None] | None = None
        self._context: Live[ssl.SSLContext] | None = None
        self._slots = asyncio.Semaphore(settings.connections)
        self._running: set[asyncio.Task[list[Any]]] = set()
        self._kinds: dict[str, Breaker] = {}
        self._refused: dict[_Kind, tuple[float, str]] = {}
        """Calls that the server does not take as it is now, with when and why: the last one at the end."""
        self._renewed_at = -math.inf
        self._look_now = asyncio.Event()
        self._looked = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._throttle = Throttle(_log, clock=clock)
        if settings.url is None:
            return
        if not installed():
            self._state = "unavailable"
            self._problem = (
                f"redis.url is set, and the package for it is not installed ({how_to_install('redis')}); "
                "this gateway works alone"
            )
            return
        self._state = "connecting"
        given, file, tls = settings.password, settings.password_file, settings.tls
        self._secret = Live("the password for Redis", lambda: password(given, file, "password_file"), [file])
        if settings.url.startswith("rediss:"):
            self._context = Live("TLS towards Redis", lambda: client_context(tls), [tls.ca, tls.cert, tls.key])

    @property
    def configured(self) -> bool:
        """Whether there is a point in asking."""
        return self._state not in ("off", "unavailable")

    @property
    def up(self) -> bool:
        """Whether it answered when it was last heard of."""
        return self._state == "up"

    async def looked(self) -> None:
        """Return once it was tried whether Redis can be reached; at once where there is nobody to ask."""
        if self._state == "connecting":
            await self._looked.wait()

    @property
    def renewed(self) -> tuple[Live[Any], ...]:
        """What has to be looked at for it to follow changed files."""
        return tuple(live for live in (self._secret, self._context) if live is not None)

    def describe(self) -> Mapping[str, object]:
        """For ``/readyz``. It says nothing of readiness: Redis is never needed. One that is ``up`` has a problem while
        it takes no calls of some kind."""
        self._forget()
        refused = [why for _, why in self._refused.values()]
        return {"state": self._state, "problem": refused[-1] if self._state == "up" and refused else self._problem}

    def key(self, *parts: str) -> str:
        """The key of this fleet that is called so."""
        return ":".join((self.settings.prefix, *parts))

    async def start(self) -> None:
        """Begin to connect. Never waits for it, and never fails."""
        self._telemetry.redis_state(self._state)
        if self._state == "unavailable":
            _log.error("%s", self._problem)
        if self._secret is None:
            return
        from kvsync.store.client import Credentials, connect

        secret, context = self._secret, self._context
        credentials = Credentials(self.settings.username, lambda: secret.value)

        def tls() -> ssl.SSLContext:
            assert context is not None
            return context.value

        self._client = connect(self.settings, credentials, tls)
        self._looking = asyncio.create_task(self._look(), name="redis")

    async def stop(self) -> None:
        """End all calls. They are unanswered then."""
        self._looked.set()
        client, self._client = self._client, None
        if self._looking is not None:
            self._looking.cancel()
        ending = [*self._running, *([self._looking] if self._looking is not None else [])]
        self._looking = None
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if client is not None:
            from kvsync.store.client import close

            try:
                async with asyncio.timeout(self.settings.timeout):
                    await close(client)
            except Exception as error:  # it is closed, one way or another
                _log.debug("closing the connections to Redis: %r", error)

    async def ask(self, kind: str, *commands: Command, budget: float) -> list[Any]:
        """The replies to these commands, sent in one go (but not as a transaction).

        Args:
            kind: what it is for: one of few words, all of whose calls are about equally long.
            commands: each a name and its arguments; on a cluster, each about keys of one slot.
            budget: seconds that the caller waits at most.

        Raises:
            Unanswered: any of it failed. Commands may have been done, or be done later.
        """
        begun = self._clock()
        try:
            replies = await self._asked(kind, commands, budget, begun)
        except Unanswered as unanswered:
            self._telemetry.redis_called(kind, unanswered.reason, self._clock() - begun)
            raise
        self._telemetry.redis_called(kind, "ok", self._clock() - begun)
        return replies

    async def _asked(self, kind: str, commands: Sequence[Command], budget: float, begun: float) -> list[Any]:
        self._refuse()
        breaker = self._kinds.get(kind)
        if breaker is None:
            breaker = self._kinds[kind] = Breaker(SLOW, SLOW_REST, self._clock)
        if not breaker.permits:
            raise Unanswered("resting")
        breaker.begin()
        verdict = breaker.release
        try:
            task = await self._send(kind, commands, budget)
            await asyncio.wait({task}, timeout=max(0.0, budget - (self._clock() - begun)))
            if not task.done():
                raise Unanswered("timeout", f"no answer in {budget:g} s")
            verdict = breaker.success
            if task.cancelled():
                raise Unanswered("stopped")
            return task.result()
        except Unanswered as unanswered:
            if unanswered.reason in ("timeout", "busy"):
                verdict = breaker.failure
            raise
        finally:
            verdict()

    def _refuse(self) -> None:
        if not self.configured:
            raise Unanswered("off" if self._state == "off" else "not_installed")
        if self._client is None:
            raise Unanswered("stopped")
        if self._state != "up":
            raise Unanswered("down")

    async def _send(self, kind: str, commands: Sequence[Command], budget: float) -> asyncio.Task[list[Any]]:
        """The call, under way."""
        try:
            async with asyncio.timeout(budget):
                await self._slots.acquire()
        except TimeoutError:
            raise Unanswered("busy", f"no connection was free for {budget:g} s") from None
        task = asyncio.create_task(self._call(kind, commands, max(budget, self.settings.timeout)))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[list[Any]]) -> None:
        self._slots.release()
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: there may be nobody left who waits for it

    async def _call(self, kind: str, commands: Sequence[Command], limit: float) -> list[Any]:
        client = self._client
        if client is None:
            raise Unanswered("stopped")
        # Not by the word alone: a server that is full takes a kind's HDEL, and refuses its HSET.
        same = kind, frozenset(command[0] for command in commands)
        try:
            replies = await self._replies(client, commands, limit)
        except Unanswered as unanswered:
            if refuses(unanswered):
                self._refused.pop(same, None)
                self._refused[same] = self._clock(), f"{kind} is refused: {unanswered}"
            if unanswered.reason == "read_only":
                await self._renew(client)
            raise
        if self._refused.pop(same, None) is not None and not self._refused:
            self._throttle.log(logging.INFO, "taken", "Redis takes calls again (%s)", kind)
        return replies

    def _forget(self) -> None:
        """What was refused long ago and not asked since says nothing of now."""
        limit = self._clock() - REMEMBERED
        kept = {same: told for same, told in self._refused.items() if told[0] > limit}
        if self._refused and not kept:
            self._throttle.log(logging.INFO, "taken", "Redis has refused no call for %g s", REMEMBERED)
        self._refused = kept

    async def _replies(self, client: Client, commands: Sequence[Command], limit: float) -> list[Any]:
        try:
            async with asyncio.timeout(limit):
                replies = await _exchange(client, commands)
        except Exception as error:
            raise self._failed(error) from error
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, BaseException):
                raise self._failed(reply) from reply
            if not fits(command[0], reply):
                raise self._failed(ValueError(f"{command[0]!s} was answered with {type(reply).__name__}"))
        return replies

    async def _renew(self, client: Client) -> None:
        """Its address may be another server's by now: after a failover the old one keeps connections, and refuses."""
        now = self._clock()
        if now - self._renewed_at < FIRST_REST:
            return
        self._renewed_at = now
        from kvsync.store.client import renew

        try:
            async with asyncio.timeout(self.settings.timeout):
                await renew(client)
        except Exception as error:  # they are not used any more, one way or another
            _log.debug("closing connections to a Redis that is read-only: %r", error)

    def _failed(self, error: BaseException) -> Unanswered:
        reason = reason_of(error)
        detail = f"{type(error).__name__}: {error}"[:MOST_SHOWN]
        if reason in DEAD:
            self._tell("down", f"{reason}: {detail}")
            self._look_now.set()
        else:
            fault = error if reason == "fault" else None
            self._throttle.warning(reason, "Redis refused a call (%s): %s", reason, detail, exc_info=fault)
        return Unanswered(reason, detail)

    # ---- is it there?

    async def _look(self) -> None:
        """Look whether it answers, for ever."""
        rest = FIRST_REST
        while True:
            client = self._client
            if client is None:
                return
            self._look_now.clear()
            self._forget()
            begun = self._clock()
            result = "ok"
            try:
                async with asyncio.timeout(self.settings.timeout):
                    pong = await client.execute_command("PING")
                if not pong:
                    raise ValueError("no answer to a PING")
            except Exception as error:
                unanswered = self._failed(error)
                result = unanswered.reason
                if result == "too_large":  # to a PING
                    self._tell("down", str(unanswered))
                elif result not in DEAD:  # an answer all the same
                    self._tell("up")
            else:
                self._tell("up")
            self._telemetry.redis_called("ping", result, self._clock() - begun)
            if self._state == "up":
                rest = FIRST_REST
                try:
                    async with asyncio.timeout(LOOK):
                        await self._look_now.wait()
                except TimeoutError:
                    pass
                # One that answers a PING and nothing else is not asked without end.
                await asyncio.sleep(begun + FIRST_REST - self._clock())
            else:
                await asyncio.sleep(rest)
                rest = min(LONGEST_REST, 2 * rest)

    def _tell(self, state: Literal["up", "down"], problem: str | None = None) -> None:
        before, self._state, self._problem = self._state, state, problem
        self._looked.set()
        if before == state:
            return
        self._telemetry.redis_state(state)
        if state == "up":
            self._throttle.log(logging.INFO, "up", "Redis answers (%s)", self.settings.url)
        else:
            said = "Redis is not reached (%s): %s; this gateway goes on alone"
            self._throttle.warning("down", said, self.settings.url, problem)


async def _exchange(client: Client, commands: Sequence[Command]) -> list[Any]:
    if len(commands) == 1:
        return [await client.execute_command(*commands[0])]
    pipeline: Any = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    return replies


__all__ = ["Command", "State", "Store", "Telemetry"]
