"""Which models there are, and who serves them now.

What must always hold: an answer is that of the last change applied. A model that was served once stays known when its
last engine goes away: the truth about it is then "not now" (503, worth a retry), not "no such model". Of those that
nobody serves only so many stay known: names come from labels, which could fill the memory. None of them keeps anybody
from an adapter that is served under its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvsync.discovery.model import Change, Engine

LEFT: Final = 1_000
"""Models that nobody serves any more, of which is remembered that they were served."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker that can be chosen."""

    worker: str
    engine: Engine
    rank: int


class _Told(NamedTuple):
    """What all engines together say."""

    adapters: Mapping[str, str]
    """An adapter's name that two models claim means the first model by name, always the same one."""
    policies: Mapping[str, tuple[str, bool]]
    """Of two engines that say different things of their model, the first by name, always the same one."""


def _told(engines: Iterable[Engine]) -> _Told:
    by_model = sorted(engines, key=lambda engine: engine.model, reverse=True)
    by_name = sorted(engines, key=lambda engine: engine.name, reverse=True)
    return _Told(
        {adapter: engine.model for engine in by_model for adapter in engine.adapters},
        {engine.model: (engine.policy, engine.policy_locked) for engine in by_name if engine.policy is not None},
    )


class Fleet:
    """All engines, by their ``uid``.

    Args:
        models: names that are known from the start, even without an engine.
    """

    def __init__(self, models: Iterable[str] = ()) -> None:
        self._engines: dict[str, Engine] = {}
        self._named = frozenset(models)
        self._served: Counter[str] = Counter()
        """By model: its engines."""
        self._left: dict[str, None] = {}
        """Models that were served; the last one to be left is the last."""
        self._slots: dict[tuple[str, str | None], tuple[Slot, ...]] = {}
        self._told: _Told | None = None
        self.version = 0
        """Grows with every change: what was computed from the fleet under an older one is out of date."""

    def apply(self, change: Change) -> None:
        """Take one change over. What is gone already, or said twice, changes nothing."""
        new = change.engine
        old = self._engines.pop(new.uid, None)
        if change.kind != "gone":
            self._engines[new.uid] = new
            self._served[new.model] += 1
            self._left.pop(new.model, None)
        if old is not None:
            self._served[old.model] -= 1
            if not self._served[old.model]:
                del self._served[old.model]
                self._left[old.model] = None
                if len(self._left) > LEFT:
                    del self._left[next(iter(self._left))]
        self._told = None
        self._slots.clear()
        self.version += 1

    def resolve(self, name: str) -> tuple[str, str | None] | None:
        """The base model and the adapter that a request's ``model`` means; ``None`` when nobody ever served it."""
        model = None if name in self._served else self._now.adapters.get(name)
        if model is not None:
            return model, name
        return (name, None) if name in self._served or name in self._named or name in self._left else None

    def models(self) -> tuple[tuple[str, str | None], ...]:
        """Every name that can be asked for, sorted, with its base model where the name is an adapter's."""
        known = self._named.union(self._served, self._left, self._now.adapters)
        adapters = self._now.adapters
        return tuple((name, None if name in self._served else adapters.get(name)) for name in sorted(known))

    @property
    def _now(self) -> _Told:
        """As of the last change. A thousand of them may come in one go, and an engine may have a thousand adapters."""
        if self._told is None:
            self._told = _told(self._engines.values())
        return self._told

    def policy(self, model: str) -> tuple[str | None, bool]:
        """The policy that a model's engines ask for, if any, and whether no header may choose another."""
        return self._now.policies.get(model, (None, False))

    def engines(self, model: str, adapter: str | None = None) -> tuple[Engine, ...]:
        """The ready engines that serve the model, and the adapter where one is asked for."""
        return tuple(
            engine
            for engine in self._engines.values()
            if engine.ready and engine.model == model and (adapter is None or adapter in engine.adapters)
        )

    def slots(self, model: str, adapter: str | None = None) -> tuple[Slot, ...]:
        """All ranks of :meth:`engines`, in a fixed order; the same tuple until the next change."""
        key = (model, adapter)
        found = self._slots.get(key)
        if found is None:
            found = tuple(
                Slot(engine.worker(rank), engine, rank)
                for engine in self.engines(model, adapter)
                for rank in engine.ranks
            )
            if found:  # names that nobody serves come from clients and would fill the memory
                self._slots[key] = found
        return found

    def addresses(self) -> Iterator[tuple[str, str]]:
        """Every worker, with what it is called by every replica alike (names tell of what one gateway has seen)."""
        for engine in self._engines.values():
            for rank in engine.ranks:
                yield engine.worker(rank), f"{engine.url} {rank}"

    def __iter__(self) -> Iterator[Engine]:
        """All engines, ready or not."""
        return iter(self._engines.values())


__all__ = ["Fleet", "Slot"]
