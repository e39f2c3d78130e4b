"""What a soak measures, and the judgement over it: flat, or not.

A figure is flat when none of its samples after the first is more than 5 % (and more than a fixed grain, which is what
one look differs from another at in a process that does nothing) above the first. The first is taken when the work has
run once in full, so that pools, caches and the allocator have what they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

TOLERANCE: Final = 0.05
GRAIN: Final = {"rss": 2 << 20, "threads": 1, "files": 2, "sockets": 2, "series": 0}


@dataclass(frozen=True, slots=True)
class Sample:
    """The gateway's process at one moment, with nothing under way."""

    done: int
    """How much of the part's work had been done."""
    rss: int
    """Bytes resident, after garbage collection and ``malloc_trim``."""
    threads: int
    files: int
    sockets: int
    series: int
    """Lines of ``/metrics``."""
    added: tuple[str, ...] = ()
    """Those among them that the look before did not have."""


@dataclass(slots=True)
class Part:
    """What one part of the soak did and saw."""

    name: str
    work: str
    """In words, with its figures."""
    samples: list[Sample] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Further figures, for the report."""
    faults: list[str] = field(default_factory=list)
    """What did not hold, the figures that are not flat apart."""
    seconds: float = 0.0

    def require(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)

    def grown(self) -> list[str]:
        """The figures that are not flat."""
        if len(self.samples) < 2:
            return []
        first = asdict(self.samples[0])
        found = []
        for name, grain in GRAIN.items():
            most = max(getattr(sample, name) for sample in self.samples[1:])
            if most - first[name] > max(grain, TOLERANCE * first[name]):
                found.append(f"{self.name}: {name} grew from {first[name]:,} to {most:,}")
                if name == "series":
                    found[-1] += ": " + ", ".join(line for sample in self.samples[1:] for line in sample.added)
        return found

    def verdict(self) -> list[str]:
        """Everything that is wrong; empty when the part passed."""
        return [f"{self.name}: {fault}" for fault in self.faults] + self.grown()

    def document(self) -> dict[str, Any]:
        document = {**asdict(self), "wrong": self.verdict()}
        for sample in document["samples"]:
            del sample["added"]
        return document


def table(parts: Sequence[Mapping[str, Any]]) -> str:
    """One line per part, of the documents."""
    heads = ("part", "s", "MB first → last (most)", "threads", "files", "sockets", "series", "result")
    rows = [heads]
    for part in parts:
        samples = part["samples"]
        figures = ["–"] * 5
        if samples:
            first, last = samples[0], samples[-1]
            most = max(sample["rss"] for sample in samples)
            megabytes = [f"{bytes_ / 2**20:.1f}" for bytes_ in (first["rss"], last["rss"], most)]
            figures = [f"{megabytes[0]} → {megabytes[1]} ({megabytes[2]})"]
            figures += [f"{first[name]} → {last[name]}" for name in ("threads", "files", "sockets", "series")]
        result = "flat" if not part["wrong"] else "; ".join(part["wrong"])
        rows.append((part["name"], f"{part['seconds']:.0f}", *figures, result))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
