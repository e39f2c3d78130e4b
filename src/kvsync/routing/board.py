"""All candidates of one choice, as a policy sees them.

A board is the sequence of its :class:`~kvsync.routing.decision.Candidate` values, kept as columns: at 64 workers,
making a row object for each would cost more than everything else in a choice, and hardly any row is ever looked at.
Boards are never changed once made, and a decision record keeps its board.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from kvsync.index.match import Match
from kvsync.routing.decision import Candidate, Load
from kvsync.routing.fleet import Slot

NOTHING = Match(0, trust="none")
"""The match of a worker that the index does not know."""


class Board(Sequence[Candidate]):
    """Columns of equal length, one row per candidate.

    Args:
        slots: who can be chosen.
        matches: what the index says of each.
        expected: tokens beyond the credit that each may well have, doubtful blocks and choices just made.
        shared: of the tokens queued at each, those that this prompt begins with and would not wait for in vain.
        running, queued: the load of each.
        prompt_tokens: of the whole request; 0 when they are unknown.
        turn: grows with every choice among these candidates.
    """

    __slots__ = ("expected", "matches", "prompt_tokens", "queued", "running", "shared", "slots", "turn")

    def __init__(
        self,
        slots: Sequence[Slot],
        matches: Sequence[Match],
        expected: Sequence[int],
        shared: Sequence[int],
        running: Sequence[int],
        queued: Sequence[int],
        prompt_tokens: int,
        turn: int = 0,
    ) -> None:
        self.slots = slots
        self.matches = matches
        self.expected = expected
        self.shared = shared
        self.running = running
        self.queued = queued
        self.prompt_tokens = prompt_tokens
        self.turn = turn

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, place: int | slice) -> Candidate | tuple[Candidate, ...]:
        if isinstance(place, slice):
            return tuple(self[at] for at in range(*place.indices(len(self.slots))))
        slot = self.slots[place]
        return Candidate(
            worker=slot.worker,
            engine=slot.engine,
            rank=slot.rank,
            match=self.matches[place],
            expected=self.expected[place],
            load=Load(self.running[place], self.queued[place]),
        )


class Scores(Mapping[str, float]):
    """A board's scores by worker, without a dictionary of their own."""

    __slots__ = ("_figures", "_slots")

    def __init__(self, slots: Sequence[Slot], figures: Sequence[float]) -> None:
        self._slots = slots
        self._figures = figures

    def __getitem__(self, worker: str) -> float:
        for slot, figure in zip(self._slots, self._figures, strict=True):
            if slot.worker == worker:
                return figure
        raise KeyError(worker)

    def __iter__(self) -> Iterator[str]:
        return (slot.worker for slot in self._slots)

    def __len__(self) -> int:
        return len(self._slots)


__all__ = ["NOTHING", "Board", "Scores"]
