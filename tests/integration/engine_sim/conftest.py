"""An engine like the one that the captures were made with, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from kvsync.engine_sim import SimConfig, SimEngine, TimeModel

FAST = TimeModel(speed=1_000)


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    config = SimConfig(
        adapters=("lora1",), blocks=64, block_size=32, max_model_len=1024, time=FAST, topic="kv@pod1@tiny"
    )
    async with SimEngine(config) as running:
        yield running


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.url, timeout=aiohttp.ClientTimeout(20)) as session:
        yield session
