"""Load that replicas tell each other: who counts, for how long, and what is not believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from kvsync.config.redis import LoadSharingSettings, RedisSettings
from kvsync.routing.decision import Load
from kvsync.routing.load import LoadTable
from kvsync.store.connection import Command, Store
from kvsync.store.loads import GONE_AFTER, MOST_BYTES, MOST_REPLICAS, SharedLoads
from kvsync.store.replies import Unanswered

LIFETIME = 2.0


class Hash(Store):
    """One hash of a server, without the server."""

    def __init__(self) -> None:
        super().__init__(RedisSettings(), Telemetry())
        self.fields: dict[bytes, bytes] = {}
        self.fails: set[str] = set()
        self.asked: list[Command] = []

    async def ask(self, kind: str, *commands: Command, budget: float) -> list[Any]:
        self.asked += commands
        if kind in self.fails:
            raise Unanswered("down")
        return [self._do(*command) for command in commands]

    def _do(self, name: Any, key: Any, *arguments: Any) -> Any:
        if name == "PEXPIRE":
            return True
        assert key == "kvsync:load"
        if name == "HSET":
            self.fields[arguments[0]] = arguments[1]
        elif name == "HDEL":
            for field in arguments:
                self.fields.pop(field, None)
        elif name == "HGETALL":
            return dict(self.fields)
        return 1


class Telemetry:
    def __init__(self) -> None:
        self.others = 0
        self.unusable: Counter[str] = Counter()

    def replicas(self, others: int) -> None:
        self.others = others

    def load_news_unusable(self, reason: str) -> None:
        self.unusable[reason] += 1

    def redis_called(self, call: str, result: str, seconds: float) -> None: ...

    def redis_state(self, state: str) -> None: ...


class Workers:
    """Names differ between replicas, addresses do not."""

    def __init__(self, **addresses: str) -> None:
        self.version = 0
        self._addresses = addresses

    def addresses(self) -> Iterable[tuple[str, str]]:
        return self._addresses.items()


class Replica:
    def __init__(self, store: Hash, clock: Any = None, **addresses: str) -> None:
        self.now = 100.0
        self.table = LoadTable(64.0)
        self.telemetry = Telemetry()
        self.workers = Workers(**(addresses or {"a": "http://a 0", "b": "http://b 0"}))
        settings = LoadSharingSettings(lifetime=LIFETIME)
        self.shared = SharedLoads(store, settings, self.table, self.workers, self.telemetry, lambda: self.now)
        self.table.view(list(addresses or "ab"))

    def hears(self) -> dict[str, Load]:
        self.shared.add_up()
        return {worker: load for worker, load in self.table.elsewhere().items() if load != Load()}


async def rounds(count: int, *replicas: Replica) -> None:
    for _ in range(count):
        for replica in replicas:
            await replica.shared.exchange()


async def test_each_adds_what_the_others_sent_and_not_its_own() -> None:
    store = Hash()
    one, two, three = (Replica(store) for _ in range(3))
    one.table.reserve("a", 100)
    two.table.reserve("a", 20)
    two.table.reserve("b", 3).first_byte()
    await rounds(3, one, two, three)
    assert one.hears() == {"a": Load(1, 20), "b": Load(1, 0)}
    assert two.hears() == {"a": Load(1, 100)}
    assert three.hears() == {"a": Load(2, 120), "b": Load(1, 0)}
    assert [each.telemetry.others for each in (one, two, three)] == [2, 2, 2]
    assert one.shared.replicas == 2


async def test_workers_are_known_by_their_addresses() -> None:
    store = Hash()
    one = Replica(store, a="http://x 0", b="http://y 0")
    two = Replica(store, b="http://x 0", c="http://z 0")
    one.table.reserve("a", 5)
    one.table.reserve("b", 6)
    await rounds(2, one, two)
    assert two.hears() == {"b": Load(1, 5)}


async def test_who_says_nothing_more_counts_for_its_lifetime() -> None:
    store = Hash()
    one, two = Replica(store), Replica(store)
    two.table.reserve("a", 7)
    await rounds(2, two, one)
    assert one.hears() == {"a": Load(1, 7)}
    for _ in range(10):  # its field is still there
        one.now += LIFETIME / 11
        await rounds(1, one)
    assert one.hears() == {"a": Load(1, 7)}
    one.now += LIFETIME / 10
    assert one.hears() == {}
    assert one.telemetry.others == 0
    await rounds(1, two, one)
    assert one.hears() == {"a": Load(1, 7)}


async def test_without_redis_what_was_told_runs_out() -> None:
    store = Hash()
    one, two = Replica(store), Replica(store)
    two.table.reserve("a", 7)
    await rounds(2, two, one)
    store.fails = {"load_tell", "load_read"}
    one.now += LIFETIME + 0.001
    await rounds(1, one)
    assert one.hears() == {}


async def test_a_server_that_takes_nothing_is_still_read() -> None:
    store = Hash()
    one, two = Replica(store), Replica(store)
    two.table.reserve("a", 7)
    await rounds(2, two)
    await rounds(1, one)
    store.fails = {"load_tell"}
    await rounds(1, one)
    store.fails = set()
    await rounds(1, two)
    store.fails = {"load_tell"}
    await rounds(1, one)
    assert one.hears() == {"a": Load(1, 7)}


async def test_who_died_before_this_one_started_never_counts() -> None:
    store = Hash()
    dead = Replica(store)
    dead.table.reserve("a", 7)
    await rounds(5, dead)
    one = Replica(store)
    for _ in range(10):
        await rounds(1, one)
        assert one.hears() == {}
        one.now += LIFETIME / 5


async def test_clocks_of_hosts_mean_nothing() -> None:
    store = Hash()
    one, two = Replica(store), Replica(store)
    two.now = 5e9
    two.table.reserve("a", 7)
    await rounds(2, two, one)
    assert one.hears() == {"a": Load(1, 7)}


async def test_who_stops_is_forgotten_at_once() -> None:
    store = Hash()
    one, two = Replica(store), Replica(store)
    two.table.reserve("a", 7)
    await rounds(2, two, one)
    await two.shared.stop()
    await rounds(1, one)
    assert one.hears() == {}
    assert len(store.fields) == 1


async def test_fields_of_the_dead_are_removed() -> None:
    store = Hash()
    store.fields[b"\xff garbage"] = b"\xc1"
    one, two = Replica(store), Replica(store)
    await rounds(2, two, one)
    assert len(store.fields) == 3
    one.now += GONE_AFTER * LIFETIME + 1
    await rounds(1, one)
    assert len(store.fields) == 1
    assert one.telemetry.unusable == {"malformed": 1}
    lives = {int(command[2]) for command in store.asked if command[0] == "PEXPIRE"}
    assert lives == {60_000}


async def test_a_fleet_that_changes_is_counted_anew() -> None:
    store = Hash()
    one, two = Replica(store), Replica(store)
    two.table.reserve("a", 7)
    await rounds(2, two, one)
    one.workers = Workers(c="http://a 0")
    one.shared._workers = one.workers
    one.workers.version = 1
    one.table.view("c")
    assert one.hears() == {"c": Load(1, 7)}


encode = msgspec.msgpack.encode
NUMBER = 2**64 - 1


@pytest.mark.parametrize(
    "news",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"[1, 2, []]",
        b"\x91" * 100_000,
        encode([2, 7, []]),
        encode([1, -7, []]),
        encode([1, 2**63, []]),
        encode([1, 7.5, []]),
        encode([1, 7, [[NUMBER, 1]]]),
        encode([1, 7, [[NUMBER, 1, 1, 1]]]),
        encode([1, 7, [[NUMBER, -1, 1]]]),
        encode([1, 7, [[NUMBER, 1, 2**50]]]),
        encode([1, 7, [["a", 1, 1]]]),
        encode([1, 7, {}, 9]),
        encode({"version": 1}),
        b"\xdd\xff\xff\xff\xff",
    ],
)
async def test_what_is_no_load_counts_nothing_and_is_counted(news: bytes) -> None:
    store = Hash()
    one, two = Replica(store), Replica(store)
    two.table.reserve("a", 7)
    store.fields[b"x"] = news
    await rounds(3, two, one)
    assert one.hears() == {"a": Load(1, 7)}
    assert one.telemetry.unusable == {"malformed": 1}


def test_adding_up_takes_no_more_than_its_share_of_time() -> None:
    replica = Replica(Hash())
    assert replica.shared.pause == 0.05
    replica.shared._took = 0.01
    assert replica.shared.pause == pytest.approx(0.2)


async def test_bounds() -> None:
    store = Hash()
    one = Replica(store)
    store.fields = {b"%d" % n: encode([1, 1, []]) for n in range(MOST_REPLICAS - 1)}
    store.fields[b"large"] = encode([1, 1, [[n, 1, 1] for n in range(2**60, 2**60 + MOST_BYTES // 9)]])
    await rounds(1, one)
    assert one.telemetry.unusable == {"too_large": 1}
    store.fields[b"one more"] = encode([1, 1, []])
    await rounds(1, one)
    assert one.telemetry.unusable == {"too_large": 1, "too_many": 1}
