"""How many physical copies of which blocks one worker has, per tier and KV-cache group, and which are in doubt.

What must always hold: a hash is resident while some tier and group has a copy of it, and ``left`` hears of it when the
last one goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from kvsync.events.types import EngineHash
from kvsync.index.match import Tier

_TIERS: Final[dict[str, Tier]] = {
    "gpu": "gpu",
    "cpu": "cpu",
    "storage": "storage",
    "fs": "storage",
    "obj": "storage",
    "disk": "storage",
}


def tier_of(medium: str | None) -> Tier | None:
    """The tier of an event's medium; ``None`` for a medium that is unknown."""
    return "gpu" if medium is None else _TIERS.get(medium.casefold())


class _Place:
    """The blocks of one tier and group."""

    def __init__(self) -> None:
        self.copies: dict[EngineHash, int] = {}
        self.doubtful: set[EngineHash] = set()


class Residence:
    """See the module."""

    def __init__(self, left: Callable[[EngineHash], None]) -> None:
        self._left = left
        self._places: dict[tuple[Tier, int], _Place] = {}
        self._tiers_of: Counter[EngineHash] = Counter()
        """In how many tiers and groups a hash is resident."""
        self.gpu_copies = 0

    def __contains__(self, engine_hash: object) -> bool:
        return engine_hash in self._tiers_of

    @property
    def hashes(self) -> Iterable[EngineHash]:
        return self._tiers_of

    @property
    def blocks(self) -> int:
        """Distinct hashes."""
        return len(self._tiers_of)

    @property
    def copies(self) -> int:
        return sum(sum(place.copies.values()) for place in self._places.values())

    @property
    def doubtful(self) -> int:
        return sum(len(place.doubtful) for place in self._places.values())

    def groups(self, tier: Tier) -> list[int]:
        """The groups that have had blocks in this tier."""
        return [group for at, group in self._places if at == tier]

    def held(self, tier: Tier, group: int, engine_hash: EngineHash, *, even_doubtful: bool) -> bool:
        place = self._places.get((tier, group))
        if place is None or engine_hash not in place.copies:
            return False
        return even_doubtful or engine_hash not in place.doubtful

    def add(self, tier: Tier, group: int, engine_hash: EngineHash) -> None:
        """One copy more; it is there without a doubt."""
        place = self._places.setdefault((tier, group), _Place())
        if engine_hash in place.copies:
            place.copies[engine_hash] += 1
        else:
            place.copies[engine_hash] = 1
            self._tiers_of[engine_hash] += 1
        place.doubtful.discard(engine_hash)
        self.gpu_copies += tier == "gpu"

    def remove(self, tier: Tier, group: int, engine_hash: EngineHash, left: int | None, *, doubt: bool) -> bool:
        """One copy less (or ``left`` copies left); with ``doubt`` what is only counted to be left is doubtful.

        False when the block was not known to be there.
        """
        place = self._places.get((tier, group))
        if place is None or engine_hash not in place.copies:
            return False
        had = place.copies[engine_hash]
        now = had - 1 if left is None else left
        if now <= 0:
            self._take(tier, place, engine_hash)
            return True
        if tier == "gpu":
            self.gpu_copies += now - had
        place.copies[engine_hash] = now
        if doubt and left is None:
            place.doubtful.add(engine_hash)
        return True

    def copy(self) -> dict[tuple[Tier, int], tuple[dict[EngineHash, int], set[EngineHash]]]:
        """By tier and group, in the order in which they were first spoken of: copies, and which hashes are in doubt."""
        return {at: (dict(place.copies), set(place.doubtful)) for at, place in self._places.items()}

    def speak_of(self, tier: Tier, group: int) -> None:
        """There is this place, whether or not anything is in it."""
        self._places.setdefault((tier, group), _Place())

    def put(self, tier: Tier, group: int, engine_hash: EngineHash, copies: int, *, doubtful: bool) -> None:
        """So many copies of a hash of which there are none in this place."""
        place = self._places[tier, group]
        place.copies[engine_hash] = copies
        if doubtful:
            place.doubtful.add(engine_hash)
        self._tiers_of[engine_hash] += 1
        if tier == "gpu":
            self.gpu_copies += copies

    def confirm(self, group: int, engine_hash: EngineHash) -> None:
        """An engine had this block in its cache: a GPU copy is no longer in doubt, if no other tier has one."""
        if all(engine_hash not in place.copies for (tier, _), place in self._places.items() if tier != "gpu"):
            place = self._places.get(("gpu", group))
            if place is not None:
                place.doubtful.discard(engine_hash)

    def drop_doubtful(self, engine_hash: EngineHash | None = None) -> int:
        """Take away what is in doubt, of one hash or altogether; returns of how many tiers, groups and hashes."""
        dropped = 0
        for (tier, _), place in self._places.items():
            some = place.doubtful if engine_hash is None else place.doubtful & {engine_hash}
            for doubted in list(some):
                self._take(tier, place, doubted)
                dropped += 1
        return dropped

    def drop(self, engine_hash: EngineHash) -> int:
        """Take away every copy of it; returns of how many tiers and groups."""
        dropped = 0
        for (tier, _), place in self._places.items():
            if engine_hash in place.copies:
                self._take(tier, place, engine_hash)
                dropped += 1
        return dropped

    def _take(self, tier: Tier, place: _Place, engine_hash: EngineHash) -> None:
        copies = place.copies.pop(engine_hash)
        place.doubtful.discard(engine_hash)
        if tier == "gpu":
            self.gpu_copies -= copies
        self._tiers_of[engine_hash] -= 1
        if not self._tiers_of[engine_hash]:
            del self._tiers_of[engine_hash]
            self._left(engine_hash)


__all__ = ["Residence", "tier_of"]
