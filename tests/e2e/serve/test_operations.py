"""A gateway in operation: its file changes, engines come and go, nobody is there, and in the end it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kvsync.engine_sim import TimeModel
from tests.faults.client import DEADLINE, events, until
from tests.faults.fleet import SYNC, Listed, models, sim
from tests.faults.process import Running, running, write
from tests.faults.words import tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST_BYTE = 0.5


@dataclass
class Place:
    gateway: Running
    engines: Mapping[str, Listed]
    config: dict[str, object] = field(default_factory=dict)
    """As it was at the start."""

    def list(self, *names: str) -> None:
        """Have the file name these engines for the model ``tiny``, and everything else as before."""
        others = self.config["models"]
        assert isinstance(others, list)
        tiny = {"name": "tiny", "engines": [self.engines[name].entry for name in names]}
        write(self.gateway.process.file, self.config | {"models": [tiny, *others[1:]]})

    async def worker(self, name: str) -> str:
        """Under which an engine is known: its second life has another name than its first."""
        (worker,) = (row["worker"] for row in (await self.gateway.workers()).values() if row["engine"] == name)
        return str(worker)

    async def listed(self, *names: str) -> None:
        """Return once the gateway has exactly these engines for it."""

        async def look() -> bool:
            rows = (await self.gateway.workers()).values()
            return sorted(row["engine"] for row in rows if row["model"] == "tiny") == sorted(names)

        await until(look, f"the fleet {names}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        engines = {}
        for name in ("a", "b"):
            engines[name] = Listed(name, await stack.enter_async_context(sim("tiny")))
        config = {
            "gateway": {"first_byte_timeout": FIRST_BYTE},
            "events": {"enabled": True},
            "tokenizer": {"remote": {"enabled": True, "endpoint": engines["a"].engine.url}},
            "models": [
                {"name": "tiny", "engines": [engines["a"].entry]},
                {"name": "empty"},
                {"name": "dead", "engines": [_plain("d", stack.enter_context(_refusing()))]},
                {"name": "mute", "engines": [_plain("m", stack.enter_context(_silent()))]},
            ],
        }
        gateway = await stack.enter_async_context(running(tmp_path_factory.mktemp("operations"), config))
        yield Place(gateway, engines, config)


def _plain(name: str, port: int) -> dict[str, object]:
    return {"name": name, "url": f"http://127.0.0.1:{port}", "kv_events": False}


@contextmanager
def _refusing() -> Iterator[int]:
    """A port that nobody listens on and nobody else gets."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _silent() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@asynccontextmanager
async def _traffic(gateway: Running) -> AsyncIterator[Counter[str]]:
    """Requests without a pause, while the block runs; counts who answered. Every one has to be answered."""
    served: Counter[str] = Counter()
    enough = asyncio.Event()

    async def keep_asking() -> None:
        while not enough.is_set():
            body = {"model": "tiny", "prompt": tokens(40), "max_tokens": 4}
            answer = await gateway.post("/v1/completions", body, {"routing-strategy": "round-robin"})
            assert answer.status == 200, answer.pieces
            served[answer.engine] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(keep_asking())
        try:
            yield served
        finally:
            enough.set()


async def _more(served: Counter[str], *names: str) -> None:
    """Return once each of these engines has answered some more."""
    before = served.copy()

    async def look() -> bool:
        return all(served[name] >= before[name] + 3 for name in names)

    await until(look, f"answers of {names}")


async def test_engines_come_and_go_under_traffic(place: Place) -> None:
    gateway = place.gateway
    await place.listed("a")
    async with _traffic(gateway) as served:
        await _more(served, "a")
        place.list("a", "b")
        await place.listed("a", "b")
        await _more(served, "a", "b")
        first, second = await place.worker("a"), await place.worker("b")
        await gateway.live(second)
        place.list("b")
        await place.listed("b")
        await _more(served, "b")
    page = await gateway.metrics()
    assert not page.about(first), "series of an engine that is gone"
    assert {sample.name for sample in page.about(second)} >= {"kvsync_worker_tries_total", "kvsync_stream_state"}
    # An engine that comes back is another one: nothing that was known of the first is held for true of it.
    place.list("a", "b")
    await place.listed("a", "b")
    async with _traffic(gateway) as served:
        await _more(served, "a", "b")
    assert await place.worker("a") != first


