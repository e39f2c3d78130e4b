"""What tokenizing, index and routing do together in one gateway: images, the second look, the figures at scrape.

The engine is a real HTTP server; its events are put into the index directly, as streams are tested elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvsync.app import App
from kvsync.config import Settings
from tests.integration.tokenize.fake import FakeEngine, engine_tokens
from tests.unit.tokenize.support import TINY
from tests.wire import batch, stored

CHAT = "/v1/chat/completions"
IDS = [*range(300, 309), *[9] * 10, *range(400, 406)]
"""Nine tokens of text, an image of ten, six of text."""


class Engine(FakeEngine):
    async def chat(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}]})


class Gateway:
    """A gateway before two engines, ``a`` and ``b``, that are one server; ``a`` announces blocks of 4, ``b`` of 8."""

    def __init__(self, app: App, session: aiohttp.ClientSession, engine: Engine) -> None:
        self.app = app
        self.engine = engine
        self._session = session

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The decision record of an answered chat request."""
        url = f"http://127.0.0.1:{self.app.gateway.port}{CHAT}"
        async with self._session.post(url, json={"model": "tiny", **body}) as response:
            assert response.status == 200, await response.text()
            request_id = response.headers["request-id"]
        record: dict[str, Any] = json.loads(await self.admin(f"/v1/decisions/{request_id}"))
        return record

    async def admin(self, path: str, question: Any = None) -> str:
        url = f"http://127.0.0.1:{self.app.admin.port}{path}"
        async with self._session.request("GET" if question is None else "POST", url, json=question) as response:
            return await response.text()

    def hold(self, ids: list[int], keys: dict[str, list[Any]] | None = None) -> None:
        """Both engines store the whole blocks of a prompt."""
        for worker, size in (("a", 4), ("b", 8)):
            blocks = len(ids) // size
            shown = [None] * blocks if keys is None else keys[worker]
            self.app.index.add_worker(worker, "tiny")
            hashes = range(1, blocks + 1)
            self.app.index.apply(worker, batch(stored(hashes, ids[: blocks * size], None, size, extra_keys=shown)))


@asynccontextmanager
async def gateway(**tokenizer: Any) -> AsyncIterator[Gateway]:
    engine = Engine()
    http = web.Application()
    http.router.add_post("/tokenize", engine.handle)
    http.router.add_post(CHAT, engine.chat)
    http.router.add_post(f"{CHAT}/render", engine.render)
    server = TestServer(http, host="127.0.0.1")
    await server.start_server(shutdown_timeout=0.1)
    url = str(server.make_url("")).rstrip("/")
    settings = Settings.model_validate(
        {
            "gateway": {"host": "127.0.0.1", "port": 0, "drain_timeout": 1},
            "admin": {"port": 0},
            "tokenizer": tokenizer,
            "models": [
                {"name": "tiny", "tokenizer": TINY, "engines": [{"name": name, "url": url} for name in ("a", "b")]}
            ],
        }
    )
    app = App(settings)
    await app.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Gateway(app, session, engine)
    finally:
        await app.stop()
        await server.close()


def rendering(image: str) -> dict[str, Any]:
    place = {"offset": 9, "length": 10}
    return {"token_ids": IDS, "features": {"mm_hashes": {"image": [image]}, "mm_placeholders": {"image": [place]}}}


def picture(seen: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{seen}"}}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}]}


def credits(record: dict[str, Any]) -> dict[str, int]:
    return {each["worker"]: each["credit"] for each in record["candidates"]}


async def test_a_request_with_an_image_is_credited_by_each_engine_s_block_size() -> None:
    async with gateway(remote={"enabled": True, "endpoint": "engines", "render": True}) as made:
        made.hold(
            IDS,
            {
                "a": [None, None, [["cat", 1]], [["cat", -3]], [["cat", -7]], None],
                "b": [None, [["cat", 1]], [["cat", -7]]],
            },
        )
        made.engine.rendering = rendering("cat")
        record = await made.ask(picture("CAT"))
        assert (credits(record), record["prompt_tokens"]) == ({"a": 24, "b": 24}, 25)
        made.engine.rendering = rendering("dog")
        assert credits(await made.ask(picture("DOG"))) == {"a": 8, "b": 8}
        made.engine.rendering = rendering("cat")
        question = {"model": "tiny", "messages": picture("CAT")["messages"]}
        matched = json.loads(await made.admin("/v1/match", question))
        assert {worker: match["credit"] for worker, match in matched["workers"].items()} == {"a": 24, "b": 24}
        made.engine.rendering = 403
        record = await made.ask(picture("CAT"))
        assert (record["tokens"]["reason"], credits(record)) == ("not_rendered", {"a": 0, "b": 0})


async def test_the_tokenizer_s_endpoints_are_counted_at_scrape() -> None:
    async with gateway(remote={"enabled": True, "endpoint": "engines", "retries": 0, "breaker_failures": 1}) as made:
        await made.ask({"messages": [{"role": "user", "content": "hello"}]})
        assert "aibrix_tokenizer_pool_active_tokenizers 1.0" in await made.admin("/metrics")
        made.engine.troubles = [500]
        await made.ask({"messages": [{"role": "user", "content": "hello again"}]})
        figures = await made.admin("/metrics")
        assert "aibrix_tokenizer_pool_active_tokenizers 0.0" in figures
        assert "aibrix_tokenizer_pool_unhealthy_tokenizers_total 1.0" in figures


async def test_without_a_remote_tokenizer_there_is_none_to_count() -> None:
    async with gateway() as made:
        await made.ask({"messages": [{"role": "user", "content": "hello"}]})
        assert "aibrix_tokenizer_pool_active_tokenizers 0.0" in await made.admin("/metrics")


async def test_answered_requests_with_local_tokens_are_looked_up_in_the_index() -> None:
    remote = {"enabled": True, "endpoint": "engines"}
    async with gateway(remote=remote, local={"prove": 1, "compare": 0}) as made:
        body = {"messages": [{"role": "user", "content": "hello world, hello world"}]}
        made.hold(engine_tokens(body))
        async with asyncio.timeout(20):
            while not made.app.tokenizer.stats()["first_blocks"]["confirmed"]:
                await made.ask(body)
                await asyncio.sleep(0.05)
        assert made.app.tokenizer.stats()["first_blocks"]["absent"] == 0
