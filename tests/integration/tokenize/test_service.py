"""The tokenizer service as the gateway uses it: real servers, the real tiny tokenizer, answers of real vLLM."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvsync.config import LocalTokenizerSettings, ModelSettings, RemoteTokenizerSettings, TokenizerSettings
from kvsync.tokenize.block0 import DELAY, Held
from kvsync.tokenize.service import ANSWER_AGE, TokenizerService
from kvsync.tokenize.types import Prompt, TokenizedRequest
from tests.integration.tokenize.fake import MAX_MODEL_LEN, FakeEngine, engine_tokens, running, until
from tests.unit.tokenize.support import TINY, engine_answers, pack, unpack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,SECRET"}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
ANSWERS = list(engine_answers())


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class House:
    """An engine and services that use it."""

    def __init__(self, stack: AsyncExitStack, engine: FakeEngine) -> None:
        self.stack = stack
        self.engine = engine
        self.clock = Clock()

    async def service(
        self,
        *,
        tokenizer: Path | None = TINY,
        endpoint: str | None = "engines",
        local: dict[str, Any] | None = None,
        chance: Callable[[], float] = lambda: 1.0,
        held: Held = lambda *_: None,
        **remote: Any,
    ) -> TokenizerService:
        settings = TokenizerSettings(
            remote=RemoteTokenizerSettings(
                **{"enabled": endpoint is not None, "endpoint": endpoint, "retries": 0, **remote}
            ),
            local=LocalTokenizerSettings(**{"prove": 2, "compare": 0.5, **(local or {})}),
        )
        models = [ModelSettings(name="tiny", tokenizer=tokenizer)]
        service = TokenizerService(
            settings, models, lambda _: [self.engine.url], held=held, clock=self.clock, chance=chance
        )
        await service.start()
        self.stack.push_async_callback(service.close)
        return service

    async def proved(self, shape: str, ask: Callable[[int], Any], **kwargs: Any) -> TokenizerService:
        """A service with one shape proved by two requests."""
        service = await self.service(**kwargs)
        for number in range(2):
            await ask(number)(service)
        await until(lambda: service.stats()["shapes"].get(f"tiny:{shape}", {}).get("state") == "proved")
        self.engine.bodies.clear()
        return service


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running(FakeEngine()))
        yield House(stack, engine)


async def ask(
    service: TokenizerService, path: str, body: dict[str, Any], adapter: str | None = None
) -> TokenizedRequest:
    return await service.tokenize(path, body, "tiny", adapter)


def saying(number: int) -> Callable[[TokenizerService], Any]:
    return lambda service: ask(service, CHAT, user(f"proof {number}"))


def ids(result: TokenizedRequest) -> list[list[int]]:
    return [unpack(prompt.tokens) for prompt in result.prompts]


# --- what comes out


@pytest.mark.parametrize("remote", [True, False])
async def test_answers_of_real_vllm(house: House, remote: bool) -> None:
    """Every text request of the captures, by the remote tokenizer and by the local one."""
    service = await house.service(endpoint="engines" if remote else None)
    for _, path, body, expected in ANSWERS:
        result = await ask(service, path, body)
        assert ids(result) == [expected]
        assert result.prompts[0].length == len(expected)
        assert result.source in (("remote", "cache", "local") if remote else ("local",))
        assert result.comparable


async def test_token_ids_come_at_once(house: House) -> None:
    service = await house.service(tokenizer=None)
    result = service.begin(COMPLETIONS, {"prompt": [[1, 2, 3], [4]], "cache_salt": "s"}, "tiny", None)
    assert result == TokenizedRequest(
        prompts=(Prompt(pack(1, 2, 3), 3), Prompt(pack(4), 1)), source="ids", cache_salt="s", hides_keys=True
    )
    assert house.engine.bodies == []


async def test_several_texts_keep_their_order(house: House) -> None:
    service = await house.service()
    texts = [f"hello {number}" for number in range(20)]
    result = await ask(service, COMPLETIONS, {"prompt": texts})
    assert ids(result) == [engine_tokens({"prompt": text}) for text in texts]
    assert not result.comparable


async def test_one_text_of_several_unknown_is_all_unknown(house: House) -> None:
    service = await house.service()
    house.engine.troubles = [500]
    result = await ask(service, COMPLETIONS, {"prompt": ["a", "b", "c"]})
    assert (result.prompts, result.source, result.reason) == ((), "none", "tokenizer_failed")


@pytest.mark.parametrize(
    ("fields", "reads", "comparable", "reason"),
    [
        ({}, True, True, None),
        ({"n": 2}, True, False, None),
        ({"prompt_logprobs": 1}, False, False, "skips_cache"),
        ({"echo": True, "logprobs": 1}, False, False, "skips_cache"),
    ],
)
async def test_flags(house: House, fields: dict[str, Any], reads: bool, comparable: bool, reason: str | None) -> None:
    service = await house.service()
    for prompt in ("hello", [1, 2]):
        result = await ask(service, COMPLETIONS, {"prompt": prompt, **fields})
        assert (result.reads_cache, result.comparable, result.reason) == (reads, comparable, reason)
        assert len(result.prompts) == 1


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/responses", {"input": "hi"}, "unsupported_api"),
        ("/v1/messages", user("hi"), "unsupported_api"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"prompt": {}}, "invalid_request"),
        (CHAT, user("\ud800"), "invalid_request"),
        (CHAT, {**user("hi"), "chat_template": "{{ 1 }}"}, "invalid_request"),
    ],
)
async def test_what_has_no_tokens_has_a_reason_and_is_counted(
    house: House, path: str, body: dict[str, Any], reason: str
) -> None:
    service = await house.service()
    result = await ask(service, path, body)
    assert (result.prompts, result.source, result.reason) == ((), "none", reason)
    assert service.stats()["reasons"] == {reason: 1}


# --- remote: cache and single flight


async def test_whole_answers_are_remembered_for_a_while(house: House) -> None:
    service = await house.service(tokenizer=None)
    assert [(await ask(service, CHAT, user("hi"))).source for _ in range(3)] == ["remote", "cache", "cache"]
    house.clock.now += ANSWER_AGE + 1
    assert (await ask(service, CHAT, user("hi"))).source == "remote"


async def test_every_field_that_affects_the_tokens_is_part_of_the_key(house: House) -> None:
    service = await house.service(tokenizer=None)
    variants: list[dict[str, Any]] = [
        user("hi"),
        user("hi "),
        user([{"type": "text", "text": "hi"}]),
        {**user("hi"), "tools": TOOLS},
        {**user("hi"), "chat_template_kwargs": {"enable_thinking": False}},
        {**user("hi"), "chat_template_kwargs": {"enable_thinking": True}},
        {**user("hi"), "documents": [{"text": "d"}]},
        {**user("hi"), "reasoning_effort": "low"},
        {**user("hi"), "add_generation_prompt": False},
        {**user("hi"), "add_generation_prompt": False, "continue_final_message": True},
        {**user("hi"), "add_special_tokens": True},
    ]
    for body in variants:
        assert (await ask(service, CHAT, body)).source == "remote"
    house.engine.models.add("adapter")
    assert (await ask(service, CHAT, user("hi"), adapter="adapter")).source == "remote"
    assert len(house.engine.bodies) == len(variants) + 1
    for body in variants:
        result = await ask(service, CHAT, {**body, "temperature": 0.5, "max_tokens": 9})
        assert result.source == "cache", "sampling does not change the tokens"


async def test_what_is_remembered_serves_requests_with_the_same_salt_only(house: House) -> None:
    """(X3) How fast tokens come must not tell what another asked."""
    service = await house.service(tokenizer=None)
    sources = []
    for salt in ("a", "a", "b", None, "b", "a", None):
        body = user("hi") if salt is None else {**user("hi"), "cache_salt": salt}
        sources.append((await ask(service, CHAT, body)).source)
    assert sources == ["remote", "cache", "remote", "remote", "cache", "cache", "cache"]


async def test_equal_requests_under_way_share_one_call(house: House) -> None:
    service = await house.service(tokenizer=None)
    house.engine.gate = asyncio.Event()
    asking = [asyncio.ensure_future(ask(service, CHAT, user("hi"))) for _ in range(8)]
    await until(lambda: house.engine.waiting == 1 and service.stats()["shared_calls"] == 7)
    asking[0].cancel()
    house.engine.gate.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(result, TokenizedRequest) and result.prompts for result in results[1:])
    assert len(house.engine.bodies) == 1


async def test_when_all_clients_left_the_call_ends(house: House) -> None:
    service = await house.service(tokenizer=None)
    house.engine.gate = asyncio.Event()
    asking = [asyncio.ensure_future(ask(service, CHAT, user("hi"))) for _ in range(3)]
    await until(lambda: house.engine.waiting == 1)
    for task in asking:
        task.cancel()
    await asyncio.wait_for(house.engine.left.wait(), 5)


async def test_the_budget_ends_the_wait(house: House) -> None:
    service = await house.service(tokenizer=None, budget=0.1)
    house.engine.troubles = ["hang"]
    began = time.monotonic()
    result = await ask(service, CHAT, user("hi"))
    assert (result.prompts, result.reason) == ((), "tokenizer_timeout")
    assert time.monotonic() - began < 3
    assert (await ask(service, CHAT, user("hi"))).prompts, "a slow answer is not remembered as a failure"


async def test_no_tokenizer_at_all(house: House) -> None:
    service = await house.service(tokenizer=None, endpoint=None)
    assert (await ask(service, CHAT, user("hi"))).reason == "no_tokenizer"
    assert (await ask(service, COMPLETIONS, {"prompt": [1]})).source == "ids"


# --- adapters


async def test_an_adapter_is_asked_for_by_its_name(house: House) -> None:
    house.engine.models.add("adapter")
    service = await house.service()
    assert (await ask(service, CHAT, user("hi"), adapter="adapter")).prompts
    assert [body["model"] for body in house.engine.bodies] == ["adapter"]


async def test_an_adapter_that_the_tokenizer_does_not_know_is_its_base_model(house: House) -> None:
    service = await house.service()
    result = await ask(service, CHAT, user("hi"), adapter="adapter")
    assert ids(result) == [engine_tokens(user("hi"))]
    assert [body["model"] for body in house.engine.bodies] == ["adapter", "tiny"]


# --- proof


async def test_local_serves_after_equal_answers_of_that_shape(house: House) -> None:
    service = await house.proved("plain", saying)
    result = await ask(service, CHAT, user("hello"))
    assert (ids(result), result.source) == ([engine_tokens(user("hello"))], "local")
    assert (await ask(service, CHAT, {**user("hello"), "tools": TOOLS})).source == "remote"
    assert (await ask(service, COMPLETIONS, {"prompt": "hello"})).source == "remote"


async def test_repeating_one_request_proves_nothing(house: House) -> None:
    service = await house.service()
    for _ in range(10):
        await ask(service, CHAT, user("hi"))
    await until(lambda: service.stats()["comparisons"] == {"equal": 1})
    assert service.stats()["shapes"]["tiny:plain"]["state"] == "unproved"


async def test_one_difference_disables_the_shape(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.engine.tokens = lambda body: [0, *engine_tokens(body)] if "tools" in body else engine_tokens(body)
    service = await house.proved("plain", saying)
    for number in range(4):
        result = await ask(service, CHAT, {**user(f"tools {number}"), "tools": TOOLS})
        assert (result.source, ids(result)[0][0]) == ("remote", 0)
    await until(lambda: service.stats()["comparisons"].get("different", 0) >= 1)
    assert service.stats()["shapes"]["tiny:tools"]["state"] == "disabled"
    assert "local tokenizing is off for this shape" in caplog.text
    assert (await ask(service, CHAT, user("hello"))).source == "local", "other shapes go on"


async def test_a_share_stays_compared_and_a_late_difference_is_found(house: House) -> None:
    chances = iter([0.9, 0.1])
    service = await house.proved("plain", saying, chance=lambda: next(chances))
    house.engine.tokens = lambda body: [0, *engine_tokens(body)]
    assert (await ask(service, CHAT, user("one"))).source == "local"
    assert house.engine.bodies == []
    assert (await ask(service, CHAT, user("two"))).source == "local"
    await until(lambda: service.stats()["shapes"]["tiny:plain"]["state"] == "disabled")
    assert (await ask(service, CHAT, user("three"))).source == "remote"


async def test_proved_shapes_need_no_remote(house: House) -> None:
    service = await house.proved("plain", saying, chance=lambda: 0.0)
    house.engine.troubles = [500] * 9
    assert (await ask(service, CHAT, user("hello"))).source == "local"
    await until(lambda: service.stats()["comparisons"].get("remote_failed") == 1)
    assert service.stats()["shapes"]["tiny:plain"]["state"] == "proved"


async def test_what_local_may_not_render_goes_to_the_remote(house: House) -> None:
    service = await house.proved("plain", saying)
    result = await ask(service, CHAT, {"messages": [{"role": "developer", "content": "hi"}]})
    assert result.source == "remote"
    assert service.stats()["left_to_remote"] == {"developer_role": 1}


async def test_a_template_that_breaks_leaves_the_request_to_the_remote(house: House, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    source = (TINY / "chat_template.jinja").read_text()
    broken = "{% if messages[0].content == 'break' %}{{ raise_exception('no') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(broken + source)
    service = await house.proved("plain", saying, tokenizer=tmp_path)
    assert (await ask(service, CHAT, user("break"))).source == "remote"
    assert service.stats()["left_to_remote"] == {"template_error": 1}


class TestSecondLook:
    """At requests with local tokens, once they are answered."""

    async def look(self, house: House, service: TokenizerService, times: int) -> None:
        for number in range(times):
            result = await ask(service, CHAT, user(f"hello {number}"))
            assert result.source == "local"
            service.answered(result, "w")
            house.clock.now += DELAY

    async def test_beginnings_that_no_engine_holds_ask_for_a_new_proof(self, house: House) -> None:
        service = await house.proved("plain", saying, held=lambda *_: False)
        await self.look(house, service, 64)
        assert (await ask(service, CHAT, user("now the last of them is looked up"))).source == "local"
        assert service.stats()["shapes"]["tiny:plain"]["suspicions"] == 1
        assert (await ask(service, CHAT, user("hello again"))).source == "remote"

    async def test_beginnings_that_engines_hold_confirm(self, house: House) -> None:
        asked: list[tuple[Any, ...]] = []

        def held(*what: Any) -> bool:
            asked.append(what)
            return True

        service = await house.proved("plain", saying, held=held)
        await self.look(house, service, 80)
        assert service.stats()["first_blocks"] == {"confirmed": 79, "absent": 0, "unknown": 0, "unanswered": 0}
        assert asked[0] == ("w", "tiny", None, None, pack(*engine_tokens(user("hello 0"))))

    async def test_an_adapter_and_a_salt_are_told(self, house: House) -> None:
        house.engine.models.add("tuned")
        asked: list[tuple[Any, ...]] = []
        service = await house.service(local={"prove": 1}, held=lambda *what: asked.append(what))
        await ask(service, CHAT, user("proof"), "tuned")
        await until(lambda: service.stats()["shapes"].get("tuned:plain", {}).get("state") == "proved")
        result = await ask(service, CHAT, {**user("hello"), "cache_salt": "s"}, "tuned")
        service.answered(result, "w")
        house.clock.now += DELAY
        await ask(service, CHAT, user("again"), "tuned")
        assert [what[:4] for what in asked] == [("w", "tiny", "tuned", "s")]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (COMPLETIONS, {"prompt": [1, 2, 3]}),
            (COMPLETIONS, {"prompt": ["one", "two"]}),
            (COMPLETIONS, {"prompt": "hello world hello", "truncate_prompt_tokens": 3}),
            (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
            (CHAT, {**user("remote"), "tools": TOOLS}),
        ],
    )
    async def test_requests_that_are_no_sample(self, house: House, path: str, body: dict[str, Any]) -> None:
        """Ids need no check; of several prompts, cut ones and those with images nobody stores just the local tokens."""
        service = await house.proved("plain", saying)
        for number in range(3):
            await ask(service, COMPLETIONS, {"prompt": f"proof {number}"})
        await until(lambda: service.stats()["shapes"].get("tiny:text", {}).get("state") == "proved")
        assert (await ask(service, path, body)).sample is None

    async def test_without_a_remote_tokenizer_there_is_nothing_to_prove_again(self, house: House) -> None:
        service = await house.service(endpoint=None)
        result = await ask(service, CHAT, user("hello"))
        assert (result.source, result.sample) == ("local", None)


async def test_a_folder_that_can_not_be_loaded_is_served_remotely(house: House, tmp_path: Path) -> None:
    service = await house.service(tokenizer=tmp_path)
    assert (await ask(service, CHAT, user("hi"))).source == "remote"
    assert "does not exist" in service.stats()["local"]["missing"]["tiny"]


async def test_models_may_change(house: House) -> None:
    service = await house.service(tokenizer=None, endpoint=None)
    assert (await ask(service, CHAT, user("hi"))).reason == "no_tokenizer"
    await service.update_models([ModelSettings(name="tiny", tokenizer=TINY)])
    assert (await ask(service, CHAT, user("hi"))).source == "local"
    await service.update_models([])
    result = service.begin(CHAT, user("hi"), "tiny", None)
    assert isinstance(result, TokenizedRequest), "nobody is waited for"
    assert (result.prompts, result.source, result.reason) == ((), "none", "no_tokenizer")
    assert (await ask(service, CHAT, user("hi"))).reason == "no_tokenizer"


async def test_changes_of_the_models_that_overlap_are_taken_in_turn(house: House) -> None:
    service = await house.service(tokenizer=None, endpoint=None)
    with_tokenizer, without = ModelSettings(name="tiny", tokenizer=TINY), ModelSettings(name="tiny")
    await asyncio.gather(service.update_models([with_tokenizer]), service.update_models([without]))
    assert service.stats()["local"]["ready"] == []


# --- images


async def test_an_image_ends_the_known_part_and_never_leaves(house: House) -> None:
    service = await house.service()
    before = [{"role": "system", "content": "You are a helpful assistant. " * 4}]
    messages = [*before, {"role": "user", "content": [{"type": "text", "text": "what is it?"}, IMAGE]}]
    result = await ask(service, CHAT, {"messages": messages})
    (prompt,) = result.prompts
    known = engine_tokens({"messages": before, "add_generation_prompt": False})
    header = engine_tokens({"messages": [*before, {"role": "user", "content": ""}], "add_generation_prompt": False})
    assert unpack(prompt.tokens)[: len(known)] == known
    assert unpack(prompt.tokens) == header[: len(prompt.tokens) // 4]
    assert len(prompt.tokens) // 4 >= len(known)
    assert prompt.length > len(prompt.tokens) // 4
    assert (result.hides_keys, result.comparable) == (True, False)
    assert "SECRET" not in repr(house.engine.bodies)


async def test_two_images_give_the_same_known_part(house: House) -> None:
    service = await house.service()
    bodies = [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": u}}]}]} for u in "ab"
    ]
    one, other = [await ask(service, CHAT, body) for body in bodies]
    assert one.prompts[0].tokens == other.prompts[0].tokens


# --- truncation


@pytest.mark.parametrize("remote", [True, False])
class TestTruncation:
    TEXT = "hello world, hello world"

    async def go(self, house: House, remote: bool, path: str, body: dict[str, Any]) -> TokenizedRequest:
        service = await house.service(endpoint="engines" if remote else None)
        return await ask(service, path, body)

    async def test_a_text_keeps_its_special_tokens_and_its_end(self, house: House, remote: bool) -> None:
        whole = engine_tokens({"prompt": self.TEXT})
        result = await self.go(house, remote, COMPLETIONS, {"prompt": self.TEXT, "truncate_prompt_tokens": 4})
        assert ids(result) == [[0, *whole[-3:]]]

    @pytest.mark.parametrize("side", ["left", "right"])
    async def test_a_given_side_cuts_the_finished_ids(self, house: House, remote: bool, side: str) -> None:
        whole = engine_tokens({"prompt": self.TEXT})
        body = {"prompt": self.TEXT, "truncate_prompt_tokens": 4, "truncation_side": side}
        assert ids(await self.go(house, remote, COMPLETIONS, body)) == [whole[-4:] if side == "left" else whole[:4]]

    async def test_a_chat_keeps_its_end(self, house: House, remote: bool) -> None:
        result = await self.go(house, remote, CHAT, {**user(self.TEXT), "truncate_prompt_tokens": 5})
        assert ids(result) == [engine_tokens(user(self.TEXT))[-5:]]

    async def test_ids_keep_their_end(self, house: House, remote: bool) -> None:
        result = await self.go(house, remote, COMPLETIONS, {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2})
        assert ids(result) == [[3, 4]]

    async def test_special_tokens_around_a_chat_are_unknown(self, house: House, remote: bool) -> None:
        body = {**user(self.TEXT), "add_special_tokens": True, "truncate_prompt_tokens": 5}
        assert (await self.go(house, remote, CHAT, body)).reason == "truncated_special"


@pytest.mark.parametrize(("fields", "kept"), [({}, MAX_MODEL_LEN - 1), ({"max_tokens": 0}, MAX_MODEL_LEN)])
async def test_as_many_tokens_as_the_model_takes(house: House, fields: dict[str, Any], kept: int) -> None:
    """The limit is the engines' to say: it is asked for once."""
    service = await house.service()
    prompt = list(range(2, 2000))
    body = {"prompt": prompt, "truncate_prompt_tokens": -1, **fields}
    for _ in range(3):
        assert ids(await ask(service, COMPLETIONS, body)) == [prompt[-kept:]]
    assert len(house.engine.bodies) == 1


