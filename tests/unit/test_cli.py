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


@pytest.mark.parametrize("command", ["--help", "config check"])
def test_output_that_cannot_be_written_is_an_error_and_no_traceback(command: str) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "kvsync.cli", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "Error: the output can't be written: No space left on device"
    assert "Traceback" not in result.stderr
