"""Single flight: who asks what is being asked already waits for the same answer.

Always holds: one call per key at a time. A caller that is cancelled takes nothing from the others; when the last one
is gone the call itself is cancelled, and the next caller begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Flight(Generic[T]):
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiters = 0


class SingleFlight(Generic[T]):
    """Calls under way, by key. Used from one event loop."""

    def __init__(self) -> None:
        self._flights: dict[bytes, _Flight[T]] = {}
        self.shared = 0
        """Callers that joined a call of another."""

    async def run(self, key: bytes, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.get_running_loop().create_task(make()))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        else:
            self.shared += 1
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._forget(key, flight.task)
                flight.task.cancel()

    def _landed(self, key: bytes, task: asyncio.Task[T]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # retrieved here too: its last waiter may have been cancelled in the same turn

    def _forget(self, key: bytes, task: asyncio.Task[T]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]

    def __len__(self) -> int:
        return len(self._flights)


__all__ = ["SingleFlight"]
