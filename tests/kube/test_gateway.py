"""The whole way, with real sockets: pods in an API server, simulated engines behind them, the real application before
them. From a label to a routed request, and from a deletion to no traffic and no credit; figures are printed (``-s``).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import aiohttp.web

from kvsync.engine_sim import SimEngine, TimeModel
from tests.faults.client import DEADLINE, events, streamed, until
from tests.faults.engine import Engine
from tests.faults.fleet import sim
from tests.faults.serving import Serving, serving
from tests.faults.words import tokens

from .conftest import Server
from .fake import FakeApiServer
from .following import settings
from .pods import EVENTS, NAME, PORT, Json, Kube, pod, running

ROUNDS = 10


def behind(
    name: str, engine: SimEngine | Engine, *, labels: Mapping[str, str] | None = None, model: str = "tiny"
) -> Json:
    """The pod that an engine of this machine is in."""
    if isinstance(engine, Engine):
        publisher = engine.publisher
        streams: tuple[str | None, ...] = (publisher.events, publisher.replay)
    else:
        streams = (engine.events, engine.replay)
    ports = {key: _port(url) for key, url in zip(("kv-events", "kv-replay"), streams, strict=True) if url is not None}
    given = {NAME: model, EVENTS: "true"} if labels is None else labels
    return pod(name, labels={**given, PORT: str(_port(engine.url))}, ports=ports)


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


UP = running("127.0.0.1")


@asynccontextmanager
async def gateway_of(
    server: Server, kube: Kube, folder: Path, *entries: Mapping[str, object] | Engine, **kubernetes: object
) -> AsyncIterator[Serving]:
    """A gateway that looks in the namespace of ``kube``."""
    found = settings(server, folder, kube.namespace, **kubernetes).model_dump(mode="json", exclude_none=True)
    async with serving(folder, *entries, kubernetes=found, discovery={"adapters_interval": 0.2}) as gateway:
        yield gateway


async def has(gateway: Serving, kube: Kube, *names: str) -> dict[str, str]:
    """Workers by pod's name, once exactly these are there and their streams are live."""

    async def look() -> dict[str, str] | None:
        rows = await gateway.workers()
        found = {row["engine"].removeprefix(f"{kube.namespace}/"): worker for worker, row in rows.items()}
        live = all(row["state"] in ("live", "silent", "off") for row in rows.values())
        return found if live and set(found) == set(names) else None

    return await until(look, f"workers {names}")


async def answers(gateway: Serving, prompt: Sequence[int], **fields: object) -> str | None:
    """The pod that answers; ``None``: nobody."""
    answer = await gateway.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1, **fields})
    return answer.engine.partition("/")[2] if answer.status == 200 else None


async def credited(gateway: Serving, worker: str, prompt: Sequence[int]) -> int:
    return await gateway.credit(worker, model="tiny", tokens=list(prompt))


def told(what: str, seconds: Sequence[float]) -> None:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    print(f"\n{what}: median {1e3 * middle:.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}, {len(seconds)} times)")


