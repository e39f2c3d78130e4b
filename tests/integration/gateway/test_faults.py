"""Engines that refuse, reset, stall, lie and die; clients that leave. Load is released once, whatever happens."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvsync.gateway import exchange
from kvsync.routing.breaker import ANSWERING, REACHING
from tests.integration.gateway.harness import (
    BODY,
    GOOD,
    SSE_HEAD,
    FakeEngine,
    Script,
    Slow,
    Talk,
    always,
    chunk,
    ends,
    eventually,
    house,
    post,
    reply,
    stall,
)

SOON = 5.0
"""Seconds in which an engine hears that a client left. Wanted is one; the rest is for machines with much else to do."""


async def reset_at_once(engine: FakeEngine, talk: Talk) -> None:
    await talk.request()
    talk.reset()


async def close_at_once(engine: FakeEngine, talk: Talk) -> None:
    await talk.request()


def then_stall(*pieces: bytes) -> Script:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        request = await talk.request()
        assert request is not None
        engine.requests.append(request)
        await talk.send(*pieces)
        await talk.closed()
        engine.left.set()

    return script


def then_die(*pieces: bytes, reset: bool = False) -> Script:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(*pieces)
        if reset:
            await asyncio.sleep(0.05)  # let the bytes out before the reset destroys them
            talk.reset()

    return script


@pytest.fixture
def refused() -> Iterator[str]:
    """The URL of a port that nobody listens on, kept free for the test."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def mute() -> Iterator[str]:
    """The URL of a port whose backlog is full: connecting to it takes for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(address)
            fillers.append(filler)
        yield f"http://127.0.0.1:{address[1]}"
        for filler in fillers:
            filler.close()


# ---- before the status line: elsewhere, or a clear error


async def test_a_refused_connection_is_retried_elsewhere(refused: str) -> None:
    async with house(GOOD, urls=[refused]) as home:
        answer = await (await home.client()).ask()
        assert (answer.status, answer.body, answer.one(b"target-pod")) == (200, b"good", b"engine-0")
        assert ends(home) == [(refused, ["connect_refused"]), ("engine-0", ["ok"])]
        assert home.counters.retries == {"connect_refused": 1}
        assert home.routing.queries[1].exclude == {refused}


async def test_a_connection_that_takes_too_long_is_retried_elsewhere(mute: str) -> None:
    async with house(GOOD, urls=[mute], connect_timeout=0.2) as home:
        assert (await (await home.client()).ask()).body == b"good"
        assert ends(home) == [(mute, ["connect_timeout"]), ("engine-0", ["ok"])]


async def test_a_name_that_does_not_resolve_is_retried_elsewhere() -> None:
    async with house(GOOD, urls=["http://nowhere.invalid:80", "http://:0"], connect_timeout=5) as home:
        assert (await (await home.client()).ask()).body == b"good"
        assert [outcome for _, (outcome,) in ends(home)] == ["connect_failed", "connect_failed", "ok"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
async def test_a_want_of_files_or_ports_is_not_the_engine_s_failure(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Idle clients can bring it about; no engine may rest for that."""
    async with house(GOOD, retries=0) as home:
        client = await home.client()

        async def none_left(*_: object, **__: object) -> None:
            raise OSError(number, "no more")

        loop = SimpleNamespace(create_connection=none_left, time=asyncio.get_running_loop().time)
        monkeypatch.setattr(home.gateway._upstreams, "loop", loop)
        answer = await client.ask()
        assert (answer.status, answer.message) == (502, "no engine could answer (no_resources)")
        assert ends(home) == [("engine-0", ["no_resources"])]
        assert "no_resources" not in {*REACHING, *ANSWERING}


async def test_a_fault_in_one_connection_s_deadlines_does_not_end_those_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(stall, first_byte_timeout=0.2) as home:
        faulty = await home.client()
        await faulty.send(post())
        await eventually(lambda: home.gateway.open_connections() == 1)
        (connection,) = home.gateway._connections

        def broken(_: float) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(connection, "check", broken)
        assert (await (await home.client()).ask()).status == 504
        assert await faulty.ended() == b""
        await eventually(lambda: home.gateway.open_connections() == 1)
        assert caplog.text.count("looking after a connection failed") == 1


