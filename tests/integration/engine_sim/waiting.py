"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], deadline: float = 10.0) -> None:
    """Return when the condition holds.

    Raises:
        TimeoutError: it does not in time.
    """
    async with asyncio.timeout(deadline):
        while not condition():  # noqa: ASYNC110 (there is no event to wait for in what is observed from outside)
            await asyncio.sleep(0.002)
