"""KV sync starts when all of its conditions hold, says which one does not, and never keeps a request from its answer.

The configuration is the brief's: four environment variables, and a file that lists the fleet and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from .client import until
from .fleet import Batches, Listed, models, sim
from .gateway import Gateway, Process, running
from .words import asks, text

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENABLED: Final = "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED"
USE_REMOTE: Final = "AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER"
ENDPOINT: Final = "AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT"
METRICS: Final = "AIBRIX_PREFIX_CACHE_LOCAL_ROUTER_METRICS_ENABLED"

_WITHOUT_ZMQ: Final = """\
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "zmq":
            raise ModuleNotFoundError("No module named 'zmq'", name="zmq")


sys.meta_path.insert(0, Blocker())
"""


@dataclass(frozen=True)
class Place:
    """A fleet of one engine, and a tokenizing service beside it that is another."""

    engine: Listed
    tokenizer: Listed
    batches: Batches

    @property
    def environ(self) -> dict[str, str]:
        """Everything that the brief asks for."""
        return {ENABLED: "true", USE_REMOTE: "true", ENDPOINT: self.tokenizer.engine.url, METRICS: "true"}

    @property
    def config(self) -> dict[str, object]:
        return models({"tiny": [self.engine]})

    def without(self, *names: str) -> dict[str, str]:
        return {name: value for name, value in self.environ.items() if name not in names}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(batches: Batches) -> AsyncIterator[Place]:
    async with sim("tiny") as engine, sim("tiny", kv_events=False) as tokenizer:
        yield Place(Listed("a", engine), Listed("tokenizer", tokenizer), batches)


@dataclass(frozen=True)
class Case:
    """One way to start, and what has to be said about it."""

    missing: str | None
    """An environment variable, ``zmq``, or nothing."""
    state: str
    unmet: str | None = None
    """In ``/readyz`` and, as it is an error when sync is asked for, in the log."""
    mend: str = ""


CASES: Final = {
    "off": Case(ENABLED, "off", "KV event sync is off", f"{ENABLED}=true"),
    "no-remote": Case(USE_REMOTE, "waiting", "KV event sync requires the remote tokenizer", f"{USE_REMOTE}=true"),
    "no-endpoint": Case(ENDPOINT, "waiting", "KV event sync requires the address of the remote tokenizer", ENDPOINT),
    "no-zmq": Case("zmq", "waiting", "KV event sync requires ZMQ support", "pip install 'kvsync[zmq]'"),
    "no-metrics": Case(METRICS, "running"),
    "all": Case(None, "running"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(place: Place, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mapping[str, Gateway]]:
    """One per case, started side by side."""
    blocker = tmp_path_factory.mktemp("without-zmq")
    (blocker / "sitecustomize.py").write_text(_WITHOUT_ZMQ)
    async with AsyncExitStack() as stack:

        async def start(name: str, case: Case) -> Gateway:
            environ = place.without(case.missing or "")
            if case.state == "running":
                environ["KVSYNC_STRICT"] = "true"  # is no hindrance
            if case.missing == "zmq":
                environ["PYTHONPATH"] = os.pathsep.join(
                    [str(blocker), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
                )
            return await stack.enter_async_context(running(tmp_path_factory.mktemp(name), place.config, environ))

        yield dict(zip(CASES, await asyncio.gather(*(start(*item) for item in CASES.items())), strict=True))


@pytest.mark.parametrize("name", CASES)
async def test_start_up_names_what_is_missing(gateways: Mapping[str, Gateway], name: str) -> None:
    case, gateway = CASES[name], gateways[name]
    details = await gateway.ready()
    assert details["kv_sync"]["state"] == case.state
    log = gateway.process.log
    assert "Traceback" not in log
    if case.unmet is None:
        assert details["kv_sync"]["unmet"] == []
        assert "KV event sync runs" in log
        return
    (sentence,) = details["kv_sync"]["unmet"]
    assert case.unmet in sentence
    assert case.mend in sentence
    assert case.unmet in log
    if case.state == "waiting":
        assert sentence in log
    assert "KV event sync runs" not in log
    assert details["models"]["tiny"]["mode"] == "load-only"


@pytest.mark.parametrize("name", CASES)
async def test_the_gateway_routes_in_every_case(gateways: Mapping[str, Gateway], name: str) -> None:
    answer, decision = await gateways[name].chat("tiny", asks(text()), max_tokens=2)
    assert answer.engine == "a"
    assert decision.record["policy"] == "kv-aware"


async def test_everything_set_means_credit_and_prefix_cache_metrics(
    gateways: Mapping[str, Gateway], place: Place
) -> None:
    gateway = gateways["all"]
    await gateway.live("a")

    async def decisions(bucket: str) -> float:
        return (await gateway.metrics()).total(
            "aibrix_prefix_cache_routing_decisions_total",
            model="tiny",
            match_percent_bucket=bucket,
            using_kv_sync="true",
        )

    cold, hot = await decisions("0"), await decisions("76-100")
    messages = asks(text())
    first, decision = await gateway.chat("tiny", messages, max_tokens=1)
    assert (first.cached, decision.credited) == (0, 0)

    async def credited() -> int:
        return await gateway.credit("a", model="tiny", messages=messages)

    await until(credited, "the prompt's blocks in the index")
    again, decision = await gateway.chat("tiny", messages, max_tokens=1)
    assert again.cached == decision.credited > 0
    assert await decisions("0") == cold + 1
    assert await decisions("76-100") == hot + 1
    page = await gateway.metrics()
    assert page.total("aibrix_prefix_cache_indexer_status", indexer_type="sync") == 1
    assert page.total("aibrix_prefix_cache_indexer_status", indexer_type="local") == 0
    assert page.total("aibrix_prefix_cache_routing_latency_seconds_count", model="tiny", using_kv_sync="true") >= 2
    assert page.total("kvsync_kv_sync", state="on") == 1


@pytest.mark.parametrize(("name", "state"), [("off", "off"), ("no-remote", "waiting"), ("no-zmq", "waiting")])
async def test_metrics_do_not_pretend(gateways: Mapping[str, Gateway], name: str, state: str) -> None:
    page = await gateways[name].metrics()
    assert page.total("kvsync_kv_sync", state=state) == 1
    assert page.total("kvsync_kv_sync", state="on") == 0
    assert page.total("aibrix_prefix_cache_indexer_status", indexer_type="sync") == 0
    assert page.total("aibrix_prefix_cache_routing_decisions_total", using_kv_sync="true") == 0


async def test_without_the_switch_there_are_no_prefix_cache_metrics(gateways: Mapping[str, Gateway]) -> None:
    names = (await gateways["no-metrics"].metrics()).names
    assert not [name for name in names if name.startswith("aibrix_prefix_cache_")]
    assert "aibrix_kvcache_zmq_connection_status" in names


async def test_sync_starts_by_itself_once_the_tokenizer_is_there(place: Place, tmp_path: Path) -> None:
    with _taken_port() as (port, free):
        endpoint = f"http://127.0.0.1:{port}"
        environ = place.environ | {ENDPOINT: endpoint, "KVSYNC_EVENTS_CONDITION_INTERVAL": "0.2"}
        async with running(tmp_path, place.config, environ) as gateway:
            details = await gateway.ready()
            assert details["kv_sync"]["state"] == "waiting"
            (sentence,) = details["kv_sync"]["unmet"]
            assert f"{endpoint} is not" in sentence
            assert sentence in gateway.process.log
            answer, decision = await gateway.complete("tiny", text(), max_tokens=1)
            assert (answer.engine, decision.record["mode"]) == ("a", "load-only")
            free()
            async with sim("tiny", kv_events=False, port=port):

                async def runs() -> bool:
                    return bool((await gateway.ready())["kv_sync"]["state"] == "running")

                await until(runs, "KV sync runs", deadline=10)
                assert (await gateway.ready())["kv_sync"]["unmet"] == []
                await gateway.live("a")
                rows = await gateway.workers()
                assert rows["a"]["last_sequence"] == place.batches.of(place.engine)["a"] - 1


async def test_strict_means_no_start(place: Place, tmp_path: Path) -> None:
    process = Process(tmp_path, place.config, place.without(USE_REMOTE) | {"KVSYNC_STRICT": "true"})
    try:
        status = await process.ended()
    finally:
        await process.stop()
    assert status == 1
    assert f"KV event sync requires the remote tokenizer (set {USE_REMOTE}=true" in process.log
    assert "requests on port" not in process.log
    assert "Traceback" not in process.log


@contextmanager
def _taken_port() -> Iterator[tuple[int, Callable[[], None]]]:
    """A port on which nobody listens and that nobody else gets; and what frees it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1], holder.close