async def test_the_limit_stays_unknown_without_a_remote(house: House) -> None:
    service = await house.service(endpoint=None)
    for prompt in ([1, 2, 3], "hello"):
        result = await ask(service, COMPLETIONS, {"prompt": prompt, "truncate_prompt_tokens": -1})
        assert (result.prompts, result.reason) == ((), "unknown_limit")


# --- probe


class TestProbe:
    async def test_sentences(self, house: House) -> None:
        assert "AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER=true" in str(
            await (await house.service(endpoint=None)).probe()
        )
        service = await house.service(endpoint=None, enabled=True)
        assert "AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT" in str(await service.probe())

    @pytest.mark.parametrize("own", [True, False])
    async def test_a_reachable_tokenizer(self, house: House, own: bool) -> None:
        service = await house.service(endpoint=house.engine.url + "/" if own else "engines")
        assert await service.probe() is None
        house.engine.troubles = [503]
        assert "status_503" in str(await service.probe())

    async def test_no_model(self, house: House) -> None:
        service = await house.service()
        await service.update_models([])
        assert "no model" in str(await service.probe())


# --- the event loop


async def test_a_full_queue_means_routing_by_load(house: House) -> None:
    service = await house.service(endpoint=None, local={"threads": 1, "queue": 1})
    asking = [ask(service, COMPLETIONS, {"prompt": f"hello {number} " * 2000}) for number in range(6)]
    results = await asyncio.gather(*asking)
    assert [result.reason for result in results] == [None, None, *["queue_full"] * 4]
    assert (await ask(service, COMPLETIONS, {"prompt": "hello"})).source == "local"


