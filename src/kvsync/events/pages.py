"""The samples of an engine's ``/metrics``.

Engines are foreign: whatever a page holds, reading it raises nothing and takes a bounded time and space. Pages are read
on the event loop, and ``/metrics`` has thousands of lines, so only the lines that are asked for are looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

MAX_METRICS_BYTES: Final = 16 << 20
MAX_SAMPLES: Final = 1024
"""Of one metric."""
MAX_SAMPLE_BYTES: Final = 16 << 10
"""Of one line; vLLM's longest has some 1.5 kB."""
_LABEL: Final = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\\n]|\\.)*)"(?:,|(?=}))')
_VALUE: Final = re.compile(rb" +([^\s]{1,64})")


def samples(body: bytes, name: bytes) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of each sample of a metric, as far as they make sense; values are finite."""
    at = 0 if body.startswith(name) else body.find(b"\n" + name) + 1
    for _ in range(MAX_SAMPLES):
        if not body.startswith(name, at):
            return
        place, end = at + len(name), at + MAX_SAMPLE_BYTES
        labels = {}
        whole = True
        if body.startswith(b"{", place):
            place += 1
            while label := _LABEL.match(body, place, end):
                labels[label[1].decode()] = label[2].decode(errors="replace")
                place = label.end()
            whole = body.startswith(b"}", place)
            place += whole
        if whole and (value := _VALUE.match(body, place, end)) is not None:
            number = _number(value[1])
            if number is not None:
                yield labels, number
        at = body.find(b"\n" + name, place) + 1
        if not at:
            return


def rank_of(labels: dict[str, str]) -> int | None:
    """The data-parallel rank that a sample is about; ``None`` when its label is none."""
    rank = labels.get("engine", "0")
    return int(rank) if rank.isascii() and rank.isdecimal() and len(rank) <= 4 else None


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


__all__ = ["MAX_METRICS_BYTES", "MAX_SAMPLES", "MAX_SAMPLE_BYTES", "rank_of", "samples"]
