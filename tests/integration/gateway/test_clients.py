"""Every kind of client: polite, slow, pipelining, confused and hostile."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from kvsync.tokenize.types import TokenizedRequest
from tests.integration.gateway.harness import (
    BODY,
    AtOnce,
    Client,
    FakeEngine,
    Talk,
    always,
    eventually,
    house,
    post,
    reply,
)

GOOD = always(reply(b"good"))
OK = 200
PODS = "error on getting pods for model"


async def echo(engine: FakeEngine, talk: Talk) -> None:
    while (request := await talk.request()) is not None:
        engine.requests.append(request)
        await talk.send(reply(request.body))


# ---- model list and the gateway's own errors


async def test_the_model_list() -> None:
    async with house() as home:
        client = await home.client()
        await client.send(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
        answer = await client.answer()
        data = answer.json["data"]
        assert isinstance(data, list)
        assert [(model["id"], model["parent"], model["object"]) for model in data] == [
            ("m", None, "model"),
            ("m-adapter", "m", "model"),
            ("org/big-model", None, "model"),
        ]
        assert answer.one(b"content-type") == b"application/json"
        await client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
        to_head = await client.answer(to_head=True)
        assert to_head.one(b"content-length") == answer.one(b"content-length")
        for name in (b"org/big-model", b"org%2Fbig-model", b"m-adapter?x=1"):
            await client.send(b"GET /v1/models/%b HTTP/1.1\r\nHost: g\r\n\r\n" % name)
            assert (await client.answer()).status == OK
        await client.send(b"GET /v1/models/no HTTP/1.1\r\nHost: g\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.message) == (404, "model no does not exist")
        assert home.counters.answers["/v1/models", 404, "model_not_found"] == 1
        assert home.counters.connections["opened"] == 1


@pytest.mark.parametrize(
    ("body", "fields", "status", "message", "header"),
    [
        (b'{"model": "x"}', (), 400, "model x does not exist", b"x-error-no-model-backends"),
        (b'{"model": "org/big-model"}', (), 503, f"{PODS} org/big-model", b"x-error-no-model-backends"),
        (BODY, (b"routing-strategy: nonsense",), 400, "incorrect routing strategy nonsense", b"x-error-routing"),
        (BODY, (b"External-Filter: ((",), 400, "incorrect external filter: no label selector", b"x-error-routing"),
        (b"", (), 400, "the request body is not valid JSON: Input data was truncated", None),
        (b'{"model": "m"', (), 400, "the request body is not valid JSON: Input data was truncated", None),
        (b'["m"]', (), 400, "the request body must be a JSON object", None),
        (b"null", (), 400, "the request body must be a JSON object", None),
        (b"{}", (), 400, "no model in request body", None),
        (b'{"model": null}', (), 400, "no model in request body", None),
        (b'{"model": ""}', (), 400, "no model in request body", None),
        (b'{"model": 7}', (), 400, "model must be a string", None),
        (b'{"model": ["m"]}', (), 400, "model must be a string", None),
        (b"[" * 100_000, (), 400, "the request body is not valid JSON: nested too deeply", None),
    ],
)  # fmt: skip
async def test_refusals_and_their_words(
    body: bytes, fields: tuple[bytes, ...], status: int, message: str, header: bytes | None
) -> None:
    async with house(GOOD) as home:
        client = await home.client()
        answer = await client.ask(body, b"/v1/chat/completions", b"request-id: r-1", *fields)
        assert (answer.status, answer.message) == (status, message)
        assert answer.one(b"request-id") == b"r-1"
        assert [name for name, _ in answer.fields if name.startswith(b"x-error")] == ([header] if header else [])
        assert (await client.ask()).body == b"good"  # the connection lives on
        assert len(home.engine.requests) == 1


async def test_of_duplicate_keys_the_last_counts_as_for_the_engine() -> None:
    async with house(echo) as home:
        client = await home.client()
        body = b'{"model": "nobody", "model": "m"}'
        assert (await client.ask(body)).body == body
        assert (await client.ask(b'{"model": "m", "model": "nobody"}')).status == 400


async def test_a_name_from_the_client_is_cut_and_escaped() -> None:
    async with house() as home:
        answer = await (await home.client()).ask(json.dumps({"model": "x\r\nevil: 1" + "y" * 10_000}).encode())
        assert answer.status == 400
        assert len(answer.body) < 1000
        assert answer.message.startswith("model x\r\nevil: 1yyy")
        assert answer.get(b"evil") == []


async def test_a_fault_in_a_room_does_not_leave_the_client_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(AtOnce):
        async def begin(self, *args: object) -> TokenizedRequest:  # type: ignore[override]
            raise RuntimeError("broken tokenizer")

    async with house(GOOD, tokenizing=Broken()) as home:
        client = await home.client()
        assert (await client.ask()).body == b"good"
        assert home.routing.queries[0].tokenized.reason == "tokenizer_failed"
        assert "broken tokenizer" in caplog.text
        home.routing.choose = None  # type: ignore[assignment,method-assign]
        answer = await client.ask()
        assert (answer.status, answer.message) == (503, "error on selecting target pod")


@pytest.mark.parametrize("size", [100, 300_000])
async def test_nor_does_one_that_comes_at_once(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Large bodies are read in a turn of their own, where nobody would see the exception."""

    class Broken(AtOnce):
        def begin(self, *args: object) -> TokenizedRequest:
            raise RuntimeError("broken tokenizer")

    async with house(GOOD, tokenizing=Broken()) as home:
        body = json.dumps({"model": "m", "prompt": "x" * size}).encode()
        assert (await (await home.client()).ask(body)).body == b"good"
        assert home.routing.queries[0].tokenized.reason == "tokenizer_failed"
        assert "broken tokenizer" in caplog.text


