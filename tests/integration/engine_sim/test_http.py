"""The HTTP face against recorded answers of real vLLM 0.32, and end to end with the events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest

from kvsync.engine_sim import SimConfig, SimEngine, TimeModel
from tests.integration.engine_sim.captures import DATA, Renaming, exchanges
from tests.integration.engine_sim.subscriber import Subscriber
from tests.integration.engine_sim.waiting import until

FAST = TimeModel(speed=1_000)
SAMPLES = json.loads((DATA / "http_samples_v0.32.json").read_text())
WORDS = {"model": "tiny", "prompt": "hello world", "max_tokens": 3}


def supported(sample: Any) -> bool:
    return not any(part in sample["path"] for part in ("render", "/inference", "/kv_event_sources", "/v1/models"))


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if supported(sample)])
async def test_recorded_answers(sample: Any) -> None:
    """Status and document, but for ids, times and what only a model with weights can know."""
    forced = None
    if sample["status"] == 200 and sample["path"].endswith("completions"):
        forced = sample["response"]["choices"][0]["token_ids"]
    config = SimConfig(blocks=64, block_size=32, max_model_len=1024, time=FAST, test_hooks=True)
    async with SimEngine(config) as engine, aiohttp.ClientSession(engine.url) as session:
        body = sample["request"]
        if forced:
            body = body | {"forced_output_token_ids": forced}
        async with session.request(sample["method"], sample["path"], json=body) as answer:
            assert answer.status == sample["status"]
            if sample["content_type"] is None:
                assert await answer.read() == b""
                return
            assert answer.content_type == sample["content_type"]
            found = await answer.json()
    expected = sample["response"]
    if forced:
        for name in ("id", "created", "system_fingerprint"):
            assert type(found[name]) is type(expected[name])
            found[name] = expected[name]
        assert list(found) == list(expected)
        assert list(found["choices"][0]) == list(expected["choices"][0])
    assert found == expected


async def test_models(client: aiohttp.ClientSession) -> None:
    [recorded] = next(sample for sample in SAMPLES if sample["path"] == "/v1/models")["response"]["data"]
    base, adapter = (await (await client.get("/v1/models")).json())["data"]
    assert list(base) == list(recorded)
    assert list(base["permission"][0]) == list(recorded["permission"][0])
    assert (base["id"], base["parent"], base["max_model_len"]) == ("tiny", None, 1024)
    assert (adapter["id"], adapter["parent"]) == ("lora1", "tiny")


async def test_event_sources(engine: SimEngine, client: aiohttp.ClientSession) -> None:
    recorded = next(sample for sample in SAMPLES if sample["path"] == "/kv_event_sources")["response"]["0"]
    found = (await (await client.get("/kv_event_sources")).json())["0"]
    assert engine.events
    assert engine.replay
    assert found == recorded | {
        "endpoint": f"tcp://*:{engine.events.rpartition(':')[2]}",
        "replay_endpoint": f"tcp://*:{engine.replay.rpartition(':')[2]}",
    }


@pytest.mark.parametrize("changes", [{"event_sources": False}, {"version": "0.30.0"}, {"kv_events": False}], ids=str)
async def test_no_event_sources(changes: dict[str, Any]) -> None:
    async with SimEngine(SimConfig(**changes)) as engine, aiohttp.ClientSession(engine.url) as session:
        assert (await session.get("/kv_event_sources")).status == 404
        assert (engine.events is None) == ("kv_events" in changes)


async def test_metrics(client: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": list(range(100)), "max_tokens": 2, "ignore_eos": True}
    for _ in range(2):
        assert (await client.post("/v1/completions", json=body)).status == 200
    text = await (await client.get("/metrics")).text()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = 'engine="0",model_name="tiny"'
    assert lines[f"vllm:prefix_cache_queries_total{{{labels}}}"] == "200.0"
    assert lines[f"vllm:prefix_cache_hits_total{{{labels}}}"] == "96.0"
    assert lines[f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}}'] == "96.0"
    assert lines[f"vllm:generation_tokens_total{{{labels}}}"] == "4.0"
    assert lines['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == "2.0"
    [config] = [name for name in lines if name.startswith("vllm:cache_config_info")]
    assert 'num_gpu_blocks="64"' in config
    assert 'block_size="32"' in config
    # Every name but the histograms' is one that real vLLM has, with the same label names.
    real = (DATA / "metrics_v0.32.txt").read_text()
    for name in lines:
        metric, _, rest = name.partition("{")
        if metric != "vllm:cache_config_info":
            names = [label.split("=")[0] for label in rest.rstrip("}").split(",")]
            assert any(
                line.startswith(metric + "{")
                and [label.split("=")[0] for label in line[line.index("{") + 1 : line.rindex("}")].split(",")] == names
                for line in real.splitlines()
            ), name


async def events_of(text: str) -> list[Any]:
    """The documents of an event stream, which must end properly."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_streamed_completion(client: aiohttp.ClientSession) -> None:
    body = WORDS | {"ignore_eos": True, "return_token_ids": True}
    whole = await (await client.post("/v1/completions", json=body)).json()
    answer = await client.post("/v1/completions", json=body | {"stream": True})
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    chunks = await events_of(await answer.text())
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [choice["prompt_token_ids"] is not None for choice in choices] == [True, False, False]
    assert ["system_fingerprint" in chunk for chunk in chunks] == [False, False, True]
    assert not any("usage" in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_streamed_usage(client: aiohttp.ClientSession) -> None:
    prompt = list(range(40))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
    assert (await client.post("/v1/completions", json=body)).status == 200
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = await events_of(await (await client.post("/v1/completions", json=body | options)).text())
    assert not any("usage" in chunk or "system_fingerprint" in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 40,
        "total_tokens": 42,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    options["stream_options"]["continuous_usage_stats"] = True
    chunks = await events_of(await (await client.post("/v1/completions", json=body | options)).text())
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


async def test_streamed_chat(client: aiohttp.ClientSession) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, *tokens, last = await events_of(await (await client.post("/v1/chat/completions", json=body)).text())
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [list(chunk["choices"][0]["delta"]) for chunk in tokens] == [["content"]] * 3
    assert tokens[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 3
    assert {chunk["object"] for chunk in (first, *tokens, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (first, *tokens, last)}) == 1
    body |= {"stream": False}
    del body["stream_options"]
    whole = await (await client.post("/v1/chat/completions", json=body)).json()
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in tokens)
    assert whole["choices"][0]["message"]["content"] == text


async def test_an_answer_sent_back_is_found_in_the_cache(client: aiohttp.ClientSession) -> None:
    messages = [{"role": "user", "content": "word " * 30}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 70, "ignore_eos": True}
    first = await (await client.post("/v1/chat/completions", json=body)).json()
    answer = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
    second = await (await client.post("/v1/chat/completions", json=body)).json()
    filled = (first["usage"]["total_tokens"] - 1) // 32 * 32
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == filled > first["usage"]["prompt_tokens"]


async def test_several_prompts_and_samples(client: aiohttp.ClientSession) -> None:
    prompts = [list(range(100)), list(range(100))]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
    answer = await (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompts[0]] * 4
    assert answer["usage"]["prompt_tokens"] == 200
    assert answer["usage"]["completion_tokens"] == 8
    # Two equal prompts of 100 tokens: 96 of 200, as real vLLM says.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    texts = await (await client.post("/v1/completions", json={"prompt": ["a b", "c"], "max_tokens": 1})).json()
    assert len(texts["choices"]) == 2


async def test_echo_and_logprobs_skip_the_cache(client: aiohttp.ClientSession) -> None:
    prompt = list(range(300, 340))
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "echo": True}
    plain = await (await client.post("/v1/completions", json=body)).json()
    with_logprobs = await (await client.post("/v1/completions", json=body | {"logprobs": 1})).json()
    assert plain["choices"][0]["logprobs"] is None
    logprobs = with_logprobs["choices"][0]["logprobs"]
    assert [len(values) for values in logprobs.values()] == [42] * 4
    assert logprobs["token_logprobs"][0] is None
    assert with_logprobs["choices"][0]["text"] == plain["choices"][0]["text"]
    assert with_logprobs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = await (await client.post("/v1/completions", json=body)).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    skipped = await (await client.post("/v1/completions", json=body | {"prompt_logprobs": 1})).json()
    assert skipped["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": 90}, slice(None)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
        ({}, slice(None)),
    ],
)
async def test_truncation_of_token_ids(client: aiohttp.ClientSession, changes: Any, expected: slice) -> None:
    prompt = list(range(10, 20))
    body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True} | changes
    answer = await (await client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["prompt_token_ids"] == prompt[expected]


async def test_truncation_of_text_keeps_the_first_special_token(client: aiohttp.ClientSession) -> None:
    body = {"prompt": "hello world", "max_tokens": 1, "return_token_ids": True}
    whole = (await (await client.post("/v1/completions", json=body)).json())["choices"][0]["prompt_token_ids"]
    body["truncate_prompt_tokens"] = 3
    answer = await (await client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["prompt_token_ids"] == [whole[0], *whole[-2:]]
    body["truncation_side"] = "left"
    answer = await (await client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["prompt_token_ids"] == whole[-3:]
    longest = {"prompt": "word " * 2_000, "max_tokens": 5, "truncate_prompt_tokens": -1}
    usage = (await (await client.post("/v1/completions", json=longest)).json())["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1023, 1)


async def test_a_client_that_leaves_takes_its_request_along() -> None:
    config = SimConfig(time=TimeModel(decode_rate=20))
    async with SimEngine(config) as engine:
        [rank] = engine.ranks
        for stream in (False, True):
            async with aiohttp.ClientSession(engine.url) as session:
                body = WORDS | {"max_tokens": 2_000, "ignore_eos": True, "stream": stream}
                asking = asyncio.create_task(session.post("/v1/completions", json=body).__aenter__())
                await until(lambda: rank.load == 1)
                if stream:
                    await (await asking).content.readany()
                    assert (await (await session.get("/load")).json())["server_load"] == 1
                asking.cancel()
            await until(lambda: rank.load == 0)
            assert rank.scheduler.cache.pool.usage == 0
        assert rank.scheduler.counters.finished["abort"] == 2


async def test_ranks() -> None:
    config = SimConfig(data_parallel_size=3, time=FAST)
    async with SimEngine(config) as engine, aiohttp.ClientSession(engine.url) as session:
        body = {"prompt": list(range(40)), "max_tokens": 1}

        async def cached(header: str | None) -> int:
            headers = {} if header is None else {"X-data-parallel-rank": header}
            answer = await (await session.post("/v1/completions", json=body, headers=headers)).json()
            found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        # Each rank has its own cache; without a header, and with one that is no number, they take turns.
        assert [await cached(rank) for rank in ("1", "1", "0", "1")] == [0, 32, 0, 32]
        assert [await cached(rank) for rank in (None, "x", None)] == [32, 32, 0]
        for rank in ("3", "-1"):
            answer = await session.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})
            assert answer.status == 400
        sources = await (await session.get("/kv_event_sources")).json()
        ports = [[int(sources[r][e].rpartition(":")[2]) for r in "012"] for e in ("endpoint", "replay_endpoint")]
        assert all([port - ports_of[0] for port in ports_of] == [0, 1, 2] for ports_of in ports)
        metrics = await (await session.get("/metrics")).text()
        assert 'vllm:prefix_cache_hits_total{engine="1",model_name="tiny"} 96.0' in metrics
        for each in engine.ranks:
            assert each.publisher
            with Subscriber(each.publisher) as reader:
                _, first = reader.replay(0)[0]
                assert msgspec.msgpack.decode(first)[2] == each.number


async def test_reset_over_http(client: aiohttp.ClientSession) -> None:
    body = {"prompt": list(range(40)), "max_tokens": 1}
    for expected in (0, 32):
        answer = await (await client.post("/v1/completions", json=body)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    assert await (await client.post("/reset_prefix_cache")).json() == {"success": True}
    answer = await (await client.post("/v1/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_reset_while_running() -> None:
    config = SimConfig(time=TimeModel(decode_rate=200))
    async with SimEngine(config) as engine, aiohttp.ClientSession(engine.url) as session:
        body = WORDS | {"max_tokens": 60, "ignore_eos": True}
        asking = asyncio.create_task(session.post("/v1/completions", json=body).__aenter__())
        await until(lambda: engine.ranks[0].scheduler.running)
        assert await (await session.post("/reset_prefix_cache")).json() == {"success": False}
        answer = await session.post("/reset_prefix_cache?reset_running_requests=true")
        assert await answer.json() == {"success": True}
        assert (await (await asking).json())["usage"]["completion_tokens"] == 60
        assert engine.ranks[0].scheduler.counters.preemptions == 1


def same_event(ours: dict[str, Any], theirs: dict[str, Any], names: Renaming) -> None:
    hashes = ("block_hashes", "parent_block_hash")
    assert {k: v for k, v in ours.items() if k not in hashes} == {k: v for k, v in theirs.items() if k not in hashes}
    assert list(ours) == list(theirs)
    pairs = zip(ours.get("block_hashes", []), theirs.get("block_hashes", []), strict=True)
    assert all(names.same(our_hash, their_hash) for our_hash, their_hash in pairs)
    assert names.same(ours.get("parent_block_hash"), theirs.get("parent_block_hash"))


async def test_the_capture_basic_over_http_and_zmq() -> None:
    """Requests as they were sent, to the simulated server; answers and batches as real vLLM gave them."""
    config = SimConfig(blocks=64, block_size=32, max_model_len=1024, time=FAST, topic="kv@pod1@tiny", test_hooks=True)
    async with SimEngine(config) as engine, aiohttp.ClientSession(engine.url) as session:
        names = Renaming()
        publisher = engine.ranks[0].publisher
        assert publisher
        with Subscriber(publisher) as reader:
            seqs = []
            # Request 25 has two samples with different outputs: what is forced is the same for all.
            for exchange in [each for each in exchanges("v0.32_basic.jsonl") if each.number != 25]:
                path = "/v1/chat/completions" if "messages" in exchange.body else "/v1/completions"
                body = exchange.body | {"forced_output_token_ids": list(exchange.outputs[0])}
                async with session.post(path, json=body, headers=exchange.headers) as answer:
                    assert answer.status == 200
                    document = await answer.json()
                assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == exchange.cached
                ids = document.get("prompt_token_ids") or document["choices"][0]["prompt_token_ids"]
                assert tuple(ids) == exchange.prompt
                assert tuple(document["choices"][0]["token_ids"]) == exchange.outputs[0]
                for _, events in exchange.batches:
                    seq, (_, ours, rank) = await asyncio.to_thread(reader.batch)
                    seqs.append(seq)
                    assert rank == 0
                    for our_event, their_event in zip(ours, events, strict=True):
                        same_event(our_event, their_event, names)
            assert seqs == list(range(reader.base, reader.base + 22))
            assert [seq for seq, _ in await asyncio.to_thread(reader.replay, reader.base)] == seqs


async def test_adapters_over_http(client: aiohttp.ClientSession) -> None:
    body = {"prompt": list(range(40)), "max_tokens": 1}
    for model, expected in (("tiny", 0), ("lora1", 0), ("lora1", 32), ("tiny", 32)):
        answer = await (await client.post("/v1/completions", json=body | {"model": model})).json()
        assert answer["model"] == model
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    metrics = await (await client.get("/metrics")).text()
    assert 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} 1.0' in metrics
