"""What the chart renders, at work: kvsync and Envoy with the configurations of one release, but for addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from scripts.deploy import render

from tests.deploy.objects import only, parsed
from tests.deploy.values import ENVOY
from tests.faults.client import until
from tests.faults.fleet import Listed, models, sim
from tests.faults.process import running
from tests.faults.words import text
from tests.integration.extproc.envoy import cluster, envoy


def asked(log: str) -> int:
    """The port of the external processor."""
    found = re.search(r"Envoy's questions on port (\d+)", log)
    assert found, log
    return int(found[1])


@pytest.mark.usefixtures("helm")
async def test_a_request_goes_by_way_of_envoy_to_the_engine_that_has_its_prefix(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({**ENVOY, "config": {"extproc": {"enabled": True}}}))
    objects = parsed(render.template("kv", "serving", values))
    rendered = yaml.safe_load(only(objects, "ConfigMap", "kv-kvsync-envoy")["data"]["envoy.yaml"])

    def chart(config: dict[str, Any]) -> None:
        """The release's configuration, at the addresses that the test has chosen."""
        rendered["admin"] = config["admin"]
        rendered["static_resources"]["listeners"][0]["address"] = config["static_resources"]["listeners"][0]["address"]
        cluster(rendered, "kvsync")["load_assignment"] = cluster(config, "kvsync")["load_assignment"]
        config.clear()
        config.update(rendered)

    async with sim("tiny") as a, sim("tiny", seed=1) as b:
        config = yaml.safe_load(only(objects, "ConfigMap", "kv-kvsync")["data"]["kvsync.yaml"])
        config |= models({"tiny": [Listed("a", a), Listed("b", b)]})
        config["kubernetes"]["enabled"] = False
        config["telemetry"]["log_format"] = "text"
        config["extproc"] |= {"host": "127.0.0.1", "port": 0}
        config["admin"]["host"] = "127.0.0.1"
        (tmp_path / "envoy").mkdir()
        async with (
            running(tmp_path, config) as gateway,
            envoy(tmp_path / "envoy", asked(gateway.process.log), changes=chart) as door,
            aiohttp.ClientSession(f"http://127.0.0.1:{door.port}") as client,
        ):
            await door.healthy(processors=1)
            await gateway.live("a", "b")
            prompt = {"model": "tiny", "messages": [{"role": "user", "content": text()}], "max_tokens": 1}

            async def ask() -> str:
                async with client.post("/v1/chat/completions", json=prompt) as answer:
                    assert answer.status == 200, await answer.text()
                    return answer.headers["target-pod"]

            first = await ask()

            async def known() -> bool:
                return bool(await gateway.credit(first, model="tiny", messages=prompt["messages"]))

            await until(known, "the prompt's blocks in the index")
            assert [await ask() for _ in range(3)] == [first] * 3
