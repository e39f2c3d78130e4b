"""Pages of an engine that the gateway reads itself: fetched within bounds, and the samples of its ``/metrics``.

Engines are foreign: whatever a page holds, reading it raises nothing but :class:`NoPage`, follows no redirect, and
takes a bounded time and space. Pages are read on the event loop, and ``/metrics`` has thousands of lines, so only the
lines that are asked for are looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import aiohttp

from kvsync.discovery.access import EngineAccess

MAX_METRICS_BYTES: Final = 16 << 20
MAX_SAMPLES: Final = 1024
"""Of one metric."""
MAX_SAMPLE_BYTES: Final = 16 << 10
"""Of one line; vLLM's longest has some 1.5 kB."""
_LABEL: Final = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\\n]|\\.)*)"(?:,|(?=}))')
_VALUE: Final = re.compile(rb" +([^\s]{1,64})")

Reason: TypeAlias = Literal["unreachable", "timeout", "status", "too_large"]


class NoPage(Exception):
    """A page that should be there could not be had; ``reason`` is for counting."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


async def fetch(
    session: aiohttp.ClientSession, access: EngineAccess, base: str, path: str, limit: int, patience: float
) -> bytes | None:
    """The body of a page of at most ``limit`` bytes, within ``patience`` seconds; ``None``: there is no such page.

    Raises:
        NoPage: no answer, a server error, no admittance, or too much.
    """
    try:
        timeout = aiohttp.ClientTimeout(total=patience)
        arguments = access.arguments(base)
        async with session.get(base + path, timeout=timeout, allow_redirects=False, **arguments) as response:
            if response.status in (401, 403):
                raise NoPage("status", f"GET {path}: status {response.status} (see gateway.engine_api_key)")
            if response.status >= 500:
                raise NoPage("status", f"GET {path}: status {response.status}")
            if response.status != 200:
                return None
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > limit:
                    raise NoPage("too_large", f"GET {path}: more than {limit} bytes")
            return bytes(body)
    except TimeoutError:
        raise NoPage("timeout", f"GET {path}: no answer in {patience:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise NoPage("unreachable", f"GET {path}: {error or type(error).__name__}") from None


def samples(body: bytes, name: bytes) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of each sample of a metric, as far as they make sense; values are finite."""
    at = 0 if body.startswith(name) else body.find(b"\n" + name) + 1
    for _ in range(MAX_SAMPLES):
        if not body.startswith(name, at):
            return
        place, end = at + len(name), at + MAX_SAMPLE_BYTES
        labels = {}
        whole = True
        if body.startswith(b"{", place):
            place += 1
            while label := _LABEL.match(body, place, end):
                labels[label[1].decode()] = label[2].decode(errors="replace")
                place = label.end()
            whole = body.startswith(b"}", place)
            place += whole
        if whole and (value := _VALUE.match(body, place, end)) is not None:
            number = _number(value[1])
            if number is not None:
                yield labels, number
        at = body.find(b"\n" + name, place) + 1
        if not at:
            return


def rank_of(labels: dict[str, str]) -> int | None:
    """The data-parallel rank that a sample is about; ``None`` when its label is none."""
    rank = labels.get("engine", "0")
    return int(rank) if rank.isascii() and rank.isdecimal() and len(rank) <= 4 else None


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


__all__ = ["MAX_METRICS_BYTES", "MAX_SAMPLES", "MAX_SAMPLE_BYTES", "NoPage", "Reason", "fetch", "rank_of", "samples"]
