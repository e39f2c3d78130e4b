"""Through Envoy a request gets the answer that it gets at the gateway's own port, and engines get the same."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.http import SSE_HEAD, FakeEngine, Received, Talk, chunk, reply
from tests.integration.extproc.envoy import in_pieces
from tests.integration.extproc.harness import Street, good, note, street
from tests.integration.gateway.harness import BODY, Answer, eventually, post

KEY, OTHER_KEY = "key-of-alice-0123", "key-of-bob-012345"
ENVOYS = frozenset(
    {
        b"host",
        b"x-forwarded-for",
        b"x-forwarded-proto",
        b"x-envoy-external-address",
        b"x-envoy-expected-rq-timeout-ms",
        b"target-pod",
        b"x-gateway-destination-endpoint",
        b"routing-strategy",
    }
)
"""Fields that a request by way of Envoy has, or has of its client, and others have not."""
COMPARED = (
    b"content-type",
    b"allow",
    b"routing-strategy",
    b"target-pod",
    b"target-pod-ip",
    b"www-authenticate",
    b"x-error-no-model-backends",
    b"x-error-routing",
    b"x-kvsync-match",
    b"x-engine",
)


def comparable(received: Received, apart: frozenset[bytes] = ENVOYS) -> tuple[bytes, list[tuple[bytes, bytes]], bytes]:
    fields = sorted((name.lower(), value) for name, value in received.fields if name.lower() not in apart)
    ours = {b"x-request-id", b"request-id"}
    return received.line, [(name, b"" if name in ours else value) for name, value in fields], received.body


def shown(answer: Answer) -> tuple[int, bytes, dict[bytes, list[bytes]]]:
    return answer.status, answer.body, {name: answer.get(name) for name in COMPARED if answer.get(name)}


async def telling(engine: FakeEngine, talk: Talk) -> None:
    """An engine that claims what is not its to say."""
    lies = [b"target-pod: liar", b"request-id: liar", b"x-kvsync-match: liar", b"x-data-parallel-rank: 9"]
    while (request := await talk.request()) is not None:
        note(engine, request)
        status = b"418 Teapot" if b"teapot" in request.body else b"200 OK"
        await talk.send(reply(b'{"ok":true}', status, b"content-type: application/json", b"x-engine: e", *lies))


GOOD_REQUESTS: list[bytes] = [
    post(),
    post(b'{"model": "m", "messages": []}', b"/v1/chat/completions"),
    post(b'{"model": "m", "input": "x"}', b"/v1/embeddings", b"request-id: mine-1", b"x-custom: 1", b"X_Custom: 2"),
    post(BODY, b"/v1//x/../completions?a=%20b&c"),
    post(BODY, b"/%761/completions"),
    post(BODY, b"/v1/completions", b"routing-strategy: random", b"external-filter: zone=east"),
    post(BODY, b"/v1/completions", b"request-id: not well formed", b"x-request-id: theirs"),
    post(BODY, b"/v1/completions", b"request-id: a", b"request-id: b"),
    post(BODY, b"/v1/completions", b"Authorization: Bearer of-the-client", b"X-Api-Key: k"),
    post(BODY, b"/v1/completions", b"target-pod: 127.0.0.1:9", b"X-Gateway-Destination-Endpoint: 127.0.0.1:9"),
    post(BODY, b"/v1/completions", b"te: trailers", b"keep-alive: 5", b"proxy-authorization: x"),
    post(BODY, b"/v1/completions", b"X-Data-Parallel-Rank: 3", b"x_data_parallel_rank: 3", b"Target_Pod_Ip: 1"),
    post(b'{"model": "adapter", "prompt": [1, 2, 3], "x": 1e300}'),
    post(b'{"model": "m", "prompt": "teapot"}'),
    post(b'{"model": "m", "prompt": "' + b"x" * 300_000 + b'"}'),
]
REFUSED: list[bytes] = [
    post(b'{"model": "nobody"}'),
    post(b'{"model": ""}'),
    post(b'{"model": 5}'),
    post(b"{}"),
    post(b"[1]"),
    post(b"{nonsense"),
    post(b'{"model": "m", "x": [' + b"[" * 5000),
    post(b""),
    post(BODY, b"/v1/completions", b"routing-strategy: nonsense"),
    post(BODY, b"/v1/completions", b"external-filter: (("),
    post(BODY, b"/v1/completions", b"external-filter: zone=nowhere"),
    post(BODY, b"/v1/completions", b"content-encoding: gzip"),
    post(b"", b"/v1/completions", b"content-encoding: gzip"),
    post(BODY, b"/sleep", b"content-encoding: gzip"),
    post(BODY, b"/v1/completions", b"expect: nonsense"),
    post(BODY, b"/v1/completions", b"content-encoding: br", b"expect: nonsense"),
    post(BODY, b"/" + b"x" * 9000),
    post(BODY, b"/reset_prefix_cache"),
    post(BODY, b"/v1/models"),
    post(BODY, b"/v1/completions/../../sleep"),
    post(BODY, b"/v1/completions%00"),
    post(b'{"model": "empty", "prompt": "x"}'),
    b"GET /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /v1/models/m HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /v1/models/nobody HTTP/1.1\r\nHost: h\r\n\r\n",
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n",
    b"DELETE /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
]


async def both(made: Street, raw: bytes) -> tuple[Answer, Answer]:
    """The answers of the gateway's own port and of Envoy."""
    return await made.say(raw, made.app.gateway.port), await made.say(raw)


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_the_same_requests_get_the_same_answers(tmp_path: Path, mode: str) -> None:
    """(X2) And the engine gets the same request."""

    def changes(config: dict[str, Any]) -> None:
        if mode != "BUFFERED":
            in_pieces(config)

    # Envoy sends chunks to the engine where the body came in pieces.
    apart = ENVOYS | {b"content-length", b"transfer-encoding"} if mode != "BUFFERED" else ENVOYS
    labels = {"labels": {"zone": "east"}, "adapters": ["adapter"]}
    async with street(tmp_path, telling, changes=changes, entry=labels, gateway={"reveal_match": True}) as made:
        (engine,) = made.engines
        for raw in GOOD_REQUESTS:
            own, by_envoy = await both(made, raw)
            assert shown(own) == shown(by_envoy), raw[:200]
            assert by_envoy.get(b"target-pod") == [b"engine-0"], (raw[:200], own)
            first, second = engine.requests[-2:]
            assert comparable(first, apart) == comparable(second, apart), raw[:200]
            address = b"127.0.0.1:%d" % engine.port
            assert second.get(b"target-pod") == second.get(b"x-gateway-destination-endpoint") == [address]
            assert len(second.get(b"x-request-id")) == 1
            assert second.get(b"x-request-id") == by_envoy.get(b"request-id")
        seen = len(engine.requests)
        for raw in REFUSED:
            own, by_envoy = await both(made, raw)
            assert shown(own) == shown(by_envoy), raw[:200]
            assert len(by_envoy.get(b"request-id")) == 1
        assert len(engine.requests) == seen
        await eventually(lambda: made.running() == 0)
        for status in ("200", "400", "418", "501", "503"):
            paths = ("/v1/completions", "/v1/models", "other")
            total = sum(
                sample.value
                for family in made.app.metrics.registry.collect()
                for sample in family.samples
                if sample.name == "kvsync_requests_total"
                and sample.labels["status"] == status
                and sample.labels["path"] in paths
            )
            assert total % 2 == 0, status  # both ports count alike
        assert made.figure("kvsync_worker_tries_total", worker="engine-0", outcome="ok") == 2 * (len(GOOD_REQUESTS) - 1)
        assert made.figure("kvsync_worker_tries_total", worker="engine-0", outcome="request_error") == 2


