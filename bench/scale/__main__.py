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
from bench.scale.costs import RESULTS

HELD = {False: ((10, 5), (100, 5), (1_000, 1), (1_000, 5), (1_000, 20)), True: ((10, 1), (100, 1))}
"""Workers, and millions of blocks. ``True``: a quick look."""
FOLLOWED = {False: ((10, 5), (100, 5), (1_000, 5), (1_000, 20)), True: ((10, 2),)}
LOOKUPS = {False: 300, True: 50}
"""Of each kind."""
SECONDS = {False: 20, True: 5}
"""Of publishing."""
PATIENCE = 1_200.0


def measured(module: str, workers: int, millions: int, more: int) -> dict[str, Any]:
    began, load = time.monotonic(), os.getloadavg()[0]
    command = (sys.executable, "-m", f"bench.scale.{module}", str(workers), str(millions * 1_000_000), str(more))
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE)
    print(f"{module}: {workers} workers, {millions} M blocks: {time.monotonic() - began:.0f} s", flush=True)
    return {
        "millions": millions,
        **json.loads(done.stdout),
        "machine_load": [round(load, 2), round(os.getloadavg()[0], 2)],
    }


def request_cpu() -> tuple[float | None, str | None]:
    """CPU seconds of a routed request as the last run of the rows has them, and its file."""
    path = render.latest()
    rows = [] if path is None else json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        samples = row["samples"].get(OURS, [])
        if row["name"] == "gateway-json" and samples:
            assert path is not None
            return median(sample["figures"]["cpu"] for sample in samples), path.name
    return None, None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="as little as shows that everything runs; only shown")
    quick: bool = parser.parse_args().quick
    found: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine.describe()}
    found["request_cpu"], found["request_cpu_from"] = request_cpu()
    found["held"] = [measured("held", *line, LOOKUPS[quick]) for line in HELD[quick]]
    found["followed"] = [measured("followed", *line, SECONDS[quick]) for line in FOLLOWED[quick]]
    text = json.dumps(found, indent=1) + "\n"
    if quick:
        print(text)
    else:
        (RESULTS / f"scale-{found['date'][:10]}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
