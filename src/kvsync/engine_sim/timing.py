"""How long a step takes, and the clock that lets it.

The stated time model: a step lasts as long as its prompt tokens take at ``prefill_rate``, plus one decode interval
(1 / ``decode_rate``) if any sequence decodes in it. So a prompt of n tokens alone has its first token after
n / ``prefill_rate`` seconds and each further one after 1 / ``decode_rate``; a long prompt slows the others' decoding
by its chunks, as in an engine with chunked prefill. Cached tokens take no time. Everything is divided by ``speed``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from kvsync.engine_sim.scheduler import Plan

_MOST_LAG = 0.05
"""Seconds by which a busy host may fall behind and still catch up; the rest is lost, not run in a burst."""


@dataclass(frozen=True, slots=True)
class TimeModel:
    """See the module.

    Raises:
        ValueError: a rate is not positive.
    """

    prefill_rate: float = 8_000.0
    """Prompt tokens per second, over all sequences of a rank."""
    decode_rate: float = 40.0
    """Output tokens per second of each sequence."""
    speed: float = 1.0
    """How much faster than that everything runs."""

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "decode_rate", "speed"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    def step(self, plan: Plan) -> float:
        """Seconds that this step takes."""
        decoding = False
        prefill = 0
        for request, tokens in plan.work:
            if request.produced and tokens == 1:
                decoding = True
            else:
                prefill += tokens
        return (prefill / self.prefill_rate + decoding / self.decode_rate) / self.speed


class Clock(Protocol):
    """Time as a rank sees it, in seconds from any origin."""

    def now(self) -> float: ...

    async def sleep_until(self, when: float) -> None:
        """Return at ``when`` or later; gives other tasks a turn even if it has passed."""


class LoopClock:
    """The running event loop's time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self.now()))


class Pace:
    """Ends of steps on a clock, without drift: a step begins where the last one ended, not where the host woke up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end = clock.now()

    def resume(self) -> None:
        """Begin anew now, after a pause without work."""
        self._end = self._clock.now()

    async def pass_step(self, seconds: float) -> None:
        self._end = max(self._end, self._clock.now() - _MOST_LAG) + seconds
        await self._clock.sleep_until(self._end)
