"""What knowledge serves, told steadily: a mode per worker and per model.

Streams reconnect and gaps are repaired within moments; an alarm for each would be ignored before long. So a change for
the worse is told after it held for :data:`WORSE_AFTER` seconds and one for the better after :data:`BETTER_AFTER`; only
the first step up of a worker or model that is new is told at once, since nothing has wavered yet.

What must always hold: this is for people. Routing uses the knowledge of the moment, never what is told here.

| mode | what serves |
|---|---|
| ``exact`` | events, sound and complete |
| ``partial`` | events, sound but perhaps incomplete |
| ``observed`` | no events that could be trusted, but answers of the last two minutes |
| ``load-only`` | nothing is known of the cache |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from kvsync.discovery.model import Change

Mode: TypeAlias = Literal["exact", "partial", "observed", "load-only"]
MODES: Final[tuple[Mode, ...]] = ("exact", "partial", "observed", "load-only")
"""The best first."""

WORSE_AFTER: Final = 1.0
BETTER_AFTER: Final = 5.0


class Moment(NamedTuple):
    """What is known of one worker at this moment."""

    model: str
    mode: Mode
    why: str
    """Half a sentence."""
    ready: bool
    """Requests are routed to it; only such workers count for their model."""


@dataclass(frozen=True, slots=True)
class ModeChange:
    """One line for the log."""

    kind: Literal["worker", "model"]
    name: str
    before: Mode
    after: Mode
    why: str

    @property
    def worse(self) -> bool:
        return MODES.index(self.after) > MODES.index(self.before)

    def __str__(self) -> str:
        return f"{self.kind} {self.name} is served by {self.after} knowledge (before: {self.before}): {self.why}"


def of_model(modes: Iterable[Mode]) -> Mode:
    """A model's mode: that of its workers where they agree, else the best that is sound for some of them, and never
    ``exact`` unless it is for all."""
    found = set(modes)
    if len(found) == 1:
        return found.pop()
    if found & {"exact", "partial"}:
        return "partial"
    return "observed" if "observed" in found else "load-only"


class _Told:
    """One worker's or model's mode, as told, and since when it has been another."""

    __slots__ = ("_first", "_side", "_since", "_worst", "mode")

    def __init__(self) -> None:
        self.mode: Mode = "load-only"
        self._first = True
        """Nothing else was told yet."""
        self._side = 0
        """Where it has been since: 1 worse than told, -1 better, 0 as told."""
        self._since = 0.0
        self._worst = 0

    def look(self, mode: Mode, now: float) -> Mode | None:
        """Take what it is now. Returns the mode that was told before, when another is told from now on."""
        rank, told = MODES.index(mode), MODES.index(self.mode)
        side = (rank > told) - (rank < told)
        if side != self._side:
            self._side, self._since, self._worst = side, now, rank
        self._worst = max(self._worst, rank)
        after = WORSE_AFTER if side > 0 else 0.0 if self._first else BETTER_AFTER
        if not side or now - self._since < after:
            return None
        # What got better while it wavered is no better than the worst of that time.
        before, self.mode = self.mode, mode if side > 0 else MODES[self._worst]
        self._first = False
        self._side = 0
        return before


class Modes:
    """The modes of all workers and models. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[str, _Told] = {}
        self._models: dict[str, _Told] = {}

    @property
    def workers(self) -> Mapping[str, Mode]:
        """By worker, as told."""
        return {name: told.mode for name, told in self._workers.items()}

    @property
    def models(self) -> Mapping[str, Mode]:
        """By model with a ready worker, as told."""
        return {name: told.mode for name, told in self._models.items()}

    def apply(self, change: Change) -> None:
        """The fleet changed: who is gone has no mode, and under an old name begins anew."""
        if change.kind == "gone":
            for worker in map(change.engine.worker, change.engine.ranks):
                self._workers.pop(worker, None)

    def look(self, known: Mapping[str, Moment]) -> list[ModeChange]:
        """Take what is known now of every worker there is; the others are forgotten.

        Returns:
            what is told otherwise from now on.
        """
        by_model: dict[str, list[Moment]] = {}
        for worker in known.values():
            if worker.ready:
                by_model.setdefault(worker.model, []).append(worker)
        now = self._clock()
        changes = []
        for name, worker in known.items():
            told = self._workers.setdefault(name, _Told())
            if before := told.look(worker.mode, now):
                changes.append(ModeChange("worker", name, before, told.mode, worker.why))
        for name, members in by_model.items():
            told = self._models.setdefault(name, _Told())
            if before := told.look(of_model(worker.mode for worker in members), now):
                changes.append(ModeChange("model", name, before, told.mode, _shares(members)))
        _keep(self._workers, known)
        _keep(self._models, by_model)
        return changes


def _shares(members: Iterable[Moment]) -> str:
    modes = [worker.mode for worker in members]
    return ", ".join(f"{modes.count(mode)} of {len(modes)} workers {mode}" for mode in MODES if mode in modes)


def _keep(kept: dict[str, _Told], names: Mapping[str, object]) -> None:
    for name in kept.keys() - names.keys():
        del kept[name]


__all__ = ["BETTER_AFTER", "MODES", "WORSE_AFTER", "Mode", "ModeChange", "Modes", "Moment", "of_model"]
