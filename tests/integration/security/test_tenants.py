"""A port that is open to tenants only, and what of a client reaches an engine then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsync.config import GatewaySettings, Settings
from kvsync.discovery.access import EngineAccess, live_access
from kvsync.requests.auth import Tenants
from tests.integration.gateway.harness import (
    BODY,
    AtOnce,
    Client,
    FakeEngine,
    Slow,
    Talk,
    always,
    eventually,
    house,
    post,
    reply,
)

KEY, OTHER, ENGINE_KEY = "key-of-tenant-a-0123456789", "key-of-tenant-b-0123456789", "key-of-the-engines-012345"
BEARER = b"Authorization: Bearer " + KEY.encode()
SALTING: dict[str, Any] = {"cache_salt": "enforce", "salt_secret": "a-secret-for-making-salts"}
TENANTS = [
    {"name": "a", "api_keys": [KEY]},
    {"name": "b", "api_keys": [OTHER]},
    {"name": "c", "api_keys": ["key-of-tenant-c-0123456789"], "cache_salt": "strip"},
]


def tenants(**gateway: Any) -> Tenants:
    return Tenants(Settings.model_validate({"gateway": gateway, "tenants": TENANTS}))


async def echo(engine: FakeEngine, talk: Talk) -> None:
    while (request := await talk.request()) is not None:
        engine.requests.append(request)
        await talk.send(reply(request.body))


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: g\r\n",
        b"GET /v1/models/m HTTP/1.1\r\nHost: g\r\n",
        b"HEAD /v1/models HTTP/1.1\r\nHost: g\r\n",
        b"POST /nowhere HTTP/1.1\r\nHost: g\r\n",
        b"DELETE /v1/models HTTP/1.1\r\nHost: g\r\n",
        b"POST /v1/completions HTTP/1.0\r\nHost: g\r\n",
    ],
)
async def test_nobody_without_a_key_learns_anything(head: bytes) -> None:
    async with house(echo, tenants=tenants()) as home:
        for key, reason in ((b"", "no_api_key"), (b"Authorization: Bearer wrong-key-0123456789\r\n", "wrong_api_key")):
            client = await home.client()
            await client.send(head + key + b"\r\n")
            answer = await client.answer(to_head=head.startswith(b"HEAD"))
            assert answer.status == 401
            assert answer.one(b"www-authenticate").startswith(b'Bearer realm="kvsync"')
            if not head.startswith(b"HEAD"):
                assert "API key" in answer.message
            assert sum(count for (_, _, why), count in home.counters.answers.items() if why == reason) == 1
        assert not home.engine.requests
        assert not home.routing.queries


async def test_a_stranger_s_body_is_not_waited_for() -> None:
    async with house(echo, tenants=tenants(), max_body_bytes=10 << 20) as home:
        client = await home.client()
        await client.send(post(b"x" * 100, b"/v1/completions", b"Expect: 100-continue")[:-100])
        answer = await client.answer()
        assert answer.status == 401  # and no 100 before it
        assert answer.one(b"connection") == b"close"
        client = await home.client()
        await client.send(post(b"", framing=b"Content-Length: 10000000"))
        assert (await client.answer()).status == 401


async def test_a_tenant_is_served_and_no_credential_of_a_client_reaches_an_engine() -> None:
    access = EngineAccess(key=lambda: ENGINE_KEY)
    async with house(echo, tenants=tenants(), access=access) as home:
        client = await home.client()
        fields = (
            BEARER,
            b"X-API-Key: " + KEY.encode(),
            b"Proxy-Authorization: Basic eA==",
            b"X_Api_Key: " + KEY.encode(),
        )
        answer = await client.ask(BODY, b"/v1/completions", *fields)
        assert answer.status == 200
        assert home.engine.requests[0].get(b"authorization") == [b"Bearer " + ENGINE_KEY.encode()]
        assert KEY.encode() not in b"".join(b"".join(field) for field in home.engine.requests[0].fields)
        assert ENGINE_KEY.encode() not in b"".join(b"".join(field) for field in answer.fields)
        await client.send(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n" + BEARER + b"\r\n\r\n")
        assert (await client.answer()).status == 200
        assert (await client.ask(BODY, b"/v1/completions")).status == 401  # a key counts for its own request only
    async with house(echo, tenants=tenants()) as home:
        await (await home.client()).ask(BODY, b"/v1/completions", BEARER)
        assert home.engine.requests[0].get(b"authorization") == []


async def test_without_tenants_a_client_s_credentials_pass_unless_the_gateway_has_its_own(tmp_path: Path) -> None:
    theirs = (b"Authorization: Bearer theirs", b"X-Api-Key: theirs")
    async with house(echo) as home:
        await (await home.client()).ask(BODY, b"/v1/completions", *theirs)
        assert home.engine.requests[0].get(b"authorization") == [b"Bearer theirs"]
        assert home.engine.requests[0].get(b"x-api-key") == [b"theirs"]
    file = tmp_path / "engine-key"
    file.write_text(ENGINE_KEY + "\n")
    access, lives = live_access(GatewaySettings(engine_api_key_file=file))
    async with house(echo, access=access) as home:
        client = await home.client()
        await client.ask(BODY, b"/v1/completions", *theirs)
        file.write_text("the-renewed-key-of-engines\n")
        assert [live.check() for live in lives] == ["applied", "unchanged"]
        await client.ask(BODY, b"/v1/completions", *theirs)
        sent = [request.get(b"authorization") + request.get(b"x-api-key") for request in home.engine.requests]
        assert sent == [[b"Bearer " + ENGINE_KEY.encode()], [b"Bearer the-renewed-key-of-engines"]]


async def test_methods_are_told_to_strangers_and_nothing_else() -> None:
    async with house(echo, tenants=tenants()) as home:
        client = await home.client()
        for path, status in ((b"/v1/completions", 204), (b"*", 204), (b"/metrics", 501)):
            await client.send(b"OPTIONS %b HTTP/1.1\r\nHost: g\r\n\r\n" % path)
            assert (await client.answer()).status == status
        assert not home.engine.requests


# ---- salts


async def salt_of(engine: FakeEngine, client: Client, key: str, body: bytes) -> object:
    """The salt with which a tenant's request came to the engine."""
    answer = await client.ask(body, b"/v1/completions", b"Authorization: Bearer " + key.encode())
    assert answer.status == 200
    return json.loads(engine.requests[-1].body).get("cache_salt")


