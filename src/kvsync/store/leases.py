"""Turns at replaying one engine, over all replicas.

A replay holds up an engine's live events, and all replicas want one at the same time: when they start together, and
when an engine comes back. So a stream that catches up takes one of ``at_once`` places of its engine (a key each, with
a time to live), or waits for one, ``patience`` at most; then it goes on without.

Without Redis, or while it does not answer, replicas can't know of each other: a stream waits for a random while, up to
``spread``, once; and with Redis configured up to ``ALONE``, so that an outage does not bring all at once. Which replica
is the first, none can know either: it waits like the others.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final, Literal, Protocol, TypeAlias

from kvsync.config.warm import ReplayTurnSettings
from kvsync.store.connection import Store
from kvsync.store.replies import Unanswered

ALONE: Final = 1.0
LONGEST: Final = 35.0
"""Seconds that a place is kept at most: as long as all rounds of a repair take, and a little. A replica that dies in
its turn keeps it no longer."""
AGAIN: Final = (0.05, 0.25)
"""Seconds, from and to, between two tries for a place."""

Result: TypeAlias = Literal["granted", "expired", "alone"]
"""``expired``: no place was free for all of ``patience`` · ``alone``: nobody to ask."""


class Telemetry(Protocol):
    def replay_turn(self, result: Result, seconds: float) -> None:
        """A stream got its turn after so long."""


class _Turn:
    """One stream's turn. It ends once, wherever it stands then."""

    def __init__(self, turns: ReplayTurns) -> None:
        self._turns = turns
        self.ended = asyncio.Event()

    def end(self) -> None:
        self._turns.loop.call_soon_threadsafe(self.ended.set)


class ReplayTurns:
    """See the module: :class:`kvsync.events.contracts.Turns`. Create it on the event loop that it runs on.

    Args:
        spread: seconds, 0 for none.
    """

    def __init__(
        self,
        store: Store,
        settings: ReplayTurnSettings,
        spread: float,
        telemetry: Telemetry,
        *,
        random: Random | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._store = store
        self._settings = settings
        self._spread = spread
        self._telemetry = telemetry
        self._random = random or Random()
        self._under_way: dict[asyncio.Task[None], _Turn] = {}
        self._closed = False

    def ask(self, engine: str, granted: Callable[[], object]) -> _Turn:
        turn = _Turn(self)
        self.loop.call_soon_threadsafe(self._begin, engine, granted, turn)
        return turn

    async def close(self) -> None:
        """End all turns and give their places back, as far as Redis takes them in time."""
        self._closed = True
        if not self._under_way:
            return
        for turn in self._under_way.values():
            turn.ended.set()
        tasks = list(self._under_way)
        await asyncio.wait(tasks, timeout=2 * self._store.settings.timeout)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, engine: str, granted: Callable[[], object], turn: _Turn) -> None:
        if self._closed:
            return
        task = self.loop.create_task(self._see_to(engine, granted, turn), name=f"replay turn of {engine}")
        self._under_way[task] = turn
        task.add_done_callback(self._under_way.pop)

    async def _see_to(self, engine: str, granted: Callable[[], object], turn: _Turn) -> None:
        began = self.loop.time()
        place: tuple[str, str] | None = None
        try:
            result: Result
            try:
                async with asyncio.timeout(self._settings.patience):
                    await self._store.looked()
                    place = await self._place(engine, turn)
                result = "granted"
            except TimeoutError:
                result = "expired"
            except Unanswered:
                result = "alone"
                await self._pause(turn)
            if turn.ended.is_set():
                return
            self._telemetry.replay_turn(result, self.loop.time() - began)
            granted()
            await turn.ended.wait()
        finally:
            if place is not None:
                await self._give_back(*place)

    async def _place(self, engine: str, turn: _Turn) -> tuple[str, str] | None:
        """A place and the word that it was taken with; ``None`` where the turn ended before one was free."""
        mine = secrets.token_hex(8)
        numbers = list(range(self._settings.at_once))
        while not turn.ended.is_set():
            self._random.shuffle(numbers)
            for number in numbers:
                key = self._store.key("replay", engine, str(number))
                taking = self._store.ask(
                    "replay_turn",
                    ("SET", key, mine, "NX", "PX", round(1000 * LONGEST)),
                    budget=self._store.settings.timeout,
                )
                (taken,) = await taking
                if taken:
                    return key, mine
            await self._wait(turn, self._random.uniform(*AGAIN))
        return None

    async def _pause(self, turn: _Turn) -> None:
        longest = max(self._spread, ALONE) if self._store.configured else self._spread
        if longest > 0:
            await self._wait(turn, self._random.uniform(0, longest))

    async def _wait(self, turn: _Turn, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await turn.ended.wait()

    async def _give_back(self, key: str, mine: str) -> None:
        budget = self._store.settings.timeout
        with suppress(Unanswered):  # it is counted there, and the place is free again after LONGEST
            (holder,) = await self._store.ask("replay_turn", ("GET", key), budget=budget)
            # Should it change hands just here, one replay more runs for a while, and that is no harm.
            if holder == mine.encode():
                await self._store.ask("replay_turn", ("DEL", key), budget=budget)


__all__ = ["ReplayTurns", "Result", "Telemetry"]
