"""Calls of a real server, well and ill: never longer than their budget, counted, and working again by themselves."""

from __future__ import annotations

import asyncio
import importlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import NoneType

import pytest

from kvsync.config.limits import LimitsSettings
from kvsync.config.live import Live
from kvsync.config.redis import LoadSharingSettings, RedisSettings
from kvsync.routing.fleet import Fleet
from kvsync.routing.load import LoadTable
from kvsync.store import connection
from kvsync.store.client import ITEM, LONGEST_REPLY
from kvsync.store.connection import Command, Store
from kvsync.store.limits import Limits
from kvsync.store.loads import SharedLoads
from kvsync.store.replies import Unanswered
from tests.certificates import Authority
from tests.faults.network import Proxy
from tests.integration.store.conftest import Told, store, until
from tests.valkey import Valkey, cluster, free_ports

BUDGET = 0.1
SLACK = 0.4
"""Seconds beyond the budget that a busy machine may take."""


async def refused(asked: Store, reason: str | tuple[str, ...], *command: str, budget: float = BUDGET) -> None:
    """One call that has to fail so, in time."""
    begun = time.monotonic()
    with pytest.raises(Unanswered) as raised:
        await asked.ask("test", command or ("GET", "a"), budget=budget)
    assert raised.value.reason in ((reason,) if isinstance(reason, str) else reason), raised.value
    assert time.monotonic() - begun < budget + SLACK


async def answers(asked: Store) -> bool:
    try:
        await asked.ask("test", ("PING",), budget=5.0)
    except Unanswered:
        return False
    return True


async def until_answered(asked: Store) -> None:
    deadline = time.monotonic() + 20
    while not await answers(asked):
        assert time.monotonic() < deadline, asked.describe()
        await asyncio.sleep(0.01)


async def test_replies_come_in_order_and_are_counted(valkey: Valkey) -> None:
    told = Told()
    async with store(valkey.url, told) as asked:
        assert asked.describe() == {"state": "up", "problem": None}
        commands = [("SET", "a", b"\x00\xff"), ("GET", "a"), ("INCRBY", "n", 5), ("GET", "nothing")]
        assert await asked.ask("test", *commands, budget=5.0) == [True, b"\x00\xff", 5, None]
        assert await asked.ask("test", ("GET", "a"), budget=5.0) == [b"\x00\xff"]
        assert asked.key("load", "x") == "kvsync:load:x"
    assert told.results["test", "ok"] == 2
    assert told.results["ping", "ok"] >= 1
    assert told.states == ["connecting", "up"]
    await refused(asked, "stopped")


async def test_without_a_url_there_is_nobody_to_ask() -> None:
    told = Told()
    async with store(None, told, up=False) as asked:
        assert not asked.configured
        assert asked.renewed == ()
        await refused(asked, "off")
    assert told.states == ["off"]


async def test_without_the_package_it_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    asked = Store(RedisSettings(url="redis://127.0.0.1:1"), told, installed=lambda: False)
    await asked.start()
    assert not asked.configured
    assert "pip install 'kvsync[redis]'" in str(asked.describe()["problem"])
    assert "pip install 'kvsync[redis]'" in caplog.text
    assert told.states == ["unavailable"]
    await refused(asked, "not_installed")
    await asked.stop()