async def test_enforced_salts_on_the_wire() -> None:
    """(X3) B sends A's salt as the engine knows it, and gains nothing; equal requests of A stay equal."""
    async with house(echo, tenants=tenants(**SALTING), **SALTING) as home:
        client = await home.client()
        plain = BODY
        a = await salt_of(home.engine, client, KEY, plain)
        assert isinstance(a, str)
        assert len(a) == 43
        assert await salt_of(home.engine, client, KEY, plain) == a
        stolen = b'{"model": "m", "cache_salt": "%b", "prompt": "hello"}' % a.encode()
        b = await salt_of(home.engine, client, OTHER, stolen)
        assert b not in (a, None)
        assert await salt_of(home.engine, client, OTHER, plain) != a
        assert await salt_of(home.engine, client, KEY, stolen) not in (a, b)
        assert await salt_of(home.engine, client, "key-of-tenant-c-0123456789", stolen) is None
        twice = b'{"cache_salt": "x", "model": "m", "cache\\u005fsalt": "%b", "prompt": 1.50e-07}' % a.encode()
        await salt_of(home.engine, client, OTHER, twice)
        body = home.engine.requests[-1].body
        assert a.encode() not in body
        assert b"1.50e-07" in body
        assert (
            len(set(json.loads(body, object_pairs_hook=lambda pairs: [v for k, v in pairs if k == "cache_salt"]))) == 1
        )


async def test_the_tokenizer_sees_the_engine_s_salt() -> None:
    tokenizing = Slow()
    tokenizing.go.set()
    async with house(echo, tenants=tenants(**SALTING), tokenizing=tokenizing, **SALTING) as home:
        client = await home.client()
        salt = await salt_of(home.engine, client, KEY, b'{"model": "m", "cache_salt": "mine", "prompt": "x"}')
        assert tokenizing.seen[0][1]["cache_salt"] == salt != "mine"


