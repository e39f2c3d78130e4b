"""The admin port: what it shows, and how it answers questions that are none."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from yarl import URL

from kvsync.config import AdminSettings
from kvsync.events.types import ExtraKey, Image
from kvsync.gateway.admin import Admin, AdminPorts, MatchQuestion
from kvsync.index.match import Match, MatchTable, Tokens
from kvsync.requests.ports import JsonObject
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import ImageSpan, Prompt, TokenizedRequest
from tests.integration.gateway.harness import Models


class Index:
    def __init__(self) -> None:
        self.asked: list[tuple[Tokens, str, str | None, str | None, object]] = []

    def match(
        self,
        tokens: Tokens,
        model: str,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    ) -> MatchTable:
        self.asked.append((tokens, model, adapter, cache_salt, block_keys))
        return MatchTable(a=Match(32, 16, {"gpu": 16, "cpu": 16}, "partial"), b=Match(0, trust="none"))

    def block_sizes(self, model: str) -> dict[str, int]:
        return {"a": 16, "b": 16}


class Words:
    """One token per character; prompts that are none stay unknown."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, JsonObject, str, str | None]] = []

    async def begin(self, path: str, body: JsonObject, model: str, adapter: str | None) -> TokenizedRequest:
        self.seen.append((path, body, model, adapter))
        if "messages" in body:
            prompt = Prompt(array("I", [7]).tobytes(), 1, (ImageSpan("i", 0, 1),))
            return TokenizedRequest((prompt,), "remote", cache_salt="from-body")
        text = str(body["prompt"])
        if not text:
            return TokenizedRequest((), "none", "tokenizer_timeout")
        return TokenizedRequest((Prompt(array("I", map(ord, text)).tobytes(), len(text)),), "local")


