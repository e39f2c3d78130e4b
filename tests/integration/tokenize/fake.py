"""A vLLM ``/tokenize`` on loopback: the tiny model's tokenizer, and a rendering written apart from the product's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer

from tests.unit.tokenize.support import TINY

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
MAX_MODEL_LEN = 1024

Trouble: TypeAlias = int | str | bytes
"""What goes wrong with one request: a status, ``hang``, ``reset``, or these bytes as a 200 answer."""


def engine_tokens(body: dict[str, Any]) -> list[int]:
    """What vLLM answers for the tiny model (its chat template, spelled out)."""
    if "messages" not in body:
        return _encode(body["prompt"], body.get("add_special_tokens", True))
    text = ""
    if body.get("tools"):
        tools = [
            {
                "type": "function",
                "function": {name: tool["function"].get(name) for name in ("name", "description", "parameters")},
            }
            for tool in body["tools"]
        ]
        text += "<|im_start|>system\nTools: " + json.dumps(tools, ensure_ascii=False) + "<|im_end|>\n"
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
    if body.get("continue_final_message"):
        text = text.removesuffix("<|im_end|>\n")
    elif body.get("add_generation_prompt", True):
        text += "<|im_start|>assistant\n"
    return _encode(text, body.get("add_special_tokens", False))


def _encode(text: str, special: bool) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=special).ids
    return ids


class FakeEngine:
    """One server. ``troubles`` are used up one a request, in order; after them everything works."""

    def __init__(self) -> None:
        self.troubles: list[Trouble] = []
        self.bodies: list[dict[str, Any]] = []
        self.models = {"tiny"}
        self.tokens: Callable[[dict[str, Any]], list[int]] = engine_tokens
        self.gate: asyncio.Event | None = None
        """Closed, it holds every answer back."""
        self.waiting = 0
        self.asked_to_render: list[dict[str, Any]] = []
        self.rendering: Trouble | dict[str, Any] = 403
        """The answer of the render route; 403 is that of an engine without ``--enable-scale-out``."""
        self.left = asyncio.Event()
        """Set when a client went away before its answer."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        trouble = self.troubles.pop(0) if self.troubles else None
        if self.gate is not None:
            await self._wait(self.gate)
        if trouble == "hang":
            await self._wait(asyncio.Event())
        if trouble == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(trouble, bytes):
            return web.Response(body=trouble, content_type="application/json")
        if isinstance(trouble, int):
            return web.json_response({"error": {"message": "trouble", "code": trouble}}, status=trouble)
        if body.get("model", "tiny") not in self.models:
            return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)
        if body.get("chat_template") is not None:
            return web.json_response({"error": {"message": "untrusted template", "code": 400}}, status=400)
        tokens = self.tokens(body)
        answer = {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens, "token_strs": None}
        return web.json_response(answer)

    async def render(self, request: web.Request) -> web.StreamResponse:
        self.asked_to_render.append(await request.json())
        if self.rendering == "hang":
            await self._wait(asyncio.Event())
        if isinstance(self.rendering, bytes):
            return web.Response(body=self.rendering, content_type="application/json")
        if isinstance(self.rendering, int):
            return web.json_response({"error": {"message": "no", "code": self.rendering}}, status=self.rendering)
        return web.json_response(self.rendering)

    async def _wait(self, event: asyncio.Event) -> None:
        self.waiting += 1
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        finally:
            self.waiting -= 1


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/tokenize", engine.handle)
    app.router.add_post("/v1/chat/completions/render", engine.render)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(shutdown_timeout=0.1)
    engine.url = str(server.make_url("")).rstrip("/")
    try:
        yield engine
    finally:
        await server.close()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)
