"""A TCP balancer that looks at ``/readyz``, as operators have one before several gateways.

Each new connection goes to the next target that said yes when it was last asked; one that can't be reached is passed
over for the next. What is open stays where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

import aiohttp

EVERY: Final = 0.05
"""Seconds between two questions to one target."""


@dataclass(eq=False)
class Target:
    """A gateway by its ports."""

    port: int
    admin_port: int
    ready: bool = False
    open: int = field(default=0)
    """Connections to it."""


class Balancer:
    """See the module. ``targets`` may be changed at any time."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._asking: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._asking = asyncio.create_task(self._keep_asking())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        assert self._asking is not None
        self._server.close()
        tasks = [self._asking, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_asking(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:

            async def ask(target: Target) -> None:
                try:
                    async with session.get(f"http://127.0.0.1:{target.admin_port}/readyz") as response:
                        target.ready = response.status == 200
                except (aiohttp.ClientError, TimeoutError):
                    target.ready = False

            while True:
                await asyncio.gather(*map(ask, self.targets))
                await asyncio.sleep(EVERY)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(asyncio.CancelledError, OSError):  # the test is over; who is gone needs nothing more
            await self._carry(reader, writer)
        writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for target in self._in_turn():
            target.open += 1  # before it is dialled: whoever sees 0 and not ready knows that nothing comes any more
            try:
                other_reader, other_writer = await asyncio.open_connection("127.0.0.1", target.port)
            except OSError:
                target.open -= 1
                continue
            try:
                await asyncio.gather(_pass(reader, other_writer), _pass(other_reader, writer))
            finally:
                other_writer.close()
                target.open -= 1
            return

    def _in_turn(self) -> Sequence[Target]:
        ready = [target for target in self.targets if target.ready]
        self._turn += 1
        cut = self._turn % len(ready) if ready else 0
        return ready[cut:] + ready[:cut]


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
