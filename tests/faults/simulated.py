"""Simulated engines as processes of their own, which can be killed and started again at the same addresses."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

import aiohttp

from .client import until
from .process import START

_BANNER: Final = re.compile(
    r"at (http://[\d.]+:(\d+)) as .*\n(?:events (tcp://[\d.]+:(\d+))  replay (tcp://[\d.]+:(\d+))\n)?"
)
_SILENT: Final = "--no-events"


class SimulatedEngine:
    """``kvsync sim``. Its first life chooses the ports, its later ones have the same.

    Args:
        name: in the gateway's configuration.
        options: of the command; a later life may have others.
    """

    def __init__(self, name: str, *options: str) -> None:
        self.name = name
        self.options = options
        self._ports = ("0", "0", "0")
        self._process: subprocess.Popen[str] | None = None
        self._found: re.Match[str] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return self._banner[1]

    @property
    def entry(self) -> dict[str, object]:
        """Its line in the gateway's configuration."""
        streams = {} if self.events is None else {"events": self.events, "replay": self.replay}
        return {"name": self.name, "url": self.url, **streams}

    @property
    def events(self) -> str | None:
        """Where it publishes, if it does."""
        return self._banner[3]

    @property
    def replay(self) -> str | None:
        return self._banner[5]

    async def start(self) -> None:
        """Begin a life; returns once it takes requests."""
        names = ("--port", "--events-port", "--replay-port")
        ports = [word for pair in zip(names, self._ports, strict=True) for word in pair]
        command = [sys.executable, "-m", "kvsync.cli", "sim", *ports, *self.options]
        self._process = await asyncio.to_thread(
            subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        said = self._process.stdout
        assert said is not None
        lines = 1 if _SILENT in self.options else 2
        self._found = _BANNER.search(await asyncio.to_thread(lambda: "".join(said.readline() for _ in range(lines))))
        self._ports = (self._banner[2], self._banner[4] or "0", self._banner[6] or "0")

        async def serves() -> bool:
            try:
                async with aiohttp.ClientSession() as session, session.get(self.url + "/health") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until(serves, f"{self.name} serves", START)

    def kill(self) -> None:
        """End it at once, with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    @property
    def _banner(self) -> re.Match[str]:
        assert self._found is not None, f"{self.name} did not start"
        return self._found
