"""Medians, spread, ratios, and whether a target is met: all that is derived from a document's samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.model import OURS


@dataclass(frozen=True, slots=True)
class Figure:
    """One side's figure over its repeats, in the target's unit."""

    median: float
    low: float
    high: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Verdict:
    ours: Figure | None
    peers: Mapping[str, Figure]
    best: str | None
    """The peer that the ratio is to."""
    ratio: float | None
    """How many times better than ``best``: medians of one run."""
    met: bool | None
    """``None``: there is nothing to meet."""


def figures(row: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Figure]:
    """By side, for those that have the figure."""
    found = {}
    for side, samples in row["samples"].items():
        values = [
            s["figures"][target["figure"]] * target["factor"] for s in samples if target["figure"] in s["figures"]
        ]
        if values:
            found[side] = Figure(median(values), min(values), max(values), len(values))
    return found


def verdict(row: Mapping[str, Any], target: Mapping[str, Any]) -> Verdict:
    found = figures(row, target)
    ours = found.pop(OURS, None)
    wanted = target["peers"]
    peers = {side: figure for side, figure in found.items() if wanted is None or side in wanted}
    lower = target["better"] == "lower"
    best = (min if lower else max)(peers, key=lambda side: peers[side].median) if peers else None
    ratio = None
    if ours is not None and best is not None and target["ratios"]:
        over, under = (peers[best], ours) if lower else (ours, peers[best])
        ratio = over.median / under.median if under.median else None
    bounds = [target["ratio"], target["at_most"], target["at_least"]]
    met: bool | None = None
    if any(bound is not None for bound in bounds):
        met = ours is not None
        if target["ratio"] is not None:
            met = met and ratio is not None and ratio >= target["ratio"]
        if target["at_most"] is not None:
            met = met and ours is not None and ours.median <= target["at_most"]
        if target["at_least"] is not None:
            met = met and ours is not None and ours.median >= target["at_least"]
    return Verdict(ours, peers, best, ratio, met)


def number(value: float) -> str:
    """Three digits that matter; whole numbers as they are."""
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{int(value):,}"
    if size >= 1000:
        return f"{round(value, 2 - len(str(int(size))) + 1):,.0f}"
    return f"{value:.{max(0, 2 - _exponent(size))}f}"


def _exponent(size: float) -> int:
    return int(f"{size:.2e}".partition("e")[2])


def wanted(target: Mapping[str, Any]) -> str:
    """The target as text."""
    parts = []
    if target["ratio"] is not None:
        parts.append(f"≥ {target['ratio']:g}×")
    if target["at_most"] is not None:
        parts.append(f"≤ {target['at_most']:g} {target['unit']}".rstrip())
    if target["at_least"] is not None:
        parts.append(f"≥ {target['at_least']:g} {target['unit']}".rstrip())
    return ", ".join(parts)


def line(row: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """A target and its figures, for a terminal."""
    found = verdict(row, target)
    parts = [f"{target['what']}:"]
    if found.ours is not None:
        parts.append(f"{number(found.ours.median)} {target['unit']}")
    parts += [f"{side} {number(figure.median)}" for side, figure in found.peers.items()]
    if found.ratio is not None:
        parts.append(f"{found.ratio:.2f}×")
    if found.met is not None:
        parts.append(f"({wanted(target)}) {'met' if found.met else 'NOT MET'}")
    return "  ".join(parts)
