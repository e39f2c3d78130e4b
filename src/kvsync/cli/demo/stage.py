"""The demo's fleet and gateway, in this process: real sockets on loopback, ports chosen by the system."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvsync.app import App
from kvsync.config import Settings
from kvsync.engine_sim import SimConfig, SimEngine, TimeModel
from kvsync.engine_sim.config import TINY_LLAMA

MODEL = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many engines, of what size and speed."""

    engines: int
    usable_blocks: int
    """Per engine."""
    block_size: int = 16
    prefill_rate: float = 3_000.0
    """Prompt tokens per second and engine, cached ones not counted."""
    step_tokens: int = 256
    """Of one scheduler step at most. What a step evicts is published at its end, so this bounds how old news is."""
    decode_rate: float = 120.0
    """Output tokens per second and sequence."""

    @property
    def blocks(self) -> int:
        """Of all engines together."""
        return self.engines * self.usable_blocks

    @property
    def capacity(self) -> float:
        """Prompt tokens per second that the engines compute together when nothing is cached."""
        return self.engines * self.prefill_rate


@dataclass(frozen=True, slots=True)
class Stage:
    url: str
    admin_url: str
    app: App
    engines: tuple[SimEngine, ...]


@asynccontextmanager
async def stage(fleet: Fleet, *, port: int = 0, admin_port: int = 0) -> AsyncIterator[Stage]:
    """Fresh engines with empty caches and a fresh gateway, KV sync running."""
    async with AsyncExitStack() as stack:
        engines = []
        for number in range(fleet.engines):
            config = SimConfig(
                model=MODEL,
                blocks=fleet.usable_blocks + 1,
                block_size=fleet.block_size,
                max_model_len=fleet.usable_blocks * fleet.block_size,
                max_num_batched_tokens=fleet.step_tokens,
                seed=number,
                time=TimeModel(prefill_rate=fleet.prefill_rate, decode_rate=fleet.decode_rate),
            )
            engines.append(await stack.enter_async_context(SimEngine(config)))
        app = App(_settings(engines, port, admin_port))
        await app.start()
        stack.push_async_callback(app.stop)
        yield Stage(f"http://127.0.0.1:{app.gateway.port}", f"http://127.0.0.1:{app.admin.port}", app, tuple(engines))


def _settings(engines: list[SimEngine], port: int, admin_port: int) -> Settings:
    return Settings.model_validate(
        {
            "gateway": {"host": "127.0.0.1", "port": port, "drain_timeout": 1},
            "admin": {"host": "127.0.0.1", "port": admin_port},
            "events": {"enabled": True, "strict": True},
            "tokenizer": {"remote": {"enabled": True, "endpoint": "engines"}},
            "models": [
                {
                    "name": MODEL,
                    "tokenizer": TINY_LLAMA,
                    "engines": [
                        {"name": f"engine-{n}", "url": e.url, "events": e.events, "replay": e.replay}
                        for n, e in enumerate(engines)
                    ],
                }
            ],
        }
    )


__all__ = ["MODEL", "Fleet", "Stage", "stage"]
