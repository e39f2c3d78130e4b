"""All candidates of one choice, as a policy sees them.

A board is the sequence of its :class:`~kvsync.routing.decision.Candidate` values, but keeps no row object: load is in
columns, and what is known of a prompt only of those rows of which something is known. Of sixty-four or a thousand
workers few hold anything of a prompt, and hardly any row is ever looked at. Boards are never changed once made, and a
decision record keeps its board.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, overload

from kvsync.index.match import Match, Trust
from kvsync.routing.decision import Candidate, Load
from kvsync.routing.fleet import Slot
from kvsync.routing.load import Columns

NOTHING: Final = Match(0, trust="none")
"""The match of a worker that the index does not know."""
_EMPTY: Final[Mapping[Trust, Match]] = {"exact": Match(0), "partial": Match(0, trust="partial"), "none": NOTHING}


class Board(Sequence[Candidate]):
    """A row per candidate.

    Args:
        slots: who can be chosen.
        matches: by row, what the index says of those that hold something of the prompt.
        trusts: by worker, how far it can be trusted, where that is not ``exact``.
        expected: by row, tokens beyond the credit that the worker may well have: doubtful blocks, choices just made,
            answers of late.
        shared: by row, of the tokens queued there, those that are expected and that this prompt would not wait for in
            vain.
        load: of each.
        prompt_tokens: of the whole request; 0 when they are unknown.
        turn: grows with every choice among these candidates.
    """

    __slots__ = (
        "_trusts",
        "busy",
        "expected",
        "matches",
        "prompt_tokens",
        "queued",
        "running",
        "shared",
        "slots",
        "told",
        "turn",
    )

    def __init__(
        self,
        slots: Sequence[Slot],
        matches: Mapping[int, Match],
        expected: Mapping[int, int],
        shared: Mapping[int, int],
        load: Columns,
        prompt_tokens: int,
        turn: int = 0,
        trusts: Mapping[str, Trust] | None = None,
    ) -> None:
        self.slots = slots
        self.matches = matches
        self.expected = expected
        self.shared = shared
        self.running, self.queued, self.busy = load
        self.prompt_tokens = prompt_tokens
        self.turn = turn
        self.told = matches.keys() | expected.keys()
        """The rows of which something is known."""
        self._trusts = trusts or {}

    def match(self, row: int) -> Match:
        """What the index says of a row."""
        found = self.matches.get(row)
        return found if found is not None else _EMPTY[self._trusts.get(self.slots[row].worker, "exact")]

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, place: int | slice) -> Candidate | tuple[Candidate, ...]:
        if isinstance(place, slice):
            return tuple(self[at] for at in range(*place.indices(len(self.slots))))
        row = range(len(self.slots))[place]
        return self.candidate(row, self.match(row))

    def candidate(self, row: int, match: Match) -> Candidate:
        """A row, with the match that the index gave for it."""
        slot = self.slots[row]
        load = Load(self.running[row], self.queued[row])
        return Candidate(slot.worker, slot.engine, slot.rank, match, self.expected.get(row, 0), load)


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
