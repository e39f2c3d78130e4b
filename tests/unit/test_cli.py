"""The command line as a whole: every command explains itself, whatever is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = "import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"
EXTRAS = ("zmq", "tokenizers", "jinja2", "rich", "kvsync_core")


@pytest.mark.parametrize("command", ["", "serve", "demo", "sim", "watch", "config", "config check"])
def test_help_needs_no_extra(command: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=EXTRAS))
    result = subprocess.run(
        [sys.executable, "-m", "kvsync.cli", *command.split(), "--help"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Usage: kvsync")