async def test_a_head_without_a_body_and_a_head_asked_for(tmp_path: Path) -> None:
    async with street(tmp_path, good) as made:
        answer = await made.say(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        assert (answer.status, answer.message.partition(":")[0]) == (400, "the request body is not valid JSON")
        answer = await made.say(b"HEAD /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", to_head=True)
        assert answer.status == 200


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_large_bodies(tmp_path: Path, mode: str) -> None:
    """(P8) 5 MB arrive byte for byte, with their length; beyond the limit there is one clear refusal."""

    def changes(config: dict[str, Any]) -> None:
        if mode != "BUFFERED":
            in_pieces(config)

    body = json.dumps({"model": "m", "prompt": "x" * 5_000_000}).encode()
    chunks = [body[at : at + 40_001] for at in range(0, len(body), 40_001)]
    chunked = post(b"".join(map(chunk, chunks)) + chunk(b""), framing=b"Transfer-Encoding: chunked")
    async with street(tmp_path, good, changes=changes, gateway={"max_body_bytes": 6_000_000}) as made:
        (engine,) = made.engines
        for raw in (post(body), chunked):
            assert (await made.say(raw)).status == 200
            received = engine.requests.pop()
            assert hashlib.sha256(received.body).digest() == hashlib.sha256(body).digest()
            if mode == "BUFFERED":
                assert received.get(b"content-length") == [b"%d" % len(body)]
                assert not received.get(b"transfer-encoding")
        answer = await made.say(post(b"", framing=b"Content-Length: 6000001"))
        assert (answer.status, answer.message) == (413, "the request body exceeds 6000000 bytes")
        too_long = chunk(b'{"model": "m", "prompt": "') + chunk(b"x" * 50_000) * 121
        if mode == "BUFFERED":  # nobody but Envoy sees it before its end, and its own limit is higher
            too_long += chunk(b"")
        answer = await made.say(post(too_long, framing=b"Transfer-Encoding: chunked"))
        assert (answer.status, answer.message) == (413, "the request body exceeds 6000000 bytes")


async def test_beyond_envoys_own_limit(tmp_path: Path) -> None:
    """(P8) Envoy refuses in the gateway's envelope."""

    def changes(config: dict[str, Any]) -> None:
        config["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 1 << 20

    async with street(tmp_path, good, changes=changes) as made:
        pieces = chunk(b"x" * 60_000) * 20 + chunk(b"")
        answer = await made.say(post(pieces, framing=b"Transfer-Encoding: chunked"))
        assert answer.status == 413
        assert answer.json["error"] == {
            "message": "Payload Too Large",
            "type": "invalid_request_error",
            "code": "request_payload_too_large",
            "param": None,
        }
        await eventually(lambda: made.app.extproc is not None and made.app.extproc.streams == 0)


async def test_tenants_keys_and_salts(tmp_path: Path) -> None:
    """(X3) Salted bodies go out with their own length; clients' keys stay here and the engines' own goes out."""
    tenants = [
        {"name": "alice", "api_keys": [KEY], "cache_salt": "enforce"},
        {"name": "bob", "api_keys": [OTHER_KEY], "cache_salt": "strip"},
    ]
    gateway = {"salt_secret": "a-secret-of-some-length", "engine_api_key": "key-of-the-engines"}
    bearer = b"authorization: Bearer %b" % KEY.encode()
    cases = [
        post(BODY, b"/v1/completions", bearer, b"x-api-key: k", b"X_Api_Key: k"),
        post(b'{"model": "m", "prompt": "p", "cache_salt": "own"}', b"/v1/completions", bearer),
        post(
            b'{"cache_salt": "own", "model": "m"}', b"/v1/completions", b"authorization: Bearer %b" % OTHER_KEY.encode()
        ),
        post(BODY, b"/v1/embeddings", bearer),
        post(b'{"model": "m", "kv_transfer_params": {}}', b"/v1/completions", bearer),
        post(BODY, b"/v1/completions"),
        post(BODY, b"/v1/completions", b"authorization: Bearer nobodys-key-0123"),
        b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
        b"OPTIONS /v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
    ]
    async with street(tmp_path, good, tenants=tenants, gateway=gateway) as made:
        (engine,) = made.engines
        for raw in cases:
            own, by_envoy = await both(made, raw)
            assert shown(own) == shown(by_envoy), raw
        assert len(engine.requests) == 6
        for first, second in zip(engine.requests[::2], engine.requests[1::2], strict=True):
            assert comparable(first) == comparable(second)
            assert second.get(b"authorization") == [b"Bearer key-of-the-engines"]
            assert second.get(b"content-length") == [b"%d" % len(second.body)]
            assert not second.get(b"x-api-key")
        assert len(json.loads(engine.requests[3].body)["cache_salt"]) == 43
        assert "cache_salt" not in json.loads(engine.requests[5].body)


MALFORMED: list[tuple[bytes, int]] = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET /v1/models HTTP/1.1\r\nHost: h\r\nno field\r\n\r\n", 400),
    (post(BODY, b"/v1/completions", b"content-length: 3"), 400),
    (post(BODY, b"https://h/v1/completions"), 403),
    (post(BODY, b"/v1/completions", b"x: " + b"y" * 70_000), 431),
]


async def test_what_is_malformed_is_told_so(tmp_path: Path) -> None:
    """By Envoy itself, before kvsync is asked; a filter that has to show it the answer first would lose it. HTTP/1.0 is
    spoken, as at the gateway's own port."""
    async with street(tmp_path, good) as made:
        for raw, status in MALFORMED:
            answer = await made.say(raw)
            assert answer.status == status, raw[:80]
            assert b'"type":"invalid_request_error"' in answer.body
        assert made.figure("kvsync_extproc_streams_total", event="opened") == 0
        for host in (b"Host: h\r\n", b""):
            client = await made.client()
            head = b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n" % (host, len(BODY))
            await client.send(head + BODY)
            said = await client.reader.read()
            assert said.startswith(b"HTTP/1.0 200 OK\r\n")
            assert said.endswith(b'{"ok":true}')


def http2(kind: int, flags: int, payload: bytes = b"", stream: int = 1) -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@pytest.mark.parametrize("name", ["envoy.yaml", "envoy-fail-open.yaml"])
async def test_trailers_in_place_of_a_body_are_no_way_round_a_decision(tmp_path: Path, name: str) -> None:
    """(X2) Only HTTP/2 can say so. Envoy has no body to show then, and would go on without a decision."""
    fields = {b":method": b"POST", b":path": b"/v1/completions", b":scheme": b"http", b":authority": b"h"}
    literal = [bytes([0, len(key)]) + key + bytes([len(value)]) + value for key, value in fields.items()]
    async with street(tmp_path, good, name=name) as made:
        client = await made.client()
        settings, head, trailers = http2(4, 0, stream=0), http2(1, 4, b"".join(literal)), http2(1, 5, b"\x00\x01t\x011")
        await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + head + trailers)
        reason = {"path": "/v1/completions", "status": "400", "reason": "bad_json"}
        await eventually(lambda: made.figure("kvsync_requests_total", **reason) == 1)
        said = await client.reader.readuntil(b"}}")
        assert b'"message":"the request body is not valid JSON' in said
        assert made.engines[0].requests == []


