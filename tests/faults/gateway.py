"""A running ``kvsync serve``: a process of its own, seen through its ports and its log."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from tests.faults.client import DEADLINE, Answer, Body, Client, until
from tests.faults.metrics import Scrape

START: Final = 90.0
"""Seconds for a start or an end of a process, on a machine that has much else to do."""
_PORTS: Final = re.compile(rb"requests on port (\d+), admin on port (\d+)")
_LAYERS: Final = re.compile(r"AIBRIX_|KVSYNC_|ROUTING_ALGORITHM$")


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision record, as far as tests look at it."""

    worker: str
    credit: Mapping[str, int]
    """By worker, of all candidates."""
    record: Mapping[str, Any]

    @property
    def credited(self) -> int:
        """What the chosen worker was credited with."""
        return self.credit[self.worker]


class Process:
    """``python -m kvsync.cli serve`` with a configuration file; ports are the system's choice.

    Args:
        folder: for the file and the log.
        environ: put on top of this process's environment, out of which the gateway's own settings are taken.
    """

    def __init__(self, folder: Path, config: Mapping[str, object], environ: Mapping[str, str]) -> None:
        self.file = folder / "fleet.yaml"
        self._log = folder / "gateway.log"
        write(self.file, config)
        command = [sys.executable, "-m", "kvsync.cli", "serve", "--config", str(self.file)]
        command += ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
        inherited = {name: value for name, value in os.environ.items() if not _LAYERS.match(name)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=inherited | dict(environ)
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def ports(self) -> tuple[int, int]:
        """Of the data and the admin server, once both listen.

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

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not end it."""
        self._process.terminate()
        try:
            await self.ended()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


class Gateway:
    """The gateway's two ports."""

    def __init__(self, process: Process, data: Client, admin: Client, url: str) -> None:
        self.process = process
        self.admin = admin
        self.url = url
        self._data = data

    async def post(self, path: str, body: Body | bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """One request, whatever becomes of it."""
        return await self._data.post(path, body, headers)

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self._data.get(path)

    async def ask(self, path: str, body: Body, headers: Mapping[str, str] | None = None) -> tuple[Answer, Decision]:
        """One request that has to succeed, and why it went where it went."""
        answer = await self.post(path, body, headers)
        assert answer.status == 200, answer.pieces
        return answer, await self.decision(answer.request_id)

    async def chat(self, model: str, messages: Sequence[Body], **fields: Any) -> tuple[Answer, Decision]:
        return await self.ask("/v1/chat/completions", {"model": model, "messages": messages, **fields})

    async def complete(self, model: str, prompt: Sequence[int] | str, **fields: Any) -> tuple[Answer, Decision]:
        return await self.ask("/v1/completions", {"model": model, "prompt": prompt, **fields})

    async def decision(self, request_id: str) -> Decision:
        record = await self.admin.json(f"/v1/decisions/{request_id}")
        return Decision(record["worker"], {each["worker"]: each["credit"] for each in record["candidates"]}, record)

    async def ready(self) -> dict[str, Any]:
        """The details of ``/readyz``, which has to say yes."""
        details: dict[str, Any] = await self.admin.json("/readyz")
        return details

    async def workers(self) -> dict[str, dict[str, Any]]:
        """The rows of ``/v1/workers``."""
        return {row["worker"]: row for row in (await self.admin.json("/v1/workers"))["workers"]}

    async def match(self, **question: Any) -> dict[str, Any]:
        """``POST /v1/match``, which has to succeed."""
        answer = await self.admin.post("/v1/match", question)
        assert answer.status == 200, answer.pieces
        return answer.pieces[0]

    async def credit(self, worker: str, **question: Any) -> int:
        """What a worker is credited with for one prompt; 0 where the index does not know the worker."""
        found = (await self.match(**question))["workers"].get(worker)
        return int(found["credit"]) if found else 0

    async def metrics(self) -> Scrape:
        _, page = await self.admin.get("/metrics")
        return Scrape(page)

    async def live(self, *workers: str) -> None:
        """Return once the streams of these workers (of all, if none is named) are followed and caught up."""

        async def look() -> bool:
            rows = await self.workers()
            # Silent is live, too, and the engine has served for a while without an event.
            return all(rows[name]["state"] in ("live", "silent") for name in workers or rows)

        await until(look, "every stream live")

    async def applied(self, batches: Mapping[str, int]) -> None:
        """Return once the index has taken so many batches of each worker, counted from the gateway's start."""

        async def look() -> bool:
            rows = await self.workers()
            return all(_applied(rows[worker]) >= count for worker, count in batches.items())

        await until(look, f"batches applied: {dict(batches)}")


def _applied(row: Mapping[str, Any]) -> int:
    return int(row["index"].get("counts", {}).get("batches", 0))


@asynccontextmanager
async def running(
    folder: Path, config: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> AsyncIterator[Gateway]:
    """A gateway that takes requests."""
    process = Process(folder, config, environ or {})
    try:
        port, admin_port = await process.ports()
        timeout = aiohttp.ClientTimeout(total=2 * DEADLINE)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            url = f"http://127.0.0.1:{port}"
            admin = Client(session, f"http://127.0.0.1:{admin_port}")
            yield Gateway(process, Client(session, url), admin, url)
    finally:
        await process.stop()


def write(file: Path, config: Mapping[str, object] | str) -> None:
    """Replace a configuration file in one step, as an editor or a mounted volume does."""
    beside = file.with_suffix(".new")
    beside.write_text(config if isinstance(config, str) else yaml.safe_dump(dict(config), sort_keys=False))
    beside.replace(file)
