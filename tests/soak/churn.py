"""Blocks, suffixes and workers that come and go for ever, while what is held stays the same: nothing may grow.

Everything goes the whole way: batches over real ZMQ into a gateway of its own process. After each round the streams are
drained, and what the index then says of the engines' caches is held against the truth.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests import wire
from tests.faults.client import until
from tests.faults.engine import BLOCK, Engine
from tests.faults.process import write

from .figures import Part
from .watched import PATIENCE, Watched, watched

CHAIN: Final = 16
"""Blocks of one chain; one batch stores one."""
LIVE_SUFFIXES: Final = 2_000
MOST_PARKED: Final = 4_096
"""Stores of one worker that wait for a parent at most."""
SUFFIXES_PER_BATCH: Final = 128
SLOTS: Final = 8
"""Workers that live at the same time."""
WARM_UP: Final = 60
"""Generations of them before the first look."""
CONFIG: Final[Mapping[str, Any]] = {
    "events": {"enabled": True},
    "tokenizer": {"remote": {"enabled": True, "endpoint": "engines"}},
    # What is remembered of choices is bounded: by time, of which a look at memory waits for the end, and by number.
    "routing": {"expected_lifetime": 0.5, "observed_lifetime": 0.5, "decisions": 100},
}


async def run(scale: float, folder: Path) -> list[Part]:
    """3 million evictions, 10 million suffixes and 5,000 worker lifetimes (times ``scale``), one after the other in
    one gateway."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                Engine(f"churn-{n}", blocks=1_000_000, hashes=str(max(n, 1)), buffer_steps=200)
            )
            for n in range(4)
        ]
        config = {**CONFIG, **models(engine.entry for engine in engines)}
        gateway = await stack.enter_async_context(watched(folder, config))
        await gateway.gateway.live()
        rounds = 10 if scale >= 0.1 else 2
        return [
            await evictions(gateway, engines, max(3_000, int(3_000_000 * scale)), rounds),
            await suffixes(gateway, engines[0], max(20_000, int(10_000_000 * scale)), rounds),
            await lifetimes(gateway, config, max(5 * SLOTS, int(5_000 * scale)), rounds),
        ]


def models(entries: Iterator[dict[str, object]] | Sequence[dict[str, object]]) -> dict[str, object]:
    return {"models": [{"name": "tiny", "engines": list(entries)}]}


@asynccontextmanager
async def part(name: str, work: str) -> AsyncIterator[Part]:
    found = Part(name, work)
    started = time.monotonic()
    yield found
    found.seconds = round(time.monotonic() - started, 1)


async def drained(gateway: Watched, engines: Sequence[Engine]) -> dict[str, dict[str, Any]]:
    """The workers' rows once everything published so far is in the index, and metrics tell how each worker is known (a
    look once a second does it)."""

    async def look() -> dict[str, dict[str, Any]] | None:
        rows = await gateway.gateway.workers()
        for engine in engines:
            row = rows[engine.name]
            current = row["state"] in ("live", "silent") and row["trust"] == "exact"
            if not current or row["last_sequence"] != engine.publisher.published - 1:
                return None
        _, page = await gateway.gateway.admin.get("/metrics")
        told = all(f'kvsync_worker_mode{{mode="exact",worker="{engine.name}"}}'.encode() in page for engine in engines)
        return rows if told else None

    return await until(look, "the streams drained", PATIENCE)


# ---- evictions


def tokens_of(engine: Engine, chain: int) -> list[int]:
    """A chain's tokens: the first two engines hold the same, the others their own."""
    seed = {"churn-2": 1, "churn-3": 2}.get(engine.name, 0)
    return [token for block in range(CHAIN) for token in (chain >> 16, chain & 0xFFFF, seed, block, *range(12))]


def turnover(engine: Engine, chain: int, live: int) -> list[wire.Event]:
    """One step: the oldest chain is evicted, tail first, and a new one is stored. Now and then the new one has a salt
    or an adapter that never comes again, a second copy, a copy in another tier, or a parent that nobody knows."""
    events: list[wire.Event] = []
    if chain >= live:
        events += _removal(engine, chain - live)
    return events + _storage(engine, chain)


def kind(chain: int) -> str:
    """What is special about a chain."""
    kinds = {0: "salt", 5: "salt", 10: "salt", 15: "salt", 1: "adapter", 3: "copy", 13: "copy", 4: "cpu", 22: "orphan"}
    return kinds.get(chain % 25, "plain")


def _names(engine: Engine, chain: int) -> list[int]:
    seed = {"churn-2": 1, "churn-3": 2}.get(engine.name, 0)
    return [(seed << 60) + chain * CHAIN + block + 1 for block in range(CHAIN)]


def _storage(engine: Engine, chain: int) -> list[wire.Event]:
    names, tokens = _names(engine, chain), tokens_of(engine, chain)
    event = wire.stored(names, tokens, block_size=BLOCK)
    match kind(chain):
        case "salt":
            event["extra_keys"] = [[f"salt-{chain}"]] + [None] * (CHAIN - 1)
        case "adapter":
            event |= {"lora_name": f"adapter-{chain}", "lora_id": 1, "extra_keys": [[f"adapter-{chain}"]] * CHAIN}
        case "copy":
            return [event, event]
        case "cpu":
            return [event, event | {"medium": "CPU"}]
        case "orphan":
            event["parent_block_hash"] = names[0] + (1 << 59)
    return [event]


