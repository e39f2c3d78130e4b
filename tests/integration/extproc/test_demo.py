"""`make demo-envoy` shows the whole chain, and leaves nothing running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "envoy" / "demo.py"


def test_the_demo() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--conversations", "2"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("first token after") == 2 + sum("engine-" in line for line in done.stdout.splitlines())
    assert done.stdout.splitlines()[-1].startswith("From cache: kv-aware ")
