"""KV sync turned on pod by pod for a fleet that serves, and off again, as docs/migrate.md says: the gateway and its
engines are processes of their own, and no request is lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.migrate.page import run
from tests.faults.client import until
from tests.faults.fleet import SYNC
from tests.faults.process import running as gateway_of
from tests.faults.simulated import SimulatedEngine
from tests.faults.traffic import traffic

from .conftest import Server
from .following import settings
from .pods import NAME, PORT, Json, Kube, pod, running

OPTIONS = ("--prefill-rate", "40000", "--decode-rate", "100", "--blocks", "2000", "--seed")


def behind(engine: SimulatedEngine) -> Json:
    """The pod that an engine of this machine is in, without the label that has its events followed."""
    streams = {"kv-events": engine.events, "kv-replay": engine.replay}
    ports = {name: _port(endpoint) for name, endpoint in streams.items() if endpoint is not None}
    return pod(engine.name, labels={NAME: "tiny", PORT: str(_port(engine.url))}, ports=ports)


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


async def test_on_and_off_by_the_pods_label(server: Server, kube: Kube, tmp_path: Path) -> None:
    engines = [SimulatedEngine("old", *OPTIONS, "0", "--no-events")]
    engines += [SimulatedEngine(name, *OPTIONS, seed) for name, seed in (("a", "1"), ("b", "2"))]
    old, a, b = engines
    found = settings(server, tmp_path, kube.namespace).model_dump(mode="json", exclude_none=True)
    config = {**SYNC, "gateway": {"host": "127.0.0.1"}, "kubernetes": found}

    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(engine) for engine in engines))
        for engine in (old, a):
            await kube.create(behind(engine), running("127.0.0.1"))
        gateway = await stack.enter_async_context(gateway_of(tmp_path, config))

        def named(engine: SimulatedEngine) -> str:
            return f"{kube.namespace}/{engine.name}"

        async def rows() -> dict[str, dict[str, Any]]:
            """Workers by pod's name."""
            return {row["engine"].partition("/")[2]: row for row in (await gateway.workers()).values()}

        async def are(**followed: bool) -> None:
            """Return once exactly these pods are workers, their streams live, or off and nothing known of them."""

            async def look() -> bool:
                found = await rows()
                return set(found) == set(followed) and all(
                    found[name]["state"] in ("live", "silent")
                    if yes
                    else (found[name]["state"], found[name]["blocks"]) == ("off", 0)
                    for name, yes in followed.items()
                )

            await until(look, f"workers, followed or not: {followed}")

        await are(old=False, a=False)
        async with traffic(gateway.url) as asked:
            await asked.more(named(old), named(a))
            # Step 2, by a rollout: a pod with events gets ready, then the one without is told to end.
            await kube.create(behind(b), running("127.0.0.1"))
            await are(old=False, a=False, b=False)
            await kube.delete("old", now=False)

            async def leaves() -> bool:
                return not (await rows())["old"]["ready"]

            await until(leaves, "the old pod gets nothing new")
            await run("**Wait until it has nothing to do:**", {"ENGINE": old.url})
            await kube.delete("old")
            await are(a=False, b=False)
            old.kill()
            await asked.more(named(a), named(b))
            # Step 3: one pod, then all. What they had cached before is known by replay.
            await kube.label("a", kv_events_enabled="true")
            await are(a=True, b=False)
            assert (await rows())["a"]["blocks"] > 0
            await kube.label("b", kv_events_enabled="true")
            await are(a=True, b=True)
            before = (await gateway.metrics()).total("kvsync_credited_tokens_total")
            await asked.more(named(a), named(b))
            page = await gateway.metrics()
            assert page.total("kvsync_credited_tokens_total") > before
            assert page.total("kvsync_audit_answers_total", verdict="over") == 0
            # Back: the label goes, and with it all that was known of the pod; requests don't.
            for name, left in (("a", {"a": False, "b": True}), ("b", {"a": False, "b": False})):
                await kube.label(name, kv_events_enabled=None)
                await are(**left)
                await asked.more(named(a), named(b))
        assert "Traceback" not in gateway.process.log