async def test_a_short_prompt_waits_for_no_thread(house: House) -> None:
    service = await house.service(endpoint=None, local={"threads": 1, "queue": 1})
    long = [asyncio.ensure_future(ask(service, COMPLETIONS, {"prompt": f"hello {n} " * 20_000})) for n in range(2)]
    await asyncio.sleep(0)
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    for path, body in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, chat)):
        assert (await ask(service, path, body)).source == "local"
    assert service.stats()["pool"]["pending"] == 2, "both are there still"
    assert [result.source for result in await asyncio.gather(*long)] == ["local", "local"]


async def test_long_prompts_do_not_hold_up_the_loop_and_leave_when_their_clients_do(house: House) -> None:
    service = await house.service(endpoint=None, budget=60)
    text = "the quick brown fox jumps over the lazy dog, " * 12_000
    asking = [asyncio.ensure_future(ask(service, COMPLETIONS, {"prompt": f"{n} {text}"})) for n in range(20)]
    ticks = array("d")
    await asyncio.sleep(0)
    for _ in range(100):
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        ticks.append(time.perf_counter() - began)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert sorted(ticks)[-5] < 0.1
    result = await ask(service, COMPLETIONS, {"prompt": "hello"})
    assert result.source == "local", "what nobody waits for does not keep the threads busy"
    await until(lambda: service.stats()["pool"]["pending"] == 0)


async def test_large_requests_are_written_in_the_pool(house: House) -> None:
    service = await house.service(tokenizer=None)
    text = "hello world " * 30_000
    result = await ask(service, CHAT, user(text))
    assert ids(result) == [engine_tokens(user(text))]
    assert (await ask(service, CHAT, user(text))).source == "cache"


async def test_closing_ends_comparisons_under_way(house: House) -> None:
    service = await house.proved("plain", saying, chance=lambda: 0.0)
    house.engine.gate = asyncio.Event()
    assert (await ask(service, CHAT, user("hello"))).source == "local"
    await until(lambda: house.engine.waiting == 1)
    await service.close()
    await asyncio.wait_for(house.engine.left.wait(), 5)
