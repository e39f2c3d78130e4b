"""How many requests may be sent again: a budget over all engines.

Retries multiply load exactly when engines have the least to spare: with three engines down and three tries each, a
healthy fourth one would see four times its traffic. What must always hold: over the last :data:`WINDOW` seconds no more
than :data:`SPARE` + :data:`SHARE` × requests are sent again, whatever happens. Requests are those of these seconds, or
those in flight where that is more: an engine that is killed resets all that it had at once, however long it had them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

WINDOW: Final = 10
"""Seconds, counted in whole ones: the oldest leaves as the next begins."""
SHARE: Final = 0.2
"""Of the requests in the window, so many may be sent again."""
SPARE: Final = 10
"""Retries that the window has besides: a gateway with little traffic may retry too."""


class RetryBudget:
    """Counts requests and retries of the last seconds. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second = int(clock())
        self._requests = [0] * WINDOW
        self._retries = [0] * WINDOW

    def request(self) -> None:
        """A request was chosen a worker for the first time."""
        self._requests[self._place()] += 1

    def take(self, in_flight: int) -> bool:
        """Whether one more retry may be made, with so many requests in flight; ``True`` counts it."""
        place = self._place()
        if sum(self._retries) + 1 > SPARE + SHARE * max(in_flight, sum(self._requests)):
            return False
        self._retries[place] += 1
        return True

    def _place(self) -> int:
        """Where this second is counted. Seconds that passed without a call are emptied on the way."""
        now = int(self._clock())
        if now == self._second:
            return now % WINDOW
        for second in range(max(self._second + 1, now - WINDOW + 1), now + 1):
            self._requests[second % WINDOW] = self._retries[second % WINDOW] = 0
        self._second = max(self._second, now)
        return self._second % WINDOW


__all__ = ["SHARE", "SPARE", "WINDOW", "RetryBudget"]