async def test_from_a_label_to_a_routed_request_and_from_deletion_to_nothing(
    server: Server, kube: Kube, tmp_path: Path
) -> None:
    """(L2) Neither traffic nor credit nor a series is left of a pod that was deleted."""
    routed, unrouted, uncredited = [], [], []
    async with sim("tiny") as a, sim("tiny", seed=1) as b, gateway_of(server, kube, tmp_path) as gateway:
        await kube.create(behind("b", b), UP)
        await has(gateway, kube, "b")
        for _ in range(ROUNDS):
            await kube.create(behind("a", a, labels={}), UP)  # a running pod that is nobody's engine
            started = time.perf_counter()
            await kube.label("a", name="tiny", kv_events_enabled="true")
            while await answers(gateway, tokens(), priority=0) != "a":
                assert time.perf_counter() - started < DEADLINE
            routed.append(time.perf_counter() - started)
            worker = (await has(gateway, kube, "a", "b"))["a"]
            prompt = tokens()
            while await answers(gateway, prompt) != "a":
                prompt = tokens()

            async def held(worker: str = worker, prompt: Sequence[int] = prompt) -> bool:
                return await credited(gateway, worker, prompt) == 96

            await until(held, "credit")
            started = time.perf_counter()
            deleted = asyncio.create_task(kube.delete("a"))
            while worker in (await gateway.match(model="tiny", tokens=list(prompt)))["workers"]:
                assert time.perf_counter() - started < DEADLINE
            uncredited.append(time.perf_counter() - started)
            # Its prompt goes elsewhere although the process still serves: nothing knows of it any more.
            assert await answers(gateway, prompt) == "b"
            unrouted.append(time.perf_counter() - started)
            await deleted
            assert set(await has(gateway, kube, "b")) == {"b"}
            assert {await answers(gateway, tokens()) for _ in range(5)} == {"b"}
            page = await gateway.metrics()
            assert not page.about(worker)
    told("label changed -> first request answered by the pod", routed)
    told("pod deleted -> no credit", uncredited)
    told("pod deleted -> its prompt answered by another pod", unrouted)
    assert statistics.median([*routed, *unrouted]) < 2.0


async def test_a_terminating_pod_gets_nothing_new_and_ends_what_it_has(
    server: Server, kube: Kube, tmp_path: Path
) -> None:
    """(K3) With a deletion timestamp a pod is not ready, whatever its probes say; its open streams finish."""
    prompt = tokens()
    async with (
        Engine("a") as a,
        sim("tiny") as b,
        gateway_of(server, kube, tmp_path) as gateway,
        aiohttp.ClientSession() as session,
    ):
        await kube.create(behind("a", a), UP)
        await kube.create(behind("b", b), UP)
        worker = (await has(gateway, kube, "a", "b"))["a"]
        await a.subscribed()
        a.store(prompt)
        await gateway.credited(worker, prompt, 96)
        a.open.clear()
        body = streamed({"model": "tiny", "prompt": prompt})
        asked = asyncio.create_task(session.post(gateway.url + "/v1/completions", json=body))

        async def there() -> bool:
            return len(a.served) == 1

        await until(there, "the request at the pod")
        await kube.delete("a", now=False)

        async def draining() -> bool:
            return (await gateway.workers())[worker]["ready"] is False

        await until(draining, "not ready")
        assert await answers(gateway, prompt) == "b"  # though it is still followed, and holds the prompt
        assert await credited(gateway, worker, prompt) == 96
        await kube.delete("a")
        await has(gateway, kube, "b")
        a.open.set()
        async with asyncio.timeout(DEADLINE), await asked as response:
            pieces = events(await response.read())
        assert [piece["choices"][0]["text"] for piece in pieces if piece["choices"]] == ["o", " k"]
        assert len(a.served) == 1


async def test_an_address_that_another_pod_gets_brings_no_credit_along(
    server: Server, kube: Kube, tmp_path: Path
) -> None:
    """(K2) The pod is deleted, and the deletion is told late; meanwhile its address is another's."""
    prompt = tokens()
    later = UP | {"startTime": "2026-02-01T00:00:00Z"}
    async with Engine("a") as engine, gateway_of(server, kube, tmp_path) as gateway:
        await kube.create(behind("old", engine), UP)
        worker = (await has(gateway, kube, "old"))["old"]
        await engine.subscribed()
        engine.store(prompt)
        await gateway.credited(worker, prompt, 96)
        await kube.delete("old", now=False)
        engine.restart()
        await kube.create(behind("new", engine), later)
        now = (await has(gateway, kube, "new"))["new"]
        assert await credited(gateway, now, prompt) == 0
        engine.store(prompt)
        await gateway.credited(now, prompt, 96)
        await kube.delete("old")
        await kube.create(pod("fence", labels={NAME: "other"}), running("10.0.0.99"))
        await has(gateway, kube, "new", "fence")
        assert await credited(gateway, now, prompt) == 96


