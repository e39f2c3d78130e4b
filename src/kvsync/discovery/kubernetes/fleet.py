"""Pods' verdicts as changes of the fleet. Pure.

What must always hold: one address is one engine's. Where two pods say that they have it (one that ended was not
removed, or not told of), the one with the greater claim has it, and the other gets it back when that one goes. A pod
of the same name is another engine, and so is one whose address, model or ranks changed: the old one is gone before the
new one is added, so nothing known of the old one is credited to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from kvsync.discovery.kubernetes.pods import Verdict
from kvsync.discovery.kubernetes.reflector import Key
from kvsync.discovery.model import Change, Engine


class PodFleet:
    """All pods that were judged, and the engines among them as last told."""

    def __init__(self) -> None:
        self._pods: dict[Key, Verdict] = {}
        self._at: dict[str, set[Key]] = {}
        """By URL, the pods that say they have it."""
        self._told: dict[Key, Engine] = {}

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._told.values())

    @property
    def pods(self) -> tuple[Verdict, ...]:
        """Those that have to do with models, engines or not."""
        return tuple(self._present(verdict) for verdict in self._pods.values())

    def counts(self) -> Counter[str]:
        """Pods by what they are: ``ready``, ``followed`` (an engine that is not ready), or why they are no engine."""
        found: Counter[str] = Counter()
        for verdict in self.pods:
            if verdict.engine is None:
                found[str(verdict.reason)] += 1
            else:
                found["ready" if verdict.engine.ready else "followed"] += 1
        return found

    def update(self, gone: Iterable[Verdict], seen: Iterable[Verdict]) -> list[Change]:
        """Take over what happened; returns what that changes, those that are gone first and new ones last."""
        touched: set[Key] = set()
        for verdict in gone:
            held = self._pods.get(verdict.key)
            if held is not None and held.uid == verdict.uid:
                del self._pods[verdict.key]
                touched |= self._leave(held)
        for verdict in seen:
            held = self._pods.get(verdict.key)
            self._pods[verdict.key] = verdict
            if held is not None:
                touched |= self._leave(held)
            touched |= self._come(verdict)
        return self._settle(touched)

    def _leave(self, verdict: Verdict) -> set[Key]:
        touched = {verdict.key}
        if verdict.engine is not None and (there := self._at.get(verdict.engine.url)) is not None:
            there.discard(verdict.key)
            touched |= there
            if not there:
                del self._at[verdict.engine.url]
        return touched

    def _come(self, verdict: Verdict) -> set[Key]:
        if verdict.engine is None:
            return {verdict.key}
        there = self._at.setdefault(verdict.engine.url, set())
        there.add(verdict.key)
        return set(there)

    def _present(self, verdict: Verdict) -> Verdict:
        """The verdict, with those taken into account that say they have the same address."""
        if verdict.engine is None:
            return verdict
        rivals = self._at[verdict.engine.url]
        owner = max(rivals, key=lambda key: (self._pods[key].claim, key)) if len(rivals) > 1 else verdict.key
        if owner == verdict.key:
            return verdict
        detail = f"its address is that of {'/'.join(owner)}, which was started later"
        return replace(verdict, engine=None, reason="address_taken", detail=detail)

    def _settle(self, touched: Iterable[Key]) -> list[Change]:
        gone: list[Change] = []
        changed: list[Change] = []
        added: list[Change] = []
        for key in sorted(touched):
            held = self._pods.get(key)
            new = self._present(held).engine if held is not None else None
            old = self._told.pop(key, None)
            if new is not None:
                self._told[key] = new
            if old is not None and (new is None or not _same_process(old, new)):
                gone.append(Change("gone", old))
            if new is None or new == old:
                continue
            if old is not None and _same_process(old, new):
                changed.append(Change("changed", new))
            else:
                added.append(Change("added", new))
        return gone + changed + added


def _same_process(old: Engine, new: Engine) -> bool:
    """What else differs, a running engine can change: its readiness, labels, adapters, whether it is followed."""
    return (old.uid, old.url, old.model, old.data_parallel_size) == (
        new.uid,
        new.url,
        new.model,
        new.data_parallel_size,
    )


__all__ = ["PodFleet"]
