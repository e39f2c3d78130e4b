"""A document as a run leaves it, small and made up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.model import OURS, Target

MACHINE = {
    "cpu": "A processor",
    "cores": 2,
    "vectors": "AVX2",
    "memory_gib": 23.5,
    "system": "Linux 6.1",
    "python": "3.11.7",
    "load_before": 0.5,
    "versions": {"kvsync": "0.1.0"},
    "commit": "0123456789ab",
    "changed": False,
}


def row(*targets: Target, **sides: list[dict[str, float]]) -> dict[str, Any]:
    """A row that ran; ``ours`` stands for kvsync."""
    return {
        "name": "row",
        "title": "A row, with commas → arrows",
        "method": "By hand.",
        "targets": [asdict(target) for target in targets],
        "samples": {
            OURS if side == "ours" else side: [{"figures": one, "seconds": 1.0, "load": 1.5} for one in figures]
            for side, figures in sides.items()
        },
        "wrong": {},
        "failed": None,
        "seconds": 1.0,
    }


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "date": "2026-11-30 01:00 UTC",
        "quick": False,
        "machine": MACHINE,
        "rows": list(rows),
        "seconds": 90.0,
    }