def _removal(engine: Engine, chain: int) -> list[wire.Event]:
    events = [wire.removed([name]) for name in reversed(_names(engine, chain))]
    match kind(chain):
        case "copy":
            return events * 2
        case "cpu":
            return events + [event | {"medium": "CPU"} for event in events]
    return events


async def evictions(gateway: Watched, engines: Sequence[Engine], count: int, rounds: int) -> Part:
    chains = count // (CHAIN * len(engines))
    """To be evicted, per engine."""
    live = min(1_500, max(50, chains // 20))
    total = chains * CHAIN * len(engines)
    work = f"{total:,} evictions over {len(engines)} engines, {live * CHAIN:,} blocks live on each"
    async with part("evictions", work) as found:
        at = 0

        def publish(until_chain: int) -> None:
            nonlocal at
            for chain in range(at, until_chain):
                for engine in engines:
                    engine.tell(*turnover(engine, chain, live))
            at = until_chain

        await asyncio.to_thread(_orphans, engines)
        await asyncio.to_thread(publish, 2 * live)
        _cleared_and_refilled(engines[-1], at, live)
        held = None
        for done in range(rounds + 1):
            if done:
                await asyncio.to_thread(publish, 2 * live + chains * done // rounds)
                _cleared_and_refilled(engines[-1], at, live)
            rows = await drained(gateway, engines)
            blocks = {engine.name: rows[engine.name]["blocks"] for engine in engines}
            # Chains of each kind come and go at different moments, so the live set breathes by some of them.
            held = held or blocks
            for name, figure in blocks.items():
                found.require(
                    abs(figure - held[name]) <= 4 * CHAIN, f"{name} has {figure:,} blocks, before {held[name]:,}"
                )
            found.samples.append(await gateway.sample(at * CHAIN * len(engines)))
        for engine in engines:
            await _verify(gateway, engine, at, live, found)
        found.facts = {"live_blocks": held, "clears_and_refills": rounds}
        for engine in engines:  # an empty cache for the next part
            engine.tell(wire.cleared())
        rows = await drained(gateway, engines)
        found.require(all(rows[e.name]["blocks"] == 0 for e in engines), "blocks are left after the last clear")
    return found


def _orphans(engines: Sequence[Engine]) -> None:
    """Fill what waits for a parent: it is bounded, and is full before the first look."""
    for engine in engines:
        for first in range(0, MOST_PARKED, 64):
            chains = [25 * (10**9 + first + n) + 22 for n in range(64)]  # far from all others
            engine.tell(*(event for chain in chains for event in _storage(engine, chain)))
            engine.tell(*(event for chain in chains for event in _removal(engine, chain)))


def _cleared_and_refilled(engine: Engine, at: int, live: int) -> None:
    engine.tell(wire.cleared())
    for chain in range(at - live, at):
        engine.tell(*_storage(engine, chain))


async def _verify(gateway: Watched, engine: Engine, at: int, live: int, found: Part) -> None:
    """Plain chains that live are credited in full, those that were evicted not at all."""
    plain = [chain for chain in range(at - 2 * live, at) if kind(chain) in ("plain", "copy", "cpu")]
    for chain in plain[:: max(1, len(plain) // 40)]:
        credit = await gateway.gateway.credit(engine.name, model="tiny", tokens=[*tokens_of(engine, chain), 7])
        expected = CHAIN * BLOCK if chain >= at - live else 0
        found.require(credit == expected, f"{engine.name}: chain {chain} is credited {credit}, held are {expected}")


# ---- suffixes


def _integer(value: int) -> bytes:
    return b"\xcf" + value.to_bytes(8, "big")


def _suffix_forms(parent: int) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """The bytes around the three numbers that differ from one suffix to the next."""
    name, first, second = 1 << 62, 1 << 31, (1 << 31) + 1
    event = wire.stored([name], [first, second, *range(14)], parent=parent, block_size=BLOCK)
    stored = _encoded(event)
    removed = _encoded(wire.removed([name]))
    head, rest = stored.split(_integer(name))
    mid, rest = rest.split(b"\xce" + first.to_bytes(4, "big"))
    between, tail = rest.split(b"\xce" + second.to_bytes(4, "big"))
    assert between == b""
    removed_head, removed_tail = removed.split(_integer(name))
    return head, mid, tail, removed_head, removed_tail


def _encoded(event: wire.Event) -> bytes:
    whole = wire.batch(event)
    return whole[len(b"\x93\xcb") + 8 + 1 : -1]  # without the outer array, its time, the list's head and the rank


def suffix_batch(forms: tuple[bytes, bytes, bytes, bytes, bytes], first: int, ts: float) -> bytes:
    """Stores so many new suffixes, and removes those that are the oldest then."""
    head, mid, tail, removed_head, removed_tail = forms
    pieces = []
    for n in range(first, first + SUFFIXES_PER_BATCH):
        pieces.append(
            head + _integer((1 << 62) + n) + mid + struct.pack(">BIBI", 0xCE, n >> 16, 0xCE, n & 0xFFFF) + tail
        )
        if n >= LIVE_SUFFIXES:
            pieces.append(removed_head + _integer((1 << 62) + n - LIVE_SUFFIXES) + removed_tail)
    return b"\x93\xcb" + struct.pack(">d", ts) + b"\xdd" + struct.pack(">I", len(pieces)) + b"".join(pieces) + b"\x00"


async def suffixes(gateway: Watched, engine: Engine, count: int, rounds: int) -> Part:
    batches = count // SUFFIXES_PER_BATCH
    total = batches * SUFFIXES_PER_BATCH
    work = f"{total:,} unique suffixes under one prefix stored and removed, {LIVE_SUFFIXES:,} live"
    async with part("suffixes", work) as found:
        prefix = list(range(8 * BLOCK))
        engine.store(prefix)
        forms = _suffix_forms(engine.names(prefix)[-1])
        publisher = engine.publisher
        warm = -(-2 * LIVE_SUFFIXES // SUFFIXES_PER_BATCH)
        at = 0

        def publish(until_batch: int) -> None:
            nonlocal at
            for number in range(at, until_batch):
                body = suffix_batch(forms, number * SUFFIXES_PER_BATCH, publisher.started + publisher.published)
                publisher.send(body)
            at = until_batch

        await asyncio.to_thread(publish, warm)
        # Small steps: what is published and not yet taken fills the sender's memory.
        steps = 4 * rounds
        for step in range(steps + 1):
            await asyncio.to_thread(publish, warm + batches * step // steps)
            rows = await drained(gateway, [engine])
            blocks = rows[engine.name]["blocks"]
            found.require(blocks == LIVE_SUFFIXES + 8, f"{blocks:,} blocks instead of {LIVE_SUFFIXES + 8:,}")
            if step % 4 == 0:
                found.samples.append(await gateway.sample(at * SUFFIXES_PER_BATCH))
        last = at * SUFFIXES_PER_BATCH - 1
        for n, held in ((last, True), (last - LIVE_SUFFIXES, False)):
            prompt = [*prefix, n >> 16, n & 0xFFFF, *range(14), 7]
            credit = await gateway.gateway.credit(engine.name, model="tiny", tokens=prompt)
            found.require(credit == (9 if held else 8) * BLOCK, f"suffix {n} is credited {credit}")
    return found


# ---- workers


async def lifetimes(gateway: Watched, config: Mapping[str, Any], count: int, rounds: int) -> Part:
    """Every generation, all workers go and as many new ones come, at the same addresses; every second time, they are
    other processes, too. Each is followed, holds a prompt of its own, and answers for itself and for an adapter that
    nobody had before."""
    generations = count // SLOTS
    work = f"{generations * SLOTS:,} workers, {SLOTS} at a time, at the same addresses"
    async with part("lifetimes", work) as found, AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(f"slot-{n}", buffer_steps=100)) for n in range(SLOTS)]
        marks = {0, *(generations * n // rounds for n in range(1, rounds + 1))}
        for generation in range(-min(WARM_UP, generations), generations + 1):
            await _generation(gateway, config, engines, generation, found)
            if generation in marks:
                await asyncio.sleep(0.6)
                found.samples.append(await gateway.sample(generation * SLOTS))
        found.facts = {"generations": generations}
    return found


async def _generation(
    gateway: Watched, config: Mapping[str, Any], engines: Sequence[Engine], generation: int, found: Part
) -> None:
    prompts = {}
    generation += WARM_UP
    adapter = f"adapter-{generation}"
    for slot, engine in enumerate(engines):
        if generation % 2:
            engine.restart()
        else:
            engine.clear()
        engine.name = f"slot-{slot}-{generation}"
        prompts[engine.name] = [generation, slot, *range(158)]
        engine.store(prompts[engine.name])
    entries = [{**engine.entry, "adapters": [adapter]} for engine in engines]
    write(gateway.gateway.process.file, {**config, **models(entries)})
    gateway.gateway.process.signal(signal.SIGHUP)

    async def replaced() -> bool:
        rows = await gateway.gateway.workers()
        return set(rows) == set(prompts) and all(
            row["state"] in ("live", "silent") and row["trust"] == "exact" and row["blocks"] == 10
            for row in rows.values()
        )

    await until(replaced, f"generation {generation}", PATIENCE)
    for name, prompt in prompts.items():
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
        answer = await gateway.gateway.post("/v1/completions", body)
        found.require(answer.status == 200 and answer.engine == name, f"{name}'s prompt went elsewhere")
    for _ in range(SLOTS):
        answer = await gateway.gateway.post("/v1/completions", {"model": adapter, "prompt": [1] * 64, "max_tokens": 2})
        found.require(answer.status == 200, f"a request for {adapter} got {answer.status}")
