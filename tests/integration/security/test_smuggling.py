"""Raw bytes from clients, and what an engine sees of them: one request per request, framed in one way only, to a listed
path, without a field that could choose a target."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator

import pytest

from kvsync.requests.paths import OPENAI_PATHS
from tests.integration.gateway.harness import BODY, Client, FakeEngine, Received, Talk, house, post, reply

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n"
FORBIDDEN = {
    b"target-pod",
    b"target-pod-ip",
    b"x-gateway-destination-endpoint",
    b"x-data-parallel-rank",
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"expect",
}
_LINE = re.compile(rb"POST (/[!-~]+?)(\?[!-~\x80-\xff]*)? HTTP/1\.1")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


async def strict(engine: FakeEngine, talk: Talk) -> None:
    """Record every request as its bytes are, and answer it; what is no whole request is recorded as well."""
    data = b""
    while True:
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            line, *rows = data[:end].split(b"\r\n")
            fields = [(name, value) for name, _, value in (row.partition(b": ") for row in rows)]
            lengths = [value for name, value in fields if name.lower() == b"content-length"]
            length = int(lengths[0]) if len(lengths) == 1 and lengths[0].isdigit() else 0
            if len(data) >= end + 4 + length:
                engine.requests.append(Received(line, fields, data[end + 4 : end + 4 + length]))
                data = data[end + 4 + length :]
                await talk.send(reply(b"good"))
                continue
        more = await talk.reader.read(65536)
        if not more:
            if data:
                engine.requests.append(Received(b"LEFT OVER " + data, [], b""))
            return
        data += more


def judge(request: Received, port: int) -> None:
    line = _LINE.fullmatch(request.line)
    assert line, request.line
    assert line[1].decode() in OPENAI_PATHS
    for name, value in request.fields:
        assert _TOKEN.fullmatch(name), name
        assert not re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", value), value
    names = [name.lower().replace(b"_", b"-") for name, _ in request.fields]
    assert not FORBIDDEN & set(names), names
    for single in (b"host", b"content-length", b"x-request-id"):
        assert names.count(single) == 1, single
    assert request.get(b"host") == [b"127.0.0.1:%d" % port]
    assert request.get(b"content-length") == [b"%d" % len(request.body)]


# ---- one by one


@pytest.mark.parametrize(
    "fields",
    [
        b"target-pod: evil\r\nTARGET-POD: evil\r\nTarget-Pod-IP: 10.0.0.1:80",
        b"X-Gateway-Destination-Endpoint: 10.0.0.1:80\r\nx-gateway-destination-endpoint:10.0.0.2:80",
        b"X-Data-Parallel-Rank: 3\r\nx-data-parallel-rank:\t3\t\r\nX_Data_Parallel_Rank: 3\r\nX-Data_Parallel-Rank: 3",
        b"Connection: Content-Length, Host, Content-Type, X-Request-Id",
        b"Connection: close, x-data-parallel-rank, \t authorization",
        b"connection: keep-alive\r\nConnection: x-one\r\nX-One: 1\r\nKeep-Alive: timeout=5",
        b"Content_Length: 5\r\nTransfer_Encoding: chunked",
        b"X-Content-Length: 5",
        b"Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic eA==\r\nTE: trailers\r\nTrailer: X",
        b"X-Request-ID: one\r\nx-request-id: two\r\nRequest-ID: three\r\nrequest-id: four",
        b"X-Eight-Bit: \xe9\xff\x80\r\nX-Tab: a\tb\r\nX-Empty:\r\nX-Blank:    ",
        b"X-Forwarded-Host: evil\r\nX-Original-URL: /sleep\r\nX-Rewrite-URL: /sleep\r\nForwarded: host=evil",
        b"X-HTTP-Method-Override: DELETE",
    ],
)
async def test_accepted_requests_reach_the_engine_clean(fields: bytes) -> None:
    async with house(strict) as home:
        client = await home.client()
        for _ in range(2):
            await client.send(HEAD + fields + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
        await client.answer()
        if b"close" not in fields:
            assert (await client.answer()).body == b"good"
        assert home.engine.requests
        for request in home.engine.requests:
            judge(request, home.engine.port)
            assert request.body == BODY


@pytest.mark.parametrize(
    "target",
    [
        b"http://evil.test/v1/completions",
        b"HTTPS://evil.test:1/v1/completions",
        b"http://user:word@evil.test/v1/completions",
        b"http://127.0.0.1:1/v1/completions?target-pod=evil",
        b"//evil.test/../v1/completions",
        b"/v1/completions?http://evil.test/",
        b"/%76%31/completions",
    ],
)
async def test_a_target_s_host_is_nobody_s_business(target: bytes) -> None:
    async with house(strict) as home:
        client = await home.client()
        for host in (b"g", b"evil.test", b"127.0.0.1:1", b"[::1]", b"a, b", b"\xe9", b""):
            await client.send(
                b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n\r\n" % (target, host, len(BODY)) + BODY
            )
            assert (await client.answer()).body == b"good"
        for request in home.engine.requests:
            judge(request, home.engine.port)


async def test_what_a_body_hides_stays_in_the_body() -> None:
    """Bodies that look like requests, cut at every place, with chunk extensions and trailers."""
    body = b'{"model": "m",\r\n\r\n"POST /sleep HTTP/1.1":\r\n"Host: g",\r\n\r\n"prompt":\r\n0\r\n\r\n}'
    async with house(strict) as home:
        client = await home.client()
        for cut in range(0, len(body), 3):
            pieces = [body[:cut], body[cut:]]
            chunks = b"".join(b'%x;a=b;c="d"\r\n%b\r\n' % (len(piece), piece) for piece in pieces if piece)
            end = b"0;x\r\nX-Data-Parallel-Rank: 1\r\nContent-Length: 3\r\n\r\n" if cut % 2 else b"0\r\nX-T: 1\r\n\r\n"
            data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + end
            await client.send(data)
            answer = await client.answer()
            if answer.status != 200:  # a length in a trailer is refused, and ends the connection
                client = await home.client()
        for request in home.engine.requests:
            judge(request, home.engine.port)
            assert request.body == body
        assert len(home.engine.requests) >= len(body) // 6  # those without a length in the trailer


# ---- all together, at random

NAMES = (
    b"Content-Length|content-length|Content-Length | Content-Length|Content_Length|Transfer-Encoding|TRANSFER-ENCODING|"
    b"Transfer-Encoding\t|\x0bTransfer-Encoding|Host|Connection|Expect|Upgrade|X-Data-Parallel-Rank|target-pod|TE|"
    b"x_data_parallel_rank|X|X-A|X-B|X\x00|X\xff||:|Trailer"
).split(b"|")
VALUES = (
    b"33|0|+33|-1|33 33|33,33|0x21|033|\t33|33\t|chunked|Chunked| chunked|chunked, identity|identity|"
    b"xchunked|chunked\x00|\x0bchunked|close|keep-alive|content-length|close, transfer-encoding|100-continue|h2c|"
    b"a\rb|a\nX: y|a\r\n b|\xff|\x00||a long one that says little"
).split(b"|")
CHUNKED = b"Transfer-Encoding: chunked"
BODIES = [
    BODY,
    b"",
    b"0\r\n\r\n",
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    b'%x;e="\r\n"\r\n%b\r\n0\r\n\r\n' % (len(BODY), BODY),
    b"%X\n%b\n0\n\n" % (len(BODY), BODY),
    b"0%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    b"%x\r\n%b\r\n0\r\nContent-Length: 33\r\n\r\n" % (len(BODY), BODY),
    b"-1\r\n\r\n",
    b"fffffffffffffffff\r\n",
]
ENDS = [b"\n", b"\r", b"\r\r\n", b"\r\n\t", b"\x00\r\n", b"\r\n\r\n"]
SMUGGLED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nX-Smuggled: yes\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
)


def wild(chance: random.Random) -> bytes:
    """A request that would be right, with a few things wrong."""
    assert len(BODY) == 33
    framing = chance.choice([b"Content-Length: 33", CHUNKED])
    lines = [b"Host: g", framing]
    for _ in range(chance.choice([0, 1, 1, 2])):
        colon = chance.choice([b": ", b": ", b":", b" : ", b":\t"])
        lines.append(chance.choice(NAMES) + colon + chance.choice(VALUES))
    chance.shuffle(lines)
    lines.insert(0, b"POST /v1/completions HTTP/1.1")
    head = b"".join(line + (chance.choice(ENDS) if chance.random() < 0.05 else b"\r\n") for line in lines)
    body = BODIES[0 if framing is not CHUNKED else 3] if chance.random() < 0.6 else chance.choice(BODIES)
    return head + (chance.choice(ENDS) if chance.random() < 0.05 else b"\r\n") + body


def cases(count: int) -> Iterator[bytes]:
    chance = random.Random(4)
    for _ in range(count):
        yield wild(chance)


async def everything(client: Client) -> bytes:
    try:
        async with asyncio.timeout(5):
            return await client.reader.read()
    except ConnectionError:
        return b""


async def test_whatever_bytes_come_an_engine_sees_clean_requests_and_every_answer_has_its_request() -> None:
    """4,000 requests with something wrong, each followed by one that is marked. An engine must never see the marked one
    as part of another, nor another number of requests than there are answers."""
    async with house(strict, client_timeout=0.5) as home:
        for raw in cases(4000):
            before = len(home.engine.requests)
            client = await home.client()
            await client.send(raw + SMUGGLED)
            client.half_close()
            answers = await everything(client)
            client.close()
            seen = home.engine.requests[before:]
            for request in seen:
                judge(request, home.engine.port)
                assert b"X-Smuggled" not in request.body, raw
            assert len(seen) == answers.count(b"HTTP/1.1 200 OK"), (raw, answers)
            assert len(seen) <= 2, raw
        assert len(home.engine.requests) > 1000  # the pieces are not so hostile that nothing gets through


async def test_requests_of_two_clients_on_one_engine_connection_never_mix() -> None:
    """What one client left unfinished is no prefix of another's request."""
    async with house(strict) as home:
        first = await home.client()
        await first.send(post() + HEAD + b"Content-Length: 1000\r\n\r\n" + b"POST /sleep HTTP/1.1\r\n\r\n")
        assert (await first.answer()).body == b"good"
        second = await home.client()
        assert (await second.ask()).body == b"good"
        first.close()
        assert (await second.ask()).body == b"good"
        assert home.engine.connections == 1
        for request in home.engine.requests:
            judge(request, home.engine.port)
