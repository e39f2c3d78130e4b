"""The second check of local tokenizing: do engines hold the beginnings of the prompts that they answered?

The index is made of the tokens that engines themselves announced. If local tokenizing goes wrong from the start (a
missing BOS, another system text), no engine ever holds what we take for a prompt's first blocks. So a sample of the
requests with local tokens is looked up again, a moment after their answers. One absence proves nothing: the blocks may
have been evicted meanwhile. Only a long row of absences without one presence is a suspicion. The row that it takes
doubles after each, since a proof that succeeded again says that the suspicion was wrong.

Always holds: at most ``MOST`` prompts are kept, of at most ``MOST_TOKENS`` tokens. Used from one event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

MOST: Final = 16
MOST_TOKENS: Final = 16_384
"""A longer prompt is no sample. None is cut: what a sliding window holds of a prompt is its end."""
DELAY: Final = 1.0
"""Seconds from an answer to its lookup: the last events before it may still be on their way."""
PATIENCE: Final = 60.0
"""Seconds after which a prompt without an answer gives up its place, if another one wants it."""


class Held(Protocol):
    def __call__(
        self, worker: str, model: str, adapter: str | None, cache_salt: str | None, tokens: bytes
    ) -> bool | None:
        """Whether a worker holds the beginning of a prompt that ``worker`` answered; ``None`` when nobody can tell."""


@dataclass(frozen=True, slots=True)
class _Sample:
    model: str
    adapter: str | None
    cache_salt: str | None
    shape: str
    tokens: bytes
    since: float


class FirstBlocks:
    """Prompts that wait for their answers, and answered ones that wait to be looked up."""

    def __init__(
        self, held: Held, suspect: Callable[[str, str], None], clock: Callable[[], float], *, row: int = 64
    ) -> None:
        self._held = held
        self._suspect = suspect
        self._clock = clock
        self._first_row = row
        self._numbers = count()
        self._open: dict[int, _Sample] = {}
        self._answered: deque[tuple[float, str, _Sample]] = deque()
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        self._verdicts: Counter[str] = Counter(confirmed=0, absent=0, unknown=0, unanswered=0)

    def sample(self, model: str, adapter: str | None, cache_salt: str | None, shape: str, tokens: bytes) -> int | None:
        """Keep a request's local tokens if there is room; the number to say to :meth:`answered`. Looks up what was
        answered long enough ago."""
        now = self._clock()
        while self._answered and self._answered[0][0] <= now:
            self._judge(*self._answered.popleft()[1:])
        if len(self._open) + len(self._answered) >= MOST:
            for number in [number for number, each in self._open.items() if now - each.since >= PATIENCE]:
                del self._open[number]
                self._verdicts["unanswered"] += 1
        if len(self._open) + len(self._answered) >= MOST or len(tokens) > MOST_TOKENS * 4:
            return None
        number = next(self._numbers)
        self._open[number] = _Sample(model, adapter, cache_salt, shape, tokens, now)
        return number

    def answered(self, number: int, worker: str) -> None:
        """``worker`` answered the request of that number."""
        sample = self._open.pop(number, None)
        if sample is not None:
            self._answered.append((self._clock() + DELAY, worker, sample))

    def _judge(self, worker: str, sample: _Sample) -> None:
        held = self._held(worker, sample.model, sample.adapter, sample.cache_salt, sample.tokens)
        name = sample.adapter or sample.model
        absent, limit = self._rows.get((name, sample.shape), (0, self._first_row))
        if held is None:
            self._verdicts["unknown"] += 1
        elif held:
            self._verdicts["confirmed"] += 1
            self._rows[name, sample.shape] = (0, limit)
        else:
            self._verdicts["absent"] += 1
            suspicious = absent + 1 >= limit
            self._rows[name, sample.shape] = (0, limit * 2) if suspicious else (absent + 1, limit)
            if suspicious:
                self._suspect(name, sample.shape)

    def stats(self) -> dict[str, int]:
        return dict(self._verdicts)


__all__ = ["DELAY", "MOST", "MOST_TOKENS", "PATIENCE", "FirstBlocks", "Held"]