def test_importing_it_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "redis" or name.startswith(("redis.", "kvsync.store"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    module = importlib.import_module("kvsync.store.connection")
    assert module.Store(RedisSettings(url="redis://127.0.0.1:1"), Told(), installed=lambda: False).configured is False


def test_a_gateway_without_redis_never_loads_the_package() -> None:
    program = """
import asyncio, sys
from kvsync.app import App
from kvsync.config import Settings

async def run():
    app = App(Settings.model_validate({"gateway": {"host": "127.0.0.1", "port": 0}, "admin": {"port": 0}}))
    await app.start()
    await app.stop()

asyncio.run(run())
print("redis" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False"]


@pytest.mark.faults
async def test_absent_at_start_and_there_later(valkey: Valkey) -> None:
    """A server that is not there when the gateway starts (D1)."""
    valkey.stop()
    told = Told()
    async with store(valkey.url, told, up=False) as asked:
        await refused(asked, "down")
        await until(lambda: asked.describe()["state"] == "down", "it is not noticed")
        assert "unreachable" in str(asked.describe()["problem"])
        await valkey.start()
        await until(lambda: asked.up, "it is not found")
        assert await answers(asked)
    assert told.results["ping", "unreachable"] >= 1
    assert told.states == ["connecting", "down", "up"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_that_is_started_again_is_used_again(valkey: Valkey, end: int) -> None:
    async with store(valkey.url) as asked:
        assert await answers(asked)
        valkey.stop(end)
        await refused(asked, ("unreachable", "down"))
        await refused(asked, "down")
        await valkey.start()
        await until_answered(asked)


@pytest.mark.faults
async def test_a_black_hole_costs_a_budget_and_then_nothing(valkey: Valkey) -> None:
    """A server that takes everything and answers nothing (D1)."""
    told = Told()
    async with store(valkey.url, told, timeout=0.5) as asked:
        assert await answers(asked)
        valkey.freeze()
        for _ in range(3):
            await refused(asked, "timeout")
        begun = time.monotonic()
        await refused(asked, ("resting", "down"))
        assert time.monotonic() - begun < BUDGET
        await until(lambda: not asked.up, "a server that never answers counts as up")
        await asyncio.gather(*(refused(asked, "down") for _ in range(50)))
        valkey.thaw()
        await until_answered(asked)
    assert told.longest < 5.0


@pytest.mark.faults
async def test_slow_answers_come_to_nobody_and_keep_their_connections(valkey: Valkey) -> None:
    """Replies that take longer than the budget (D1)."""
    async with Proxy(valkey.url) as proxy, store(proxy.endpoint, timeout=5.0) as asked:
        assert await answers(asked)
        proxy.delay = 0.15
        before = proxy.connections
        for n in range(3):
            await refused(asked, "timeout", "SET", f"k{n}", "v")
        await refused(asked, "resting")
        proxy.delay = 0.0
        await until_answered(asked)
        assert asked.up
        assert proxy.connections - before <= 3  # one for each of those under way at once, and none was thrown away
        assert await asked.ask("other", ("GET", "k0"), budget=5.0) == [b"v"]  # done, although nobody waited


async def test_calls_of_one_kind_rest_without_the_others(valkey: Valkey) -> None:
    async with store(valkey.url) as asked:
        slow = ("BLPOP", "nothing", 1)
        for _ in range(3):
            with pytest.raises(Unanswered, match="timeout"):
                await asked.ask("slow", slow, budget=0.01)
        with pytest.raises(Unanswered, match="resting"):
            await asked.ask("slow", slow, budget=0.01)
        assert await asked.ask("other", ("PING",), budget=20.0) == [True]


async def test_a_connection_that_is_reset_is_made_again(valkey: Valkey) -> None:
    async with Proxy(valkey.url) as proxy, store(proxy.endpoint) as asked:
        for reset in (True, False):
            assert await answers(asked)
            proxy.cut(reset=reset)
            await until_answered(asked)


async def test_half_open_connections_end_with_the_timeout(valkey: Valkey) -> None:
    async with Proxy(valkey.url) as proxy, store(proxy.endpoint, timeout=0.3) as asked:
        assert await answers(asked)
        proxy.swallow()
        await refused(asked, "timeout")
        await until_answered(asked)


async def test_more_calls_than_connections_wait_their_turn(valkey: Valkey) -> None:
    told = Told()
    async with Proxy(valkey.url) as proxy, store(proxy.endpoint, told, connections=2) as asked:
        await asyncio.gather(*(asked.ask("test", ("INCRBY", "n", 1), budget=10.0) for _ in range(200)))
        assert proxy.connections <= 2
        proxy.hold()
        held = [asyncio.create_task(asked.ask("held", ("PING",), budget=10.0)) for _ in range(2)]
        await asyncio.sleep(0)  # both begin
        await refused(asked, "busy")
        proxy.release()
        await asyncio.gather(*held)
        assert await asked.ask("count", ("GET", "n"), budget=5.0) == [b"200"]


async def test_the_look_has_a_connection_of_its_own(valkey: Valkey) -> None:
    told = Told()
    async with store(valkey.url, told, connections=1, timeout=5.0) as asked:
        blocked = asyncio.create_task(asked.ask("test", ("BLPOP", "nothing", 1), budget=5.0))
        await asyncio.sleep(0)
        asked._look_now.set()
        looks = told.results["ping", "ok"]
        await until(lambda: told.results["ping", "ok"] > looks, "a busy store can't look")
        await blocked
    assert told.results["ping", "busy"] == 0


async def test_who_leaves_while_it_waits_leaves_nothing_behind(valkey: Valkey) -> None:
    async with Proxy(valkey.url) as proxy, store(proxy.endpoint, connections=1) as asked:
        assert await answers(asked)
        proxy.hold()
        waiting = [asyncio.create_task(asked.ask("test", ("PING",), budget=10.0)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*waiting, return_exceptions=True)
        )
        proxy.release()
        await until_answered(asked)


async def test_stopping_ends_what_is_under_way(valkey: Valkey) -> None:
    async with store(valkey.url) as asked:
        valkey.freeze()
        waiting = asyncio.create_task(asked.ask("test", ("GET", "a"), budget=20.0))
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        await asked.stop()
        with pytest.raises(Unanswered, match="stopped"):
            await waiting
        assert time.monotonic() - begun < 2
        valkey.thaw()


async def test_a_full_server_refuses_and_stays_up(tmp_path: Path) -> None:
    full = ("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    async with Valkey(tmp_path, *full) as valkey, store(valkey.url) as asked:
        await refused(asked, "full", "SET", "a", "b")
        with pytest.raises(Unanswered, match="full"):
            await asked.ask("test", ("GET", "a"), ("SET", "a", "b"), budget=5.0)
        assert await asked.ask("test", ("GET", "a"), budget=5.0) == [None]
        assert asked.up


async def test_what_a_server_refuses_is_its_problem_until_it_takes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that answers and takes no writes is up, and says what is wrong (D1)."""
    caplog.set_level("INFO", connection.__name__)
    told = Told()
    full = ("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    async with Valkey(tmp_path, *full) as valkey, store(valkey.url, told) as asked, valkey.client() as client:
        for kind in ("tell", "count"):
            with pytest.raises(Unanswered, match="full"):
                await asked.ask(kind, ("SET", "a", "b"), budget=5.0)
            assert str(asked.describe()["problem"]).startswith(f"{kind} is refused: full: ")
        # Neither another kind's success says anything of these, nor what a full server takes of the same kind.
        assert await asked.ask("read", ("GET", "a"), budget=5.0) == [None]
        assert await asked.ask("count", ("DEL", "a"), budget=5.0) == [0]
        looks = told.results["ping", "ok"]
        asked._look_now.set()
        await until(lambda: told.results["ping", "ok"] > looks, "it does not look")
        assert asked.describe()["state"] == "up"
        assert str(asked.describe()["problem"]).startswith("count is refused: full: ")
        await client.config_set("maxmemory", 0)
        assert await asked.ask("count", ("SET", "a", "b"), budget=5.0) == [True]
        assert str(asked.describe()["problem"]).startswith("tell is refused: full: ")
        assert "takes calls again" not in caplog.text
        for _ in range(2):
            assert await asked.ask("tell", ("SET", "a", "b"), budget=5.0) == [True]
        assert asked.describe() == {"state": "up", "problem": None}
        assert caplog.text.count("Redis takes calls again") == 1


async def test_what_was_refused_long_ago_is_no_problem_any_more(valkey: Valkey) -> None:
    now = 0.0
    asked = Store(RedisSettings(url=valkey.url), Told(), clock=lambda: time.monotonic() + now)
    await asked.start()
    await asked.looked()
    async with valkey.client() as client:
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        await refused(asked, "read_only", "SET", "a", "b", budget=5.0)
        assert str(asked.describe()["problem"]).startswith("test is refused: read_only: ")
        now = connection.REMEMBERED
        assert asked.describe() == {"state": "up", "problem": None}
    await asked.stop()


async def test_what_is_at_one_key_is_no_problem_of_the_server(valkey: Valkey) -> None:
    async with store(valkey.url) as asked:
        await asked.ask("test", ("SET", "a", "text"), budget=5.0)
        await refused(asked, "error", "INCRBY", "a", "1", budget=5.0)
        await refused(asked, "error", "HGETALL", "a", budget=5.0)
        assert asked.describe() == {"state": "up", "problem": None}


async def test_a_replica_refuses_writes(valkey: Valkey) -> None:
    async with valkey.client() as client:
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    async with store(valkey.url) as asked:
        await refused(asked, "read_only", "SET", "a", "b")
        assert asked.up


@pytest.mark.faults
async def test_an_address_that_is_another_servers_after_a_failover(tmp_path: Path, valkey: Valkey) -> None:
    """The old one lives on as the new one's replica and keeps its connections (D1)."""
    (tmp_path / "new").mkdir()
    async with Valkey(tmp_path / "new") as new, Proxy(valkey.url) as proxy, store(proxy.endpoint) as asked:
        await asyncio.gather(*(asked.ask("test", ("INCRBY", "n", 1), budget=5.0) for _ in range(8)))
        async with valkey.client() as client:
            await client.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
        proxy.towards(new.url)
        deadline = time.monotonic() + 20
        while True:
            try:
                assert (await asked.ask("test", ("SET", "after", "1"), budget=5.0)) == [True]
                break
            except Unanswered as unanswered:
                reason = unanswered.reason
            assert reason == "read_only"
            assert time.monotonic() < deadline, "it goes on with the old one"
            await asyncio.sleep(0.01)
        async with new.client() as client:
            assert await client.get("after") == b"1"
        assert asked.up


async def test_a_user_without_the_right(valkey: Valkey) -> None:
    async with valkey.client() as client:
        await client.execute_command("ACL", "SETUSER", "kv", "on", ">geheim", "~kvsync:*", "+ping", "+get")
    async with store(valkey.url, username="kv", password="geheim") as asked:
        await refused(asked, "no_permission", "SET", "kvsync:a", "b")
        await refused(asked, "no_permission", "GET", "other:a")
        assert await asked.ask("test", ("GET", "kvsync:a"), budget=5.0) == [None]
        assert asked.up


async def test_the_rights_that_the_page_names_are_enough(valkey: Valkey) -> None:
    page = (Path(__file__).parents[3] / "docs" / "redis.md").read_text()
    rights = re.findall(r"[+~][a-z*:-]+", page.partition("With ACLs")[2].partition("\n\n")[0])
    assert "+hgetall" in rights
    assert "~kvsync-prod:*" in rights
    async with valkey.client() as client:
        await client.execute_command("ACL", "SETUSER", "kv", "on", ">geheim", *rights)
    told = Telemetry()
    async with store(valkey.url, told, username="kv", password="geheim", prefix="kvsync-prod") as asked:
        table, fleet = LoadTable(64.0), Fleet()
        shared = SharedLoads(asked, LoadSharingSettings(), table, fleet, told)
        await shared.exchange()
        await shared.stop()
        limits = Limits(LimitsSettings(users=True), {"m": 5}, asked, told)
        judging = limits.begin(b"alice", "m")
        assert judging is not None
        (await judging).spent({"total_tokens": 5}, 0)
        await limits.tell()
    assert {result for _, result in told.results} == {"ok"}
    assert {call for call, _ in told.results} == {"ping", "load_tell", "load_read", "limits", "limits_tell"}


class Telemetry(Told):
    def replicas(self, others: int) -> None: ...

    def load_news_unusable(self, reason: str) -> None: ...

    def limited(self, kind: str, result: str, counted: str) -> None: ...

    def limit_fault(self, reason: str) -> None: ...


async def test_a_wrong_password_is_told_and_mended_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("wrong\n")
    async with (
        Valkey(tmp_path, "--requirepass", "right & long") as valkey,
        store(valkey.url, password_file=str(file), up=False) as asked,
    ):
        await until(lambda: asked.describe()["state"] == "down", "a wrong password is not noticed")
        assert str(asked.describe()["problem"]).startswith("auth: ")
        file.write_text("right & long\n")
        (live,) = asked.renewed
        assert live.check() == "applied"
        await until_answered(asked)


@asynccontextmanager
async def saying(talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that says what the test wants."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("reply", "reasons"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", {"bad_reply"}),
        (b"$99999999999999999999\r\n", {"bad_reply", "timeout", "too_large"}),
        (b"*2147483647\r\n", {"bad_reply", "timeout"}),
        (b"$-7\r\n", {"bad_reply", "timeout"}),
        (b":twelve\r\n", {"bad_reply"}),
        (b"\x00" * 1000, {"bad_reply", "timeout"}),
        (b"*1\r\n" * 5000, {"bad_reply", "timeout"}),
        (b"-LOADING Redis is loading the dataset in memory\r\n", {"loading"}),
        (b"-NOAUTH Authentication required.\r\n", {"auth"}),
        (b"-CLUSTERDOWN The cluster is down\r\n", {"cluster_down"}),
        (b"-MASTERDOWN Link with MASTER is down\r\n", {"cluster_down"}),
        (b"", {"unreachable"}),
    ],
)
async def test_what_a_server_says_that_is_none_or_not_ready(reply: bytes, reasons: set[str]) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536) and reply:
            writer.write(reply)
            await writer.drain()

    told = Told()
    async with saying(talk) as url, store(url, told, up=False, timeout=0.3) as asked:
        await until(lambda: any(told.results["ping", reason] for reason in reasons), f"{told.results}")
        assert asked.describe()["state"] == "down"
        assert len(str(asked.describe()["problem"])) < 300
        await refused(asked, "down")


