"""A consumer that stands still for 30 s while an engine publishes 200,000 batches: memory stays bounded, and afterwards
the gap is found and repaired, or the worker forgotten: it is not credited with what it does not hold any more."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from tests.faults.client import until
from tests.faults.engine import BLOCK, Engine

from .churn import CHAIN, CONFIG, drained, kind, models, part, tokens_of, turnover
from .figures import Part
from .watched import PATIENCE, watched

BATCHES: Final = 200_000
HIGH_WATER: Final = 50_000
"""Batches that the publisher keeps for a subscriber (vLLM: 100,000, which a quick machine's kernel buffers add to)."""
PAUSE: Final = 30.0
LIVE: Final = 500
"""Chains that the engine holds at any time."""
MOST_WAITING: Final = 64 << 20
"""``events.receive_bytes``"""


async def run(scale: float, folder: Path) -> list[Part]:
    batches, pause = max(2_000, int(BATCHES * scale)), PAUSE * min(1.0, math.sqrt(scale))
    work = f"the gateway stopped for {pause:g} s, {batches:,} batches published meanwhile"
    async with part("freeze", work) as found, AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine("churn-0", blocks=1_000_000, hwm=HIGH_WATER))
        config: dict[str, Any] = {**CONFIG, **models([engine.entry])}
        config["events"] = {"enabled": True, "receive_bytes": MOST_WAITING}
        gateway = await stack.enter_async_context(watched(folder, config))
        at = 0

        def publish(until_chain: int) -> None:
            nonlocal at
            for chain in range(at, until_chain):
                engine.tell(*turnover(engine, chain, LIVE))
            at = until_chain

        await gateway.gateway.live()
        await asyncio.to_thread(publish, 2 * LIVE)
        await drained(gateway, [engine])
        before = await gateway.look()
        gateway.gateway.process.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            await asyncio.to_thread(publish, at + batches)
            published = time.monotonic() - stopped
            await asyncio.sleep(max(0.0, pause - published))
        finally:
            gateway.gateway.process.signal(signal.SIGCONT)
        thawed = time.monotonic()

        async def followed() -> dict[str, Any] | None:
            row = (await gateway.gateway.workers())[engine.name]
            current = row["state"] in ("live", "silent") and row["last_sequence"] == engine.publisher.published - 1
            return row if current else None

        row = await until(followed, "the stream followed again", PATIENCE)
        recovered = time.monotonic() - thawed
        await _sound(gateway, engine, at, found)
        await asyncio.to_thread(publish, at + LIVE)

        plain = next(chain for chain in range(at - 1, 0, -1) if kind(chain) == "plain")

        async def credited() -> bool:
            prompt = [*tokens_of(engine, plain), 7]
            return await gateway.gateway.credit(engine.name, model="tiny", tokens=prompt) == CHAIN * BLOCK

        await until(credited, "what is stored afterwards is credited", PATIENCE)
        after = await gateway.look()
        grown = after["most"] - before["rss"]
        found.require(grown < 4 * MOST_WAITING, f"memory grew by {grown >> 20} MB while {MOST_WAITING >> 20} may wait")
        counts = row["stream"]["counts"]
        if batches > 2 * HIGH_WATER:  # so many that the publisher must have dropped some
            found.require(counts["missed"] + counts["forgotten"] > 0, f"batches were dropped and nobody saw: {counts}")
        found.facts = {
            "seconds_stopped": round(max(pause, published), 1),
            "seconds_until_followed": round(recovered, 1),
            "trust_afterwards": row["trust"],
            "counts": counts,
            "rss_before": before["rss"],
            "rss_at_most": after["most"],
            "rss_after": after["rss"],
        }
    return [found]


async def _sound(gateway: Any, engine: Engine, at: int, found: Part) -> None:
    """No chain that the engine has dropped is credited."""
    for chain in (at - LIVE - 5, at - 2 * LIVE, at // 2, 2 * LIVE - 6):
        held = at - LIVE <= chain < at
        credit = await gateway.gateway.credit(engine.name, model="tiny", tokens=[*tokens_of(engine, chain), 7])
        found.require(held or not credit, f"chain {chain}, long dropped, is credited {credit}")
