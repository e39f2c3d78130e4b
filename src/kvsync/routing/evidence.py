"""What a worker's audited answers say about it, once several of them agree. Pure: figures in, a finding out.

Only answers whose credit was not nothing are evidence: one without credit can't contradict it. Two findings:

``contradiction``
    :data:`CONTRADICTIONS` of the last :data:`WINDOW` show less than was credited: something is wrong with what is known
    of the worker. At most one in :data:`PAUSE` seconds, since what follows from it takes a while.
``drops_last_block``
    :data:`SHORT_ROW` in a row show exactly one block less, and none shows what was credited: the engine drops the last
    block of every hit, as EAGLE and MTP speculative decoding do, and no event says so.

While nothing but such short answers is in the window, they are not taken for a contradiction; but they stay in it, and
the first answer that fits neither makes them one. So wrong credit of one block is found out after :data:`SHORT_ROW`
answers at the latest. Answers with more than was credited speak for and against nothing: somebody else's prompt was
stored between the choice and the answer.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Literal, NamedTuple, TypeAlias

WINDOW: Final = 20
CONTRADICTIONS: Final = 3
SHORT_ROW: Final = 20
PAUSE: Final = 60.0

Finding: TypeAlias = Literal["contradiction", "drops_last_block"]


class Figures(NamedTuple):
    """One audited answer, in tokens."""

    credit: int
    cached: int

    def short_by(self, block_size: int) -> bool:
        return self.credit - self.cached == block_size


class Evidence:
    """The last audited answers of one worker."""

    __slots__ = ("_found_at", "_overs", "_short", "window")

    def __init__(self) -> None:
        self.window: deque[Figures] = deque(maxlen=WINDOW)
        self._overs = 0
        """How many of them are in :attr:`over`: counted along, for nearly all answers are right."""
        self._short = 0
        """Answers in a row that were exactly one block short."""
        self._found_at = -math.inf
        """When the last contradiction was found."""

    @property
    def over(self) -> list[Figures]:
        """Those in the window that had less than was credited."""
        return list(filter(_is_over, self.window))

    def take(self, figures: Figures, block_size: int, now: float) -> Finding | None:
        """Take one audited answer of a worker with blocks of that size (0: unknown).

        After a finding the caller acts, and then calls :meth:`clear`.
        """
        if not figures.credit or figures.cached > figures.credit:
            return None
        window = self.window
        if len(window) == WINDOW:
            self._overs -= _is_over(window[0])
        window.append(figures)
        self._overs += _is_over(figures)
        short = block_size > 0 and figures.short_by(block_size)
        self._short = self._short + 1 if short else 0
        if self._short >= SHORT_ROW:
            return "drops_last_block"
        # All of it is one unbroken row: it is being found out.
        if self._short >= len(window) or self._overs < CONTRADICTIONS or now - self._found_at < PAUSE:
            return None
        self._found_at = now
        return "contradiction"

    def clear(self) -> None:
        """What was found is seen to: what was said before is evidence no more."""
        self.window.clear()
        self._overs = self._short = 0


def _is_over(figures: Figures) -> bool:
    return figures.cached < figures.credit


__all__ = ["CONTRADICTIONS", "PAUSE", "SHORT_ROW", "WINDOW", "Evidence", "Figures", "Finding"]
