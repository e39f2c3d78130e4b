"""Chats with images by the render route of a real HTTP server, and what becomes of them when it does not render."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvsync.config import ModelSettings, RemoteTokenizerSettings, TokenizerSettings
from kvsync.tokenize.pool import BoundedPool
from kvsync.tokenize.render import Renderer
from kvsync.tokenize.service import TokenizerService
from kvsync.tokenize.types import ImageSpan, TokenizedRequest
from tests.integration.tokenize.fake import FakeEngine, engine_tokens, running
from tests.unit.tokenize.support import unpack

CHAT = "/v1/chat/completions"
SECRET = "data:image/png;base64,SECRET"
IMAGE = {"type": "image_url", "image_url": {"url": SECRET}}
SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 4}
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "what is it?"}, IMAGE]}],
}
IDS = [*range(300, 340), *[9] * 24, *range(400, 410)]


def rendering(*images: tuple[str, int, int]) -> dict[str, Any]:
    features = {
        "mm_hashes": {"image": [name for name, _, _ in images]},
        "mm_placeholders": {"image": [{"offset": offset, "length": length} for _, offset, length in images]},
        "kwargs_data": None,
    }
    return {"request_id": "chatcmpl-1", "token_ids": IDS, "features": features, "cache_salt": None, "model": "tiny"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class House:
    def __init__(self, stack: AsyncExitStack, engine: FakeEngine) -> None:
        self.stack = stack
        self.engine = engine
        self.clock = Clock()

    async def service(self, **remote: Any) -> TokenizerService:
        settings = TokenizerSettings(
            remote=RemoteTokenizerSettings(**{"enabled": True, "endpoint": "engines", "render": True, **remote})
        )
        models = [ModelSettings(name="tiny")]
        service = TokenizerService(settings, models, lambda _: [self.engine.url], clock=self.clock)
        await service.start()
        self.stack.push_async_callback(service.close)
        return service


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        yield House(stack, await stack.enter_async_context(running(FakeEngine())))


async def ask(service: TokenizerService, body: dict[str, Any] = BODY, adapter: str | None = None) -> TokenizedRequest:
    return await service.tokenize(CHAT, body, "tiny", adapter)


def prompts(service: TokenizerService) -> dict[str, int]:
    counted: dict[str, int] = service.stats()["render"]["prompts"]
    return counted


def is_cut_before_the_image(result: TokenizedRequest) -> bool:
    """The rule without a rendering: a match ends before the first image's message."""
    (prompt,) = result.prompts
    known = engine_tokens({"messages": [SYSTEM], "add_generation_prompt": False})
    return (
        unpack(prompt.tokens)[: len(known)] == known
        and prompt.length > len(prompt.tokens) // 4
        and (prompt.images, result.reason, result.comparable) == ((), "not_rendered", False)
    )


async def test_a_rendered_prompt_is_known_as_a_whole(house: House) -> None:
    service = await house.service()
    house.engine.rendering = rendering(("cat", 40, 24))
    result = await ask(service, {**BODY, "max_tokens": 5, "cache_salt": "s"})
    (prompt,) = result.prompts
    assert (unpack(prompt.tokens), prompt.length) == (IDS, len(IDS))
    assert prompt.images == (ImageSpan("cat", 40, 24),)
    assert (result.source, result.reason, result.cache_salt) == ("remote", None, "s")
    assert (result.comparable, result.hides_keys) == (True, True)
    assert house.engine.bodies == [], "nothing else was asked"
    assert house.engine.asked_to_render == [{**BODY, "max_tokens": 5, "cache_salt": "s", "mm_payload": "none"}]
    assert prompts(service) == {"rendered": 1}


async def test_an_adapter_s_prompt_is_rendered_by_the_base_model(house: House) -> None:
    service = await house.service()
    house.engine.rendering = rendering(("cat", 40, 24))
    await ask(service, {**BODY, "model": "tuned"}, "tuned")
    assert [body["model"] for body in house.engine.asked_to_render] == ["tiny"]


async def test_a_request_that_skips_the_cache_or_samples_twice_is_not_compared(house: House) -> None:
    service = await house.service()
    house.engine.rendering = rendering(("cat", 40, 24))
    result = await ask(service, {**BODY, "prompt_logprobs": 1})
    assert (result.reason, result.comparable, len(result.prompts)) == ("skips_cache", False, 1)
    assert not (await ask(service, {**BODY, "n": 2})).comparable