async def test_retries_end(refused: str) -> None:
    async with house(GOOD, urls=[f"{refused}", "http://127.0.0.1:1", "http://127.0.0.1:2"], retries=2) as home:
        answer = await (await home.client()).ask()
        assert answer.status == 502
        assert answer.message == "no engine could answer (connect_refused)"
        assert [outcome for _, (outcome,) in ends(home)] == ["connect_refused"] * 3
        assert home.counters.answers == {("/v1/completions", 502, "connect_refused"): 1}


async def test_no_engine_left_to_try_says_why_the_last_one_failed(refused: str) -> None:
    async with house(urls=[refused]) as home:
        answer = await (await home.client()).ask()
        assert (answer.status, answer.message) == (502, "no engine could answer (connect_refused)")


async def test_all_ranks_of_an_engine_that_refuses_are_left_out() -> None:
    async with house(GOOD, data_parallel_size=2) as home:
        home.engine.server.close()
        await home.engine.server.wait_closed()
        assert (await (await home.client()).ask()).status == 502
        assert home.routing.queries[-1].exclude == {"engine-0#0", "engine-0#1"}


@pytest.mark.parametrize("dying", [reset_at_once, close_at_once])
async def test_a_reset_on_a_fresh_connection_is_retried_once_elsewhere(dying: Script) -> None:
    """(P3) Before the first byte of an answer."""
    async with house(dying, GOOD) as home:
        assert (await (await home.client()).ask()).body == b"good"
        assert ends(home) == [("engine-0", ["reset"]), ("engine-1", ["ok"])]
        assert home.counters.retries == {"reset": 1}
    async with house(dying, dying, GOOD) as home:
        answer = await (await home.client()).ask()
        assert (answer.status, answer.message) == (502, "no engine could answer (reset)")
        assert ends(home) == [("engine-0", ["reset"]), ("engine-1", ["reset"])]


async def test_without_budget_there_is_no_retry_where_an_engine_had_the_request(refused: str) -> None:
    async with house(reset_at_once, GOOD, urls=[refused]) as home:
        home.routing.budget = 0
        answer = await (await home.client()).ask()
        assert (answer.status, answer.message) == (502, "no engine could answer (reset)")
        # Nobody had the request at the engine that refused the connection: going on from there multiplies no work.
        assert ends(home) == [(refused, ["connect_refused"]), ("engine-0", ["reset"])]
        assert home.counters.retries == {"connect_refused": 1}
        assert home.counters.refused_retries == {"retry_budget": 1}


async def test_an_engine_that_does_not_read_the_request_is_left_for_another() -> None:
    async def deaf(engine: FakeEngine, talk: Talk) -> None:
        talk.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await engine.left.wait()

    async def slow(engine: FakeEngine, talk: Talk) -> None:
        """Reads all the time, but for longer than the limit in all."""
        head = await talk.reader.readuntil(b"\r\n\r\n")
        left = size
        assert b"content-length: %d" % left in head
        while left:
            left -= len(await talk.reader.read(1 << 20))
            await asyncio.sleep(0.005)
        await talk.send(reply(b"good"))

    size = 30 << 20
    async with house(deaf, slow, send_timeout=0.3, first_byte_timeout=0.4) as home:
        answer = await (await home.client()).ask(BODY.ljust(size))
        assert (answer.status, answer.body) == (200, b"good")
        assert ends(home) == [("engine-0", ["send_timeout"]), ("engine-1", ["ok"])]
        assert home.counters.retries == {"send_timeout": 1}
        home.engine.left.set()


async def test_that_retry_can_be_switched_off() -> None:
    async with house(reset_at_once, GOOD, retry_fresh_reset=False) as home:
        assert (await (await home.client()).ask()).status == 502
        assert ends(home) == [("engine-0", ["reset"])]


async def test_a_reset_on_a_used_connection_is_retried_at_the_same_engine() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        if talk.number == 0:  # one answer, then a reset for the second request
            await talk.request()
            await talk.send(reply(b"first"))
            await talk.request()
            talk.reset()
        else:
            await GOOD(engine, talk)

    async with house(script, retry_fresh_reset=False) as home:
        client = await home.client()
        assert (await client.ask()).body == b"first"
        assert (await client.ask()).body == b"good"
        assert ends(home) == [("engine-0", ["ok"]), ("engine-0", ["ok"])]
        assert len(home.routing.queries) == 2  # not chosen again
        assert home.engine.connections == 2


