"""``kvsync serve`` that tells on SIGUSR1 what it holds of the system: one line of JSON in the file ``SOAK_SAMPLES``.

Run as ``python -m tests.soak.served`` with the arguments of ``kvsync serve``. Before it looks, it collects garbage and
gives freed memory back, so that what is left is in use.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
from pathlib import Path

from kvsync.cli import main

_STATUS = re.compile(r"^(VmRSS|VmHWM|Threads):\s+(\d+)", re.MULTILINE)


def sample() -> dict[str, int]:
    """Bytes resident, bytes resident at most so far, threads, open files, and those of them that are sockets."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(_STATUS.findall(Path("/proc/self/status").read_text()))
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return {
        "rss": int(status["VmRSS"]) << 10,
        "most": int(status["VmHWM"]) << 10,
        "threads": int(status["Threads"]),
        "files": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


def _tell(*_: object) -> None:
    with open(os.environ["SOAK_SAMPLES"], "a") as file:
        file.write(json.dumps(sample()) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _tell)
    main()
