"""``kvsync serve`` as a pod runs it: no file, the environment that Kubernetes gives, AIBrix's names for the rest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.faults.client import until
from tests.faults.fleet import sim
from tests.faults.process import running as gateway
from tests.faults.words import tokens

from .conftest import Server
from .pods import Kube, running
from .test_gateway import behind

SYNC = {
    "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED": "true",
    "AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER": "true",
    "AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE": "http://%s:8000",
}


async def test_the_environment_is_enough(server: Server, kube: Kube, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(server.token)
    place = urlsplit(server.url)
    environ = {
        "KUBERNETES_SERVICE_HOST": str(place.hostname),
        "KUBERNETES_SERVICE_PORT": str(place.port),
        "KVSYNC_KUBERNETES_ENABLED": "true",
        "KVSYNC_KUBERNETES_NAMESPACES": kube.namespace,
        "KVSYNC_KUBERNETES_TOKEN_FILE": str(token),
        "KVSYNC_KUBERNETES_CA_FILE": str(server.ca_file),
        **SYNC,
    }
    async with sim("tiny") as a:
        await kube.create(behind("a", a), running("127.0.0.1"))
        async with gateway(tmp_path, {}, environ) as found:
            await found.live()
            ready = await found.ready()
            assert (ready["kubernetes"]["state"], ready["kv_sync"]["state"]) == ("synced", "running")
            prompt = tokens()
            answer, first = await found.complete("tiny", prompt, max_tokens=1)
            assert (answer.engine, first.credited) == (f"{kube.namespace}/a", 0)

            async def held() -> bool:
                return await found.credit(first.worker, model="tiny", tokens=prompt) == 96

            await until(held, "credit")
            assert "no model is configured" not in found.process.log


async def test_outside_a_cluster_it_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvsync.cli", "serve", "--port", "0", "--admin-port", "0"]
    environ = {"KVSYNC_KUBERNETES_ENABLED": "true", "PATH": "/usr/bin"}
    done = await asyncio.to_thread(
        subprocess.run, command, env=environ, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "this is no pod (there is no KUBERNETES_SERVICE_HOST)" in done.stderr
    assert "set kubernetes.api_server with token_file, ca_file and namespaces" in done.stderr
    assert "Traceback" not in done.stderr