@pytest.mark.parametrize("again", [False, True])
async def test_an_engine_that_dies_of_a_request_is_not_asked_again(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is another one more than once; a connection that was used before makes no difference."""
    monkeypatch.setattr(exchange, "STALE_WITHIN", 0.02)

    async def dies(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(reply(b"first"))
        engine.requests.append(await talk.request() or pytest.fail("no request"))
        await asyncio.sleep(0.1)
        talk.reset()

    async with house(dies, dies, dies, retry_fresh_reset=again, retries=5) as home:
        client = await home.client()
        for _ in range(3):  # each engine has a connection that was used
            assert (await client.ask()).body == b"first"
            home.routing.engines.append(home.routing.engines.pop(0))
        answer = await client.ask()
        assert (answer.status, answer.message) == (502, "no engine could answer (reset)")
        assert [len(engine.requests) for engine in home.engines] == [1, int(again), 0]
        assert ends(home)[3:] == [("engine-0", ["reset"]), ("engine-1", ["reset"])][: 1 + again]


async def test_idle_connections_are_dropped_in_time() -> None:
    async with house(GOOD, upstream_idle=0.1) as home:
        await (await home.client()).ask()
        assert home.engine.open == 1
        await eventually(lambda: home.engine.open == 0)
        assert home.gateway.idle_upstreams() == 0


async def test_bytes_on_an_idle_connection_end_it() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(reply(b"one"))
        if talk.number == 0:
            await eventually(lambda: home.gateway.idle_upstreams() == 1)
            await talk.send(reply(b"for nobody"))
        await talk.closed()

    async with house(script) as home:
        client = await home.client()
        assert (await client.ask()).body == b"one"
        await eventually(lambda: home.gateway.idle_upstreams() == 0)
        assert (await client.ask()).body == b"one"


@pytest.mark.parametrize("surplus", [b"x", reply(b"smuggled"), b"\r\n\r\nHTTP/1.1 200 OK\r\n"])
async def test_bytes_after_an_answer_reach_nobody(surplus: bytes) -> None:
    async with house(always(reply(b"one") + surplus)) as home:
        client = await home.client()
        for _ in range(3):
            assert (await client.ask()).body == b"one"
        assert home.engine.connections == 3


@pytest.mark.parametrize(
    "wire",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"0" * 5000 + b"3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\r\n folded\r\n\r\n",
        b"HTTP/1.1 999999 ?\r\n\r\n",
        b"HTTP/1.1 000 ?\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (300 << 10),
        b"HTTP/1.1 200 O",
    ],
    ids=["noise", "cl+te", "two-cl", "long-cl", "te", "101", "fold", "status", "zero-status", "huge-head", "half-head"],
)
async def test_what_is_no_answer_becomes_a_502_and_is_not_retried(wire: bytes) -> None:
    async with house(then_die(wire), GOOD) as home:
        client = await home.client()
        answer = await client.ask()
        assert (answer.status, answer.message) == (502, "no engine could answer (bad_answer)")
        assert ends(home) == [("engine-0", ["bad_answer"])]
        home.routing.engines.reverse()
        assert (await client.ask()).body == b"good"  # the client's connection lives on


async def test_an_engine_that_does_not_begin_to_answer() -> None:
    async with house(stall, GOOD, first_byte_timeout=0.2) as home:
        answer = await (await home.client()).ask()
        assert (answer.status, answer.message) == (504, "the engine did not answer within 0.2 s")
        await asyncio.wait_for(home.engine.left.wait(), SOON)
        assert ends(home) == [("engine-0", ["first_byte_timeout"])]


# ---- after the status line: never again, and visibly broken


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("pieces", "version"),
    [
        ((SSE_HEAD, chunk(b"data: 1\n\n")), b"1.1"),
        ((SSE_HEAD, chunk(b"data: 1\n\n"), b"5\r\nda"), b"1.1"),
        ((SSE_HEAD, chunk(b"data: 1\n\n"), b"zz\r\n"), b"1.1"),
        ((SSE_HEAD,), b"1.1"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"data: 1\n\n"), b"1.1"),
        ((SSE_HEAD, chunk(b"data: 1\n\n")), b"1.0"),
    ],
    ids=["chunked", "in-chunk", "bad-chunk", "head-only", "length", "http1.0"],
)
async def test_an_answer_that_breaks_off_never_looks_whole(
    pieces: tuple[bytes, ...], version: bytes, reset: bool
) -> None:
    """(P3) And nobody else is asked for the rest, or for all of it again."""
    async with house(then_die(*pieces, reset=reset), GOOD) as home:
        client = await home.client()
        await client.send(post(version=version))
        answer = await client.answer()
        assert not answer.whole
        assert answer.status == 200
        assert home.counters.cuts == {("/v1/completions", "upstream_died"): 1}
        assert ends(home) == [("engine-0", ["upstream_died"])]
        assert home.answers == []
        assert await client.ended() == b""
        assert home.counters.retries == {}
        assert home.engines[1].connections == 0


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (chunk(b"x") + b"0\r\nT: ", b"y" * 4096),
        (chunk(b"x") + b"0\r\n", b"T: y\r\n" * 512),
        (b"1;e=", b"y" * 4096),
        (b"", b"0" * 4096),
    ],
    ids=["trailer", "trailers", "chunk-extension", "chunk-size"],
)
async def test_framing_without_an_end_is_cut(start: bytes, piece: bytes) -> None:
    """The parser keeps a trailer to itself until it is whole, so it would fill the memory."""

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + start)
        while True:
            await talk.send(piece)

    async with house(script) as home:
        answer = await (await home.client()).ask()
        assert (answer.status, answer.whole) == (200, False)
        assert ends(home) == [("engine-0", ["upstream_died"])]
        await eventually(lambda: home.engine.open == 0)


async def test_what_came_before_the_break_is_delivered() -> None:
    async with house(then_die(SSE_HEAD, chunk(b"data: 1\n\n"))) as home:
        answer = await (await home.client()).ask()
        assert (answer.body, answer.whole) == (b"data: 1\n\n", False)


async def test_a_stream_that_stalls_is_cut_but_a_slow_one_is_not() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        for _ in range(12):  # together twice as long as the idle limit
            await talk.send(chunk(b"data: x\n\n"))
            await asyncio.sleep(0.05)
        await talk.closed()
        engine.left.set()

    async with house(script, idle_timeout=0.25) as home:
        answer = await (await home.client()).ask()
        assert (answer.body, answer.whole) == (b"data: x\n\n" * 12, False)
        await asyncio.wait_for(home.engine.left.wait(), SOON)
        assert ends(home) == [("engine-0", ["idle_timeout"])]


@pytest.mark.parametrize(
    ("start", "byte"),
    [(b"", b"0"), (b"1;e=", b"y"), (chunk(b"data: x\n\n") + b"0\r\n", b"T: y\r\n")],
    ids=["chunk-size", "chunk-extension", "trailers"],
)
async def test_bytes_that_only_frame_an_answer_do_not_bring_it_on(start: bytes, byte: bytes) -> None:
    """An engine that trickles them would hold its client for as long as it likes."""

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + start)
        with suppress(ConnectionError):
            while True:
                await talk.send(byte)
                await asyncio.sleep(0.02)

    async with house(script, idle_timeout=0.25, first_byte_timeout=0.25) as home:
        answer = await (await home.client()).ask()
        assert (answer.status, answer.whole) == (200, False)
        assert ends(home) == [("engine-0", ["idle_timeout"])]


async def test_a_connection_that_ended_before_it_is_taken_back_is_not_kept() -> None:
    """As when a client leaves in the moment in which its engine is reached, and the engine goes, too. Nobody would ever
    drop it: it has said already that it ended."""
    async with house(GOOD) as home:
        upstreams = home.gateway._upstreams
        connection = await upstreams.connect(f"http://127.0.0.1:{home.engine.port}")
        connection.abort()
        upstreams.keep(connection)
        assert home.gateway.idle_upstreams() == 0


# ---- clients that leave


PHASES: dict[str, Script] = {
    "waiting": stall,
    "head": then_stall(SSE_HEAD),
    "streaming": then_stall(SSE_HEAD, chunk(b"data: 1\n\n")),
    "json": then_stall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"half"),
}


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_takes_its_request_along(phase: str, way: str, version: bytes) -> None:
    """(P4) Queued in the engine, before its first byte and in the middle of an answer, streamed or not."""
    async with house(PHASES[phase]) as home:
        client = await home.client()
        await client.send(post(version=version))
        await eventually(lambda: len(home.engine.requests) == 1)
        if phase != "waiting":
            await client.head()
        getattr(client, way)()
        await asyncio.wait_for(home.engine.left.wait(), SOON)
        assert ends(home) == [("engine-0", ["client_gone"])]
        assert home.counters.cuts == {("/v1/completions", "client_gone"): 1}
        assert home.answers == []
        await eventually(lambda: home.gateway.open_connections() == 0)


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_client_that_leaves_while_its_prompt_is_tokenized(way: str) -> None:
    """(P4)"""
    tokenizing = Slow()
    async with house(GOOD, tokenizing=tokenizing) as home:
        client = await home.client()
        await client.send(post())
        await tokenizing.started.wait()
        getattr(client, way)()
        await eventually(lambda: tokenizing.cancelled == 1, SOON)
        assert home.routing.tickets == []
        assert home.engine.connections == 0
        assert home.counters.cuts == {("/v1/completions", "client_gone"): 1}


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_client_that_leaves_while_its_engine_is_dialled(mute: str, way: str) -> None:
    """(P4)"""
    async with house(urls=[mute], connect_timeout=30) as home:
        client = await home.client()
        await client.send(post())
        await eventually(lambda: len(home.routing.tickets) == 1)
        getattr(client, way)()
        await eventually(lambda: home.routing.tickets[0].ends == ["client_gone"], SOON)


async def test_a_client_that_only_stopped_sending_gets_its_answer() -> None:
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        engine.left.set()
        await go.wait()
        await talk.send(SSE_HEAD, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), b"0\r\n\r\n")

    async with house(script) as home:
        client = await home.client()
        await client.send(post())
        client.half_close()
        await home.engine.left.wait()
        await asyncio.sleep(1.0)  # longer than one that left would be kept
        go.set()
        interim = await client.answer()
        assert interim.status == 100
        answer = await client.answer()
        assert (answer.body, answer.whole) == (b"data: 1\n\ndata: 2\n\n", True)
        assert await client.ended() == b""
        assert ends(home) == [("engine-0", ["ok"])]


async def test_a_client_that_stopped_sending_in_the_middle_of_its_stream_gets_the_rest() -> None:
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD, chunk(b"data: 1\n\n"))
        await go.wait()
        await talk.send(chunk(b"data: 2\n\n"), b"0\r\n\r\n")

    async with house(script) as home:
        client = await home.client()
        await client.send(post())
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        client.half_close()
        await asyncio.sleep(1.0)
        go.set()
        assert await client.reader.readuntil(b"\r\n") == b"09\r\n"  # a leading zero changes nothing
        assert await client.reader.readexactly(11) == b"data: 2\n\n\r\n"
        assert await client.ended() == b"0\r\n\r\n"
        assert ends(home) == [("engine-0", ["ok"])]


async def test_a_client_that_stops_reading_is_dropped() -> None:
    async with house(always(reply(b"x" * (32 << 20))), client_timeout=0.3) as home:
        client = await home.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post())
        await eventually(lambda: home.counters.connections["write_timeout"] == 1)
        await eventually(lambda: ends(home) == [("engine-0", ["client_gone"])])
        await eventually(lambda: home.gateway.open_connections() == 0)


# ---- TLS

TLS = Path(__file__).parents[2] / "data" / "gateway"


def engine_context() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "localhost.pem")
    return context


async def test_https_engines() -> None:
    trusting = ssl.create_default_context(cafile=str(TLS / "localhost.pem"))
    async with house(GOOD, engine_tls=engine_context(), gateway_tls=trusting) as home:
        client = await home.client()
        for _ in range(2):
            assert (await client.ask()).body == b"good"
        assert home.engine.connections == 1
        assert home.engine.requests[0].get(b"host") == [b"localhost:%d" % home.engine.port]


async def test_an_engine_whose_certificate_is_not_trusted_is_retried_elsewhere() -> None:
    async with house(GOOD, engine_tls=engine_context()) as home:
        answer = await (await home.client()).ask()
        assert answer.status == 502
        assert ends(home) == [("engine-0", ["tls_failed"])]
        assert home.engine.requests == []
