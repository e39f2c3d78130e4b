"""What the HTTP face refuses, and how: status, vLLM's error shape, and never more bytes than the cause."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from kvsync.engine_sim import SimEngine

HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "body.prompt.1"),
        ("/v1/completions", {"prompt": 3}, "body.prompt"),
        ("/v1/completions", {"prompt": [-1]}, "body.prompt.0"),
        ("/v1/completions", {"prompt": [4096]}, "prompt"),
        ("/v1/completions", {"prompt": [2**70]}, "body.prompt.0"),
        ("/v1/completions", {"prompt": [1] * 1024}, "input_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "body.max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "many"}, "body.max_tokens"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "body.n"),
        ("/v1/completions", {"prompt": "a", "n": 10**9}, "body.n"),
        ("/v1/completions", {"prompt": "a", "cache_salt": 3}, "body.cache_salt"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, "stream_options"),
        ("/v1/completions", {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 2000}, "truncate_prompt_tokens"),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": -2}, "body.truncate_prompt_tokens"),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0, "truncation_side": "left"}, "prompt"),
        ("/v1/completions", {"prompt": "a", "truncation_side": "top"}, "body.truncation_side"),
        ("/v1/completions", {"prompt": "a", "forced_output_token_ids": [1]}, "forced_output_token_ids"),
        ("/v1/completions", {"prompt": "a", "vllm_xargs": {"kv_cache_report_mode": "some"}},
         "body.vllm_xargs.kv_cache_report_mode"),
        ("/v1/completions", [], "body"),
        ("/v1/completions", None, "body"),
        ("/v1/chat/completions", {}, "body.messages"),
        ("/v1/chat/completions", {"messages": []}, None),
        ("/v1/chat/completions", {"messages": ["hi"]}, "body.messages.0"),
        ("/v1/chat/completions", {"messages": [HI], "tools": [{}]}, None),
        ("/v1/chat/completions", {"messages": [HI], "continue_final_message": True}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2_000}]}, "input_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ("/detokenize", {"tokens": "x"}, "body.tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/sim/fault", {"kind": "unknown"}, "body"),
        ("/sim/fault", {"kind": "drop_batches", "rank": 7}, None),
        ("/sim/fault", {"kind": "refuse"}, "body.refuse.seconds"),
        ("/sim/fault", {"kind": "refuse", "seconds": -1}, "body.refuse.seconds"),
        ("/sim/fault", {"kind": "status", "status": 200}, "body.status.status"),
        ("/sim/fault", {"kind": "heal", "x": 1}, "body.heal.x"),
    ],
)  # fmt: skip
async def test_refusals(engine: SimEngine, client: aiohttp.ClientSession, path: str, body: Any, param: Any) -> None:
    async with client.post(path, json=body) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["code"] == 400
    assert error["param"] == param
    assert error["message"]
    assert error["type"] in ("BadRequestError", "Bad Request")
    assert engine.ranks[0].load == 0


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}'])
async def test_bodies_that_are_no_json(client: aiohttp.ClientSession, raw: bytes) -> None:
    async with client.post("/v1/completions", data=raw) as answer:
        assert answer.status == 400
        assert len(await answer.read()) < 2_000


async def test_an_error_is_not_larger_than_its_cause(client: aiohttp.ClientSession) -> None:
    async with client.post("/v1/completions", json={"prompt": [[-1] * 10_000]}) as answer:
        assert answer.status == 400
        text = await answer.text()
    assert len(text) < 5_000
    assert "more errors" in text


async def test_models_that_are_not_there(client: aiohttp.ClientSession) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": []}),
    ):
        async with client.post(path, json=body | {"model": "nope"}) as answer:
            assert answer.status == 404
            error = (await answer.json())["error"]
        assert error["message"] == "The model `nope` does not exist. Valid aliases: tiny, lora1."
        assert error["type"] == "NotFoundError"


async def test_routes_that_are_not_there(client: aiohttp.ClientSession) -> None:
    async with client.get("/v1/nothing") as answer:
        assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})
    async with client.get("/v1/completions") as answer:
        assert (answer.status, await answer.json()) == (405, {"detail": "Method Not Allowed"})


async def test_a_body_that_is_too_large(client: aiohttp.ClientSession) -> None:
    async with client.post("/v1/completions", data=b" " * (65 << 20)) as answer:
        assert answer.status == 413
