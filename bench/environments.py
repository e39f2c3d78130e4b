"""The peers, each in an environment of its own: the packages of ``bench/peers/<name>.txt`` and nothing of kvsync.

``bench/peers/README.md`` says how a file is made. Environments stand in ``.make/peers`` and are made anew when their
file changes.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from bench.model import Unavailable
from bench.process import ROOT

PINS = Path(__file__).parent / "peers"


def environment(name: str) -> Path:
    """The Python of a peer's environment.

    Raises:
        Unavailable: it can't be installed here.
    """
    pins = PINS / f"{name}.txt"
    folder = ROOT / ".make" / "peers" / name
    python, mark = folder / "bin" / "python", folder / "pins"
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    if not (mark.exists() and mark.read_text() == wanted):
        uv = Path(sys.executable).parent / "uv"
        print(f"installing {name} from PyPI …", file=sys.stderr, flush=True)
        try:
            _run(uv, "venv", "-q", "--clear", folder, "--python", sys.executable)
            _run(uv, "pip", "install", "-q", "--require-hashes", "-r", pins, "-p", folder)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise Unavailable(f"{name} can't be installed: {said.strip().splitlines()[-1]}") from None
        mark.write_text(wanted)
    return python


def pinned(name: str, package: str) -> str:
    """The version of a package in a peer's file."""
    for line in (PINS / f"{name}.txt").read_text().splitlines():
        found, _, rest = line.partition("==")
        if found == package:
            return rest.split()[0]
    raise KeyError(package)


def _run(*command: Path | str) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
