"""A running ``kvsync serve``: a process of its own, seen through its ports and its log."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import yaml

from .client import DEADLINE, Client, until
from .gateway import Gateway

START: Final = 90.0
"""Seconds for a start or an end of a process, on a machine that has much else to do."""
_PORTS: Final = re.compile(rb"(?:requests|Envoy's questions) on port (\d+)(?:, |.*\s.*)admin on port (\d+)")
_LAYERS: Final = re.compile(r"AIBRIX_|KVSYNC_|ROUTING_ALGORITHM$")


class Process:
    """``python -m kvsync.cli serve`` (or another ``command``) with a configuration file.

    Args:
        folder: for the file and the log.
        environ: put on top of this process's environment, out of which the gateway's own settings are taken.
        module: whose ``main`` is that of ``kvsync``.
        ports: of the data and the admin server; 0 is the system's choice.
        python: in whose environment kvsync is.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object],
        environ: Mapping[str, str],
        module: str = "kvsync.cli",
        ports: tuple[int, int] = (0, 0),
        python: str = sys.executable,
        command: str = "serve",
    ) -> None:
        self.file = folder / "fleet.yaml"
        self._log = folder / "gateway.log"
        write(self.file, config)
        arguments = [python, "-m", module, command, "--config", str(self.file)]
        arguments += ["--host", "127.0.0.1", "--port", str(ports[0]), "--admin-port", str(ports[1])]
        inherited = {name: value for name, value in os.environ.items() if not _LAYERS.match(name)}
        section = config.get("gateway", {})
        if isinstance(section, Mapping) and "drain_delay" not in section:
            inherited["KVSYNC_GATEWAY_DRAIN_DELAY"] = "0"  # nobody who sends requests here needs time to notice its end
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=inherited | dict(environ)
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def ports(self) -> tuple[int, int]:
        """Of the data port (or the one that Envoy asks) and the admin server, once both listen.

        Raises:
            AssertionError: the process ended, or does not listen in time.
        """

        async def look() -> re.Match[bytes] | None:
            assert self._process.poll() is None, f"the gateway ended with {self._process.returncode}\n{self.log}"
            return _PORTS.search(self._log.read_bytes())

        found = await until(look, "the gateway's ports in its log", START)
        return int(found[1]), int(found[2])

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self, deadline: float = START) -> int:
        """The exit status, once there is one.

        Raises:
            subprocess.TimeoutExpired: not in time.
        """
        return await asyncio.to_thread(self._process.wait, deadline)

    def kill(self) -> None:
        """End it at once, with SIGKILL."""
        self._process.kill()
        self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not end it."""
        self._process.terminate()
        try:
            await self.ended()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


class Running(Gateway):
    """The ports of a process."""

    def __init__(self, process: Process, data: Client, admin: Client, url: str) -> None:
        super().__init__(data, admin, url)
        self.process = process


@asynccontextmanager
async def running(
    folder: Path,
    config: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    module: str = "kvsync.cli",
    ports: tuple[int, int] = (0, 0),
    python: str = sys.executable,
) -> AsyncIterator[Running]:
    """A gateway that takes requests; the arguments are those of :class:`Process`."""
    process = Process(folder, config, environ or {}, module, ports, python)
    try:
        port, admin_port = await process.ports()
        timeout = aiohttp.ClientTimeout(total=2 * DEADLINE)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            url = f"http://127.0.0.1:{port}"
            admin = Client(session, f"http://127.0.0.1:{admin_port}")
            yield Running(process, Client(session, url), admin, url)
    finally:
        await process.stop()


def write(file: Path, config: Mapping[str, object] | str) -> None:
    """Replace a configuration file in one step, as an editor or a mounted volume does."""
    beside = file.with_suffix(".new")
    beside.write_text(config if isinstance(config, str) else yaml.safe_dump(dict(config), sort_keys=False))
    beside.replace(file)
