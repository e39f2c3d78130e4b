"""Shared load through a real server: eight replicas, one that dies, a server that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvsync.config.redis import LoadSharingSettings
from kvsync.routing.decision import Load
from kvsync.routing.load import LoadTable
from kvsync.store.client import LONGEST_REPLY
from kvsync.store.loads import MOST_REPLICAS, SharedLoads
from tests.integration.store.conftest import Told, store, until
from tests.valkey import Valkey

SETTINGS = LoadSharingSettings(interval=0.02, lifetime=0.5)


class Replica(Told):
    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.table = LoadTable(64.0)
        self.table.view(["a", "b"])

    def addresses(self) -> Iterable[tuple[str, str]]:
        return [("a", "http://a 0"), ("b", "http://b 0")]

    def replicas(self, others: int) -> None: ...

    def load_news_unusable(self, reason: str) -> None: ...

    def hears(self, worker: str) -> Load:
        return self.table.elsewhere().get(worker, Load())

    @asynccontextmanager
    async def sharing(self, url: str, *, prefix: str = "kvsync") -> AsyncIterator[asyncio.Task[None]]:
        async with store(url, self, timeout=0.3, prefix=prefix) as shared:
            loads = SharedLoads(shared, SETTINGS, self.table, self, self)

            async def keep() -> None:
                while True:
                    await loads.step()

            task = asyncio.create_task(keep())
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await loads.stop()


@pytest.mark.faults
async def test_eight_replicas_know_of_each_other(valkey: Valkey) -> None:
    """What one has sent, the others know (M1)."""
    replicas = [Replica() for _ in range(8)]
    async with AsyncExitStack() as stack:
        tasks = [await stack.enter_async_context(replica.sharing(valkey.url)) for replica in replicas]
        ticket = replicas[0].table.reserve("a", 100)
        await until(lambda: all(each.hears("a") == Load(1, 100) for each in replicas[1:]), "it is not heard everywhere")
        assert replicas[0].hears("a") == Load()
        ticket.first_byte()
        await until(lambda: all(each.hears("a") == Load(1, 0) for each in replicas[1:]), "a first byte is not heard")
        ticket.end()
        await until(lambda: all(each.hears("a") == Load() for each in replicas[1:]), "an end is not heard")

        for replica in replicas:
            replica.table.reserve("b", 10)
        await until(lambda: all(each.hears("b") == Load(7, 70) for each in replicas), "not all are added")
        tasks[0].cancel()  # it dies without a word
        await until(lambda: all(each.hears("b") == Load(6, 60) for each in replicas[1:]), "the dead go on counting")
        assert all(replica.table.total() == 1 for replica in replicas)


async def test_a_server_that_is_away_and_comes_back(valkey: Valkey) -> None:
    one, two = Replica(), Replica()
    async with one.sharing(valkey.url), two.sharing(valkey.url):
        two.table.reserve("a", 7)
        await until(lambda: one.hears("a") == Load(1, 7), "not heard")
        valkey.freeze()
        await until(lambda: one.hears("a") == Load(), "what nobody renews goes on counting")
        valkey.thaw()
        await until(lambda: one.hears("a") == Load(1, 7), "not heard again")
        valkey.stop()
        await until(lambda: one.hears("a") == Load(), "what nobody renews goes on counting")
        await valkey.start()
        await until(lambda: one.hears("a") == Load(1, 7), "not heard again")


async def test_fleets_with_prefixes_of_their_own_do_not_meet(valkey: Valkey) -> None:
    one, two, other = Replica(), Replica(), Replica()
    async with (
        one.sharing(valkey.url, prefix="one"),
        two.sharing(valkey.url, prefix="one"),
        other.sharing(valkey.url, prefix="other"),
    ):
        for replica in (one, two, other):
            replica.table.reserve("a", 7)
        await until(lambda: one.hears("a") == two.hears("a") == Load(1, 7), "not heard")
        rounds = other.results["load_read", "ok"]
        await until(lambda: other.results["load_read", "ok"] > rounds + 2, "the other fleet does not listen")
        assert other.hears("a") == Load()


@pytest.mark.parametrize("junk", ["text", "a large field", "many fields"])
async def test_what_is_no_load_goes_away_by_itself(valkey: Valkey, junk: str, caplog: pytest.LogCaptureFixture) -> None:
    key = "kvsync:load"
    async with valkey.client() as client:
        if junk == "text":
            await client.set(key, "something else")
        elif junk == "a large field":
            await client.hset(key, "x", bytes(LONGEST_REPLY))
        else:
            await client.hset(key, mapping={str(n): "x" for n in range(MOST_REPLICAS + 10)})
        one, two = Replica(), Replica()
        one.table.reserve("a", 7)
        async with one.sharing(valkey.url), two.sharing(valkey.url):
            await until(lambda: two.hears("a") == Load(1, 7), "it does not go on")
            assert await client.hlen(key) == 2
    first = {"text": "error", "a large field": "too_large", "many fields": "ok"}[junk]
    assert one.results["load_read", first] + two.results["load_read", first] >= 1
    assert not one.results["load_read", "timeout"]
    assert f"what is at {key} is no load of replicas, and is removed: " in caplog.text
