"""Which models there are, and who serves them now.

What must always hold: an answer is that of the last change applied. A model that was served once stays known when its
last engine goes away: the truth about it is then "not now" (503, worth a retry), not "no such model".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvsync.discovery.model import Change, Engine


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker that can be chosen."""

    worker: str
    engine: Engine
    rank: int


class Fleet:
    """All engines, by their ``uid``.

    Args:
        models: names that are known from the start, even without an engine.
    """

    def __init__(self, models: Iterable[str] = ()) -> None:
        self._engines: dict[str, Engine] = {}
        self._known = set(models)
        self._adapters: dict[str, str] = {}
        self._slots: dict[tuple[str, str | None], tuple[Slot, ...]] = {}
        self._policies: dict[str, tuple[str, bool]] = {}
        self.version = 0
        """Grows with every change: what was computed from the fleet under an older one is out of date."""

    def apply(self, change: Change) -> None:
        """Take one change over. What is gone already, or said twice, changes nothing."""
        if change.kind == "gone":
            self._engines.pop(change.engine.uid, None)
        else:
            self._engines[change.engine.uid] = change.engine
            self._known.add(change.engine.model)
        # An adapter's name that two models claim means the first model by name, always the same one.
        self._adapters = {
            adapter: engine.model
            for engine in sorted(self._engines.values(), key=lambda engine: engine.model, reverse=True)
            for adapter in engine.adapters
        }
        # Two engines that say different things of their model: the first by name, always the same one.
        self._policies = {
            engine.model: (engine.policy, engine.policy_locked)
            for engine in sorted(self._engines.values(), key=lambda engine: engine.name, reverse=True)
            if engine.policy is not None
        }
        self._slots.clear()
        self.version += 1

    def resolve(self, name: str) -> tuple[str, str | None] | None:
        """The base model and the adapter that a request's ``model`` means; ``None`` when nobody ever served it."""
        if name in self._known:
            return name, None
        model = self._adapters.get(name)
        return None if model is None else (model, name)

    def models(self) -> tuple[tuple[str, str | None], ...]:
        """Every name that can be asked for, sorted, with its base model where the name is an adapter's."""
        adapters = ((name, model) for name, model in self._adapters.items() if name not in self._known)
        return tuple(sorted([*((name, None) for name in self._known), *adapters], key=lambda pair: pair[0]))

    def policy(self, model: str) -> tuple[str | None, bool]:
        """The policy that a model's engines ask for, if any, and whether no header may choose another."""
        return self._policies.get(model, (None, False))

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
