"""Runs rows and collects what they give: one document, of plain data, from which everything shown is rendered.

What must always hold: sides take turns (ours, peer, ours, peer …), so that a machine that gets busier or slower meets
all of them; a side that gave a wrong answer has no figures; a row that can't run says why and costs no other row.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.environments import environment
from bench.judge import line
from bench.machine import describe
from bench.model import Row, Run, Unavailable, Wrong
from bench.process import Failed

FORMAT = 1


def run(rows: Sequence[Row], quick: bool) -> dict[str, Any]:
    started = time.time()
    document: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "quick": quick,
        "machine": describe(),
        "rows": [],
    }
    for row in rows:
        document["rows"].append(run_row(row, quick))
    document["seconds"] = round(time.time() - started, 1)
    return document


def run_row(row: Row, quick: bool) -> dict[str, Any]:
    started = time.monotonic()
    result: dict[str, Any] = {
        "name": row.name,
        "title": row.title,
        "method": row.method,
        "targets": [asdict(target) for target in row.targets],
        "samples": {},
        "wrong": {},
        "failed": None,
    }
    say(f"{row.name}: {row.title}")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            _measure(row, Run(quick, Path(folder), environment), result)
        except Unavailable as why:
            result["failed"] = str(why)
        except Exception as error:  # of one row; the others are still worth having
            traceback.print_exc()
            result["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
    if result["failed"]:
        say(f"  did not run: {result['failed']}")
    for target in result["targets"]:
        say(f"  {line(result, target)}")
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _measure(row: Row, run: Run, result: dict[str, Any]) -> None:
    with row.open(run) as sides:
        samples = result["samples"]
        for name in sides:
            samples[name] = []
        for _ in range(row.quick_repeats if run.quick else row.repeats):
            for name, measure in sides.items():
                if name in result["wrong"]:
                    continue
                began = time.monotonic()
                try:
                    figures = dict(measure())
                except Unavailable as why:
                    result["wrong"][name] = f"not available: {why}"
                    continue
                except (Wrong, Failed) as error:
                    result["wrong"][name] = (str(error).strip() or type(error).__name__).splitlines()[-1]
                    say(f"  {name}: {error}")
                    continue
                took, load = round(time.monotonic() - began, 2), round(os.getloadavg()[0], 2)
                samples[name].append({"figures": figures, "seconds": took, "load": load})
                say(f"  {name}: " + ", ".join(f"{key} {value:.6g}" for key, value in figures.items()))
        for name in result["wrong"]:
            del samples[name]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
