"""kvsync in place of AIBrix's gateway plugin, as docs/migrate.md says: beside it first, without traffic; then behind
the same Envoy; then back. Envoy is the real one, configured as AIBrix's manifests have it; no request is lost."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from tests.faults.client import Client, until
from tests.faults.gateway import Gateway
from tests.faults.process import Process
from tests.faults.simulated import SimulatedEngine
from tests.faults.traffic import traffic
from tests.integration.extproc.envoy import cluster, endpoints, envoy, filter_of, manager

from .page import block, section
from .plugin import Plugin

OPTIONS: Final = ("--prefill-rate", "40000", "--decode-rate", "100", "--blocks", "2000", "--seed")
DISCOVERY: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
STRING: Final = {"string_match": {"safe_regex": {"regex": ".*"}}}


class Asked:
    """Whom Envoy asks: its configuration names a file, which is replaced, as a control plane would tell it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "asked.yaml"

    def be(self, port: int) -> None:
        assignment = {"@type": DISCOVERY, "cluster_name": "kvsync", "endpoints": [{"lb_endpoints": endpoints(port)}]}
        beside = self.file.with_suffix(".new")
        beside.write_text(yaml.safe_dump({"version_info": str(port), "resources": [assignment]}))
        beside.replace(self.file)

    def configure(self, config: dict[str, Any]) -> None:
        """As AIBrix's manifests have it: answers are shown, routes match on ``routing-strategy``, nothing is removed
        from requests, no attributes are sent and no health is asked for."""
        config["node"] = {"id": "envoy", "cluster": "envoy"}
        found = cluster(config, "kvsync")
        for name in ("load_assignment", "health_checks"):
            del found[name]
        found |= {
            "type": "EDS",
            "eds_cluster_config": {"eds_config": {"path_config_source": {"path": str(self.file)}}},
        }
        del manager(config)["early_header_mutation_extensions"]
        processor = filter_of(config)
        for name in ("allow_mode_override", "response_attributes", "metadata_options", "status_on_error"):
            del processor[name]
        processor["processing_mode"] = {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SEND",
            "response_body_mode": "STREAMED",
        }
        processor["message_timeout"] = "60s"
        pinned = {"prefix": "/", "headers": [{"name": "routing-strategy", **STRING}]}
        unpinned = {"direct_response": {"status": 503, "body": {"inline_string": "no target"}}}
        manager(config)["route_config"]["virtual_hosts"][0]["routes"] = [
            {"match": pinned, "route": {"cluster": "engines", "timeout": "600s"}},
            {"match": {"prefix": "/v1/completions"}, **unpinned},
            {"match": {"prefix": "/v1/chat/completions"}, **unpinned},
        ]


async def compared(folder: Path, front: str, admin: str) -> dict[str, int]:
    """What the page's script finds."""
    script = folder / "compare.py"
    script.write_text(block("beside what that engine says", "python"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), front, admin, "tiny", stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said
    return {name: int(figure) for figure, name in re.findall(r"(\d+) (\w+)", said.decode())}


async def test_beside_aibrix_then_in_its_place_then_back(tmp_path: Path) -> None:
    engines = {name: SimulatedEngine(name, *OPTIONS, str(seed)) for seed, name in enumerate("ab")}
    asked = Asked(tmp_path)
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(engine) for engine in engines.values()))
        addresses = {name: engine.url.removeprefix("http://") for name, engine in engines.items()}
        plugin = await stack.enter_async_context(Plugin(addresses))
        asked.be(plugin.port)
        front = await stack.enter_async_context(envoy(tmp_path, changes=asked.configure))
        url = f"http://127.0.0.1:{front.port}"
        config: dict[str, object] = {
            "events": {"metrics_interval": 0.5},
            "models": [{"name": "tiny", "engines": [engine.entry for engine in engines.values()]}],
        }
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async with traffic(url) as clients:
            await clients.more("a", "b")

            # 1. Beside it, with AIBrix's environment.
            environ = {each["name"]: each["value"] for each in section("### 1. Beside AIBrix")["env"]}
            kvsync = Process(tmp_path, config, environ, command="extproc")
            stack.push_async_callback(kvsync.stop)
            port, admin_port = await kvsync.ports()
            admin_url = f"http://127.0.0.1:{admin_port}"
            admin = Client(session, admin_url)
            gateway = Gateway(admin, admin, url)

            async def exact() -> bool:
                return all(row["trust"] == "exact" for row in (await gateway.workers()).values())

            await until(exact, "every worker exact")
            found = await compared(tmp_path, url, admin_url)
            assert found["claimed"] == found["had"] > 0
            await until(exact, "every worker exact still")

            async def seen() -> bool:
                return (await gateway.metrics()).total("kvsync_engine_cache_hits_tokens_total") > 0

            await until(seen, "what others' requests found in the engines' caches")
            assert (await gateway.metrics()).total("kvsync_requests_total") == 0, "it got traffic"

            # 2. In its place.
            asked.be(port)

            async def moved() -> bool:
                before = plugin.asked
                await clients.round()
                return plugin.asked == before

            await until(moved, "Envoy asks kvsync")
            await clients.round()
            assert plugin.open == 0
            await clients.more("a", "b", count=10)
            page = await gateway.metrics()
            assert page.total("kvsync_requests_total", reason="engine") > 0
            assert page.total("kvsync_credited_tokens_total") > 0
            assert page.total("kvsync_audit_answers_total", verdict="right") > 0
            assert page.total("kvsync_audit_answers_total", verdict="over") == 0

            # 3. And back: the plugin was never stopped.
            asked.be(plugin.port)
            turned = plugin.asked

            async def back() -> bool:
                opened = (await gateway.metrics()).total("kvsync_extproc_streams_total", event="opened")
                await clients.round()
                return opened == (await gateway.metrics()).total("kvsync_extproc_streams_total", event="opened")

            await until(back, "Envoy asks the plugin")
            assert plugin.asked > turned
            await clients.more("a", "b")
        assert "Traceback" not in kvsync.log
