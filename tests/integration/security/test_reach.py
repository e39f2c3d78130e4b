"""What no request on the data port reaches: admin routes, the engines' own routes, addresses that are not listed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kvsync.app import App
from kvsync.config import Settings
from kvsync.gateway.openapi import document
from kvsync.requests.errors import Problem
from kvsync.requests.paths import Paths
from tests.faults.http import FakeEngine
from tests.integration.gateway.harness import BODY, Client, always, eventually, house, post, reply
from tests.integration.gateway.test_admin import desk

ADMIN = sorted(document()["paths"])
ENGINE = [
    "/metrics",
    "/health",
    "/ping",
    "/version",
    "/load",
    "/server_info",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/collective_rpc",
    "/scale_elastic_ep",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/invocations",
    "/kv_event_sources",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/chat/completions/render",
    "/inference/v1/generate",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/docs",
    "/openapi.json",
    "/start_profile",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/abort_requests",
    "/debug/requests",
]


def spellings(path: str) -> Iterator[bytes]:
    """Ways in which one server or another would read a path as this one."""
    raw = path.encode()
    yield raw
    yield raw + b"/"
    yield b"/" + raw
    yield b"//" + raw.replace(b"/", b"//")
    yield b"/." + raw
    yield b"/v1/.." + raw
    yield b"/v1/completions/../.." + raw
    yield b"/v1/completions/%2e%2e/%2E%2E" + raw
    yield b"/v1/models/.." + raw
    yield b"/v1/completions/..%2f..%2f" + raw[1:]
    yield b"/v1/completions/..%252f..%252f" + raw[1:]
    yield b"/v1/completions/..;/.." + raw
    yield b"/v1/completions%00" + raw
    yield b"/v1/completions%0a" + raw
    yield b"/v1/completions\\.." + raw.replace(b"/", b"\\")
    yield b"/v1/completions%5c..%5c.." + raw
    yield b"/v1/completions%c0%af..%c0%af.." + raw
    yield b"/%e3%80%82%e3%80%82" + raw
    yield raw + b";x=y"
    yield raw + b"?x=y"
    yield raw + b"?/v1/completions"
    yield raw + b"%3f"
    yield raw + b"%20"
    yield raw + b"%00"
    yield raw + b"#"
    yield raw.upper()
    yield raw.replace(b"/", b"%2f")
    yield b"/" + b"".join(b"%%%02x" % byte for byte in raw[1:])
    yield b"/" + b"".join(b"%%25%02x" % byte for byte in raw[1:])
    yield b"http://g" + raw
    yield b"http://127.0.0.1:8081" + raw
    yield b"HTTP://g/v1/completions/../.." + raw


@pytest.mark.parametrize("path", [*ADMIN, *ENGINE])
def test_no_spelling_of_an_unlisted_path_is_listed(path: str) -> None:
    """(X2) Whatever is let through goes to a listed path, spelled as it is listed: nothing else is ever sent."""
    paths = Paths()
    for target in spellings(path.replace("{", "").replace("}", "")):
        try:
            route, _ = paths.find(target)
        except Problem:
            continue
        # What is left is a model's name, which only the gateway itself looks up.
        assert route.model is not None, target


@asynccontextmanager
async def app_before(engine: FakeEngine) -> AsyncIterator[App]:
    settings = {
        "gateway": {"host": "127.0.0.1", "port": 0, "drain_timeout": 0.2},
        "admin": {"port": 0},
        "models": [{"name": "m", "engines": [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]}],
    }
    app = App(Settings.model_validate(settings))
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


async def test_admin_and_engine_routes_are_not_reached_through_the_data_port() -> None:
    """(X2) Reset, sleep, tokenize, invocations and all admin routes, in any spelling and method, on a whole gateway."""
    engine = FakeEngine("e", always(reply(b"engine")))
    await engine.start()
    async with app_before(engine) as app:
        for path in (*ADMIN, *ENGINE):
            for target in spellings(path.replace("{request_id}", "r").replace("{worker}", "e")):
                for method in (b"GET", b"POST", b"PUT", b"DELETE"):
                    client = await Client.open(app.gateway.port)
                    await client.send(
                        b"%b %b HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % (method, target, len(BODY)) + BODY
                    )
                    answer = await client.answer()
                    client.close()
                    assert answer.status in (400, 404, 405, 501), (method, target)
                    assert answer.json["error"], target
    # The gateway asks for adapters by itself; these clients name no agent.
    assert [request for request in engine.requests if not request.get(b"user-agent")] == []
    await engine.stop()


async def test_no_request_reaches_an_address_that_is_not_listed() -> None:
    trap = FakeEngine("trap", always(reply(b"caught")))
    await trap.start()
    there = b"127.0.0.1:%d" % trap.port
    async with house(always(reply(b"good"))) as home:
        client = await home.client()
        for target in (
            b"http://" + there + b"/v1/completions",
            b"/v1/completions?target-pod=" + there,
            b"//" + there + b"/../v1/completions",
        ):
            await client.send(
                b"POST %b HTTP/1.1\r\nHost: %b\r\nTarget-Pod: %b\r\ntarget-pod-ip: %b\r\nX-Forwarded-Host: %b\r\n"
                b"x-gateway-destination-endpoint: %b\r\nForwarded: host=%b\r\nContent-Length: %d\r\n\r\n%b"
                % (target, there, there, there, there, there, there, len(BODY), BODY)
            )
            assert (await client.answer()).body == b"good"
        await client.send(b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (there, there))
        assert (await client.answer()).status == 501
        assert len(home.engine.requests) == 3
    assert trap.connections == 0
    await trap.stop()


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"303 See Other", b"307 Temporary", b"308 Permanent"])
async def test_an_engine_s_redirect_is_passed_and_not_followed(status: bytes) -> None:
    trap = FakeEngine("trap", always(reply(b"caught")))
    await trap.start()
    location = b"http://127.0.0.1:%d/v1/completions" % trap.port
    async with house(always(reply(b"", status, b"Location: " + location))) as home:
        answer = await (await home.client()).ask()
        assert answer.status == int(status[:3])
        assert answer.one(b"location") == location
    assert trap.connections == 0
    await trap.stop()


async def test_the_gateway_s_own_questions_follow_no_redirect() -> None:
    """Event sources, metrics and tokens: an engine that points elsewhere is not followed there."""
    trap = FakeEngine("trap", always(reply(b"caught")))
    await trap.start()
    engine = FakeEngine("e", always(reply(b"", b"307 Temporary", b"Location: http://127.0.0.1:%d/" % trap.port)))
    await engine.start()
    settings = {
        "gateway": {"host": "127.0.0.1", "port": 0, "drain_timeout": 0.2},
        "admin": {"port": 0},
        "events": {"enabled": True},
        "tokenizer": {"remote": {"enabled": True, "endpoint": "engines", "budget": 1}},
        "models": [{"name": "m", "engines": [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]}],
    }
    app = App(Settings.model_validate(settings))
    await app.start()
    try:
        client = await Client.open(app.gateway.port)
        await client.send(post())
        assert (await client.answer()).status == 307
        client.close()
        await eventually(lambda: any(b"/tokenize" in request.line for request in engine.requests))
    finally:
        await app.stop()
    assert trap.connections == 0
    await asyncio.gather(trap.stop(), engine.stop())


async def test_no_page_of_another_site_has_a_browser_change_anything() -> None:
    """A simple POST needs no leave of the server it goes to, and an operator's browser may reach the admin port."""
    async with desk() as made:
        forget, match = "/v1/workers/a/forget", "/v1/match"
        own = f"http://127.0.0.1:{made.admin.port}"
        for origin, status in (
            ("https://evil.test", 403),
            ("null", 403),
            ("", 403),
            (own + ".evil.test", 403),
            (own, 200),
        ):
            for path, data in ((forget, None), (match, b'{"model": "m", "tokens": [1]}')):
                async with made.session.post(made.url + path, data=data, headers={"Origin": origin}) as response:
                    assert response.status == status, (origin, path)
        assert made.forgotten == ["a"]