async def test_ranks(tmp_path: Path) -> None:
    async with street(tmp_path, good, entry={"data_parallel_size": 2}, routing={"policy": "round-robin"}) as made:
        for _ in range(2):
            assert (await made.ask(BODY, b"/v1/completions", b"x-data-parallel-rank: 7")).status == 200
        ranks = [request.get(b"x-data-parallel-rank") for request in made.engines[0].requests]
        assert sorted(ranks) == [[b"0"], [b"1"]]


async def test_an_engine_listed_by_name(tmp_path: Path) -> None:
    """Envoy is told addresses only; a name that nobody knows counts as an engine that can't be reached."""
    async with street(tmp_path, good) as made:
        port = made.engines[0].port
    async with street(tmp_path, good, urls=("http://no-such-host.invalid:1",)) as made:
        for _ in range(4):
            answer = await made.ask()
            assert (answer.status, answer.get(b"target-pod")) == (200, [b"engine-0"])
    assert port
    entries = [{"name": "m", "engines": [{"name": "by-name", "url": f"http://localhost:{port}"}]}]
    async with street(tmp_path, models=entries) as made:
        engine = FakeEngine("by-name", good)
        engine.server = await asyncio.start_server(engine._talk, "127.0.0.1", port)
        assert (await made.ask()).get(b"target-pod-ip") == [b"127.0.0.1:%d" % port]
        await engine.stop()


async def test_a_stream_passes_piece_by_piece_and_is_load_until_its_end(tmp_path: Path) -> None:
    """(P1) Pieces come as the engine sent them, cut inside a character."""
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        while await talk.request() is not None:
            await talk.send(SSE_HEAD, chunk(b"data: \xf0\x9f\n\n"))
            await go.wait()
            await talk.send(chunk(b"\n"), chunk(b"data: [DONE]\n\n"), chunk(b""))

    async with street(tmp_path, script) as made:
        client = await made.client()
        await client.send(post())
        status, _, fields = await client.head()
        assert (status, dict(fields)[b"target-pod"]) == (200, b"engine-0")
        assert await client.chunk() == b"data: \xf0\x9f\n\n"
        assert made.running() == 1
        go.set()
        pieces = []
        while piece := await client.chunk():
            pieces.append(piece)
        assert b"".join(pieces) == b"\ndata: [DONE]\n\n"
        await eventually(lambda: made.running() == 0)
        assert made.figure("kvsync_requests_total", path="/v1/completions", status="200", reason="engine") == 1
        assert made.figure("kvsync_extproc_open_streams") == 0
        assert made.figure("kvsync_extproc_decision_seconds_count") == 1
