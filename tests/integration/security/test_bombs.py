"""Requests that are small to send and dear to read: each ends in bounded time and memory with a clear answer, and
others are served meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import re
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvsync.config import Settings, TokenizerSettings
from kvsync.requests.auth import Tenants
from kvsync.tokenize.service import TokenizerService
from tests.integration.gateway.harness import BODY, House, always, house, post, reply
from tests.integration.gateway.test_admin import desk

KEY = "key-of-tenant-a-0123456789"
SALTING: dict[str, Any] = {"cache_salt": "enforce", "salt_secret": "a-secret-for-making-salts"}
MB = 1 << 20
CPU = 8.0
"""Seconds of CPU for one of them, client and engine included. Each takes under one here; the machine may be slow."""
MEMORY = 600 * MB

BOMBS: dict[str, Callable[[], bytes]] = {
    "nested arrays": lambda: b'{"model":"m","prompt":' + b"[" * (10 * MB) + b"]" * (10 * MB) + b"}",
    "nested objects": lambda: b'{"model":"m","x":' + b'{"a":' * (4 * MB) + b"1" + b"}" * (4 * MB) + b"}",
    "nested but legal": lambda: b'{"model":"m","x":[' + b",".join([b"[" * 400 + b"]" * 400] * 20_000) + b"]}",
    "a huge integer": lambda: b'{"model":"m","max_tokens":' + b"9" * (20 * MB) + b"}",
    "a huge fraction": lambda: b'{"model":"m","temperature":0.' + b"9" * (20 * MB) + b"}",
    "a huge exponent": lambda: b'{"model":"m","temperature":1e' + b"9" * (10 * MB) + b"}",
    "a huge key": lambda: b'{"model":"m","' + b"k" * (20 * MB) + b'":1}',
    "a key of escapes": lambda: b'{"model":"m","' + b"\\u0041" * (3 * MB) + b'":1}',
    "a million messages": lambda: b'{"model":"m","messages":[%b]}' % b",".join([b'{"role":"user"}'] * 1_000_000),
    "a million keys": lambda: b'{"model":"m",%b}' % b",".join(b'"k%d":1' % n for n in range(1_000_000)),
    "a key a million times": lambda: b'{"model":"m",%b}' % b",".join([b'"cache_salt":"x"'] * 1_000_000),
    "tiny arrays": lambda: b'{"model":"m","prompt":[%b]}' % b",".join([b"[]"] * 5_000_000),
    "tiny prompts": lambda: b'{"model":"m","prompt":[%b]}' % b",".join([b'"x"'] * 3_000_000),
    "a long text": lambda: b'{"model":"m","prompt":"%b"}' % (b"x" * (30 * MB)),
    "no JSON at all": lambda: bytes(range(256)) * (80 << 10),
    "quotes": lambda: b'"' * (20 * MB),
}


async def watched(home: House, send: Callable[[], Any]) -> Any:
    """Run it while another client asks again and again; that one has to be served all the time."""
    other = await home.client()
    done = asyncio.Event()
    served = 0

    async def ask() -> None:
        nonlocal served
        while not done.is_set():
            answer = await other.ask(BODY, b"/v1/completions", b"Authorization: Bearer " + KEY.encode())
            assert answer.status == 200
            served += 1

    asking = asyncio.create_task(ask())
    before, began = rss(), time.process_time()
    try:
        result = await send()
    finally:
        spent, grown = time.process_time() - began, rss() - before
        done.set()
        await asking
    assert served
    assert spent < CPU
    assert grown < MEMORY
    return result


def rss() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


EDITED = ["nested but legal", "a key of escapes", "a million keys", "a key a million times", "a long text"]
"""Those that get as far as having their salt set."""


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "pass") for name in BOMBS), *((name, "enforce") for name in EDITED)]
)
async def test_a_bomb_costs_its_sender_an_answer_and_nobody_else_anything(name: str, policy: str) -> None:
    bomb = BOMBS[name]()
    gateway = {**SALTING, "cache_salt": policy}
    tenants = Tenants(Settings.model_validate({"gateway": gateway, "tenants": [{"name": "a", "api_keys": [KEY]}]}))
    tokenizer = TokenizerService(TokenizerSettings(), (), lambda _: ())
    async with house(always(reply(b"good")), tenants=tenants, tokenizing=tokenizer, **gateway) as home:
        client = await home.client()

        async def send() -> Any:
            for path in (b"/v1/chat/completions", b"/v1/completions"):
                await client.send(post(bomb, path, b"Authorization: Bearer " + KEY.encode()))
                answer = await client.answer()
                assert answer.status in (200, 400, 413), answer.body[:200]
                assert len(answer.body) < 1000
                if answer.status != 200:
                    assert answer.message

        await watched(home, send)
    await tokenizer.close()


@pytest.mark.parametrize("how", [b"gzip", b"GZIP", b"deflate", b"x-gzip", b"br", b"zstd", b"identity, gzip"])
async def test_what_is_compressed_is_never_unpacked(how: bytes) -> None:
    """16 kB that would become 16 MB: refused by their head."""
    pack = zlib.compress if how == b"deflate" else gzip.compress
    bomb = pack(BODY[:-1] + b" " * (16 * MB) + b"}")
    async with house(always(reply(b"good"))) as home:
        client = await home.client()
        await client.send(post(bomb, b"/v1/completions", b"Content-Encoding: " + how))
        assert (await client.answer()).status == 415
        assert home.engine.requests == []
    async with desk() as made:
        headers = {"Content-Encoding": how.decode(), "Content-Length": str(len(bomb))}
        async with made.session.post(made.url + "/v1/match", data=bomb, headers=headers) as response:
            assert response.status == 415


@pytest.mark.parametrize("name", ["nested arrays", "a million messages", "tiny arrays", "a huge integer"])
async def test_the_admin_port_survives_them_too(name: str) -> None:
    async with desk() as made:
        began = time.process_time()
        async with made.session.post(made.url + "/v1/match", data=BOMBS[name]()) as response:
            assert response.status in (400, 413)
            assert len(await response.read()) < 1000
        assert time.process_time() - began < CPU
        async with made.session.get(made.url + "/healthz") as response:
            assert response.status == 200


async def test_chunks_and_fields_by_the_hundred_thousand() -> None:
    async with house(always(reply(b"good")), max_body_bytes=1 << 20) as home:
        other = await home.client()
        client = await home.client()
        began = time.process_time()
        with suppress(ConnectionError):
            await client.send(
                post(b"", framing=b"Transfer-Encoding: chunked") + b"1;x\r\n \r\n" * 300_000 + b"0\r\n\r\n"
            )
        assert (await other.ask()).status == 200
        assert (await client.answer()).status == 400  # 300,000 blanks are no JSON
        fields = await home.client()
        with suppress(ConnectionError):
            await fields.send(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n" + b"a:\r\n" * 300_000 + b"\r\n")
        assert (await fields.answer()).status == 431
        assert time.process_time() - began < CPU
