"""What the index knows and what answers teach, by way of Envoy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvsync.engine_sim import SimConfig, SimEngine, TimeModel
from tests.faults.client import Client as Plain
from tests.faults.http import SSE_HEAD, FakeEngine, Talk, chunk
from tests.faults.process import Process
from tests.faults.serving import serving
from tests.integration.extproc.envoy import envoy, filter_of
from tests.integration.extproc.harness import note, street
from tests.integration.gateway.harness import Client, eventually, post

EXTPROC = {"enabled": True, "host": "127.0.0.1", "port": 0, "drain_delay": 0}


def entry(name: str, engine: SimEngine) -> dict[str, object]:
    return {"name": name, "url": engine.url, "events": engine.events, "replay": engine.replay}


async def test_requests_go_where_their_prefix_is(tmp_path: Path) -> None:
    """Through either door a prompt goes to the engine that has it, with the same credit. Events tell: Envoy shows no
    answer's body."""
    sizes: dict[str, Any] = {"blocks": 257, "max_model_len": 2048, "time": TimeModel(speed=50)}
    async with SimEngine(SimConfig(model="tiny", **sizes)) as a, SimEngine(SimConfig(model="tiny", **sizes)) as b:
        entries = [entry("a", a), entry("b", b)]
        async with serving(tmp_path, *entries, extproc=EXTPROC) as gateway:
            assert gateway.app.extproc is not None
            async with envoy(tmp_path, gateway.app.extproc.port) as made, aiohttp.ClientSession() as session:
                await made.healthy(processors=1)
                by_envoy = Plain(session, f"http://127.0.0.1:{made.port}")
                for number in range(6):
                    tokens = [600 * number + place for place in range(256)]
                    request = {"model": "tiny", "prompt": tokens, "max_tokens": 2, "stream": bool(number % 2)}
                    first = await by_envoy.post("/v1/completions", request)
                    assert first.status == 200
                    worker = (await gateway.decision(first.request_id)).worker
                    await gateway.credited(worker, tokens, 240)
                    again = await by_envoy.post("/v1/completions", request)
                    answer, own = await gateway.ask("/v1/completions", request)
                    by_way = await gateway.decision(again.request_id)
                    assert (by_way.worker, by_way.credited) == (own.worker, own.credited) == (worker, 240)
                    assert answer.status == again.status == 200
                    assert by_way.record["policy"] == "kv-aware"
                    assert by_way.record["mode"] == own.record["mode"] == "exact"


def usage_chunk(cached: int) -> bytes:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


@pytest.mark.parametrize("way", ["hidden", "asked for", "STREAMED", "FULL_DUPLEX_STREAMED"])
async def test_usage_is_read_where_answers_are_shown(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `extproc.read_answers`, or because Envoy is configured so; the bytes that a client gets are the same."""

    async def script(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            note(engine, request)
            await talk.send(
                SSE_HEAD, chunk(b"data: 1\n\n"), chunk(usage_chunk(7)), chunk(b"data: [DONE]\n\n"), chunk(b"")
            )

    def changes(config: dict[str, Any]) -> None:
        if way.isupper():
            filter_of(config)["processing_mode"]["response_body_mode"] = way
        if way == "FULL_DUPLEX_STREAMED":
            filter_of(config)["processing_mode"] |= {"response_header_mode": "SEND", "response_trailer_mode": "SEND"}

    seen: list[Any] = []
    extproc = {"read_answers": way == "asked for"}
    audit = {"inject_usage": True}
    async with street(tmp_path, script, changes=changes, extproc=extproc, audit=audit) as made:
        observe = made.app.audit.observe

        def watch(*told: Any) -> int | None:
            seen.append(told[3])
            return observe(*told)

        monkeypatch.setattr(made.app.audit, "observe", watch)
        answer = await made.ask(b'{"model": "m", "prompt": "p", "stream": true}')
        await eventually(lambda: bool(seen))
        injected = way.isupper()
        assert (b"include_usage" in made.engines[0].requests[0].body) is injected
        # An engine that was not asked sends it here all the same: then it is the client's.
        assert answer.body == b"data: 1\n\n" + (b"" if injected else usage_chunk(7)) + b"data: [DONE]\n\n"
        found = None if way == "hidden" else {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
        assert seen == [found]
        assert (made.figure("kvsync_first_byte_seconds_count", path="/v1/completions") == 1) is (way != "hidden")


@pytest.mark.parametrize("name", ["envoy.yaml", "envoy-fail-open.yaml"])
async def test_a_processor_killed_while_an_answer_streams(tmp_path: Path, name: str) -> None:
    """Where Envoy fails open the stream lives on; where it fails closed it is cut, and does not look whole."""
    go = asyncio.Event()

    async def script(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            if request.line.startswith(b"GET"):
                await talk.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            await talk.send(SSE_HEAD, chunk(b"data: 1\n\n"))
            await go.wait()
            await talk.send(chunk(b"data: [DONE]\n\n"), chunk(b""))

    engine = FakeEngine("engine", script)
    await engine.start()
    config = {
        "extproc": {"host": "127.0.0.1"},
        "models": [{"name": "m", "engines": [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]}],
    }
    processor = Process(tmp_path, config, {}, command="extproc")
    try:
        port, _ = await processor.ports()
        fallback = (engine.port,) if "open" in name else ()
        async with envoy(tmp_path, port, name=name, fallback=fallback) as made:
            await made.healthy(processors=1)
            client = await Client.open(made.port)
            await client.send(post())
            assert await client.chunk_after_head() == b"data: 1\n\n"
            processor.kill()
            await made.healthy(processors=0)
            go.set()
            if "open" in name:
                assert await client.chunk() == b"data: [DONE]\n\n"
                assert await client.chunk() == b""
            else:
                with pytest.raises(asyncio.IncompleteReadError):
                    await client.chunk()
            client.close()
    finally:
        processor.kill()
        await engine.stop()
