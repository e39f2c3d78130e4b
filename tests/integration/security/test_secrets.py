"""Logs, metrics and admin answers hold no key, no salt and no prompt, however a request goes wrong; and tenants of one
fleet get nothing of each other's cache."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from kvsync.app import App
from kvsync.config import Settings
from kvsync.engine_sim import SimConfig, SimEngine
from kvsync.telemetry.logs import JsonFormatter, TextFormatter
from tests.integration.gateway.harness import BODY, Client, FakeEngine, Talk, eventually, post, reply

KEYS = {"a": "key-of-tenant-a-0123456789", "b": "key-of-tenant-b-0123456789"}
ENGINE_KEY, SALT_SECRET = "key-of-the-engines-012345", "a-secret-for-making-salts"
PROMPT, OWN_SALT = "a-prompt-that-nobody-may-log", "a-salt-of-the-client"
HIDDEN = (*KEYS.values(), ENGINE_KEY, SALT_SECRET, PROMPT, OWN_SALT, "wrong-key-0123456789")


@asynccontextmanager
async def running(engines: list[dict[str, Any]], **more: Any) -> AsyncIterator[App]:
    settings = {
        "gateway": {
            "host": "127.0.0.1",
            "port": 0,
            "drain_timeout": 0.2,
            "engine_api_key": ENGINE_KEY,
            "cache_salt": "enforce",
            "salt_secret": SALT_SECRET,
            "retries": 1,
            "expose_tokenize": True,
        },
        "admin": {"port": 0},
        "telemetry": {"log_level": "debug"},
        "tenants": [{"name": name, "api_keys": [key]} for name, key in KEYS.items()],
        "tokenizer": {"remote": {"enabled": True, "endpoint": "engines", "budget": 1, "retries": 0}},
        "models": [{"name": "tiny", "engines": engines}],
        **more,
    }
    app = App(Settings.model_validate(settings))
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


class Moody:
    """An engine that goes wrong in another way each time, and repeats what it was sent wherever it can."""

    def __init__(self) -> None:
        self.turn = 0
        self.salts: set[str] = set()

    async def __call__(self, engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            self.turn += 1
            body = request.body
            if b"cache_salt" in body:
                self.salts.add(json.loads(body)["cache_salt"])
            if request.line.startswith(b"GET"):
                await talk.send(reply(b"", b"404 Not Found"))
            elif self.turn % 7 == 0:
                talk.reset()
                return
            elif self.turn % 7 == 1:
                await talk.send(b"HTTP/1.1 200 " + body + b"\r\n\r\n")
                return
            elif self.turn % 7 == 2:
                await talk.send(reply(body, b"500 Internal Server Error"))
            elif self.turn % 7 == 3:
                await talk.send(reply(b'{"tokens": "' + body + b'"}'))
            elif self.turn % 7 == 4:
                await talk.send(reply(body, b"400 Bad Request"))
            elif self.turn % 7 == 5:
                await talk.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + body)
                return
            else:
                await talk.send(reply(b'{"tokens": [1], "count": 1}'))


def requests() -> list[bytes]:
    """Requests that go wrong in every room, all of them with something that must not be shown."""
    chat = {"model": "tiny", "cache_salt": OWN_SALT, "messages": [{"role": "user", "content": PROMPT}]}
    good = json.dumps(chat).encode()
    text = json.dumps({"model": "tiny", "prompt": PROMPT, "cache_salt": OWN_SALT}).encode()
    key = b"Authorization: Bearer " + KEYS["a"].encode()
    wrong = b"Authorization: Bearer wrong-key-0123456789"
    path = b"/v1/chat/completions"
    return [
        *[post(good, path, key)] * 8,
        *[post(text, b"/v1/completions", key)] * 8,
        post(text, b"/tokenize", key),
        post(good, path, wrong),
        post(good, path),
        post(good[:-1], path, key),
        post(good.replace(b'"tiny"', b'"other"'), path, key),
        post(good.replace(b'"messages"', b'"messages":1,"messages"'), path, key),
        post(good.replace(b'"' + OWN_SALT.encode() + b'"', b'["' + OWN_SALT.encode() + b'"]'), path, key),
        post(good, b"/v1/messages", key),
        post(good, path, key, b"routing-strategy: nonsense"),
        post(good, path, key, b"external-filter: ((" + PROMPT.encode()),
        post(good, path, key, b"request-id: " + b"r" * 200),
        post(good, path + b"?key=" + KEYS["a"].encode(), key),
        post(good, b"/" + KEYS["a"].encode() + b"/" + PROMPT.encode(), key),
        post(good, path, key + b"\x00"),
        post(good, path, key, b"X" + PROMPT.encode() + b" : y"),
        post(good, path, key, framing=b"Content-Length: " + PROMPT.encode()),
        b"GET /v1/models/" + PROMPT.encode() + b" HTTP/1.1\r\nHost: g\r\n" + key + b"\r\n\r\n",
        PROMPT.encode() + b"\r\n\r\n",
    ]


async def test_no_log_metric_or_admin_answer_holds_a_secret_or_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    moody = Moody()
    engine = FakeEngine("e", moody)
    await engine.start()
    pages: list[str] = []
    described = [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]
    async with running(described, events={"enabled": True}) as app:
        ids = []
        for raw in requests() * 3:
            client = await Client.open(app.gateway.port)
            await client.send(raw)
            answer = await client.answer()
            ids += answer.get(b"request-id")
            shown = b"".join(name + value for name, value in answer.fields)
            assert not any(hidden.encode() in shown for hidden in HIDDEN), shown
            assert not any(key.encode() in answer.body for key in (*KEYS.values(), ENGINE_KEY, SALT_SECRET)), (
                answer.body
            )
            client.close()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.admin.port}") as session:
            question = {"model": "tiny", "prompt": PROMPT, "cache_salt": OWN_SALT}
            async with session.post("/v1/match", json=question) as response:
                pages.append(await response.text())
            for path in ("/readyz", "/metrics", "/v1/workers", *(f"/v1/decisions/{name.decode()}" for name in ids)):
                async with session.get(path) as response:
                    pages.append(await response.text())
    await engine.stop()
    assert moody.turn > 30
    assert moody.salts
    assert any('"credit"' in page for page in pages)
    formatters = (TextFormatter(), JsonFormatter())
    logged = [formatter.format(record) for record in caplog.records for formatter in formatters]
    assert any("certificate" in line or "tiny" in line or "engine" in line for line in logged)
    for text in (*logged, *pages):
        for hidden in (*HIDDEN, *moody.salts):
            assert hidden not in text, text


# ---- tenants of one fleet


async def cached(app: App, tenant: str, prompt: list[int], **more: Any) -> int:
    """Tokens that the engine had for a tenant's request."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1, **more}).encode()
    client = await Client.open(app.gateway.port)
    await client.send(post(body, b"/v1/completions", b"Authorization: Bearer " + KEYS[tenant].encode()))
    answer = await client.answer()
    client.close()
    assert answer.status == 200, answer.body
    usage: Any = answer.json["usage"]
    details = usage["prompt_tokens_details"]
    return 0 if details is None else int(details["cached_tokens"])


