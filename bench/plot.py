"""Bar charts as SVG text, made by hand: equal figures give equal bytes (the page's test rests on that)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.judge import number

WIDTH = 900
LABEL = 430
RIGHT = 150
"""Room for the figures behind the bars."""
STEP = 22
STYLE = (
    "<style>text{font:12px sans-serif;fill:#24292f}.head{font-weight:600}.ours{fill:#0969da}.peer{fill:#8c959f}"
    ".miss{fill:#cf222e}.line{stroke:#57606a;stroke-width:1}.goal{stroke:#1a7f37;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.line{stroke:#8b949e}.goal{stroke:#3fb950}}</style>"
)


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    low: float
    high: float
    kind: str
    """``ours`` or ``peer``."""


@dataclass(frozen=True, slots=True)
class Group:
    """Bars of one unit: they share a scale that begins at 0."""

    head: str
    unit: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Ratio:
    label: str
    ratio: float
    wanted: float | None


def bars(groups: Sequence[Group]) -> str:
    """Each group's figures with their spread."""
    parts: list[str] = []
    y = 8
    for group in groups:
        y += STEP
        unit = f", {group.unit}" if group.unit else ""
        parts.append(_text(4, y - 6, group.head + unit, "head"))
        scale = (WIDTH - LABEL - RIGHT) / (max((bar.high for bar in group.bars), default=0.0) or 1.0)
        for bar in group.bars:
            y += STEP
            end, low, high = (LABEL + scale * value for value in (bar.value, bar.low, bar.high))
            parts.append(_text(LABEL - 8, y - 6, bar.label, anchor="end"))
            parts.append(_bar(LABEL, end, y, bar.kind))
            if bar.high > bar.low:
                parts.append(_line(low, y - 10, high, y - 10, "line"))
            parts.append(_text(max(end, high) + 6, y - 6, number(bar.value)))
        y += 8
    return _svg(y, parts)


def ratios(found: Sequence[Ratio]) -> str:
    """How many times better than the best peer, on a logarithmic scale; the mark is the target."""
    values = [one.ratio for one in found] + [one.wanted for one in found if one.wanted]
    low, high = min([0.5, *values]), max([2.0, *values])
    span = (WIDTH - LABEL - RIGHT) / math.log(high / low)

    def at(value: float) -> float:
        return LABEL + span * math.log(value / low)

    parts = []
    y = 8 + STEP
    bottom = y + STEP * len(found)
    for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        if low <= tick <= high:
            parts.append(_text(at(tick), y - 6, f"{tick:g}×", anchor="middle"))
            if tick == 1:
                parts.append(_line(at(1), y, at(1), bottom, "line"))
    for one in found:
        y += STEP
        kind = "ours" if one.wanted is None or one.ratio >= one.wanted else "miss"
        parts.append(_text(LABEL - 8, y - 6, one.label, anchor="end"))
        parts.append(_bar(min(at(1), at(one.ratio)), max(at(1), at(one.ratio)), y, kind))
        if one.wanted is not None:
            parts.append(_line(at(one.wanted), y - 18, at(one.wanted), y - 2, "goal"))
        parts.append(_text(WIDTH - RIGHT + 20, y - 6, f"{number(one.ratio)}×"))
    return _svg(bottom + 8, parts)


def _bar(start: float, end: float, y: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{start:.1f}" y="{y - 17:.1f}" width="{max(end - start, 1):.1f}" height="14"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, *parts, "</svg>", ""])