async def test_events_from_where_another_pod_is_now_credit_no_other(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K2) The end of a pod is not told, and the pod that has its address serves another port. What is published there
    is the new one's, and would be the old one's, too."""
    prompt = tokens()
    later = UP | {"startTime": "2026-02-01T00:00:00Z"}
    async with Engine("a") as engine, sim("tiny") as other, gateway_of(server, kube, tmp_path) as gateway:
        await kube.create(behind("old", engine), UP)
        await has(gateway, kube, "old")
        await engine.subscribed()
        new = behind("new", engine)
        new["metadata"]["labels"][PORT] = str(_port(other.url))
        await kube.create(new, later)
        now = (await has(gateway, kube, "old", "new"))["new"]
        engine.store(prompt)
        await gateway.credited(now, prompt, 96)
        assert set((await gateway.match(model="tiny", tokens=prompt))["workers"]) == {now}


async def test_the_label_ends_events_and_brings_them_back(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K4) Unsubscribed and purged, routed to all the same; then subscribed, and told what it missed."""
    prompt = tokens()
    async with Engine("a") as engine, gateway_of(server, kube, tmp_path) as gateway:
        await kube.create(behind("a", engine), UP)
        worker = (await has(gateway, kube, "a"))["a"]
        await engine.subscribed()
        engine.store(prompt)
        await gateway.credited(worker, prompt, 96)
        await kube.label("a", kv_events_enabled=None)

        async def purged() -> bool:
            row = (await gateway.workers())[worker]
            return bool(row["state"] == "off" and row["blocks"] == 0)

        await until(purged, "unsubscribed and purged")
        assert await answers(gateway, prompt) == "a"
        await kube.label("a", kv_events_enabled="true")
        await gateway.credited(worker, prompt, 96)


async def test_a_storm_of_pods_under_one_name_ends_followed(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K5) The last of them is tracked, and nothing of those before it is left."""
    prompt = tokens()
    async with Engine("a") as engine, gateway_of(server, kube, tmp_path) as gateway:
        engine.store(prompt)
        for turn in range(20):
            uid = await kube.create(behind("a", engine), UP)
            if turn < 19:
                await kube.delete("a")
        worker = f"{kube.namespace}/a@{uid}"

        async def last() -> bool:
            return set(await gateway.workers()) == {worker}

        await until(last, "the last pod alone")
        await gateway.live(worker)
        await gateway.credited(worker, prompt, 96)
        assert await answers(gateway, prompt) == "a"


async def test_a_dead_api_server_costs_no_request(server: Server, kube: Kube, tmp_path: Path) -> None:
    """The fleet stays as it was, ``/readyz`` says how old that is, and what happened meanwhile is found."""
    async with (
        sim("tiny") as a,
        sim("tiny", seed=1) as b,
        gateway_of(server, kube, tmp_path, degraded_after=0.5) as gateway,
    ):
        await kube.create(behind("a", a), UP)
        await has(gateway, kube, "a")
        prompt = tokens()
        assert await answers(gateway, prompt) == "a"
        await server.stop(kill=True)

        async def degraded() -> bool:
            return bool((await gateway.ready())["kubernetes"]["state"] == "degraded")

        await until(degraded, "degraded, and ready all the same")
        said = (await gateway.ready())["kubernetes"]
        assert said["pods"] == {"ready": 1}
        assert "can't be reached" in said["problems"][kube.namespace]
        assert {await answers(gateway, tokens()) for _ in range(5)} == {"a"}
        page = await gateway.metrics()
        assert page.total("kvsync_discovery_state", state="degraded", namespace=kube.namespace) == 1
        assert page.total("kvsync_discovery_failures_total", reason="unreachable") > 0
        await server.start()
        await kube.create(behind("b", b), UP)
        await has(gateway, kube, "a", "b")

        async def synced() -> bool:
            return bool((await gateway.ready())["kubernetes"]["state"] == "synced")

        await until(synced, "synced")
        page = await gateway.metrics()
        assert page.total("kvsync_discovery_state", state="synced", namespace=kube.namespace) == 1
        assert page.total("kvsync_discovery_pods", verdict="ready") == 2


async def test_pods_and_the_file_serve_together_and_adapters_are_learnt_of_both(
    server: Server, kube: Kube, tmp_path: Path
) -> None:
    async with (
        sim("tiny", adapters=("of-the-pod",)) as a,
        sim("tiny", adapters=("of-the-file",), seed=1) as b,
    ):
        listed = {"name": "b", "url": b.url, "events": b.events, "replay": b.replay}
        async with gateway_of(server, kube, tmp_path, listed) as gateway:
            await kube.create(behind("a", a), UP)
            await has(gateway, kube, "a", "b")

            async def learnt() -> bool:
                _, page = await gateway.get("/v1/models")
                return b"of-the-pod" in page and b"of-the-file" in page

            await until(learnt, "both adapters")
            for adapter, engine in (("of-the-pod", f"{kube.namespace}/a"), ("of-the-file", "b")):
                answer, decision = await gateway.complete(adapter, tokens(), max_tokens=1)
                assert answer.engine == engine
                assert decision.record["adapter"] == adapter
            await kube.delete("a")
            await has(gateway, kube, "b")
            assert (await gateway.post("/v1/completions", {"model": "of-the-pod", "prompt": [1]})).status in (400, 404)


async def test_ranks_have_ports_that_follow_each_other(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(I13) A pod of two ranks, whose replay port can't be the default one."""
    async with sim("tiny", data_parallel_size=2) as engine, gateway_of(server, kube, tmp_path) as gateway:
        manifest = behind("a", engine)
        manifest["metadata"]["labels"]["model.aibrix.ai/data-parallel-size"] = "2"
        uid = await kube.create(manifest, UP)
        await until(lambda: _rows(gateway, 2), "two workers")
        await gateway.live()
        assert set(await gateway.workers()) == {f"{kube.namespace}/a@{uid}#{rank}" for rank in range(2)}
        prompt = tokens()
        _, first = await gateway.complete("tiny", prompt, max_tokens=1)
        await gateway.credited(first.worker, prompt, 96)
        answer, second = await gateway.complete("tiny", prompt, max_tokens=1)
        assert (second.worker, answer.cached) == (first.worker, 96)