async def test_a_tenant_gains_nothing_by_another_s_prompts_or_salt() -> None:
    """(X3) On a simulated engine: B asks what A asked, with every salt it may think of, and never meets A's cache; A's
    own repeat does, and the gateway's index follows each of them by the salt that the engine sees."""
    prompt = [7] * 200
    async with SimEngine(SimConfig(blocks=500)) as engine:
        described = [{"name": "e", "url": engine.url, "events": engine.events, "replay": engine.replay}]
        async with running(described, events={"enabled": True}) as app:
            await eventually(lambda: app.kv_sync.status().state == "running")
            assert await cached(app, "a", prompt) == 0
            assert await cached(app, "a", prompt) == 192
            stolen = app.gateway._proxy._rooms.salts.enforced("a", None)
            for salt in (None, stolen, "", "a", "\u0000a", "a\u0000"):
                assert await cached(app, "b", prompt, cache_salt=salt) == (0 if salt is None or salt else 192), salt
            assert await cached(app, "b", prompt) == 192
            assert await cached(app, "a", prompt, cache_salt="own") == 0
            assert await cached(app, "a", prompt, cache_salt="own") == 192
            await eventually(
                lambda: all(
                    sum(match.credit for match in app.index.match(prompt, "tiny", cache_salt=salt).values()) == wanted
                    for salt, wanted in ((stolen, 192), (None, 0), ("own", 0))
                )
            )


async def test_the_same_text_of_two_tenants_is_tokenized_for_each() -> None:
    """(X3) The tokenizer's memory is a cache as well: an answer from it would come sooner to whoever guesses right."""
    asked = 0

    async def engine(fake: FakeEngine, talk: Talk) -> None:
        nonlocal asked
        while (request := await talk.request()) is not None:
            asked += b"/tokenize" in request.line
            await talk.send(reply(b'{"tokens": [1, 2], "count": 2, "max_model_len": 10}'))

    fake = FakeEngine("e", engine)
    await fake.start()
    async with running([{"name": "e", "url": f"http://127.0.0.1:{fake.port}"}]) as app:
        client = await Client.open(app.gateway.port)
        counts = []
        for tenant in "aabba":
            body = BODY.replace(b'"m"', b'"tiny"')
            await client.send(post(body, b"/v1/completions", b"Authorization: Bearer " + KEYS[tenant].encode()))
            assert (await client.answer()).status == 200
            counts.append(asked)
        assert counts == [1, 1, 2, 2, 2]
        client.close()
    await asyncio.gather(fake.stop())
