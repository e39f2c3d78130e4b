"""A replica's start: how many of its workers have caught up, and when that is enough to be ready.

What must always hold: once ready it stays so, whatever comes later. A worker that is new, or follows its engine's new
process, is no reason to take a replica out that serves the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvsync.config.warm import ReadySettings
from kvsync.events.contracts import WorkerStatus

log = logging.getLogger("kvsync")


@dataclass(frozen=True, slots=True)
class Start:
    """How far a start has come."""

    workers: int
    """Of engines that are ready and whose events are to be followed."""
    warm: int
    """Those that can be relied on, by a snapshot and what came since."""
    cold: int
    """Those that can be relied on, by a replay."""
    seconds: float | None
    """From the start until enough had caught up, or patience ended; ``None`` before."""

    @property
    def behind(self) -> int:
        return self.workers - self.warm - self.cold


class WarmUp:
    """See the module. ``clock``: monotonic seconds."""

    def __init__(self, settings: ReadySettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._began = clock()
        self._seconds: float | None = None

    def look(self, followed: Collection[str], streams: Collection[WorkerStatus]) -> Start:
        """``followed``: the workers that are to be followed; none where events are not."""
        caught_up = [s for s in streams if s.worker in followed and s.caught_up_in is not None]
        warm = sum(status.restored for status in caught_up)
        start = Start(len(followed), warm, len(caught_up) - warm, self._seconds)
        if self._seconds is None:
            passed = self._clock() - self._began
            enough = start.workers - start.behind >= self._settings.share * start.workers
            if enough or passed >= self._settings.patience:
                self._seconds = passed
                behind = f"; {start.behind} of {start.workers} workers have not caught up" if start.behind else ""
                log.log(logging.INFO if enough else logging.WARNING, "caught up after %.1f s%s", passed, behind)
                start = Start(start.workers, start.warm, start.cold, passed)
        return start


__all__ = ["Start", "WarmUp"]
