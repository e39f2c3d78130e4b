"""The gateway under soak: a process of its own, that is looked at while nothing is under way."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.faults.client import until
from tests.faults.process import Running, running

from .figures import Sample

PATIENCE = 300.0
"""Seconds that one step of a soak may take."""


class Watched:
    """A running gateway and its samples."""

    def __init__(self, gateway: Running, file: Path) -> None:
        self.gateway = gateway
        self._file = file
        self._seen = 0
        self._series: frozenset[str] = frozenset()

    async def look(self) -> dict[str, int]:
        """What the process says of itself (``served.py``)."""
        self.gateway.process.signal(signal.SIGUSR1)

        async def told() -> str | None:
            lines = self._file.read_text().splitlines(keepends=True)
            return lines[-1] if len(lines) > self._seen and lines[-1].endswith("\n") else None

        line = await until(told, "a sample", PATIENCE)
        self._seen += 1
        found: dict[str, int] = json.loads(line)
        return found

    async def sample(self, done: int) -> Sample:
        """A look once the process is at rest: the least of three, since a moment's allocation is no growth."""
        looks = []
        for _ in range(3):
            looks.append(await self.look())
            await asyncio.sleep(0.1)
        _, page = await self.gateway.admin.get("/metrics")
        lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
        names = frozenset(line.rpartition(" ")[0] for line in lines)
        added = tuple(sorted(names - self._series)) if self._series else ()
        self._series = names
        least = {name: min(look[name] for look in looks) for name in ("rss", "threads", "files", "sockets")}
        return Sample(done=done, series=len(lines), added=added, **least)


@asynccontextmanager
async def watched(folder: Path, config: Mapping[str, Any]) -> AsyncIterator[Watched]:
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    file = folder / "samples.jsonl"
    await asyncio.to_thread(file.write_text, "")
    async with running(folder, config, {"SOAK_SAMPLES": str(file)}, module="tests.soak.served") as gateway:
        yield Watched(gateway, file)
