"""Events that say unusual things of a cache, sent to a whole gateway: what is credited is what is held."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import wire

from .engine import BLOCK, Engine
from .serving import Serving, serving
from .words import tokens

pytestmark = pytest.mark.faults

ADAPTER = "lora1"


@asynccontextmanager
async def place(folder: Path, *names: str, ranks: int = 1) -> AsyncIterator[tuple[Serving, list[Engine]]]:
    """A gateway before engines of these names, all of which serve an adapter, too."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(name, ranks=ranks)) for name in names]
        entries = [engine.entry | {"adapters": [ADAPTER]} for engine in engines]
        gateway = await stack.enter_async_context(serving(folder, *entries, followed=False))
        await gateway.live()
        for engine in engines:
            await engine.subscribed()
        yield gateway, engines


async def credits(gateway: Serving, prompt: Sequence[int], model: str = "tiny", **fields: object) -> dict[str, int]:
    """What each worker is credited with."""
    found = await gateway.match(model=model, tokens=list(prompt), **fields)
    return {worker: match["credit"] for worker, match in found["workers"].items()}


async def applied(gateway: Serving, *engines: Engine) -> None:
    """Return once all that these engines published is in the index."""
    await gateway.applied({engine.name: engine.publisher.published for engine in engines})


@pytest.mark.parametrize(
    "names",
    [[-1, -(2**63)], [2**63, 2**64 - 1], [b"\x01" * 32, b"\x02" * 32], [b"\x01" * 8, b"\x02" * 8]],
    ids=["negative", "above 2^63", "32 bytes", "8 bytes"],
)
async def test_hashes_of_every_form_come_and_go(tmp_path: Path, names: list[int | bytes]) -> None:
    """(W3) Stored, then removed: the index is empty again."""
    prompt = tokens(2 * BLOCK + 1)
    async with place(tmp_path, "a") as (gateway, (engine,)):
        engine.tell(wire.stored(names, prompt[: 2 * BLOCK], block_size=BLOCK))
        await gateway.credited("a", prompt, 2 * BLOCK)
        engine.tell(wire.removed([names[1]]), wire.removed([names[0]]))
        await gateway.credited("a", prompt, 0)
        assert (await gateway.workers())["a"]["blocks"] == 0


async def test_long_hashes_that_share_their_ends_are_two(tmp_path: Path) -> None:
    """(W3) 32 bytes are not shortened to the 8 that another hash has, too."""
    one, two = tokens(BLOCK + 1), tokens(BLOCK + 1)
    first, second = b"\x07" * 12 + b"\x01" * 8 + b"\x07" * 12, b"\x07" * 12 + b"\x02" * 8 + b"\x07" * 12
    async with place(tmp_path, "a") as (gateway, (engine,)):
        engine.tell(wire.stored([first], one[:BLOCK], block_size=BLOCK))
        engine.tell(wire.stored([second], two[:BLOCK], block_size=BLOCK))
        await gateway.credited("a", two, BLOCK)
        engine.tell(wire.removed([first]))
        await gateway.credited("a", one, 0)
        assert await credits(gateway, two) == {"a": BLOCK}


async def test_an_adapter_its_salts_and_its_images_are_told_apart(tmp_path: Path) -> None:
    """(W4) Keys [name], [name, salt] and [name, image]: each block serves its own kind of request only."""
    prompt = tokens(2 * BLOCK + 1)
    async with place(tmp_path, "plain", "salted", "image") as (gateway, engines):
        plain, image = [ADAPTER], [ADAPTER, ["image-7", 3]]
        for engine, keys in zip(engines, ([plain, plain], [[ADAPTER, "s"], plain], [image, image]), strict=True):
            engine.store(prompt, lora_name=ADAPTER, lora_id=1, extra_keys=keys)
        await applied(gateway, *engines)
        assert await credits(gateway, prompt, ADAPTER) == {"plain": 2 * BLOCK, "salted": 0, "image": 0}
        assert await credits(gateway, prompt, ADAPTER, cache_salt="s") == {"plain": 0, "salted": 2 * BLOCK, "image": 0}
        assert await credits(gateway, prompt) == {"plain": 0, "salted": 0, "image": 0}


async def test_an_adapter_and_a_salt_of_one_name_are_two_things(tmp_path: Path) -> None:
    """(W5) Adapter X without a salt, and the base model with salt X: the same tokens, even the same engine hash."""
    prompt = tokens(BLOCK + 1)
    async with place(tmp_path, "adapter", "salt") as (gateway, (adapter, salt)):
        adapter.store(prompt, lora_name=ADAPTER, lora_id=1, extra_keys=[[ADAPTER]])
        salt.store(prompt, extra_keys=[[ADAPTER]])
        await applied(gateway, adapter, salt)
        assert await credits(gateway, prompt, ADAPTER) == {"adapter": BLOCK, "salt": 0}
        assert await credits(gateway, prompt, cache_salt=ADAPTER) == {"adapter": 0, "salt": BLOCK}
        assert await credits(gateway, prompt) == {"adapter": 0, "salt": 0}


