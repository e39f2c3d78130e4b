"""One data-parallel rank at work: steps of its scheduler, paced by the time model, events published after each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvsync.engine_sim.publisher import Publisher
from kvsync.engine_sim.request import Request
from kvsync.engine_sim.scheduler import Scheduler, Token
from kvsync.engine_sim.timing import Clock, Pace, TimeModel


class EngineGone(Exception):
    """The engine stopped or restarted while a request was in it."""


@dataclass(eq=False, slots=True)
class Running:
    """A submitted sequence: its tokens arrive in ``tokens``; ``None`` there says that the engine is gone."""

    request: Request
    tokens: asyncio.Queue[Token | None]

    async def next(self) -> Token:
        """The next output token.

        Raises:
            EngineGone: there will be none.
        """
        token = await self.tokens.get()
        if token is None:
            raise EngineGone
        return token


class Rank:
    """See the module. All methods belong to the event loop's thread.

    Args:
        publisher: where event batches go, or ``None`` with events switched off.
    """

    def __init__(
        self, number: int, scheduler: Scheduler, publisher: Publisher | None, time: TimeModel, clock: Clock
    ) -> None:
        self.number = number
        self.scheduler = scheduler
        self.publisher = publisher
        self._time = time
        self._pace = Pace(clock)
        self._submitted: dict[Request, Running] = {}
        self._work = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()

    @property
    def load(self) -> int:
        """Sequences in it, waiting ones included."""
        return len(self._submitted)

    def submit(self, request: Request) -> Running:
        running = Running(request, asyncio.Queue())
        self._submitted[request] = running
        self.scheduler.add(request)
        self._work.set()
        return running

    def cancel(self, running: Running) -> None:
        """Free what a sequence holds, in whatever state it is; of one that has ended, nothing."""
        if self._submitted.pop(running.request, None):
            self.scheduler.abort(running.request)

    def freeze(self) -> None:
        """Stand still: no step ends, nothing is published or replayed."""
        self._thawed.clear()
        if self.publisher:
            self.publisher.running.clear()

    def thaw(self) -> None:
        self._thawed.set()
        if self.publisher:
            self.publisher.running.set()

    async def run(self) -> None:
        """Work until cancelled; whoever waits for tokens then learns that the engine is gone."""
        try:
            while True:
                await self._step()
        finally:
            for running in self._submitted.values():
                running.tokens.put_nowait(None)
            self._submitted.clear()

    async def _step(self) -> None:
        if self.scheduler.idle:
            self._work.clear()
            await self._work.wait()
            self._pace.resume()
        plan = self.scheduler.plan()
        await self._pace.pass_step(self._time.step(plan))
        if not self._thawed.is_set():
            await self._thawed.wait()
            self._pace.resume()
        tokens, events = self.scheduler.finish(plan)
        if events and self.publisher:
            self.publisher.publish(events)
        for token in tokens:
            running = self._submitted[token.request]
            if token.finish:
                del self._submitted[token.request]
            running.tokens.put_nowait(token)