class Desk:
    """A running admin server and its ports."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.look = self.metrics.look
        self.index = Index()
        self.words = Words()
        self.ready = True
        self.forgotten: list[str] = []
        self.admin: Admin
        self.session: aiohttp.ClientSession
        self.url = ""

    def forget(self, worker: str) -> bool:
        self.forgotten.append(worker)
        return worker in ("a", "a#1", "zone/a#life2")

    def is_ready(self) -> tuple[bool, Mapping[str, object]]:
        return self.ready, {"mode": "kv-sync" if self.ready else "load-only"}

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, data=data) as response:
            return response.status, await response.json()


@asynccontextmanager
async def desk(**options: Any) -> AsyncIterator[Desk]:
    """``options``: of the admin server."""
    made = Desk()
    admin = Admin(
        AdminSettings(host="127.0.0.1", port=0),
        AdminPorts(
            metrics=lambda: made.look(),
            ready=made.is_ready,
            workers=lambda: [{"worker": "a", "trust": "exact", "last_sequence": 7}],
            decision=lambda request_id: {"request_id": request_id, "why": "so"} if request_id == "r-1" else None,
            forget=made.forget,
            fleet=Models(),
            tokenizing=made.words,
            index=made.index,
        ),
        **options,
    )
    made.admin = admin
    with pytest.raises(RuntimeError):
        _ = admin.port
    await admin.start()
    made.url = f"http://127.0.0.1:{admin.port}"
    async with aiohttp.ClientSession() as made.session:
        yield made
    await admin.stop()


async def test_health_readiness_and_metrics() -> None:
    async with desk() as made:
        async with made.session.get(made.url + "/healthz") as response:
            assert (response.status, await response.text()) == (200, "ok\n")
        assert await made.ask("GET", "/readyz") == (200, {"ready": True, "mode": "kv-sync"})
        made.ready = False
        assert await made.ask("GET", "/readyz") == (503, {"ready": False, "mode": "load-only"})
        made.metrics.answered("/v1/completions", 200, 0.1, "engine")
        async with made.session.get(made.url + "/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = await response.text()
        assert 'kvsync_requests_total{path="/v1/completions",reason="engine",status="200"} 1.0' in text


async def test_making_the_text_of_metrics_keeps_nobody_waiting() -> None:
    """(F2) With a thousand workers it takes half a second; the figures themselves belong to the event loop."""
    async with desk() as made:
        threads: list[bool] = []
        looked, go_on = asyncio.Event(), threading.Event()

        def text() -> bytes:
            threads.append(threading.current_thread() is threading.main_thread())
            assert go_on.wait(20)
            return b"late"

        def look() -> Callable[[], bytes]:
            looked.set()
            threads.append(threading.current_thread() is threading.main_thread())
            return text

        made.look = look
        asked = asyncio.create_task(made.session.get(made.url + "/metrics"))
        async with asyncio.timeout(20):
            await looked.wait()
            assert await made.ask("GET", "/readyz") == (200, {"ready": True, "mode": "kv-sync"})
            go_on.set()
            async with await asked as response:
                assert await response.read() == b"late"
        assert threads == [True, False]


async def test_workers_and_decisions() -> None:
    async with desk() as made:
        assert await made.ask("GET", "/v1/workers") == (
            200,
            {"workers": [{"worker": "a", "trust": "exact", "last_sequence": 7}]},
        )
        assert await made.ask("GET", "/v1/decisions/r-1") == (200, {"request_id": "r-1", "why": "so"})
        status, answer = await made.ask("GET", "/v1/decisions/r-2")
        assert (status, answer["error"]["message"]) == (404, "no decision is kept for this request id")


async def test_match_by_tokens() -> None:
    async with desk() as made:
        question = {"model": "m", "tokens": [1, 2, 2**32 - 1], "cache_salt": "s"}
        assert await made.ask("POST", "/v1/match", question) == (
            200,
            {
                "model": "m",
                "adapter": None,
                "tokens": 3,
                "source": "ids",
                "workers": {
                    "a": {"credit": 32, "by_tier": {"gpu": 16, "cpu": 16}, "expected": 16, "trust": "partial"},
                    "b": {"credit": 0, "by_tier": {}, "expected": 0, "trust": "none"},
                },
            },
        )
        assert made.index.asked == [(array("I", [1, 2, 2**32 - 1]).tobytes(), "m", None, "s", None)]


@pytest.mark.parametrize(
    ("question", "path", "adapter"),
    [
        ({"model": "m", "prompt": "ab"}, "/v1/completions", None),
        ({"model": "m-adapter", "prompt": "ab"}, "/v1/completions", "m-adapter"),
        ({"model": "m", "adapter": "m-adapter", "prompt": "ab"}, "/v1/completions", "m-adapter"),
        ({"model": "m", "messages": [{"role": "user"}]}, "/v1/chat/completions", None),
    ],
)
async def test_match_by_prompt_and_by_messages(question: dict[str, object], path: str, adapter: str | None) -> None:
    async with desk() as made:
        status, answer = await made.ask("POST", "/v1/match", question)
        assert (status, answer["model"], answer["adapter"]) == (200, "m", adapter)
        ((seen_path, body, model, seen_adapter),) = made.words.seen
        assert (seen_path, model, seen_adapter) == (path, "m", adapter)
        assert body["model"] == (adapter or "m")
        ((tokens, _, asked_adapter, salt, keys),) = made.index.asked
        assert asked_adapter == adapter
        if "messages" in question:
            assert (tokens, salt, keys) == (array("I", [7]).tobytes(), "from-body", [[Image("i", 0)]])
        else:
            assert (tokens, salt, keys) == (array("I", [97, 98]).tobytes(), None, None)


async def test_the_request_that_is_asked_about_may_be_pasted_as_it_is() -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"a": 1}], "max_tokens": 5}
    async with desk() as made:
        status, _ = await made.ask("POST", "/v1/match", request)
        assert (status, made.words.seen[0][1]) == (200, request)


@pytest.mark.parametrize(
    ("question", "status", "message"),
    [
        (b"{", 400, "the request body is not valid JSON"),
        (b'{"model":"m","messages":[{"a":' + b"[" * 100_000, 400, "nested too deeply"),
        (b"[]", 400, "Expected `object`"),
        ({"tokens": [1]}, 400, "missing required field `model`"),
        ({"model": "m", "tokens": "x"}, 400, "Expected `array | null`"),
        ({"model": "m", "tokens": [True]}, 400, "Expected `int`"),
        ({"model": "m", "tokens": [-1]}, 400, "token ids are 32 bit"),
        ({"model": "m", "tokens": [2**32]}, 400, "token ids are 32 bit"),
        ({"model": "m"}, 400, "one of tokens, prompt and messages is required"),
        ({"model": "m", "tokens": [1], "prompt": "x"}, 400, "one of tokens, prompt and messages is required"),
        ({"model": "nobody", "tokens": [1]}, 404, "model nobody does not exist"),
        ({"model": "org/big-model", "adapter": "m-adapter", "tokens": [1]}, 400, "adapter is no adapter of model"),
        ({"model": "m", "prompt": ""}, 503, "the tokens are unknown: tokenizer_timeout"),
    ],
)
async def test_questions_that_are_none(question: object, status: int, message: str) -> None:
    async with desk() as made:
        got, answer = await made.ask("POST", "/v1/match", question)
        assert got == status
        assert message in answer["error"]["message"]
        assert made.index.asked == []


async def test_unknown_paths_and_methods_are_json_too() -> None:
    async with desk() as made:
        for method, path, expected in (
            ("GET", "/v1/completions", 404),
            ("GET", "/v1/match", 405),
            ("POST", "/v1/workers", 405),
            ("GET", "/v1/decisions/", 404),
        ):
            status, answer = await made.ask(method, path)
            assert status == expected
            assert set(answer["error"]) == {"message", "type", "code", "param"}


async def test_a_workers_cache_can_be_forgotten() -> None:
    """As after an adapter was replaced under its name (I18)."""
    async with desk() as made:
        for path, worker in (("a", "a"), ("a%231", "a#1"), ("zone%2Fa%23life2", "zone/a#life2")):
            assert await made.ask("POST", f"/v1/workers/{path}/forget") == (200, {"worker": worker, "forgotten": True})
        status, answer = await made.ask("POST", "/v1/workers/nobody/forget", b"whatever")
        assert (status, answer["error"]["message"]) == (404, "there is no such worker: GET /v1/workers lists them")
        assert made.forgotten == ["a", "a#1", "zone/a#life2", "nobody"]
        for path in ("/v1/workers/a/forget", "/v1/workers//forget", "/v1/workers/zone/a/forget"):
            assert (await made.ask("GET", path))[0] in (404, 405)
        assert len(made.forgotten) == 4


async def test_a_question_costs_a_bounded_time() -> None:
    """Twenty million arrays in one body would hold up every request of the data port."""
    async with desk() as made:
        status, answer = await made.ask(
            "POST", "/v1/match", b'{"model":"m","tokens":[%b]}' % b",".join([b"[]"] * 5_000_000)
        )
        assert (status, answer["error"]["message"]) == (
            413,
            "the request body holds more than 250000 texts, arrays and objects",
        )
        status, answer = await made.ask("POST", "/v1/match", b" " * (33 << 20))
        assert status == 413
        assert set(answer["error"]) == {"message", "type", "code", "param"}


async def test_the_openapi_document_names_every_route_and_every_kind_of_answer() -> None:
    async with desk() as made:
        status, document = await made.ask("GET", "/openapi.json")
        assert (status, document["openapi"]) == (200, "3.1.0")
        named = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
        served = {
            (route.resource.canonical, route.method)
            for route in made.admin._runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        assert named == served
        schemas = document["components"]["schemas"]
        references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
        assert references == set(schemas)
        # Other answers are held against their schemas where the real application gives them.
        _, answer = await made.ask("POST", "/v1/match", {"model": "m", "tokens": [1]})
        assert set(schemas["Matches"]["properties"]) == set(answer)
        assert set(schemas["Question"]["properties"]) == set(MatchQuestion.__struct_fields__)
        _, answer = await made.ask("GET", "/v1/decisions/none")
        assert set(schemas["Error"]["properties"]["error"]["properties"]) == set(answer["error"])