async def test_bad_events_cost_themselves_only(tmp_path: Path) -> None:
    """(W6) Good, an unknown kind, one without its hashes, one that repeats a hash, good: both good ones count, what was
    known stays, and the stream goes on."""
    old, first, last = tokens(BLOCK + 1), tokens(BLOCK + 1), tokens(BLOCK + 1)
    async with place(tmp_path, "a") as (gateway, (engine,)):
        engine.store(old)
        await gateway.credited("a", old, BLOCK)
        engine.tell(
            wire.stored([1], first[:BLOCK], block_size=BLOCK),
            {"type": "BlockPinned", "block_hashes": [5]},
            {"type": "BlockStored", "token_ids": [1] * BLOCK},
            wire.stored([2, 2], tokens(2 * BLOCK), block_size=BLOCK),
            wire.stored([3], last[:BLOCK], block_size=BLOCK),
        )
        await gateway.credited("a", last, BLOCK)
        assert await credits(gateway, first) == await credits(gateway, old) == {"a": BLOCK}
        row = (await gateway.workers())["a"]
        # What one of them stored is not known: complete no more, and as sound as before.
        assert (row["trust"], row["last_sequence"]) == ("partial", 1)
        counts = row["index"]["counts"]
        assert (counts["skipped_unknown_tag"], counts["skipped_missing_field"]) == (1, 1)


async def test_a_clear_is_of_its_rank_and_of_all_its_tiers(tmp_path: Path) -> None:
    """(I3, I4) A clear names neither: rank 1, and the other engine, keep what they have; rank 0 has nothing, not even
    in host memory, which is the sound reading. A clear of a kind that nobody knows is taken for one."""
    prompt, other = tokens(BLOCK + 1), tokens(BLOCK + 1)
    async with place(tmp_path, "a", "b", ranks=2) as (gateway, (a, b)):

        async def held(*figures: int) -> None:
            for worker, figure in zip(("a#0", "a#1", "b#0"), figures, strict=True):
                await gateway.credited(worker, prompt, figure)

        for engine, rank in ((a, 0), (a, 1), (b, 0)):
            engine.store(prompt, rank=rank)
            engine.store(prompt, rank=rank, medium="CPU")
        await held(BLOCK, BLOCK, BLOCK)
        a.clear(rank=0)
        await held(0, BLOCK, BLOCK)
        assert (await gateway.workers())["a#0"]["blocks"] == 0
        a.store(other, rank=0)
        await gateway.credited("a#0", other, BLOCK)
        a.tell({"type": "TierCleared", "medium": "CPU"}, rank=1)
        await held(0, 0, BLOCK)
        assert await credits(gateway, other) == {"a#0": BLOCK, "a#1": 0, "b#0": 0, "b#1": 0}


async def test_the_block_size_is_that_of_the_events(tmp_path: Path) -> None:
    """(I6) 32 here, 528 there: each is matched in its own blocks, and a prompt shorter than one goes by load."""
    prompt = tokens(1100)
    async with place(tmp_path, "a", "b") as (gateway, (a, b)):
        a.tell(wire.stored(range(1, 35), prompt[: 34 * 32], block_size=32))
        b.tell(wire.stored([1, 2], prompt[: 2 * 528], block_size=528))
        await gateway.credited("a", prompt, 34 * 32)
        await gateway.credited("b", prompt, 2 * 528)
        rows = await gateway.workers()
        assert (rows["a"]["block_size"], rows["b"]["block_size"]) == (32, 528)
        answer, decision = await gateway.complete("tiny", prompt[:20], max_tokens=1)
        assert answer.status == 200
        assert set(decision.credit.values()) == {0}


async def test_what_left_the_gpu_counts_less_and_what_left_all_tiers_nothing(tmp_path: Path) -> None:
    """(I9) Stored on the GPU, copied to host memory, removed from the GPU, removed from host memory."""
    prompt = tokens(3 * BLOCK + 1)
    async with place(tmp_path, "a", "b") as (gateway, (a, b)):
        a.store(prompt)
        a.store(prompt, medium="CPU")
        a.tell(*(wire.removed([name]) for name in a.names(prompt)))
        b.store(prompt)
        await applied(gateway, a, b)
        found = (await gateway.match(model="tiny", tokens=prompt))["workers"]
        assert found["a"]["by_tier"] == {"cpu": 3 * BLOCK}
        assert found["b"]["by_tier"] == {"gpu": 3 * BLOCK}
        for _ in range(3):
            assert (await gateway.complete("tiny", prompt, max_tokens=1))[0].engine == "b"
        b.evict(prompt)
        await gateway.credited("b", prompt, 0)
        assert (await gateway.complete("tiny", prompt, max_tokens=1))[0].engine == "a"
        a.tell(*(wire.removed([name], medium="CPU") for name in a.names(prompt)))
        await gateway.credited("a", prompt, 0)


