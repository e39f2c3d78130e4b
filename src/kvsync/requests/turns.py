"""Work that takes milliseconds, one piece per turn of the event loop.

Fifty large requests that arrive in the same moment would hold up everything else for the sum of their costs; so they
queue here, and between two of them the loop sees to its sockets and timers. What of the work needs neither the loop nor
the interpreter is done before, by one thread: the loop does not wait for that at all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial


class Turns:
    """A queue of work, first come, first served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread = ThreadPoolExecutor(1, "large bodies")

    def add(self, work: Callable[[], None], before: Callable[[], None] | None = None) -> None:
        """Have ``work`` called in a turn of its own; if given, after the thread called ``before``, however that ended.

        The thread is not for what holds the interpreter: it would wait for it milliseconds, and hold up the loop all
        the same.
        """
        if before is None:
            self._enqueue(work)
        else:
            self._loop.run_in_executor(self._thread, before).add_done_callback(partial(self._done, work))

    def close(self) -> None:
        """What waits for the thread is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: Callable[[], None], before: asyncio.Future[None]) -> None:
        if not before.cancelled():
            self._enqueue(work)
            before.result()  # a fault in it is told by the loop

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        try:
            self._waiting[0]()
        finally:
            self._waiting.popleft()
            if self._waiting:
                self._loop.call_soon(self._next)


__all__ = ["Turns"]
