"""A bounded pool of threads for work that would hold up the event loop.

Always holds: at most ``threads`` jobs run and at most ``queue`` wait; one more is refused at once, never queued. A job
whose caller was cancelled before it began never runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from kvsync.tokenize.errors import QueueFull

P = ParamSpec("P")
T = TypeVar("T")


class BoundedPool:
    """Threads for tokenizing and for large JSON. Used from one event loop."""

    def __init__(self, threads: int, queue: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvsync-tokenize")
        self._limit = threads + queue
        self._pending = 0
        self._refused = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in a thread and return its result.

        Raises:
            QueueFull: too many jobs wait already.
        """
        if self._pending >= self._limit:
            self._refused += 1
            raise QueueFull
        loop = asyncio.get_running_loop()
        future = self._executor.submit(function, *args, **kwargs)
        self._pending += 1
        # The place is given back when the job ends, not when its caller stops waiting: a thread stays busy till then.
        future.add_done_callback(lambda done: self._release(loop, done))
        return await asyncio.wrap_future(future)

    def _release(self, loop: asyncio.AbstractEventLoop, _done: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._give_back)

    def _give_back(self) -> None:
        self._pending -= 1

    def stats(self) -> dict[str, int]:
        return {"pending": self._pending, "limit": self._limit, "refused": self._refused}

    def close(self) -> None:
        """Drop what waits; what runs ends in its thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)


__all__ = ["BoundedPool"]
