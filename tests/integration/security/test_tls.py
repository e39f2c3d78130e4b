"""TLS on the data port, on the admin port and towards engines, on real sockets."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvsync.config import EngineTlsSettings, GatewaySettings, RemoteTokenizerSettings, TlsSettings
from kvsync.discovery.access import EngineAccess, live_access
from kvsync.discovery.model import Engine
from kvsync.events.contracts import NotLocated
from kvsync.events.sources import HttpLocator
from kvsync.gateway.tls import PortTls
from kvsync.tokenize.errors import RemoteFailed
from kvsync.tokenize.pool import BoundedPool
from kvsync.tokenize.remote import RemoteTokenizer
from tests.certificates import Authority
from tests.integration.gateway.harness import (
    BODY,
    SSE_HEAD,
    FakeEngine,
    Talk,
    always,
    chunk,
    eventually,
    house,
    post,
    reply,
)
from tests.integration.gateway.test_admin import desk

NAME = "gateway.test"
GOOD = always(reply(b"good"))


async def echo(engine: FakeEngine, talk: Talk) -> None:
    while (request := await talk.request()) is not None:
        engine.requests.append(request)
        await talk.send(reply(request.body))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def port(authority: Authority, clients: Authority | None = None) -> PortTls:
    cert, key = authority.issue(NAME)
    return PortTls("the port", TlsSettings(cert=cert, key=key, client_ca=clients.file if clients else None))


def serial(writer: asyncio.StreamWriter) -> object:
    return writer.get_extra_info("peercert")["serialNumber"]


# ---- the data port


async def test_requests_large_answers_and_pipelines_over_tls(authority: Authority) -> None:
    large = b'{"model": "m", "prompt": "%b"}' % (b"x" * 5_000_000)
    async with house(echo, port_tls=port(authority)) as home:
        client = await home.client(authority.client(), NAME)
        assert (await client.ask()).body == BODY
        assert (await client.ask(large)).body == large
        await client.send(post() + post(b"{}") + post())
        assert [(await client.answer()).status for _ in range(3)] == [200, 400, 200]
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: x\r\n\r\n")
        assert (await client.answer()).status == 400
        assert await client.ended() == b""


async def test_a_broken_answer_is_seen_as_one_over_tls(authority: Authority) -> None:
    async def breaks(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD, chunk(b"data: 1\n\n"))
        talk.reset()

    async with house(breaks, port_tls=port(authority)) as home:
        answer = await (await home.client(authority.client(), NAME)).ask()
        assert (answer.status, answer.whole) == (200, False)
        assert answer.body == b"data: 1\n\n"


async def test_a_client_that_leaves_over_tls_ends_its_request(authority: Authority) -> None:
    async def stalls(engine: FakeEngine, talk: Talk) -> None:
        engine.requests.append(await talk.request())  # type: ignore[arg-type]
        await talk.closed()
        engine.left.set()

    async with house(stalls, port_tls=port(authority)) as home:
        client = await home.client(authority.client(), NAME)
        await client.send(post())
        await eventually(lambda: bool(home.engine.requests))
        client.close()
        async with asyncio.timeout(5):
            await home.engine.left.wait()
        await eventually(lambda: home.gateway.open_connections() == 0)
        assert home.routing.tickets[0].ends == ["client_gone"]


async def test_certificates_are_renewed_without_a_new_start_or_a_lost_connection(authority: Authority) -> None:
    tls = port(authority)
    async with house(echo, port_tls=tls) as home:
        old = await home.client(authority.client(), NAME)
        authority.issue(NAME)
        assert tls.live.check() == "applied"
        new = await home.client(authority.client(), NAME)
        assert serial(old.writer) != serial(new.writer)
        assert (await old.ask()).body == (await new.ask()).body == BODY


async def test_clients_without_a_certificate_that_counts_get_no_answer(tmp_path: Path, authority: Authority) -> None:
    known, unknown = Authority(tmp_path, "known"), Authority(tmp_path, "unknown")
    async with house(GOOD, port_tls=port(authority, known)) as home:
        assert (await (await home.client(authority.client(known), NAME)).ask()).body == b"good"
        for identity in (None, unknown):
            # In TLS 1.3 the client is done before the server has looked at its certificate.
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await (await home.client(authority.client(identity), NAME)).ask()
        assert len(home.routing.queries) == 1


async def test_plain_http_on_the_tls_port_and_noise_are_hung_up_on(authority: Authority) -> None:
    async with house(GOOD, port_tls=port(authority)) as home:
        for noise in (post(), b"\x16\x03\x01" + bytes(200), bytes(range(256)) * 20):
            client = await home.client()
            await client.send(noise)
            assert b"HTTP" not in await client.ended()
        assert (await (await home.client(authority.client(), NAME)).ask()).body == b"good"


async def test_a_handshake_that_stalls_is_ended(authority: Authority) -> None:
    async with house(GOOD, port_tls=port(authority), client_timeout=0.3) as home:
        client = await home.client()
        await client.send(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a hello
        await client.ended()
        slow = await home.client(authority.client(), NAME)
        await slow.send(b"POST /v1/completions HTTP/1.1\r\nHost")
        assert (await slow.answer()).status == 408


# ---- the admin port


async def test_the_admin_port_speaks_tls_and_knows_its_clients(tmp_path: Path, authority: Authority) -> None:
    known = Authority(tmp_path, "known")
    tls = port(authority, known)
    async with desk(tls=tls) as made:
        url = f"https://127.0.0.1:{made.admin.port}/healthz"
        trusted: dict[str, Any] = {"ssl": authority.client(known), "server_hostname": NAME}
        async with made.session.get(url, **trusted) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await made.session.get(url, ssl=authority.client(), server_hostname=NAME)
        with pytest.raises(aiohttp.ClientError):
            await made.session.get(url.replace("https", "http"))


# ---- towards engines


def access(**tls: Any) -> EngineAccess:
    return live_access(GatewaySettings(engine_tls=EngineTlsSettings(**tls), engine_api_key="k" * 20))[0]  # type: ignore[arg-type]


async def test_engines_are_reached_by_their_own_authority_and_name(tmp_path: Path, authority: Authority) -> None:
    stranger = Authority(tmp_path, "stranger")
    server = authority.server("engine.test")
    for way, status in (
        (access(ca=authority.file, server_name="engine.test"), 200),
        (access(ca=authority.file), 502),  # the certificate is not localhost's
        (access(ca=authority.file, server_name="other.test"), 502),
        (access(ca=stranger.file, server_name="engine.test"), 502),
        (access(server_name="engine.test"), 502),  # the system's authorities don't know it
    ):
        async with house(GOOD, engine_tls=server, access=way, retries=0) as home:
            answer = await (await home.client()).ask()
            assert answer.status == status
            assert home.engine.requests == [] or status == 200
            if status == 502:
                assert "tls_failed" in answer.message


async def test_engines_that_ask_for_a_certificate_get_the_gateway_s(tmp_path: Path, authority: Authority) -> None:
    mine = Authority(tmp_path, "mine")
    cert, key = mine.issue("gateway.test")
    server = authority.server("localhost", clients=mine)
    async with house(GOOD, engine_tls=server, access=access(ca=authority.file, cert=cert, key=key)) as home:
        assert (await (await home.client()).ask()).body == b"good"
    async with house(GOOD, engine_tls=server, access=access(ca=authority.file), retries=0) as home:
        assert (await (await home.client()).ask()).status == 502


async def test_the_gateway_s_own_questions_go_the_same_way(authority: Authority) -> None:
    """Event sources, metrics and tokens: the key is sent, the certificate's name is checked."""
    page = b'{"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}}'
    tokens = b'{"count": 1, "max_model_len": 10, "tokens": [7]}'

    async def engine(fake: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            fake.requests.append(request)
            await talk.send(reply(tokens if b"/tokenize" in request.line else page))

    fake = FakeEngine("e", engine)
    await fake.start(authority.server("engine.test"))
    url = f"https://127.0.0.1:{fake.port}"
    good, wrong = access(ca=authority.file, server_name="engine.test"), access(ca=authority.file)
    pool = BoundedPool(1, 1)
    try:
        async with aiohttp.ClientSession() as session:
            described = Engine(uid="e", name="e", url=url, model="m")
            located = await HttpLocator(session, 5, good).locate(described)
            assert located.targets[0].events == "tcp://127.0.0.1:5557"
            with pytest.raises(NotLocated, match="certificate"):
                await HttpLocator(session, 5, wrong).locate(described)
        asked = RemoteTokenizerSettings(endpoint="engines", retries=0)
        for way in (good, wrong):
            tokenizer = RemoteTokenizer(asked, lambda _: [url], pool, access=way)
            await tokenizer.start()
            try:
                if way is good:
                    assert (await tokenizer.ask(b"{}", "m")).tokens == b"\x07\0\0\0"
                else:
                    with pytest.raises(RemoteFailed):
                        await tokenizer.ask(b"{}", "m")
            finally:
                await tokenizer.close()
        assert {request.line.split()[1] for request in fake.requests} == {
            b"/kv_event_sources",
            b"/metrics",
            b"/tokenize",
        }
        assert all(request.get(b"authorization") == [b"Bearer " + b"k" * 20] for request in fake.requests)
    finally:
        pool.close()
        await fake.stop()


async def test_an_engine_that_admits_nobody_says_what_is_missing() -> None:
    fake = FakeEngine("e", always(reply(b"{}", b"401 Unauthorized")))
    await fake.start()
    try:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(NotLocated, match=r"gateway\.engine_api_key"):
                await HttpLocator(session, 5, EngineAccess()).locate(
                    Engine(uid="e", name="e", url=f"http://127.0.0.1:{fake.port}", model="m")
                )
    finally:
        await fake.stop()
