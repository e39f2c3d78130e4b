"""What a fleet costs a gateway, from the figures of a document of :mod:`bench.scale`: measured where that was measured,
and on the straight line through the two nearest points elsewhere.

What is assumed, beyond the straight lines: every block has one holder (more holders cost less); events come 16 blocks a
batch, with as many evictions; a block costs the same at other rates than the one measured (batches that come closer
together cost less); CPU is that of the machine that was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process import ROOT

RESULTS = ROOT / "bench" / "results"
ASKED = (64, 512)
"""Workers and tokens of a prompt in the row that the CPU of a request comes from."""

Document = Mapping[str, Any]
Line = Mapping[str, Any]
"""One line of the plan: so many workers and blocks."""
Points = Sequence[tuple[float, float]]


def latest(folder: Path = RESULTS) -> Path | None:
    """The last document kept."""
    return max(folder.glob("scale-*.json"), default=None)


def load(path: Path) -> Document:
    found: Document = json.loads(path.read_text(encoding="utf-8"))
    return found


def between(points: Points, at: float) -> float:
    """On the line through the two points that ``at`` lies between, or the last two before or behind it."""
    ordered = sorted(points)
    if len(ordered) == 1:
        return ordered[0][1]
    right = next((n for n in range(1, len(ordered) - 1) if at <= ordered[n][0]), len(ordered) - 1)
    (x1, y1), (x2, y2) = ordered[right - 1], ordered[right]
    return max(0.0, y1 + (y2 - y1) * (at - x1) / (x2 - x1))


@dataclass(frozen=True)
class Costs:
    """CPU in seconds, memory in bytes."""

    document: Document

    @property
    def per_block(self) -> float:
        """Bytes of a block, where most are: of the largest index that was measured."""
        largest = max(self.document["held"], key=lambda one: (one["blocks"], one["workers"]))
        found: float = largest["bytes_per_block"]
        return found

    @property
    def process(self) -> float:
        """Bytes of a process with an empty index."""
        found: float = self.document["held"][0]["process"]
        return found

    @property
    def per_stream(self) -> float:
        """Bytes of a stream that is followed."""
        most = max(self.document["followed"], key=lambda one: one["workers"])
        found: float = most["memory_of_streams"] / most["workers"]
        return found

    @property
    def on_the_wire(self) -> float:
        """Bytes that tell of one block stored and one evicted."""
        one = self.document["followed"][-1]
        found: float = one["wire_bytes_per_block"]
        return found

    def of_event(self, engines: float) -> float:
        """CPU of one block stored and one evicted, with so many streams."""
        return between(self._by_workers("followed", lambda one: one["cpu_per_block"]), engines)

    def of_silence(self, engines: float) -> float:
        """CPU each second of so many streams that say nothing."""
        return between(self._by_workers("followed", lambda one: one["idle_cpu"]), engines)

    def of_choice(self, engines: float, tokens: float) -> float:
        """CPU of choosing a worker for a prompt that one holds, lookup included."""
        lengths = [found["tokens"] for found in self.document["held"][0]["choices"]]
        return between(
            [(length, between(self._by_workers("held", _choice(length)), engines)) for length in lengths], tokens
        )

    def of_request(self, engines: float, tokens: float, cpu: float | None = None) -> float | None:
        """CPU of a request. ``cpu``: that of one with a prompt of 512 tokens over 64 workers; by default the one that
        the document has. ``None`` where neither is known."""
        whole = cpu if cpu is not None else self.document["request_cpu"]
        if whole is None:
            return None
        return max(0.0, whole - self.of_choice(*ASKED)) + self.of_choice(engines, tokens)

    def _by_workers(self, part: str, figure: Callable[[Line], float]) -> Points:
        """At the index size that was measured with every number of workers."""
        lines = self.document[part]
        sizes = [{one["millions"] for one in lines if one["workers"] == workers} for workers in self.workers(part)]
        size = max(set.intersection(*sizes))
        return [(one["workers"], figure(one)) for one in lines if one["millions"] == size]

    def workers(self, part: str) -> list[int]:
        return sorted({one["workers"] for one in self.document[part]})


def _choice(tokens: int) -> Callable[[Line], float]:
    def figure(line: Line) -> float:
        cpu: float = next(found for found in line["choices"] if found["tokens"] == tokens)["cpu"]["p50"]
        return cpu

    return figure