async def test_offload_events_without_tokens_move_what_is_known_and_nothing_else(tmp_path: Path) -> None:
    """(I10) Block size 0 and no tokens: nothing divides by it; a hash that is known gets another tier, one that is not
    serves nobody. What is only in host memory counts less than the same on a GPU."""
    prompt, unknown = tokens(4 * BLOCK + 1), tokens(BLOCK + 1)
    async with place(tmp_path, "a", "b") as (gateway, (a, b)):
        names = a.names(prompt)
        a.store(prompt)
        placeholder: dict[str, Any] = {"block_size": 0, "medium": "CPU", "extra_keys": None}
        a.tell(wire.stored(names[:3], [], **placeholder), wire.stored(a.names(unknown), [], **placeholder))
        a.tell(*(wire.removed([name]) for name in reversed(names)))
        b.store(prompt[: 3 * BLOCK])
        await applied(gateway, a, b)
        found = (await gateway.match(model="tiny", tokens=prompt))["workers"]
        assert found["a"]["by_tier"] == {"cpu": 3 * BLOCK}
        assert await credits(gateway, unknown) == {"a": 0, "b": 0}
        assert (await gateway.workers())["a"]["trust"] == "exact"
        for _ in range(3):
            assert (await gateway.complete("tiny", prompt, max_tokens=1))[0].engine == "b"


async def test_a_partial_block_that_comes_again_serves_nobody(tmp_path: Path) -> None:
    """(I14) Partial, removed when it became a whole block, then announced again with fewer tokens than a block has."""
    prompt = tokens(2 * BLOCK + 1)
    async with place(tmp_path, "a") as (gateway, (engine,)):
        whole, partial = 11, 12
        engine.tell(wire.stored([whole], prompt[:BLOCK], block_size=BLOCK))
        engine.tell(wire.stored([partial], prompt[BLOCK : BLOCK + 5], parent=whole, block_size=BLOCK))
        engine.tell(
            wire.removed([partial]), wire.stored([13], prompt[BLOCK : 2 * BLOCK], parent=whole, block_size=BLOCK)
        )
        await gateway.credited("a", prompt, 2 * BLOCK)
        engine.tell(wire.stored([partial], prompt[BLOCK : BLOCK + 5], parent=whole, block_size=BLOCK))
        await applied(gateway, engine)
        # The promoted block stays, the stale one is counted and never matched.
        assert await credits(gateway, prompt) == {"a": 2 * BLOCK}
        assert (await gateway.workers())["a"]["index"]["counts"]["unplaced"] == 2
        engine.tell(wire.removed([13]))
        await gateway.credited("a", prompt, BLOCK)


async def test_an_adapters_number_says_nothing(tmp_path: Path) -> None:
    """(I18) Two engines loaded their adapters in another order: one name, two numbers, one prefix. Loaded anew with
    other weights, its blocks of before are dropped by order, per engine."""
    prompt = tokens(BLOCK + 1)
    async with place(tmp_path, "a", "b") as (gateway, (a, b)):
        a.store(prompt, lora_name=ADAPTER, lora_id=1, extra_keys=[[ADAPTER]])
        b.store(prompt, lora_name=ADAPTER, lora_id=7, extra_keys=[[ADAPTER]])
        await applied(gateway, a, b)
        assert await credits(gateway, prompt, ADAPTER) == {"a": BLOCK, "b": BLOCK}
        await gateway.admin.post("/v1/workers/a/forget", {})
        assert await credits(gateway, prompt, ADAPTER) == {"a": 0, "b": BLOCK}


async def test_above_the_cap_credit_is_less_and_never_wrong(tmp_path: Path) -> None:
    """More blocks than the index may know: ends of prefixes go, what is read stays, and the worker is not exact."""
    hot, others = tokens(10 * BLOCK + 1), [tokens(10 * BLOCK + 1) for _ in range(30)]
    async with Engine("a") as a, serving(tmp_path, a, index={"max_blocks": 100}) as gateway:
        a.store(hot)
        await gateway.credited("a", hot, 10 * BLOCK)
        for other in others:
            a.store(other)
            await applied(gateway, a)
            assert await credits(gateway, hot) == {"a": 10 * BLOCK}
            row = (await gateway.workers())["a"]
            assert row["blocks"] <= 100
        assert row["trust"] == "partial"
        assert row["index"]["counts"]["capped"] >= 200
        for other in others:
            assert (await credits(gateway, other))["a"] <= a.holds(other)
        a.clear()
        await gateway.credited("a", hot, 0)
        await gateway.trusted("a", "exact")