# ---- paths and methods


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/completions",
        b"//v1///completions",
        b"/v1/%63ompletions",
        b"/v1%2Fcompletions",
        b"/x/../v1/./completions",
        b"/../v1/completions/",
        b"/v1/x%2F..%2fcompletions",
        b"http://elsewhere:1/v1/completions",
        b"HTTP://user@[::1]/v1/completions",
    ],
)
async def test_spellings_of_a_listed_path_reach_that_path_only(target: bytes) -> None:
    async with house(GOOD) as home:
        assert (await (await home.client()).ask(BODY, target)).status == OK
        (request,) = home.engine.requests
        assert request.line == b"POST /v1/completions HTTP/1.1"
        assert request.get(b"host") == [b"127.0.0.1:%d" % home.engine.port]


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"/v1",
        b"/v1/completion",
        b"/V1/completions",
        b"/v1/completions/x",
        b"/v1/completions%00",
        b"/v1/completions%252f..%252freset_prefix_cache",
        b"/v1/completions/../../reset_prefix_cache",
        b"/v1/completions/%2e%2e/%2e%2e/reset_prefix_cache",
        b"/v1/completions%2f..%2f..%2fsleep",
        b"/v1/..%2freset_prefix_cache",
        b"//v1//..//reset_prefix_cache",
        b"/reset%5fprefix_cache",
        b"/wake_up",
        b"/collective_rpc",
        b"//invocations",
        b"/%69nvocations",
        b"/%2ftokenize",
        b"//sleep",
        b"/%73leep",
        b"/tokenize",
        b"/detokenize",
        b"/v1/%74okenize/../../tokenize",
        b"/invocations",
        b"/metrics",
        b"/health",
        b"/v1/load_lora_adapter",
        b"ftp://h/v1/completions",
        b"http://h",
        b"/v1/completions;x",
        b"/v1/completions%23",
        b"/v1\\completions",
    ],
)
@pytest.mark.parametrize("method", [b"POST", b"GET", b"OPTIONS", b"DELETE"])
async def test_everything_else_is_refused(target: bytes, method: bytes) -> None:
    """(X2) Engines' admin and tokenizer routes, with encoded and doubled slashes and dots, and whatever else."""
    async with house(GOOD) as home:
        client = await home.client()
        await client.send(post(BODY, target).replace(b"POST", method, 1))
        answer = await client.answer()
        assert (answer.status, answer.message) == (501, "unknown request path") or answer.status == 400
        assert home.engine.connections == 0
        assert home.routing.queries == []


