"""What `kvsync serve` sets for its whole process: file descriptors and the garbage collector."""

from __future__ import annotations

import gc
import resource
from typing import Final

OTHER_FILES: Final = 1024
"""Open files beside clients and their engine connections: event streams, tokenizers, logs."""
YOUNG: Final = 10_000
"""Containers made since the last look at young ones. Python's 700 means a look every few requests."""


def allow_files(wanted: int) -> int:
    """Raise the soft limit of open files to ``wanted``, as far as the hard limit lets; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return wanted if soft == resource.RLIM_INFINITY else soft


def clients_within(files: int) -> int:
    """Client connections that may be open at once where so many files may: each may need another to its engine."""
    return max(1, (files - min(OTHER_FILES, files // 2)) // 2)


def settle_collector() -> None:
    """Everything that is there now stays: the collector need not look at it again, and at new things less often.

    Without this a full look at the heap stops all requests for tens of milliseconds now and then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 100)


__all__ = ["OTHER_FILES", "allow_files", "clients_within", "settle_collector"]
