"""Runs of blocks that an engine said it had, when no event had told of them.

What must always hold: a run that is *live* is held. So it ends when a removal names one of its blocks, and once a block
without a key is removed (it may be any of theirs) all runs are *doubtful*: expected, until their time is over.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from kvsync.index.keys import Key

OBSERVED_KEYS: Final = 65_536
"""Keys of all runs of a worker together; the oldest run goes first."""


@dataclass(slots=True)
class Run:
    """The first blocks of a prompt, by their keys."""

    keys: tuple[Key, ...]
    until: float
    """When it ends, by the caller's clock."""
    recorded_at: int
    """Position of the worker."""
    follows: Key | None = None
    """Content of the prompt's next block (:func:`kvsync.index.adoption.content`)."""
    live: bool = True

    @property
    def last(self) -> Key:
        return self.keys[-1]


class Observed:
    """The runs of one worker. ``counts`` gets ``observed_runs`` and ``observed_dropped``."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._runs: OrderedDict[Key, Run] = OrderedDict()
        """By last key, oldest first: keys are chained, so a last key names a whole run."""
        self._size = 0
        self._live: Counter[Key] = Counter()
        self._all: Counter[Key] = Counter()
        self._following: dict[Key, list[Key]] = {}
        """Content of the next block → last keys, oldest first."""

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def live_keys(self) -> int:
        """Distinct keys of the live runs."""
        return len(self._live)

    def held(self, key: Key, *, even_doubtful: bool) -> bool:
        return key in (self._all if even_doubtful else self._live)

    def record(self, run: Run) -> bool:
        """Add a run, or renew it. False when it is too long to be kept."""
        self._counts["observed_runs"] += 1
        self._end(run.last)
        self._runs[run.last] = run
        self._size += len(run.keys)
        self._live.update(run.keys)
        self._all.update(run.keys)
        if run.follows is not None:
            self._following.setdefault(run.follows, []).append(run.last)
        while self._size > OBSERVED_KEYS:
            self._end(next(iter(self._runs)))
            self._counts["observed_dropped"] += 1
        return run.last in self._runs

    def followed_by(self, content: Key) -> Run | None:
        """The newest run whose next block has this content."""
        following = self._following.get(content)
        return None if following is None else self._runs[following[-1]]

    def doubt(self) -> None:
        """Some block left, and it may be one of any run."""
        for run in self._runs.values():
            run.live = False
        self._live.clear()

    def end_with(self, key: Key, recorded_by: int | None = None) -> None:
        """End the runs that have this key; with ``recorded_by`` only those recorded up to that position."""
        if key in self._all:
            self._end_all([run for run in self._runs.values() if key in run.keys], recorded_by)

    def expire(self, now: float) -> None:
        self._end_all([run for run in self._runs.values() if run.until <= now])

    def clear(self) -> None:
        self._end_all(list(self._runs.values()))

    def _end_all(self, runs: list[Run], recorded_by: int | None = None) -> None:
        for run in runs:
            if recorded_by is None or run.recorded_at <= recorded_by:
                self._end(run.last)

    def _end(self, last: Key) -> None:
        run = self._runs.pop(last, None)
        if run is None:
            return
        self._size -= len(run.keys)
        _take(self._all, run.keys)
        if run.live:
            _take(self._live, run.keys)
        if run.follows is not None:
            following = self._following[run.follows]
            following.remove(last)
            if not following:
                del self._following[run.follows]


def _take(counter: Counter[Key], keys: tuple[Key, ...]) -> None:
    counter.subtract(keys)
    for key in keys:
        if counter[key] <= 0:
            del counter[key]


__all__ = ["OBSERVED_KEYS", "Observed", "Run"]
