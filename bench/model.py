"""What a row is: work, those who do it, the figures that it gives, and the targets that judge them. Data, no doing.

What must always hold: a target is a bound, a ratio to a peer, or neither; whether it is met follows from the figures
alone (:mod:`bench.judge`), never from a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

OURS = "kvsync"
"""The side that is judged; every other side of a row is a peer or something to compare with."""

Figures: TypeAlias = Mapping[str, float]
"""What one repeat of one side gave, by name. Seconds, bytes and counts: factors for people belong to the target."""
Measure: TypeAlias = Callable[[], Figures]
Sides: TypeAlias = Mapping[str, Measure]
"""By name; the order is that in which they take turns."""


class Wrong(Exception):
    """A side gave a wrong answer or lost something: what it took for that is no figure."""


class Unavailable(Exception):
    """A side or a whole row can't run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table: one figure of a row, and what it should be."""

    what: str
    """The line's text, without units."""
    figure: str
    """Its name among the row's figures."""
    unit: str
    better: Literal["lower", "higher"] = "lower"
    factor: float = 1.0
    """Figures are shown in ``unit`` = figure × factor; bounds are in ``unit`` too."""
    ratio: float | None = None
    """At least so many times better than the best of the peers."""
    at_most: float | None = None
    at_least: float | None = None
    peers: tuple[str, ...] | None = None
    """Sides that it is compared with; ``None``: all that have the figure."""
    ratios: bool = True
    """Ratios of it mean something: not so where nothing, or almost nothing, is what is wanted."""
    aside: bool = False
    """Shown in the row's own section only."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a row is told about the run that it is part of."""

    quick: bool
    """A look, not a measurement: as little work as shows that all of it works."""
    folder: Path
    """For files of the row, gone after the run."""
    environment: Callable[[str], Path]
    """The Python of a peer's own environment (the name of its file in ``bench/peers``), made when it is not there.

    Raises: Unavailable.
    """

    def pick(self, whole: int, quick: int) -> int:
        return quick if self.quick else whole


@dataclass(frozen=True, slots=True)
class Row:
    """One piece of work that several sides do in turns.

    ``open`` makes what all repeats share (publishers, payloads, backends) and yields the sides; each of their measures
    is called once per repeat, verifies what came of its work, and raises :class:`Wrong` where that is not right.
    """

    name: str
    """As on the command line."""
    title: str
    method: str
    """How it is measured: for the page, a few sentences."""
    targets: tuple[Target, ...]
    open: Callable[[Run], AbstractContextManager[Sides]]
    repeats: int = 5
    quick_repeats: int = 1
    notes: Mapping[str, str] = field(default_factory=dict)
    """By figure: why the target is not met and what was tried. Shown while it is not met."""


def simple(sides: Callable[[Run], Sides]) -> Callable[[Run], AbstractContextManager[Sides]]:
    """An ``open`` of a row whose repeats share nothing."""

    @contextmanager
    def open_(run: Run) -> Iterator[Sides]:
        yield sides(run)

    return open_


__all__ = ["OURS", "Figures", "Measure", "Row", "Run", "Sides", "Target", "Unavailable", "Wrong", "simple"]
