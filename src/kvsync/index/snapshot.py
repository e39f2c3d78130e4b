"""One worker's state told as an image, and taken from one.

The rules stand in the text of :mod:`kvsync.index.reference`, the form in :mod:`kvsync.index.image`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvsync.events.types import EngineHash
from kvsync.index.image import KINDS, BlockImage, Flag, GroupImage, Image, kind_number
from kvsync.index.worker import Group, Mark, Worker

_MARKS: Final[tuple[Mark, Mark]] = ("reannouncing", "hidden_keys")


def tell(worker: Worker) -> Callable[[], Image] | None:
    """What is known of a worker; ``None`` where an image can't say it. The function returned needs no lock."""
    if worker.suspended or worker.observed or not worker.placement.is_settled:
        return None
    groups = [
        GroupImage(number, KINDS[kind_number(group.kind)], group.window, group.block_size, group.sparse)
        for number, group in sorted(worker.groups.items())
    ]
    held = worker.residence.copy()
    placed = worker.placement.copy()
    flags: dict[Flag, bool] = {
        "hides_keys": worker.hides_keys,
        "shows_unknown_keys": worker.shows_unknown_keys,
        "lost": worker.lost or worker.placement.incomplete,
        "overfull": worker.overfull,
        "eagle": worker.facts.eagle,
    }
    marks = [0 if mark not in worker.marks else 2 if worker.marks[mark] else 1 for mark in _MARKS]
    image = Image(worker.facts.model, frozenset(flag for flag, is_set in flags.items() if is_set), (marks[0], marks[1]))
    image.groups = groups

    def write() -> Image:
        image.places = list(held)
        copies: dict[EngineHash, list[tuple[int, int, bool]]] = {}
        for number, (counts, doubtful) in enumerate(held.values()):
            for name, count in counts.items():
                copies.setdefault(name, []).append((number, count, name in doubtful))
        for name, places in copies.items():
            spot = placed.spots.get(name)
            shares = spot is not None and spot[0] in placed.shared
            if spot is not None and not shares and places == [(0, 1, False)] and isinstance(name, int) and name >= 0:
                image.plain.append((spot[0], name, spot[1]))
            else:
                image.others.append(BlockImage(name, spot, shares, tuple(places)))
        return image

    return write


def take(worker: Worker, image: Image) -> None:
    """Have a worker of which nothing is known know what an image tells.

    Raises:
        ValueError: something is known of it already, or the image is of another model.
    """
    if image.model != worker.facts.model:
        raise ValueError(f"an image of model {image.model!r}, for a worker of {worker.facts.model!r}")
    if not worker.is_new:
        raise ValueError("something is known of the worker already: an image is for a new one")
    worker.positions.lose()
    worker.hides_keys = "hides_keys" in image.flags
    worker.shows_unknown_keys = "shows_unknown_keys" in image.flags
    worker.lost = "lost" in image.flags
    worker.facts.eagle |= "eagle" in image.flags
    for mark, level in zip(_MARKS, image.marks, strict=True):
        if level:
            worker.marks[mark] = worker.marks.get(mark, False) or level == 2
    for told in image.groups:
        group = worker.groups[told.number] = Group()
        group.kind, group.window = told.kind, told.window
        group.block_size, group.sparse = told.block_size, told.sparse
    for place in image.places:
        worker.residence.speak_of(*place)
    for key, name, depth in image.plain:
        worker.residence.put(*image.places[0], name, 1, doubtful=False)
        worker.placement.put(name, key, depth, shares=False)
    for block in image.others:
        for number, count, doubtful in block.copies:
            worker.residence.put(*image.places[number], block.name, count, doubtful=doubtful)
        if block.spot is not None:
            worker.placement.put(block.name, *block.spot, shares=block.shares_key)
    usable = worker.facts.usable_blocks
    worker.overfull = "overfull" in image.flags or (usable is not None and worker.residence.gpu_copies > usable)
    if worker.residence.blocks:
        worker.counts["restored"] += worker.residence.blocks


__all__ = ["take", "tell"]
