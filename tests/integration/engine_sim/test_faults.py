"""Each fault does what it says, once, and what is not broken goes on."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvsync.engine_sim import SimConfig, SimEngine, TimeModel
from kvsync.engine_sim.faults import (
    AnswerStatus,
    CutReplays,
    CutStream,
    DropBatches,
    Freeze,
    Heal,
    Refuse,
    ResetConnection,
    Restart,
)
from kvsync.engine_sim.publisher import Publisher
from tests.integration.engine_sim.subscriber import Subscriber
from tests.integration.engine_sim.waiting import until

PROMPT = list(range(40))
BODY = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with SimEngine(SimConfig(time=TimeModel(speed=1_000))) as running:
        yield running


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.url, timeout=aiohttp.ClientTimeout(20)) as session:
        yield session


def publisher(engine: SimEngine) -> Publisher:
    found = engine.ranks[0].publisher
    assert found
    return found


async def complete(client: aiohttp.ClientSession, **changes: Any) -> int:
    """Cached tokens of a whole answer."""
    async with client.post("/v1/completions", json=BODY | changes) as answer:
        assert answer.status == 200
        found: int = (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found


async def collect(answer: aiohttp.ClientResponse, received: list[bytes]) -> None:
    async for data in answer.content.iter_any():
        received.append(data)


async def test_status(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    await engine.inject(AnswerStatus(status=503))
    await engine.inject(AnswerStatus(count=2))
    statuses = []
    for _ in range(4):
        async with client.post("/v1/completions", json=BODY) as answer:
            statuses.append(answer.status)
            if answer.status != 200:
                assert (await answer.json())["error"]["code"] == answer.status
    assert statuses == [503, 500, 500, 200]


async def test_reset_before_the_first_byte(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    await engine.inject(ResetConnection())
    # A fresh connection: on a reused one the client would try again by itself.
    async with aiohttp.ClientSession(engine.url) as fresh:
        with pytest.raises(aiohttp.ClientOSError) as error:
            await fresh.post("/v1/completions", json=BODY)
    assert error.value.errno == errno.ECONNRESET
    assert await complete(client) == 0


async def test_a_stream_is_cut(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    await engine.inject(CutStream(after=2))
    async with client.post("/v1/completions", json=BODY | {"stream": True}) as answer:
        received: list[bytes] = []
        with pytest.raises(aiohttp.ClientError):
            await collect(answer, received)
    assert b"".join(received).count(b"data: ") <= 2
    await until(lambda: engine.ranks[0].load == 0)
    async with client.post("/v1/completions", json=BODY | {"stream": True}) as answer:
        assert (await answer.text()).endswith("data: [DONE]\n\n")


async def test_refused_connections(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    assert await complete(client) == 0
    await engine.inject(Refuse(seconds=60))
    assert await complete(client) == 32  # On the connection that is open.
    async with aiohttp.ClientSession(engine.url) as fresh:
        with pytest.raises(aiohttp.ClientConnectorError):
            await complete(fresh)
        await engine.inject(Heal())
        assert await complete(fresh) == 32


async def test_refused_for_a_while(engine: SimEngine) -> None:
    await engine.inject(Refuse(seconds=0.05))
    async with aiohttp.ClientSession(engine.url) as fresh:
        with pytest.raises(aiohttp.ClientConnectorError):
            await complete(fresh)

        async def served() -> bool:
            try:
                return await complete(fresh) == 0
            except aiohttp.ClientConnectorError:
                return False

        async with asyncio.timeout(10):
            while not await served():
                pass


async def test_frozen(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    await complete(client)
    reader = await asyncio.to_thread(Subscriber, publisher(engine))
    with reader:
        async with client.post("/sim/fault", json={"kind": "freeze"}) as answer:
            assert answer.status == 200
        health = asyncio.create_task(client.get("/health").__aenter__())
        asking = asyncio.create_task(complete(client, prompt=PROMPT[::-1]))
        reader.ask(b"", bytes(8))
        _, pending = await asyncio.wait([health, asking], timeout=0.1)
        assert pending == {health, asking}
        assert reader.silent(1)
        assert reader.answer(1) is None
        async with client.post("/sim/fault", json={"kind": "heal"}) as answer:
            assert answer.status == 200
        assert (await health).status == 200
        assert await asking == 0
        assert (await asyncio.to_thread(reader.batch))[0] == reader.base
        assert await asyncio.to_thread(reader.answer) is not None


async def test_frozen_for_a_while(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    await engine.inject(Freeze(seconds=0.05))
    assert not engine.thawed.is_set()
    assert await complete(client) == 0


async def test_dropped_and_lost_batches(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    source = publisher(engine)
    reader = await asyncio.to_thread(Subscriber, source)
    with reader:
        await engine.inject(DropBatches(count=1))
        await complete(client)
        await complete(client, prompt=PROMPT[::-1])
        assert (await asyncio.to_thread(reader.batch))[0] == reader.base + 1
        assert [seq - reader.base for seq, _ in await asyncio.to_thread(reader.replay, reader.base)] == [0, 1]
        async with client.post("/sim/fault", json={"kind": "drop_batches", "forever": True}) as answer:
            assert answer.status == 200
        await complete(client, prompt=[7, *PROMPT])
        await complete(client, prompt=[8, *PROMPT])
        assert (await asyncio.to_thread(reader.batch))[0] == reader.base + 3
        assert [seq - reader.base for seq, _ in await asyncio.to_thread(reader.replay, reader.base)] == [0, 1, 3]
        await engine.inject(CutReplays(after=1))
        reader.ask(b"", bytes(8))
        assert await asyncio.to_thread(reader.answer) is not None
        assert await asyncio.to_thread(reader.answer, 50) is None
        await engine.inject(Heal())
        assert len(await asyncio.to_thread(reader.replay, reader.base)) == 3


async def test_restart(client: aiohttp.ClientSession) -> None:
    config = SimConfig(data_parallel_size=2, time=TimeModel(decode_rate=50))
    async with SimEngine(config) as engine, aiohttp.ClientSession(engine.url) as mine:
        addresses = (engine.url, engine.events, engine.replay)
        assert await complete(mine) == 0
        first = publisher(engine)
        streams = []
        for _ in range(2):
            answer = await mine.post("/v1/completions", json=BODY | {"max_tokens": 1_000, "stream": True})
            await answer.content.readany()
            streams.append(answer)
        async with mine.post("/sim/fault", json={"kind": "restart"}) as restarted:
            assert restarted.status == 200
        for answer in streams:
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        assert (engine.url, engine.events, engine.replay) == addresses
        second = publisher(engine)
        assert second is not first
        assert second.endpoint == first.endpoint
        assert second.published == 0
        assert await complete(mine) == 0
        assert [rank.load for rank in engine.ranks] == [0, 0]


async def test_restart_of_a_frozen_engine_that_refuses(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    await engine.inject(Freeze())
    await engine.inject(Refuse(seconds=60))
    await engine.inject(AnswerStatus())
    await engine.inject(Restart())
    assert await complete(client) == 0


async def test_healing_disarms_what_waits(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    for fault in (AnswerStatus(count=5), ResetConnection(count=5), CutStream(count=5), DropBatches(count=5)):
        await engine.inject(fault)
    await engine.inject(Heal())
    await complete(client)
    async with client.post("/v1/completions", json=BODY | {"stream": True}) as answer:
        assert (await answer.text()).endswith("[DONE]\n\n")
    assert publisher(engine).faults.drop_next == 0


async def test_faults_that_need_events() -> None:
    async with SimEngine(SimConfig(kv_events=False)) as engine:
        with pytest.raises(ValueError, match="switched off"):
            await engine.inject(DropBatches())
        with pytest.raises(ValueError, match="no rank 1"):
            await engine.inject(CutReplays(after=0, rank=1))
        await engine.inject(Freeze())
        await engine.inject(Restart())
        await engine.inject(Heal())


async def test_addresses_that_are_taken(engine: SimEngine) -> None:
    assert engine.events
    taken = [int(address.rpartition(":")[2]) for address in (engine.url, engine.events)]
    with pytest.raises(OSError):
        await SimEngine(SimConfig(port=taken[0])).start()
    with pytest.raises(OSError, match="no ports for events"):
        await SimEngine(SimConfig(events_port=taken[1], replay_port=1)).start()


async def test_stopping_cuts_what_is_open_and_can_be_repeated() -> None:
    engine = SimEngine(SimConfig(time=TimeModel(decode_rate=50)))
    await engine.start()
    async with aiohttp.ClientSession(engine.url) as session:
        answer = await session.post("/v1/completions", json=BODY | {"max_tokens": 1_000, "stream": True})
        await answer.content.readany()
        await engine.stop()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    await engine.stop()
