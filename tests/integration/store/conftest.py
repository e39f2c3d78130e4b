from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvsync.config.redis import RedisSettings
from kvsync.store.connection import Store
from tests.valkey import Valkey

DEADLINE = 20.0


class Told:
    """What a store tells its telemetry."""

    def __init__(self) -> None:
        self.results: Counter[tuple[str, str]] = Counter()
        self.longest = 0.0
        self.states: list[str] = []

    def redis_called(self, call: str, result: str, seconds: float) -> None:
        self.results[call, result] += 1
        if call != "ping":
            self.longest = max(self.longest, seconds)

    def redis_state(self, state: str) -> None:
        self.states.append(state)


async def until(condition: Callable[[], object], what: str) -> None:
    """Return once it holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


@asynccontextmanager
async def store(url: str | None, told: Told | None = None, *, up: bool = True, **settings: Any) -> AsyncIterator[Store]:
    """A store that has started; with ``up``, once it has reached its server."""
    made = Store(RedisSettings.model_validate({"url": url, **settings}), told if told is not None else Told())
    await made.start()
    try:
        if up:
            await until(lambda: made.up, f"not reached: {made.describe()}")
        yield made
    finally:
        await made.stop()


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[Valkey]:
    async with Valkey(tmp_path) as server:
        yield server