async def test_other_media_are_rendered_and_plain_chats_are_not(house: House) -> None:
    service = await house.service()
    house.engine.rendering = {
        "token_ids": IDS,
        "features": {
            "mm_hashes": {"audio": ["bark"], "video": ["run"]},
            "mm_placeholders": {"audio": [{"offset": 50, "length": 2}], "video": [{"offset": 40, "length": 4}]},
        },
    }
    audio = {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA"}}]}]}
    (prompt,) = (await ask(service, audio)).prompts
    assert prompt.images == (ImageSpan("run", 40, 4), ImageSpan("bark", 50, 2))
    await ask(service, {"messages": [SYSTEM]})
    assert len(house.engine.asked_to_render) == 1


async def test_renderings_are_not_remembered(house: House) -> None:
    """What stands behind an image's URL may have changed."""
    service = await house.service()
    house.engine.rendering = rendering(("cat", 40, 24))
    await ask(service)
    house.engine.rendering = rendering(("dog", 40, 24))
    (prompt,) = (await ask(service)).prompts
    assert prompt.images == (ImageSpan("dog", 40, 24),)


async def test_a_large_rendering_is_read(house: House) -> None:
    service = await house.service()
    house.engine.rendering = {**rendering(("cat", 40, 300_000)), "token_ids": [100_000] * 400_000}
    (prompt,) = (await ask(service)).prompts
    assert (prompt.length, prompt.images) == (400_000, (ImageSpan("cat", 40, 300_000),))


@pytest.mark.parametrize("render", [True, False])
async def test_images_leave_only_where_rendering_is_on(house: House, render: bool) -> None:
    service = await house.service(render=render)
    house.engine.rendering = rendering(("cat", 40, 24))
    result = await ask(service)
    assert ("SECRET" in json.dumps(house.engine.asked_to_render)) is render
    assert (result.prompts[0].images == ()) is not render
    assert "SECRET" not in json.dumps(house.engine.bodies)
    assert result.reason is None


@pytest.mark.parametrize("off", [{"enabled": False}, {"endpoint": None}])
async def test_rendering_needs_a_remote_tokenizer(house: House, off: dict[str, Any]) -> None:
    service = await house.service(**off)
    assert service.stats()["render"] is None
    assert (await ask(service)).reason == "no_tokenizer"


class TestWithoutRendering:
    async def test_an_engine_without_the_route_is_told_of_once_and_asked_again_after_a_rest(
        self, house: House, caplog: pytest.LogCaptureFixture
    ) -> None:
        service = await house.service(breaker_rest=5)
        with caplog.at_level(logging.WARNING, "kvsync.tokenize.render"):
            for _ in range(3):
                assert is_cut_before_the_image(await ask(service))
            assert len(house.engine.asked_to_render) == 1, "the image was sent once"
            house.clock.now += 5
            assert is_cut_before_the_image(await ask(service))
        assert len(house.engine.asked_to_render) == 2
        (told,) = caplog.messages
        assert "--enable-scale-out" in told
        assert prompts(service) == {"status_403": 2, "no_endpoint": 2}
        assert service.stats()["remote"]["taken_out"] == 0, "it tokenizes as ever"
        house.clock.now += 5
        house.engine.rendering = rendering(("cat", 40, 24))
        assert (await ask(service)).prompts[0].images == (ImageSpan("cat", 40, 24),)

    @pytest.mark.parametrize("status", [400, 404, 422, 500, 501, 503, 302])
    async def test_a_refusal_or_failure_is_counted(self, house: House, status: int) -> None:
        service = await house.service()
        house.engine.rendering = status
        assert is_cut_before_the_image(await ask(service))
        assert prompts(service) == {f"status_{status}": 1}
        assert len(house.engine.asked_to_render) == 1, "an image is not sent twice"

    @pytest.mark.parametrize(
        "hostile",
        [
            b"",
            b"{}",
            b'{"token_ids":[1,2,3],"features":null}',
            json.dumps(rendering(("cat", 40, 500))).encode(),
            json.dumps(rendering(("cat", 40, 24), ("dog", 50, 4))).encode(),
            json.dumps(rendering(("cat", -1, 24))).encode(),
        ],
    )
    async def test_an_answer_that_can_not_be(self, house: House, hostile: bytes) -> None:
        service = await house.service()
        house.engine.rendering = hostile
        assert is_cut_before_the_image(await ask(service))
        assert prompts(service) == {"bad_answer": 1}

    async def test_an_answer_without_end_is_not_read_on(self, house: House) -> None:
        service = await house.service()
        house.engine.rendering = b'{"token_ids":[' + b"1," * (9 << 20) + b"1]}"
        assert is_cut_before_the_image(await ask(service))
        assert prompts(service) == {"too_large": 1}

    async def test_a_server_that_hangs_leaves_time_for_the_part_before_the_image(self, house: House) -> None:
        service = await house.service(budget=30, timeout=0.5)
        house.engine.rendering = "hang"
        assert is_cut_before_the_image(await ask(service))
        assert prompts(service) == {"timeout": 1}

    async def test_it_gives_up_before_the_budget_is_spent(self, house: House) -> None:
        pool = BoundedPool(1, 8)
        house.stack.callback(pool.close)
        settings = RemoteTokenizerSettings(enabled=True, endpoint=house.engine.url, budget=0.4, timeout=600)
        renderer = Renderer(settings, lambda _: [], pool)
        await renderer.start()
        house.stack.push_async_callback(renderer.close)
        house.engine.rendering = "hang"
        async with asyncio.timeout(60):
            assert await renderer.prompt(BODY, "tiny") is None
        assert renderer.stats()["prompts"] == {"timeout": 1}

    async def test_failures_of_rendering_do_not_rest_the_tokenizer(self, house: House) -> None:
        service = await house.service(breaker_failures=2)
        house.engine.rendering = 500
        for _ in range(4):
            assert is_cut_before_the_image(await ask(service))
        assert prompts(service) == {"status_500": 2, "no_endpoint": 2}
        stats = service.stats()
        assert (stats["render"]["active"], stats["remote"]["active"]) == (0, 1)

    async def test_when_nothing_answers_the_request_goes_by_load(self, house: House) -> None:
        service = await house.service(retries=0)
        house.engine.troubles = [500] * 2
        result = await ask(service)
        assert (result.prompts, result.reason, result.hides_keys) == ((), "tokenizer_failed", True)

    async def test_a_body_that_can_not_be_written(self, house: House) -> None:
        service = await house.service()
        result = await ask(service, {**BODY, "user": "\ud800"})
        assert prompts(service) == {"invalid_request": 1}
        assert is_cut_before_the_image(result)
        assert house.engine.asked_to_render == []
