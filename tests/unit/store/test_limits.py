"""Limits by AIBrix's keys, alone and together, with and without an answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from kvsync.config.limits import LimitsSettings
from kvsync.config.redis import RedisSettings
from kvsync.store.connection import Command, Store
from kvsync.store.limits import LONGEST_NAME, MOST_USERS, Limits, Verdict
from kvsync.store.replies import REASONS, UNDONE, Reason, Unanswered

NOW = 1_700_000_000.0
"""Second 20 of minute 28,333,333, whose bin is 21."""
BIN = 21


class Server(Store):
    """Keys of a server, without the server."""

    def __init__(self) -> None:
        super().__init__(RedisSettings(url="redis://nobody"), Telemetry())
        self.keys: dict[bytes, bytes] = {}
        self.lives: dict[bytes, int] = {}
        self.fails: bool | Reason = False
        self.held: asyncio.Event | None = None
        """Calls are done at once, and answered when it is set."""
        self.calls: list[tuple[Command, ...]] = []

    async def ask(self, kind: str, *commands: Command, budget: float) -> list[Any]:
        self.calls.append(commands)
        if self.fails or budget <= 0:
            raise Unanswered("timeout" if isinstance(self.fails, bool) else self.fails)
        replies = [self._do(*command) for command in commands]
        if self.held is not None:
            await self.held.wait()
        return replies

    def _do(self, name: Any, key: Any, amount: Any = None) -> Any:
        if name == "GET":
            return self.keys.get(key)
        if name == "EXPIRE":
            self.lives[key] = amount
            return True
        assert name == "INCRBY"
        count = int(self.keys.get(key, b"0")) + amount
        self.keys[key] = b"%d" % count
        return count


class Telemetry:
    def __init__(self) -> None:
        self.results: Counter[tuple[str, str, str]] = Counter()
        self.faults: Counter[str] = Counter()

    def limited(self, kind: str, result: str, counted: str) -> None:
        self.results[kind, result, counted] += 1

    def limit_fault(self, reason: str) -> None:
        self.faults[reason] += 1

    def redis_called(self, call: str, result: str, seconds: float) -> None: ...

    def redis_state(self, state: str) -> None: ...


class Replica:
    def __init__(self, server: Server, models: dict[str, int] | None = None, **settings: Any) -> None:
        self.now = NOW
        self.telemetry = Telemetry()
        made = LimitsSettings(**{"users": True, **settings})
        self.limits = Limits(made, models or {}, server, self.telemetry, lambda: self.now)

    async def ask(self, user: bytes = b"alice", model: str = "m") -> Verdict:
        judging = self.limits.begin(user, model)
        assert judging is not None
        return await judging


def record(**figures: object) -> bytes:
    return json.dumps({"name": "alice", **figures}).encode()


async def test_keys_are_aibrix_s() -> None:
    server = Server()
    replica = Replica(server, {"m": 100})
    server.keys[b"aibrix-users/alice"] = record(rpm=5, tpm=1000)
    verdict = await replica.ask()
    assert verdict.refused is None
    assert verdict.wants_usage
    assert verdict.fields == (b"x-update-rpm: 1\r\n", b"x-update-tpm: 0\r\n")
    verdict.spent({"total_tokens": 12}, 0)
    await replica.limits.tell()
    assert server.keys == {
        b"aibrix-users/alice": record(rpm=5, tpm=1000),
        b"aibrix:alice_RPM_CURRENT:%d" % BIN: b"1",
        b"aibrix:alice_TPM_CURRENT:%d" % BIN: b"12",
        b"aibrix_model:m_MODEL_RPS_CURRENT:%d" % (NOW % 64): b"1",
    }
    assert sorted(server.lives.values()) == [1, 60, 60]
    assert [len(call) for call in server.calls] == [4, 2, 2]  # one exchange each


async def test_requests_up_to_the_limit_pass_whichever_replica_they_meet() -> None:
    server = Server()
    server.keys[b"aibrix-users/alice"] = record(rpm=3)
    one, two = Replica(server), Replica(server)
    assert [(await each.ask()).refused for each in (one, two, one, two, one)] == [None, None, None, "rpm", "rpm"]
    refusal = await two.ask()
    assert (refusal.subject, refusal.allowed, refusal.retry_after) == ("alice", 3, 40)
    assert (await two.ask(b"bob")).refused is None
    one.now = two.now = NOW + 40
    assert (await two.ask()).refused is None
    assert two.telemetry.results == {
        ("user", "allowed", "shared"): 3,
        ("user", "rpm_exceeded", "shared"): 2,
    }


@pytest.mark.parametrize(
    ("text", "rpm", "tpm"),
    [
        (None, 100, 100_000),
        (record(), 100, 100_000),
        (record(rpm=0, tpm=0), 100, 100_000),
        (record(rpm=7), 7, 7000),
        (record(rpm=7, tpm=9), 7, 9),
        (record(tpm=9), 100, 9),
    ],
)
async def test_defaults_are_aibrix_s(text: bytes | None, rpm: int, tpm: int) -> None:
    server = Server()
    if text is not None:
        server.keys[b"aibrix-users/alice"] = text
    replica = Replica(server)
    server.keys[b"aibrix:alice_RPM_CURRENT:%d" % BIN] = b"%d" % (rpm - 1)
    assert (await replica.ask()).refused is None
    assert (await replica.ask()).allowed == rpm
    server.keys[b"aibrix:alice_RPM_CURRENT:%d" % BIN] = b"0"
    server.keys[b"aibrix:alice_TPM_CURRENT:%d" % BIN] = b"%d" % (tpm - 1)
    assert (await replica.ask()).refused is None
    server.keys[b"aibrix:alice_TPM_CURRENT:%d" % BIN] = b"%d" % tpm
    refusal = await replica.ask()
    assert (refusal.refused, refusal.allowed) == ("tpm", tpm)


async def test_defaults_can_be_set() -> None:
    server = Server()
    replica = Replica(server, requests_per_minute=2, tokens_per_minute=5)
    (await replica.ask()).spent({"total_tokens": 5}, 0)
    assert (await replica.ask()).refused == "tpm"
    assert (await replica.ask()).refused == "rpm"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"alice",
        b"[]",
        b'{"rpm": "5"}',
        b'{"rpm": -5}',
        b'{"rpm": 1e99}',
        b'{"rpm": 99999999999999999999}',
        b"\xff",
        b"[" * 100_000,
    ],
)
async def test_a_record_that_is_none_leaves_the_defaults(text: bytes) -> None:
    server = Server()
    server.keys[b"aibrix-users/alice"] = text
    replica = Replica(server, requests_per_minute=1)
    assert (await replica.ask()).refused is None
    assert (await replica.ask()).refused == "rpm"
    assert replica.telemetry.faults == {"bad_record": 2}


@pytest.mark.parametrize("spoilt", [b"", b"many", b"-7", b"9" * 5000])
async def test_a_spoilt_count_of_tokens_refuses_nobody(spoilt: bytes) -> None:
    server = Server()
    server.keys[b"aibrix:alice_TPM_CURRENT:%d" % BIN] = spoilt
    assert (await Replica(server).ask()).refused is None


async def test_without_an_answer_each_goes_on_from_what_it_heard_last() -> None:
    server = Server()
    server.keys[b"aibrix-users/alice"] = record(rpm=5, tpm=100)
    one, two = Replica(server), Replica(server)
    for each in (one, two, one):
        (await each.ask()).spent({"total_tokens": 10}, 0)
    await one.limits.tell()
    server.fails = True
    assert [(await one.ask()).refused for _ in range(4)] == [None, None, "rpm", "rpm"]  # 3 were counted together
    assert [(await two.ask()).refused for _ in range(4)] == [None, None, None, "rpm"]  # it had heard of 2
    assert two.telemetry.results["user", "allowed", "alone"] == 3
    one.now += 60
    assert (await one.ask()).refused is None
    (await one.ask()).spent({"total_tokens": 100}, 0)
    assert (await one.ask()).refused == "tpm"  # by the record that it read before
    server.fails = False
    one.now += 60
    assert (await one.ask()).refused is None
    assert server.keys[b"aibrix:alice_RPM_CURRENT:%d" % (BIN + 2)] == b"1"


async def test_tokens_that_could_not_be_told_still_count_here() -> None:
    server = Server()
    server.keys[b"aibrix-users/alice"] = record(tpm=10)
    one, two = Replica(server), Replica(server)
    (await one.ask()).spent({"total_tokens": 10}, 0)
    assert (await one.ask()).refused == "tpm"  # before they are told, too
    server.fails = True
    await one.limits.tell()
    server.fails = False
    assert (await one.ask()).refused == "tpm"
    assert (await two.ask()).refused is None
    assert one.telemetry.faults == {"untold": 1}
    await one.limits.tell()
    assert b"aibrix:alice_TPM_CURRENT:%d" % BIN not in server.keys


async def test_tokens_on_their_way_are_not_counted_twice() -> None:
    """Redis has them and has not said so yet: nobody is refused for it."""
    server = Server()
    server.keys[b"aibrix-users/alice"] = record(tpm=100)
    replica = Replica(server)
    (await replica.ask()).spent({"total_tokens": 60}, 0)
    server.held = asyncio.Event()
    telling = asyncio.create_task(replica.limits.tell())
    await asyncio.sleep(0)
    held, server.held = server.held, None
    for _ in range(2):
        verdict = await replica.ask()
        assert (verdict.refused, verdict.fields[1]) == (None, b"x-update-tpm: 60\r\n")
        held.set()
        await telling
    verdict.spent({"total_tokens": 40}, 0)
    assert (await replica.ask()).refused == "tpm"


@pytest.mark.parametrize("reason", REASONS)
async def test_tokens_of_which_nobody_knows_whether_they_were_told_refuse_nobody_by_being_counted_twice(
    reason: Reason,
) -> None:
    server = Server()
    server.keys[b"aibrix-users/alice"] = record(tpm=100)
    replica = Replica(server)
    (await replica.ask()).spent({"total_tokens": 60}, 0)
    server.fails = reason
    await replica.limits.tell()
    server.fails = False
    told = reason not in UNDONE
    server.keys[b"aibrix:alice_TPM_CURRENT:%d" % BIN] = b"%d" % (30 + 60 * told)  # others told 30
    verdict = await replica.ask()
    assert (verdict.refused, verdict.fields[1]) == (None, b"x-update-tpm: 90\r\n")
    assert replica.telemetry.faults == {"untold": 1}


async def test_an_answer_that_comes_in_the_next_minute_is_of_its_own() -> None:
    server = Server()
    server.keys[b"aibrix-users/alice"] = record(rpm=5, tpm=50)
    replica = Replica(server)
    for _ in range(4):
        await replica.ask()
    server.keys[b"aibrix:alice_TPM_CURRENT:%d" % BIN] = b"49"
    server.held = asyncio.Event()
    waiting = asyncio.create_task(replica.ask())
    await asyncio.sleep(0)
    held, server.held = server.held, None
    replica.now += 60
    assert (await replica.ask()).fields == (b"x-update-rpm: 1\r\n", b"x-update-tpm: 0\r\n")
    held.set()
    verdict = await waiting
    assert (verdict.refused, verdict.fields) == (None, (b"x-update-rpm: 5\r\n", b"x-update-tpm: 49\r\n"))
    server.fails = True  # alone, it goes on from what is of this minute
    verdict = await replica.ask()
    assert (verdict.refused, verdict.fields) == (None, (b"x-update-rpm: 2\r\n", b"x-update-tpm: 0\r\n"))


async def test_told_tokens_count_once() -> None:
    server = Server()
    replica = Replica(server)
    for _ in range(3):
        (await replica.ask()).spent({"prompt_tokens": 5, "completion_tokens": 2}, 0)
    await replica.limits.tell()
    await replica.limits.tell()
    assert server.keys[b"aibrix:alice_TPM_CURRENT:%d" % BIN] == b"21"
    assert (await replica.ask()).fields[1] == b"x-update-tpm: 21\r\n"


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"total_tokens": 9, "prompt_tokens": 1}, 9),
        ({"prompt_tokens": 5, "completion_tokens": 2}, 7),
        ({"input_tokens": 5, "output_tokens": 2}, 7),
        ({"prompt_tokens": 5}, 5),
        ({"total_tokens": True, "output_tokens": 2}, 2),
        ({"total_tokens": -9}, 33),
        ({"total_tokens": 2**80}, 33),
        ({"total_tokens": "9"}, 33),
        ({}, 33),
        (None, 33),
    ],
)
async def test_tokens_of_an_answer(usage: dict[str, object] | None, tokens: int) -> None:
    server = Server()
    replica = Replica(server)
    (await replica.ask()).spent(usage, 33)
    await replica.limits.tell()
    assert server.keys[b"aibrix:alice_TPM_CURRENT:%d" % BIN] == b"%d" % tokens
    assert replica.telemetry.faults == ({"no_usage": 1} if tokens == 33 else {})


async def test_models_have_a_second_and_a_refused_user_takes_none_of_it() -> None:
    server = Server()
    replica = Replica(server, {"m": 2}, requests_per_minute=3)
    assert [(await replica.ask()).refused for _ in range(2)] == [None, None]
    refusal = await replica.ask()
    assert (refusal.refused, refusal.subject, refusal.allowed, refusal.retry_after) == ("model_rps", "m", 2, 1)
    for _ in range(3):
        assert (await replica.ask()).refused == "rpm"
    assert server.keys[b"aibrix_model:m_MODEL_RPS_CURRENT:%d" % (NOW % 64)] == b"3"
    replica.now += 1
    assert (await replica.ask(b"")).refused is None
    assert replica.limits.begin(b"", "other") is None
    server.fails = True
    assert [(await replica.ask(b"")).refused for _ in range(2)] == [None, "model_rps"]
    replica.limits.update({})
    assert replica.limits.begin(b"", "m") is None


@pytest.mark.parametrize("user", [b"", b"alice"])
async def test_those_that_wait_together_for_a_server_that_hangs_are_counted_one_by_one(user: bytes) -> None:
    server = Hanging()
    replica = Replica(server, {"m": 5 if not user else 1000}, requests_per_minute=5)
    waiting = [asyncio.create_task(replica.ask(user)) for _ in range(20)]
    await asyncio.sleep(0)
    server.gives_up.set()
    assert sum(verdict.refused is None for verdict in await asyncio.gather(*waiting)) == 5


async def test_an_answer_that_comes_in_the_next_second_is_of_its_own() -> None:
    server = Server()
    replica = Replica(server, {"m": 5})
    server.held = asyncio.Event()
    waiting = asyncio.create_task(replica.ask(b""))
    await asyncio.sleep(0)
    held, server.held = server.held, None
    replica.now += 1
    for _ in range(5):
        assert (await replica.ask(b"")).refused is None
    held.set()
    assert (await waiting).refused is None
    server.fails = True
    assert (await replica.ask(b"")).refused == "model_rps", "five were counted in this second"


class Hanging(Server):
    def __init__(self) -> None:
        super().__init__()
        self.gives_up = asyncio.Event()

    async def ask(self, kind: str, *commands: Command, budget: float) -> list[Any]:
        await self.gives_up.wait()
        raise Unanswered("timeout")


async def test_nothing_is_asked_where_nothing_is_limited() -> None:
    server = Server()
    replica = Replica(server, users=False)
    assert replica.limits.begin(b"alice", "m") is None
    assert not replica.limits.users
    assert Replica(server).limits.begin(b"", "m") is None


async def test_users_without_end_are_bounded() -> None:
    server = Server()
    server.fails = True
    replica = Replica(server, requests_per_minute=1)
    assert (await replica.ask(b"x" * 10_000)).refused is None
    assert (await replica.ask(b"x" * LONGEST_NAME + b"y")).refused == "rpm"
    for n in range(MOST_USERS):
        (await replica.ask(b"%d" % n)).spent({"total_tokens": 1}, 0)
    assert len(replica.limits._users) == MOST_USERS
    assert len(replica.limits._untold) == MOST_USERS
    (await replica.ask(b"one more")).spent({"total_tokens": 1}, 0)
    assert replica.telemetry.faults == {"untold": 1}
    server.fails = False
    server.calls.clear()
    await replica.limits.tell()
    assert len(server.calls) == MOST_USERS / 500
