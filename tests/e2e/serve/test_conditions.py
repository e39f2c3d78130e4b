"""KV sync starts when all of its conditions hold, says which one does not, and never keeps a request from its answer.

The configuration is AIBrix's four environment variables, and a file that lists the fleet and nothing else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from tests.faults.client import until
from tests.faults.fleet import Batches, Listed, models, sim
from tests.faults.process import Process, running
from tests.faults.words import asks, text

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
        """Everything that KV sync needs, and the switch of its metrics."""
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
    """A condition that does not hold, and what has to be said about it."""

    missing: str
    """An environment variable, or ``zmq``."""
    state: str
    unmet: str
    """In ``/readyz`` and in the log."""
    mend: str


CASES: Final = {
    "off": Case(ENABLED, "off", "KV event sync is off", f"{ENABLED}=true"),
    "no-remote": Case(USE_REMOTE, "waiting", "KV event sync requires the remote tokenizer", f"{USE_REMOTE}=true"),
    "no-endpoint": Case(ENDPOINT, "waiting", "KV event sync requires the address of the remote tokenizer", ENDPOINT),
    "no-zmq": Case("zmq", "waiting", "KV event sync requires ZMQ support", "pip install 'kvsync[zmq]'"),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_is_missing_is_named_and_requests_are_routed(place: Place, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    environ = place.without(case.missing)
    if case.missing == "zmq":
        (tmp_path / "sitecustomize.py").write_text(_WITHOUT_ZMQ)
        environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    async with running(tmp_path, place.config, environ) as gateway:
        details = await gateway.ready()
        assert details["kv_sync"]["state"] == case.state
        (sentence,) = details["kv_sync"]["unmet"]
        assert case.unmet in sentence
        assert case.mend in sentence
        assert details["models"]["tiny"]["mode"] == "load-only"
        for body in ({"messages": asks(text())}, {"messages": asks(text()), "stream": True}):
            answer = await gateway.post("/v1/chat/completions", {"model": "tiny", "max_tokens": 2, **body})
            assert (answer.status, answer.engine) == (200, "a")
            decision = await gateway.decision(answer.request_id)
            assert decision.record["policy"] == "kv-aware"
            assert decision.record["mode"] in ("load-only", "observed"), "events served"
        page = await gateway.metrics()
        assert page.total("kvsync_kv_sync", state=case.state) == 1
        assert page.total("kvsync_kv_sync", state="running") == 0
        assert page.total("aibrix_prefix_cache_indexer_status", indexer_type="sync") == 0
        assert page.total("aibrix_prefix_cache_routing_decisions_total", using_kv_sync="false") == 2
        assert page.total("aibrix_prefix_cache_routing_decisions_total", using_kv_sync="true") == 0
        log = gateway.process.log
        # What was asked for and is not to be had is an error, with the mend; what was not asked for is none.
        assert (sentence if case.state == "waiting" else case.unmet) in log
        assert "KV event sync runs" not in log
        assert "Traceback" not in log


async def test_everything_set_means_credit_and_prefix_cache_metrics(place: Place, tmp_path: Path) -> None:
    async with running(tmp_path, place.config, place.environ | {"KVSYNC_STRICT": "true"}) as gateway:
        assert (await gateway.ready())["kv_sync"] == {"state": "running", "unmet": []}
        assert "KV event sync runs" in gateway.process.log
        messages = asks(text())
        first, decision = await gateway.chat("tiny", messages, max_tokens=1)
        assert (first.cached, decision.credited) == (0, 0)

        async def credited() -> int:
            return await gateway.credit("a", model="tiny", messages=messages)

        await until(credited, "the prompt's blocks in the index")
        again, decision = await gateway.chat("tiny", messages, max_tokens=1)
        assert again.cached == decision.credited > 0
        page = await gateway.metrics()
        for bucket in ("0", "76-100"):
            decisions = "aibrix_prefix_cache_routing_decisions_total"
            assert page.total(decisions, model="tiny", match_percent_bucket=bucket) == 1
        assert page.total("aibrix_prefix_cache_indexer_status", indexer_type="sync") == 1
        assert page.total("aibrix_prefix_cache_indexer_status", indexer_type="local") == 0
        assert page.total("aibrix_prefix_cache_routing_latency_seconds_count", model="tiny") == 2
        assert page.total("kvsync_kv_sync", state="running") == 1


async def test_without_the_switch_there_are_no_prefix_cache_metrics(place: Place, tmp_path: Path) -> None:
    async with running(tmp_path, place.config, place.without(METRICS)) as gateway:
        assert (await gateway.ready())["kv_sync"]["state"] == "running"
        await gateway.live("a")
        names = (await gateway.metrics()).names
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
