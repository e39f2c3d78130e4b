"""Programs that are measured or that make the load, each in a process of its own: ``python -m bench.subjects.<name>``.

They are asked over standard input and output (:class:`bench.process.Subject`). Those of peers run in the peers' own
environments, so all imports of this package at import time are of the standard library.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


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
