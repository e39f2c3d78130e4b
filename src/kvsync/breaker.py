"""When to leave a failing endpoint alone.

closed → (``failures`` in a row) → open → (``rest`` seconds) → half-open: one call at a time is let through; its success
closes the breaker, its failure opens it again. A call that ends in neither (the client's own mistake, a cancelled
wait) says nothing about the endpoint: it neither counts nor clears the row of failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal


class Breaker:
    """One endpoint's. Every allowed call ends with exactly one of success, failure, trip and release."""

    def __init__(self, failures: int, rest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._rest = rest
        self._clock = clock
        self._row = 0
        self._opened: float | None = None
        self._trial = False
        self.openings = 0
        """How often it went from letting calls through to not doing so."""

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        if self._opened is None:
            return "closed"
        return "open" if self._clock() - self._opened < self._rest else "half-open"

    @property
    def permits(self) -> bool:
        """Whether a call may be made now."""
        state = self.state
        return state == "closed" or (state == "half-open" and not self._trial)

    def begin(self) -> None:
        """A call is made. Only when it is permitted."""
        self._trial = self.state == "half-open"

    def success(self) -> None:
        self._row = 0
        self._opened = None
        self._trial = False

    def failure(self) -> None:
        self._row += 1
        if self._row >= self._limit:
            self.openings += self.state != "open"
            self._opened = self._clock()
        self._trial = False

    def trip(self) -> None:
        """A failure that needs no row of them: the endpoint said itself that it can't."""
        self._row = self._limit
        self.failure()

    def release(self) -> None:
        """The call said nothing about the endpoint."""
        self._trial = False


__all__ = ["Breaker"]
