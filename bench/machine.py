"""What the figures were measured on, as far as the system tells."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.process import ROOT

PACKAGES = ("kvsync", "kvsync-core", "pyzmq", "uvloop", "msgspec", "tokenizers")


def describe() -> dict[str, Any]:
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    flags = next((line.split() for line in _lines("/proc/cpuinfo") if line.startswith("flags")), [])
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "vectors": "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "none known",
        "memory_gib": round(int(memory) / (1 << 20), 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        **_commit(),
    }


def _commit() -> dict[str, Any]:
    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "--short=12", "HEAD"), "changed": git("status", "--porcelain", "-uno") != ""}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed": None}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