async def test_an_error_nobody_knows_is_an_answer_all_the_same() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(b"-MISCONF " + b"x" * 5000 + b"\r\n")

    async with saying(talk) as url, store(url) as asked:
        await refused(asked, "error")
        assert asked.up
        assert str(asked.describe()["problem"]).startswith("test is refused: error: ")
        assert len(str(asked.describe()["problem"])) < 300


WRONG = (
    b":1\r\n", b":-5\r\n", b"+OK\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"*1\r\n:1\r\n",
    b"*2\r\n$1\r\na\r\n:5\r\n", b"*2\r\n*1\r\n:1\r\n:2\r\n", b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n",
    b"-MOVED 3999 127.0.0.1:1\r\n", b"-ASK 3999 127.0.0.1:1\r\n", b"-BUSY x\r\n", b"-WRONGTYPE x\r\n", b"-\r\n",
    b"%1\r\n+a\r\n:1\r\n", b"_\r\n", b">2\r\n+message\r\n+x\r\n",
)  # fmt: skip


@pytest.mark.parametrize("reply", WRONG)
async def test_replies_of_a_wrong_type_are_no_replies(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a server says to all but a PING, who asks gets what the command answers with, or is unanswered."""
    monkeypatch.setattr(connection, "FIRST_REST", 0.01)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            ping = b"PING" in data
            writer.write(b"+PONG\r\n" if ping else reply * data.count(b"\r\nkvsync:x\r\n"))

    asked: list[tuple[Command, type, type]] = [
        (("GET", "kvsync:x"), bytes, NoneType),
        (("GETRANGE", "kvsync:x", 0, 5), bytes, bytes),
        (("SET", "kvsync:x", "1", "NX"), bool, NoneType),
        (("INCRBY", "kvsync:x", 1), int, int),
        (("EXPIRE", "kvsync:x", 1), bool, NoneType),
        (("PEXPIRE", "kvsync:x", 1), bool, NoneType),
        (("DEL", "kvsync:x"), int, int),
        (("HSET", "kvsync:x", "a", "b"), int, int),
        (("HDEL", "kvsync:x", "a"), int, int),
        (("HGETALL", "kvsync:x"), dict, dict),
    ]
    told = Telemetry()
    answered = 0
    async with saying(talk) as url, store(url, told, timeout=0.3) as shared:
        for command, *kinds in asked:
            for commands in ((command,), (command, command)):
                await until(lambda: shared.up, "what is no reply keeps it down")
                with suppress(Unanswered):
                    replies = await shared.ask(str(command[0]), *commands, budget=0.3)
                    assert all(type(each) in kinds for each in replies)
                    answered += 1
        await until(lambda: shared.up, "what is no reply keeps it down")
        judging = Limits(LimitsSettings(users=True), {"m": 5}, shared, told).begin(b"alice", "m")
        assert judging is not None
        assert (await judging).refused in (None, "rpm")
    assert answered <= 2 * 7
    assert {result for _, result in told.results} <= {
        "ok", "bad_reply", "error", "unreachable", "timeout", "down", "cluster_down"
    }  # fmt: skip


@pytest.mark.parametrize("head", [b"$500000000\r\n", b"*500000000\r\n", b"*2\r\n$1\r\na\r\n$90000000\r\n"])
async def test_a_reply_that_is_too_long_is_not_read_and_takes_nothing_else_away(head: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if b"PING" in data:
                writer.write(b"+PONG\r\n")
                continue
            writer.write(head + b"$0\r\n\r\n" * (LONGEST_REPLY // ITEM + 1))
            await writer.drain()

    async with saying(talk) as url, store(url, timeout=5.0) as asked:
        for _ in range(3):
            await refused(asked, "too_large", "GETRANGE", "a", "0", "5", budget=5.0)
        assert asked.up


async def test_a_reply_without_an_end_ends_with_the_timeout() -> None:
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.read(65536)
        writer.write(b"$8000000\r\n")
        while True:
            writer.write(b"x" * 1000)
            sent += 1000
            await writer.drain()
            await asyncio.sleep(0.001)

    told = Told()
    async with saying(talk) as url, store(url, told, up=False, timeout=0.3):
        await until(lambda: told.results["ping", "timeout"], "it is read for ever")
    assert sent < 5_000_000


async def test_nobody_listens_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        told = Told()
        async with store(f"redis://127.0.0.1:{taken.getsockname()[1]}", told, up=False):
            await until(lambda: told.results["ping", "unreachable"] >= 2, "it is not tried again")


async def test_a_name_that_does_not_exist() -> None:
    told = Told()
    async with store("redis://no-such-host.invalid:6379", told, up=False, timeout=2.0):
        await until(lambda: told.results["ping", "unreachable"] + told.results["ping", "timeout"], "not told")


@asynccontextmanager
async def secured(folder: Path, authority: Authority, clients: Authority | None = None) -> AsyncIterator[str]:
    """A server behind TLS."""
    async with Valkey(folder) as valkey, behind_tls(valkey.port, authority, clients) as port:
        yield f"rediss://127.0.0.1:{port}"


@asynccontextmanager
async def behind_tls(inner: int, authority: Authority, clients: Authority | None = None) -> AsyncIterator[int]:
    """A port of TLS before one without (the server at hand is built without it)."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", inner)
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    context = authority.server("127.0.0.1", "redis.test", clients=clients)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_tls_with_a_certificate_of_our_own(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("kvsync.test", name="client")
    async with secured(tmp_path, authority, authority) as url:
        tls = {"ca": str(authority.file), "cert": str(cert), "key": str(key)}
        async with store(url, tls=tls) as asked:
            assert await answers(asked)
            assert len(asked.renewed) == 2
        async with store(url, tls={"ca": str(authority.file)}, up=False) as asked:
            await until(lambda: asked.describe()["state"] == "down", "no certificate was shown")


async def test_tls_by_another_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with secured(tmp_path, authority) as url:
        tls = {"ca": str(authority.file)}
        async with store(url, tls={**tls, "server_name": "redis.test"}) as asked:
            assert await answers(asked)
        async with store(url, tls={**tls, "server_name": "other.test"}, up=False) as asked:
            await until(lambda: str(asked.describe()["problem"]).startswith("tls: "), "a wrong name is trusted")


async def test_an_authority_that_nobody_trusts_and_its_renewal(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(other.file.read_bytes())
    async with (
        secured(tmp_path, authority) as url,
        store(url, tls={"ca": str(trusted)}, up=False) as asked,
    ):
        await until(lambda: str(asked.describe()["problem"]).startswith("tls: "), "anybody is trusted")
        trusted.write_bytes(authority.file.read_bytes())
        assert [live.check() for live in asked.renewed] == ["unchanged", "applied"]
        await until_answered(asked)


async def test_tls_where_there_is_none(valkey: Valkey) -> None:
    told = Told()
    async with store(valkey.url.replace("redis:", "rediss:"), told, up=False):
        await until(lambda: told.states[-1:] == ["down"], "an unencrypted server is taken for an encrypted one")


async def test_a_cluster(tmp_path: Path) -> None:
    async with cluster(tmp_path) as nodes:
        url = f"redis://127.0.0.1:1,127.0.0.1:{nodes[0].port}"  # the first is nobody
        async with store(url, mode="cluster", timeout=5.0) as asked:
            commands = [("INCRBY", f"n{n}", n) for n in range(50)]
            assert await asked.ask("test", *commands, budget=10.0) == list(range(50))
            assert await asked.ask("test", ("GET", "n7"), budget=5.0) == [b"7"]
            nodes[2].stop()
            lost = [n for n in range(9) if not await _kept(asked, f"n{n}")]
            assert 0 < len(lost) < 9
            await nodes[2].start()
            await until_answered(asked)


@pytest.mark.parametrize(
    "ranges", [b"*1\r\n*3\r\n:0\r\n:999999999\r\n", b"*1\r\n*3\r\n:-5\r\n:6\r\n", b"*1\r\n*3\r\n:7\r\n:6\r\n",
               b"*2\r\n" + 2 * b"*3\r\n:0\r\n:16383\r\n*3\r\n$1\r\nh\r\n:1\r\n$1\r\na\r\n"],
)  # fmt: skip
async def test_a_cluster_that_names_slots_that_there_are_none_of(ranges: bytes) -> None:
    """They are gone through one by one (a thousand million: half a minute of the event loop)."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(ranges + b"*3\r\n$1\r\nh\r\n:1\r\n$1\r\na\r\n" if b"SLOTS" in data else b"+OK\r\n")

    told = Told()
    async with saying(talk) as url, store(url, told, mode="cluster", up=False, timeout=5.0) as asked:
        async with asyncio.timeout(5):
            await until(lambda: told.results["ping", "cluster_down"], "it is believed")
        await refused(asked, "down")


async def test_who_answers_a_ping_and_nothing_else_is_not_looked_at_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "FIRST_REST", 0.2)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(b"+PONG\r\n" if b"PING" in data else b"-CLUSTERDOWN for the test\r\n")

    told = Told()
    async with saying(talk) as url, store(url, told) as asked:
        begun = time.monotonic()
        while told.results["ping", "ok"] < 4:
            with pytest.raises(Unanswered, match="down"):
                await asked.ask("test", ("GET", "a"), budget=5.0)
            await asyncio.sleep(0.001)
        assert time.monotonic() - begun > 0.2 * 2


async def _kept(asked: Store, key: str) -> bool:
    await until(lambda: asked.up, "one node of three takes all away")
    try:
        await asked.ask(key, ("GET", key), budget=5.0)
    except Unanswered:
        return False
    return True


async def test_a_cluster_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with AsyncExitStack() as stack:
        doors = {port: await stack.enter_async_context(behind_tls(port, authority)) for port in free_ports(3)}
        nodes = await stack.enter_async_context(cluster(tmp_path, doors))
        url = f"rediss://127.0.0.1:{doors[nodes[0].port]}"
        tls = {"ca": str(authority.file)}
        asked = await stack.enter_async_context(store(url, mode="cluster", timeout=5.0, tls=tls))
        commands = [("INCRBY", f"n{n}", n) for n in range(50)]
        assert await asked.ask("test", *commands, budget=10.0) == list(range(50))


async def test_sentinels_know_where_the_server_is(tmp_path: Path, valkey: Valkey) -> None:
    home = tmp_path / "sentinel"
    home.mkdir()
    config = home / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {valkey.port} 1\n")
    async with Sentinel(home, config) as sentinel:
        async with store(
            f"redis://127.0.0.1:1,127.0.0.1:{sentinel.port}", mode="sentinel", sentinel_service="main"
        ) as asked:
            assert await answers(asked)
        async with store(sentinel.url, mode="sentinel", sentinel_service="other", up=False) as asked:
            await until(lambda: asked.describe()["state"] == "down", "a service that nobody knows is found")


class Sentinel(Valkey):
    """The same program in its other role. It writes into its file."""

    def __init__(self, folder: Path, config: Path) -> None:
        super().__init__(folder, "--sentinel", config=config)


def test_live_values_of_a_store_are_files_only() -> None:
    asked = Store(RedisSettings(url="rediss://h", password=None), Told())
    assert all(isinstance(live, Live) for live in asked.renewed)