async def test_paths_that_configuration_adds() -> None:
    async with house(echo, extra_paths=["/v1/rerank"], expose_tokenize=True) as home:
        client = await home.client()
        for path in (b"/v1/rerank", b"/tokenize", b"/detokenize"):
            assert (await client.ask(BODY, path)).body == BODY
        assert [request.line.split()[1] for request in home.engine.requests] == [
            b"/v1/rerank",
            b"/tokenize",
            b"/detokenize",
        ]


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        (b"GET", b"/v1/completions", b"POST, OPTIONS"),
        (b"PUT", b"/v1/chat/completions", b"POST, OPTIONS"),
        (b"HEAD", b"/v1/embeddings", b"POST, OPTIONS"),
        (b"DELETE", b"/v1/models/m", b"GET, HEAD, OPTIONS"),
    ],
)
async def test_other_methods(method: bytes, target: bytes, allow: bytes) -> None:
    async with house() as home:
        client = await home.client()
        await client.send(b"%b %b HTTP/1.1\r\nHost: g\r\n\r\n" % (method, target))
        answer = await client.answer(to_head=method == b"HEAD")
        assert (answer.status, answer.one(b"allow")) == (405, allow)
        await client.send(b"OPTIONS %b HTTP/1.1\r\nHost: g\r\n\r\n" % target)
        answer = await client.answer()
        assert (answer.status, answer.one(b"allow"), answer.get(b"content-length")) == (204, allow, [])
        await client.send(b"OPTIONS * HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (await client.answer()).status == 204


# ---- header fields


async def test_fields_that_must_not_pass() -> None:
    async with house(GOOD) as home:
        client = await home.client()
        await client.ask(
            BODY,
            b"/v1/completions",
            b"Target-Pod: 127.0.0.1:9901",
            b"target-pod: evil",
            b"TARGET-POD-IP: 10.0.0.1",
            b"X-Gateway-Destination-Endpoint: 10.0.0.1:80",
            b"Connection: keep-alive, X-Secret",
            b"x-secret: s",
            b"Keep-Alive: 5",
            b"Proxy-Authorization: p",
            b"Proxy-Connection: keep-alive",
            b"TE: trailers",
            b"Trailer: x",
            b"Accept: */*",
            b"X-Request-Id: theirs",
        )
        (request,) = home.engine.requests
        names = sorted(name.lower() for name, _ in request.fields)
        assert names == [b"accept", b"content-length", b"host", b"x-request-id"]
        assert request.get(b"x-request-id") != [b"theirs"]


async def test_fields_of_an_engine_that_must_not_pass() -> None:
    fields = (b"Target-Pod: x", b"Request-Id: x", b"Connection: keep-alive, x-hop", b"X-Hop: x", b"Keep-Alive: 5")
    async with house(always(reply(b"{}", b"200 OK", *fields, b"X-Request-Id: e"))) as home:
        answer = await (await home.client()).ask(BODY, b"/v1/completions", b"request-id: mine")
        assert answer.one(b"target-pod") == b"engine-0"
        assert answer.one(b"request-id") == b"mine"
        assert answer.one(b"x-request-id") == b"e"
        assert answer.get(b"x-hop") == answer.get(b"keep-alive") == answer.get(b"connection") == []


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (b"request-id:",),
        (b"request-id: a b",),
        (b"request-id: a/../b",),
        (b"request-id: " + b"x" * 129,),
        (b"request-id: \xff",),
        (b"request-id: a", b"Request-ID: b"),
    ],
)
async def test_an_ill_formed_request_id_is_replaced(fields: tuple[bytes, ...]) -> None:
    async with house(GOOD) as home:
        answer = await (await home.client()).ask(BODY, b"/v1/completions", *fields)
        made = answer.one(b"request-id")
        assert re.fullmatch(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", made)
        (request,) = home.engine.requests
        assert request.get(b"x-request-id") == [made]
        assert request.get(b"request-id") == []


async def test_a_well_formed_request_id_is_kept() -> None:
    async with house(GOOD) as home:
        name = b"A.b_c-" + b"9" * 122
        answer = await (await home.client()).ask(BODY, b"/v1/completions", b"ReQuest-Id:  " + name)
        assert answer.one(b"request-id") == name
        (request,) = home.engine.requests
        assert request.get(b"x-request-id") == request.get(b"request-id") == [name]
        assert home.routing.queries[0].request_id == name.decode()


async def test_wishes_reach_the_router() -> None:
    async with house(GOOD) as home:
        answer = await (await home.client()).ask(
            BODY, b"/v1/completions", b"Routing-Strategy: random ", b"external-filter: zone=a"
        )
        (query,) = home.routing.queries
        assert (query.policy, query.label_filter) == ("random", "zone=a")
        assert answer.one(b"routing-strategy") == b"random"


# ---- bodies and their framing


@pytest.mark.parametrize("size", [0, 1, 1023, 1024])
async def test_bodies_up_to_the_limit(size: int) -> None:
    async with house(echo, max_body_bytes=2048) as home:
        client = await home.client()
        body = b'{"model": "m"}' + b" " * (2048 - 14 - size)
        assert (await client.ask(body)).body == body


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_over_the_limit_gets_one_clear_413(framing: str) -> None:
    async with house(echo, max_body_bytes=1 << 20) as home:
        client = await home.client()
        size = 16 << 20
        body = b'{"model": "m"}'.ljust(size)
        if framing == "length":
            request = post(body)
        else:
            pieces = [b"%x\r\n%b\r\n" % (1 << 18, body[at : at + (1 << 18)]) for at in range(0, size, 1 << 18)]
            request = post(b"", framing=b"Transfer-Encoding: chunked") + b"".join(pieces) + b"0\r\n\r\n"
        sending = asyncio.create_task(client.send(request))  # all of it, before looking at the answer
        await asyncio.wait({sending})
        answer = await client.answer()
        assert (answer.status, answer.message) == (413, f"the request body exceeds {1 << 20} bytes")
        assert answer.one(b"connection") == b"close"
        assert await client.ended() == b""
        assert home.counters.answers == {("other", 413, "body_too_large"): 1}
        assert home.engine.connections == 0


async def test_a_body_of_20_mb() -> None:
    async with house(echo) as home:
        body = b'{"model": "m", "prompt": "%b"}' % (b"y" * (20 << 20))
        assert (await (await home.client()).ask(body)).body == body


async def test_chunked_request_bodies_arrive_whole() -> None:
    async with house(echo) as home:
        client = await home.client()
        for _ in range(2):
            for piece in post(b"", framing=b"Transfer-Encoding: Chunked"), b"3;x=y\r\n" + BODY[:3] + b"\r\n":
                await client.send(piece)
            rest = BODY[3:]
            await client.send(b"%X\r\n%b\r\n0\r\nX-Trailer: t\r\n\r\n" % (len(rest), rest))
            assert (await client.answer()).body == BODY
        assert home.engine.requests[0].get(b"content-length") == [b"%d" % len(BODY)]
        assert home.engine.requests[0].get(b"transfer-encoding") == []


async def test_a_request_that_comes_byte_by_byte() -> None:
    async with house(echo) as home:
        client = await home.client()
        for byte in post():
            await client.send(bytes([byte]))
        assert (await client.answer()).body == BODY


SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (SMUGGLED + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (SMUGGLED + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
        (SMUGGLED + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400),
        (SMUGGLED + b"Content-Length: 5, 5\r\n\r\nhello", 400),
        (SMUGGLED + b"Content-Length: +5\r\n\r\nhello", 400),
        (SMUGGLED + b"Content-Length: 0x5\r\n\r\nhello", 400),
        (SMUGGLED + b"Content-Length: -1\r\n\r\n", 400),
        (SMUGGLED + b"Content-Length: \r\n\r\n", 400),
        (SMUGGLED + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
        (SMUGGLED + b"Content-Length: " + b"0" * 6000 + b"5\r\n\r\nhello", 400),
        (SMUGGLED + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (SMUGGLED + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
        (SMUGGLED + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (SMUGGLED + b"Transfer-Encoding: identity\r\n\r\n", 501),
        (SMUGGLED + b"Transfer-Encoding : chunked\r\n\r\n", 400),
        (SMUGGLED + b"Transfer-Encoding:\x0bchunked\r\n\r\n", 400),
        (SMUGGLED + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (SMUGGLED + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nx", 400),
        (SMUGGLED + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\nx", 400),
        (SMUGGLED + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n", 400),
        (SMUGGLED + b"Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n", 400),
        (SMUGGLED.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (SMUGGLED + b"X: a\r\n folded: yes\r\n\r\n", 400),
        (SMUGGLED + b"X: a\x00b\r\n\r\n", 400),
        (SMUGGLED + b"X: a\rb\r\n\r\n", 400),
        (SMUGGLED + b"X: a\nY: b\r\n\r\n", 400),
        (SMUGGLED + b"X Y: a\r\n\r\n", 400),
        (SMUGGLED + b": a\r\n\r\n", 400),
        (SMUGGLED + b"X\xc3\xa9: a\r\n\r\n", 400),
        (SMUGGLED + b"Host: second\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/2.0\r\nHost: g\r\n\r\n", 400),
        (b"POST /v1/completions\r\nHost: g\r\n\r\n", 400),
        (b"GET /v1/models\r\n\r\n", 400),
        (b"POST /v1/comp\xffletions HTTP/1.1\r\nHost: g\r\n\r\n", 400),
        (b"POST /v1/com pletions HTTP/1.1\r\nHost: g\r\n\r\n", 400),
        (SMUGGLED + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\n", 400),
        (b"CONNECT engine:80 HTTP/1.1\r\nHost: g\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"FOO /v1/completions HTTP/1.1\r\nHost: g\r\n\r\n", 400),
        (SMUGGLED + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", 415),
        (SMUGGLED + b"Content-Encoding: identity\r\nContent-Encoding: br\r\nContent-Length: 5\r\n\r\nhello", 415),
        (SMUGGLED + b"Expect: 200-ok\r\nContent-Length: 5\r\n\r\nhello", 417),
        (b"POST /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: g\r\n\r\n", 414),
        (SMUGGLED + b"X: " + b"y" * (65 << 10) + b"\r\n\r\n", 431),
        (SMUGGLED + b"X: y\r\n" * 20_000 + b"\r\n", 431),
    ],
)
async def test_what_cannot_be_read_in_one_way_only_is_refused_and_ends_the_connection(
    request_bytes: bytes, status: int
) -> None:
    async with house(GOOD) as home:
        client = await home.client()
        await client.send(request_bytes + post())  # the tail would be a request if the refused one were skipped
        answer = await client.answer()
        assert answer.status == status, answer
        assert answer.message
        assert await client.ended() == b""
        assert home.engine.connections == 0
        assert home.routing.queries == []


async def test_a_head_that_never_ends_is_refused_before_it_is_kept() -> None:
    async with house(GOOD, max_header_bytes=4096) as home:
        client = await home.client()
        await client.send(SMUGGLED + b"X: ")
        for _ in range(200):
            await client.send(b"y" * 100)
            await asyncio.sleep(0)
        assert (await client.answer()).status == 431


async def test_an_offer_to_upgrade_is_ignored() -> None:
    """As Java's and curl's clients make it, with a body and without."""
    fields = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQ")
    async with house(echo) as home:
        client = await home.client()
        once = post(BODY, b"/v1/completions", *fields)
        chunked = post(b"", b"/v1/completions", *fields, framing=b"Transfer-Encoding: chunked")
        chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        get = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n" + b"\r\n".join(fields) + b"\r\n\r\n"
        await client.send(once + chunked + get + once)
        assert [(await client.answer()).body for _ in range(2)] == [BODY, BODY]
        assert b"org/big-model" in (await client.answer()).body
        assert (await client.answer()).body == BODY
        for byte in chunked:
            await client.send(bytes([byte]))
        assert (await client.answer()).body == BODY
        names = {name.lower() for request in home.engine.requests for name, _ in request.fields}
        assert not names & {b"upgrade", b"http2-settings", b"connection"}


# ---- connections


async def test_100_continue() -> None:
    async with house(echo) as home:
        client = await home.client()
        head = post(BODY, b"/v1/completions", b"Expect: 100-Continue")[: -len(BODY)]
        for _ in range(2):
            await client.send(head)
            assert (await client.answer()).status == 100
            await client.send(BODY)
            assert (await client.answer()).body == BODY
        assert home.engine.requests[0].get(b"expect") == []
        await client.send(head + BODY)  # a client that does not wait
        assert (await client.answer()).body == BODY


async def test_no_100_continue_for_a_body_that_is_not_wanted() -> None:
    async with house(echo, max_body_bytes=1024) as home:
        for field, path in ((b"Content-Length: 99999", b"/v1/completions"), (b"Content-Length: 5", b"/nowhere")):
            client = await home.client()
            await client.send(post(b"", path, b"Expect: 100-continue", framing=field))
            assert (await client.answer()).status in (413, 501)
            assert await client.ended() == b""


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            engine.requests.append(request)
            if b'"slow"' in request.body:
                await asyncio.sleep(0.1)
            await talk.send(reply(request.body))

    bodies = [json.dumps({"model": "m", "n": n, "x": "slow" if n % 2 == 0 else ""}).encode() for n in range(6)]
    models = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"
    async with house(script) as home:
        client = await home.client()
        await client.send(b"".join(post(body) + models for body in bodies))
        for body in bodies:
            assert (await client.answer()).body == body
            assert (await client.answer()).json["object"] == "list"
        client = await home.client()
        for body in bodies:  # each in packets of its own
            await client.send(post(body)[:20])
            await asyncio.sleep(0.01)
            await client.send(post(body)[20:])
        client.half_close()
        got: list[bytes] = []
        while len(got) < len(bodies):
            answer = await client.answer()
            if answer.status == OK:  # else the interim answer to the half-close
                got.append(answer.body)
        assert got == bodies
        assert await client.ended() == b""


async def test_thousands_of_pipelined_requests() -> None:
    async with house() as home:
        client = await home.client()
        count = 5000
        sending = asyncio.create_task(client.send(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n" * count))
        for _ in range(count):
            assert (await client.answer()).status == OK
        await sending


async def test_a_pipeline_beyond_its_bound_is_cut_after_the_answer_under_way() -> None:
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        engine.requests.append(await talk.request() or pytest.fail("no request"))
        await go.wait()
        await talk.send(reply(b"one"))

    async with house(script) as home:
        client = await home.client()
        await client.send(post())
        await eventually(lambda: len(home.engine.requests) == 1)
        await client.send(post(b'{"model": "m"}'.ljust(2 << 20)) * 3)
        await eventually(lambda: home.counters.connections["pipeline_overflow"] == 1)
        go.set()
        answer = await client.answer()
        assert (answer.body, answer.one(b"connection")) == (b"one", b"close")
        assert await client.ended() == b""
        assert len(home.engine.requests) == 1


@pytest.mark.parametrize(
    ("version", "fields", "stays"),
    [
        (b"1.1", (), True),
        (b"1.1", (b"Connection: close",), False),
        (b"1.1", (b"Connection: keep-alive, close",), False),
        (b"1.0", (), False),
        (b"1.0", (b"Connection: Keep-Alive",), True),
    ],
)
async def test_who_closes(version: bytes, fields: tuple[bytes, ...], stays: bool) -> None:
    async with house(GOOD) as home:
        client = await home.client()
        await client.send(post(BODY, b"/v1/completions", *fields, version=version))
        answer = await client.answer()
        assert (answer.body, answer.whole) == (b"good", True)
        if stays:
            await client.send(post(BODY, b"/v1/completions", version=version))
            assert (await client.answer()).body == b"good"
        else:
            assert answer.one(b"connection") == b"close"
            assert await client.ended() == b""


async def test_bytes_after_the_last_request_are_nobodys() -> None:
    async with house(GOOD) as home:
        client = await home.client()
        await client.send(post(BODY, b"/v1/completions", b"Connection: close") + post() + b"noise")
        assert (await client.answer()).body == b"good"
        assert await client.ended() == b""
        assert len(home.engine.requests) == 1


@pytest.mark.parametrize(
    ("sent", "event", "answer"),
    [
        (b"", "idle_timeout", b""),
        (post(), "idle_timeout", b"HTTP/1.1 200 OK"),
        (b"POST /v1/comp", "request_timeout", b"HTTP/1.1 408 Request Timeout"),
        (post()[:-1], "request_timeout", b"HTTP/1.1 408 Request Timeout"),
    ],
    ids=["silent", "after-an-answer", "half-a-head", "half-a-body"],
)
async def test_a_client_that_is_silent_is_dropped(sent: bytes, event: str, answer: bytes) -> None:
    async with house(GOOD, client_timeout=0.2) as home:
        client = await home.client()
        await client.send(sent)
        assert (await client.ended()).startswith(answer)
        assert home.counters.connections == {"opened": 1, event: 1}


async def test_a_head_that_trickles_in_has_no_more_time_than_another() -> None:
    async with house(GOOD, client_timeout=0.3) as home:
        client = await home.client()

        async def trickle() -> None:
            await client.send(SMUGGLED)
            while True:
                await client.send(b"X: y\r\n")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        answer = await client.answer()
        assert answer.status == 408
        trickling.cancel()


async def test_a_body_that_trickles_in_is_waited_for_as_long_as_it_gets_on() -> None:
    body = BODY + b" " * 2000
    async with house(echo, client_timeout=0.3) as home:
        client = await home.client()
        await client.send(post(body)[: -len(body)])
        for place in range(0, len(body), 50):
            await client.send(body[place : place + 50])
            await asyncio.sleep(0.02)  # in all, more than twice the limit
        assert (await client.answer()).body == body


async def test_a_client_that_leaves_in_the_middle_of_its_request() -> None:
    async with house(GOOD) as home:
        client = await home.client()
        await client.send(post()[:-1])
        await eventually(lambda: home.gateway.open_connections() == 1)
        client.half_close()
        assert await client.ended() == b""
        assert home.counters.connections["incomplete_request"] == 1
        assert home.engine.connections == 0


async def test_many_clients_that_leave_at_random_leave_nothing_behind() -> None:
    async def slow(engine: FakeEngine, talk: Talk) -> None:
        while await talk.request():
            await asyncio.sleep(0.005)
            await talk.send(reply(b"ok"))

    async with house(slow) as home:

        async def one(number: int) -> None:
            client: Client = await home.client()
            await client.send(post() * 2)
            await asyncio.sleep(0.0005 * number)
            client.reset() if number % 2 else client.close()

        await asyncio.gather(*(one(number) for number in range(40)))
        await eventually(lambda: home.gateway.open_connections() == 0)
        assert all(len(ticket.ends) == 1 for ticket in home.routing.tickets)
