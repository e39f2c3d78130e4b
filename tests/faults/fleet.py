"""Simulated engines in this process, and the configuration that names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiohttp
import pytest

from kvsync.engine_sim import SimConfig, SimEngine, TimeModel
from kvsync.engine_sim.events import CacheEvent
from kvsync.engine_sim.publisher import Publisher
from tests.faults.metrics import Scrape

FAST: Final = TimeModel(speed=50)
"""An answer of twenty tokens takes ten milliseconds."""
SYNC: Final = {"events": {"enabled": True}, "tokenizer": {"remote": {"enabled": True, "endpoint": "engines"}}}
"""The sections that turn KV sync on."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An engine under its name in the configuration."""

    name: str
    engine: SimEngine

    @property
    def entry(self) -> dict[str, object]:
        """Its line in the file."""
        config = self.engine.config
        return {
            "name": self.name,
            "url": self.engine.url,
            "events": self.engine.events,
            "replay": self.engine.replay,
            "adapters": list(config.adapters),
            "data_parallel_size": config.data_parallel_size,
        }

    @property
    def workers(self) -> list[str]:
        ranks = self.engine.config.data_parallel_size
        return [self.name] if ranks == 1 else [f"{self.name}#{rank}" for rank in range(ranks)]

    async def fault(self, kind: str, **fields: object) -> None:
        """Let something go wrong, over HTTP as anybody would."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.engine.url + "/sim/fault", json={"kind": kind, **fields}) as response,
        ):
            assert response.status == 200, await response.text()

    async def metrics(self) -> Scrape:
        """The engine's own."""
        async with aiohttp.ClientSession() as session, session.get(self.engine.url + "/metrics") as response:
            return Scrape(await response.read())


class Batches:
    """How many batches each publisher was given.

    Counted where the engine hands them over: its answers come after that, while sending is left to another thread.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._counts: WeakKeyDictionary[Publisher, int] = WeakKeyDictionary()
        publish = Publisher.publish

        def counted(publisher: Publisher, events: Sequence[CacheEvent]) -> None:
            self._counts[publisher] = self._counts.get(publisher, 0) + 1
            publish(publisher, events)

        patch.setattr(Publisher, "publish", counted)

    def of(self, *engines: Listed) -> dict[str, int]:
        """By worker, of the engines' present lives."""
        counts = {}
        for listed in engines:
            for worker, rank in zip(listed.workers, listed.engine.ranks, strict=True):
                assert rank.publisher is not None
                counts[worker] = self._counts.get(rank.publisher, 0)
        return counts


def sim(model: str, **fields: Any) -> SimEngine:
    """A fast engine with room for a few conversations."""
    defaults: dict[str, Any] = {"blocks": 257, "max_model_len": 2048, "time": FAST}
    return SimEngine(SimConfig(model=model, **(defaults | fields)))


def models(engines: Mapping[str, Sequence[Listed]]) -> dict[str, object]:
    """The ``models`` section: each model's engines."""
    return {
        "models": [{"name": name, "engines": [listed.entry for listed in served]} for name, served in engines.items()]
    }