async def _rows(gateway: Serving, count: int) -> bool:
    return len(await gateway.workers()) == count


async def test_not_ready_before_pods_were_listed_or_given_up(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    """With an engine of the file it could serve, and would say of models of pods that nobody serves them."""
    fake.always["list"] = refuse = _refuse
    async with sim("tiny", time=TimeModel(speed=50)) as engine:
        listed = {"name": "b", "url": engine.url, "events": engine.events, "replay": engine.replay}
        async with gateway_of(fake, kube, tmp_path, listed, degraded_after=4.0) as gateway:
            found = await gateway.admin.json("/readyz", status=503)
            assert found["kubernetes"]["state"] == "starting"
            await until(lambda: _ready(gateway), "given up for now")
            assert (await gateway.ready())["kubernetes"]["state"] == "degraded"
            assert fake.always["list"] is refuse
            fake.always["list"] = None

            async def synced() -> bool:
                return bool((await gateway.ready())["kubernetes"]["state"] == "synced")

            await until(synced, "synced")


async def test_a_strict_start_waits_for_the_first_list(server: Server, kube: Kube, tmp_path: Path) -> None:
    """The engines that tokenize are pods, and a condition that they don't is refused at the start."""
    async with sim("tiny") as engine:
        await kube.create(behind("a", engine), UP)
        found = settings(server, tmp_path, kube.namespace).model_dump(mode="json", exclude_none=True)
        async with serving(tmp_path, kubernetes=found, events={"strict": True}) as gateway:
            assert (await gateway.ready())["kv_sync"]["state"] == "running"
            await has(gateway, kube, "a")


async def _ready(gateway: Serving) -> bool:
    status, _ = await gateway.admin.get("/readyz")
    return status == 200


async def _refuse(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
    return aiohttp.web.json_response({"message": "injected"}, status=500)
