"""Programs that are measured or that make the load, each in a process of its own: ``python -m bench.subjects.<name>``.

They are asked over standard input and output (:class:`bench.process.Subject`). Those of peers run in the peers' own
environments, so all imports of this package at import time are of the standard library.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

FRAME = struct.Struct("<II")
"""Before each frame of a feed: the worker's number and the frame's length."""


def answer(handlers: Mapping[str, Callable[..., Any]], line: bytes | str) -> None:
    """Answer one request. What goes wrong is the answer."""
    request = json.loads(line)
    try:
        said = {"value": handlers[request.pop("do")](**request)}
    except Exception:
        said = {"error": traceback.format_exc()}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests, one line of JSON each, until the input ends."""
    for line in sys.stdin:
        answer(handlers, line)


def trim() -> None:
    """Give memory that is free back to the system: what imports left behind would hide as much of what comes after."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def timed(action: Callable[[Any], object], arguments: Sequence[Any], times: int) -> dict[str, list[float]]:
    """Seconds of each of so many calls: by the clock, and of this thread's CPU, which no busy machine makes longer."""
    took: dict[str, list[float]] = {"seconds": [], "cpu": []}
    for argument in itertools.islice(itertools.cycle(arguments), times):
        began, cpu = time.perf_counter(), time.thread_time()
        action(argument)
        took["cpu"].append(time.thread_time() - cpu)
        took["seconds"].append(time.perf_counter() - began)
    return took


def feeding(command: Sequence[str]) -> Iterator[tuple[int, bytes]]:
    """Worker and frame, one after the other, as a process writes them: to make them costs its memory, not the caller's.

    Raises:
        RuntimeError: the process failed.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while head := process.stdout.read(FRAME.size):
            worker, size = FRAME.unpack(head)
            yield worker, process.stdout.read(size)
    if process.returncode:
        raise RuntimeError(f"{command[:3]} ended with status {process.returncode}")