async def test_the_next_engine_gets_the_same_edited_body() -> None:
    async def reset(engine: FakeEngine, talk: Talk) -> None:
        engine.requests.append(await talk.request())  # type: ignore[arg-type]
        talk.reset()

    async with house(reset, echo, tenants=tenants(**SALTING), **SALTING) as home:
        assert (await (await home.client()).ask(BODY, b"/v1/completions", BEARER)).status == 200
        first, second = (engine.requests[0].body for engine in home.engines)
        assert first == second
        assert b"cache_salt" in first


async def test_where_salts_are_not_enforceable_the_tenant_hears_why() -> None:
    async with house(echo, tenants=tenants(**SALTING), extra_paths=("/v1/score",), **SALTING) as home:
        client = await home.client()
        for path in (b"/v1/messages", b"/v1/embeddings", b"/v1/score"):
            answer = await client.ask(BODY, path, BEARER)
            assert (answer.status, answer.json["error"]["param"]) == (403, "cache_salt")  # type: ignore[index]
        assert not home.engine.requests
        assert home.counters.answers["/v1/messages", 403, "salt_not_enforceable"] == 1


@pytest.mark.parametrize(
    "field",
    [
        b'"kv_transfer_params": {"do_remote_prefill": true, "remote_host": "10.0.0.1"}',
        b'"kv_transfer_params": null, "kv\\u005ftransfer_params": {}',
        b'"ec_transfer_params": {"x": 1}',
        b'"vllm_xargs": {"kv_transfer_params": "x"}',
        b'"vllm_xargs": {"a": 1, "ec_transfer_params": null}',
    ],
)
async def test_no_tenant_has_an_engine_load_a_cache_from_elsewhere(field: bytes) -> None:
    body = b'{"model": "m", %b}' % field
    async with house(echo, tenants=tenants()) as home:
        client = await home.client()
        answer = await client.ask(body, b"/v1/completions", BEARER)
        assert answer.status == 403
        harmless = b'{"model": "m", "kv_transfer_params": null, "vllm_xargs": {"a": 1}}'
        assert (await client.ask(harmless, b"/v1/completions", BEARER)).body == harmless
        assert len(home.engine.requests) == 1
    async with house(echo) as home:  # without tenants everything passes
        assert (await (await home.client()).ask(body)).body == body


async def test_no_tenant_has_an_engine_report_in_a_way_that_spoils_its_counts() -> None:
    """One request to each engine would do, for everybody's requests, until the engines restart."""
    body = b'{"model": "m", "vllm_xargs": {"kv_cache_report_mode": "full"}}'
    async with house(echo, tenants=tenants()) as home:
        client = await home.client()
        answer = await client.ask(body, b"/v1/completions", BEARER)
        assert (answer.status, home.engine.requests) == (403, [])
        assert home.counters.answers["/v1/completions", 403, "full_reports"] == 1
        harmless = body.replace(b"full", b"incremental")
        assert (await client.ask(harmless, b"/v1/completions", BEARER)).body == harmless
    async with house(echo) as home:  # without tenants everything passes
        assert (await (await home.client()).ask(body)).body == body


async def test_a_large_body_is_edited_too() -> None:
    body = b'{"model": "m", "prompt": [%b]}' % b",".join([b"17"] * 400_000)
    async with house(echo, tenants=tenants(**SALTING), tokenizing=AtOnce(), **SALTING) as home:
        answer = await (await home.client()).ask(body, b"/v1/completions", BEARER)
        assert answer.status == 200
        assert answer.body.endswith(body[1:])
        assert b'"cache_salt":"' in answer.body[:80]
        await eventually(lambda: home.counters.answers["/v1/completions", 200, "engine"] == 1)


async def test_answers_tell_no_salt_and_no_match() -> None:
    """(X3) What the engine's answer has passes; the gateway adds nothing from which a match could be read."""
    async with house(always(reply(b"good")), tenants=tenants(**SALTING), **SALTING) as home:
        answer = await (await home.client()).ask(BODY, b"/v1/completions", BEARER)
        names = sorted(name.lower() for name, _ in answer.fields)
        assert names == [b"content-length", b"request-id", b"routing-strategy", b"target-pod", b"target-pod-ip"]
