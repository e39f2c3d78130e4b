"""Prefixes that workers answered lately: knowledge without events.

Where KV sync is off, or a worker's events can't be trusted, its answers still tell something: a prompt that it has just
computed is in its cache for a while. So its prefixes are remembered here, on the grid of
:mod:`kvsync.routing.expected`, for ``routing.observed_lifetime``.

What must always hold: this is a hint. It counts only for workers that the index does not know or does not trust, it
never becomes credit, and an answer that contradicts it ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvsync.routing.expected import GRID, ExpectedTable, Hope

CONVINCING: Final = GRID[1]
"""Tokens that must have been expected before an answer that had nothing cached contradicts: of fewer, an engine with
large blocks may hold no whole one."""


class ObservedTable:
    """The prefixes of all workers' answers.

    Args:
        lifetime: seconds that an answer counts.
        clock: monotonic seconds.
    """

    def __init__(self, lifetime: float, clock: Callable[[], float]) -> None:
        self._table = ExpectedTable(lifetime, clock)
        self.contradicted = 0
        """Answers that had nothing cached although much was expected."""

    @property
    def dropped(self) -> int:
        """Forgotten because there were too many."""
        return self._table.dropped

    def __len__(self) -> int:
        return len(self._table)

    def knows(self, worker: str) -> bool:
        """Whether any answer of the worker counts now."""
        return self._table.of(worker) > 0

    def lookup(self, keys: Sequence[int]) -> dict[str, Hope]:
        """What each worker may hold of the prompt with these prefixes."""
        return self._table.lookup(keys)

    def answered(self, worker: str, keys: Sequence[int], *, observed: int, cached: int | None) -> None:
        """The worker computed a prompt with these prefixes.

        Args:
            observed: tokens that were expected of it, by this table, when it was chosen.
            cached: what the engine said it had of the prompt; ``None`` where it did not say.
        """
        if not keys:
            return
        if cached == 0 and observed >= CONVINCING:
            # It evicts quickly, or does not cache at all: this answer teaches nothing better.
            self.contradicted += 1
            self._table.end(worker, keys)
        else:
            self._table.expect(worker, keys).computed()

    def drop(self, worker: str) -> None:
        """The worker, or what it had cached, is gone."""
        self._table.drop(worker)


__all__ = ["CONVINCING", "ObservedTable"]
