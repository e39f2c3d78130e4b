"""The plan: each line of it in a process of its own, all of them in one file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from statistics import median
from typing import Any

from bench import machine, render
from bench.model import OURS
from bench.process import ROOT
from bench.rows import ROWS
from bench.run import run
from bench.scale import page
from bench.scale.costs import RESULTS, load

HELD = {False: ((10, 5), (100, 5), (1_000, 1), (1_000, 5), (1_000, 20)), True: ((10, 1), (100, 1))}
"""Workers, and millions of blocks. ``True``: a quick look."""
FOLLOWED = {False: ((10, 5), (100, 5), (1_000, 5), (1_000, 20)), True: ((10, 2),)}
LOOKUPS = {False: 300, True: 50}
"""Of each kind."""
SECONDS = {False: 20, True: 5}
"""Of publishing."""
PATIENCE = 1_200.0
ROW = "gateway-json"
"""What a request costs is from there."""


def measured(module: str, workers: int, millions: int, more: int) -> dict[str, Any]:
    began, before = time.monotonic(), os.getloadavg()[0]
    command = (sys.executable, "-m", f"bench.scale.{module}", str(workers), str(millions * 1_000_000), str(more))
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE)
    print(f"{module}: {workers} workers, {millions} M blocks: {time.monotonic() - began:.0f} s", flush=True)
    return {
        "millions": millions,
        **json.loads(done.stdout),
        "machine_load": [round(before, 2), round(os.getloadavg()[0], 2)],
    }


def request_cpu(quick: bool) -> tuple[float | None, str]:
    """CPU seconds of a routed request, and where that is from: the last run of all rows, else that row alone, now."""
    path = None if quick else render.latest()
    document = run([row for row in ROWS if row.name == ROW], quick) if path is None else load(path)
    for row in document["rows"]:
        samples = row["samples"].get(OURS, [])
        if row["name"] == ROW and samples:
            return median(sample["figures"]["cpu"] for sample in samples), path.name if path else "this run"
    return None, "nowhere: the row failed"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="as little as shows that everything runs; only shown")
    quick: bool = parser.parse_args().quick
    found: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine.describe()}
    found["request_cpu"], found["request_cpu_from"] = request_cpu(quick)
    found["held"] = [measured("held", *line, LOOKUPS[quick]) for line in HELD[quick]]
    found["followed"] = [measured("followed", *line, SECONDS[quick]) for line in FOLLOWED[quick]]
    text = json.dumps(found, indent=1) + "\n"
    if quick:
        print(text)
    else:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"scale-{found['date'][:10]}.json"
        path.write_text(text, encoding="utf-8")
        page.write(path)


if __name__ == "__main__":
    main()