async def test_a_broken_file_changes_nothing(place: Place) -> None:
    gateway = place.gateway
    place.list("a", "b")
    await place.listed("a", "b")

    async def broken() -> float:
        return (await gateway.metrics()).total("kvsync_config_reloads_total", result="broken")

    for content in ("models: [", "models: [{name: tiny, engines: [{name: a, url: nowhere}]}]\n", ""):
        if not content:
            gateway.process.file.unlink()
        else:
            write(gateway.process.file, content)
        before = await broken()

        async def noticed(before: float = before) -> bool:
            return await broken() == before + 1

        await until(noticed, f"{content!r} noticed")
        await place.listed("a", "b")
        answer, _ = await gateway.complete("tiny", tokens(), max_tokens=1)
        assert answer.engine in ("a", "b")
    log = gateway.process.log
    assert log.count("the fleet stays as it is") == 3
    assert "models[0].engines[0].url" in log, "the fault is not named"
    place.list("a")
    await place.listed("a")


async def test_a_hangup_signal_has_the_file_read_at_once(place: Place) -> None:
    async def unchanged() -> float:
        return (await place.gateway.metrics()).total("kvsync_config_reloads_total", result="unchanged")

    before = await unchanged()
    place.gateway.process.signal(signal.SIGHUP)

    async def read() -> bool:
        return await unchanged() > before

    await until(read, "the same file judged again")


@pytest.mark.parametrize(
    ("model", "status", "code", "header"),
    [
        ("nobody", 400, "model_not_found", "x-error-no-model-backends"),
        ("empty", 503, None, "x-error-no-model-backends"),
        ("dead", 502, "engine_unreachable", None),
        ("mute", 504, "engine_timeout", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_there_is_said_soon_and_in_openai_form(
    place: Place, model: str, status: int, code: str | None, header: str | None, stream: bool
) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    body = {"model": model, "prompt": tokens(), "max_tokens": 1, "stream": stream}
    answer = await place.gateway.post("/v1/completions", body)
    assert loop.time() - started < FIRST_BYTE + 5
    assert answer.status == status
    assert set(answer.error) == {"message", "type", "code", "param"}
    assert answer.error["code"] == code
    assert answer.error["type"] == ("invalid_request_error" if status < 500 else "api_error")
    assert answer.request_id
    if header is not None:
        assert answer.headers[header] == "true"
    if status == 400:
        assert answer.error["message"] == f"model {model} does not exist"


async def test_without_any_engine_the_gateway_is_not_ready(tmp_path: Path) -> None:
    async with running(tmp_path, {"models": [{"name": "empty"}]}) as gateway:
        details = await gateway.admin.json("/readyz", status=503)
        assert (details["ready"], details["models"]) == (False, {})
        assert (await gateway.admin.get("/healthz"))[0] == 200
        answer = await gateway.post("/v1/completions", {"model": "empty", "prompt": "x"})
        assert answer.status == 503


async def test_a_stream_that_is_open_at_the_end_is_ended_properly(tmp_path: Path) -> None:
    """SIGTERM: no new connections, the open answer to its last byte, then exit status 0."""
    slow = sim("tiny", time=TimeModel(decode_rate=40))
    async with slow, running(tmp_path, SYNC | models({"tiny": [Listed("a", slow)]})) as gateway:
        body = {"model": "tiny", "prompt": tokens(), "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(gateway.url + "/v1/completions", json=body) as got:
            content = await got.content.readuntil(b"\n\n")
            gateway.process.signal(signal.SIGTERM)

            async def refused() -> bool:
                try:
                    async with session.get(gateway.url + "/v1/models"):
                        return False
                except aiohttp.ClientConnectionError:
                    return True

            await until(refused, "new connections refused")
            details = await gateway.admin.json("/readyz", status=503)
            assert details["draining"]
            content += await got.content.read()
        pieces = events(content)
        assert len(pieces) == 40
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
        assert await gateway.process.ended(DEADLINE) == 0
        assert "Traceback" not in gateway.process.log
