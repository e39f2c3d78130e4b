"""Clients that ask one address without a pause while what is behind it changes, and count what became of each request.

Whatever is no whole answer with status 200 is lost: nothing is sent again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from .client import DEADLINE, Client, streamed, until
from .words import tokens

_LONG: Final = 40
"""Tokens of a streamed answer."""


@dataclass
class Traffic:
    """What was asked and answered."""

    url: str
    model: str = "tiny"
    prompts: Sequence[Sequence[int]] = field(default_factory=lambda: [tokens() for _ in range(8)])
    """Asked in turn, again and again."""
    answered: Counter[str] = field(default_factory=Counter)
    """Whole answers by engine."""
    cached: int = 0
    """Prompt tokens that the engines had."""
    prompted: int = 0
    """All prompt tokens."""
    asking: dict[str, int] = field(default_factory=dict)
    """By client, how many requests it has begun."""
    lost: list[str] = field(default_factory=list)

    async def more(self, *engines: str, count: int = 3) -> None:
        """Return once each of these engines (or all together, if none is named) answered so many more."""
        before = self.answered.copy()

        async def look() -> bool:
            if not engines:
                return self.answered.total() >= before.total() + count
            return all(self.answered[name] >= before[name] + count for name in engines)

        await until(look, f"{count} more answers of {engines or 'anybody'}; lost: {self.lost[:3]}")

    async def round(self) -> None:
        """Return once every request that was begun before is over, and another of each client's has begun."""
        before = dict(self.asking)

        async def look() -> bool:
            return all(self.asking[name] > count for name, count in before.items())

        await until(look, "a round of all clients")

    async def ask(self, client: Client, headers: Mapping[str, str], prompt: Sequence[int], *, stream: bool) -> None:
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": _LONG if stream else 2, "ignore_eos": True}
        try:
            answer = await client.post("/v1/completions", streamed(body) if stream else body, headers)
        except (aiohttp.ClientError, TimeoutError, AssertionError) as fault:  # not there, cut, late, not whole
            self.lost.append(repr(fault))
            return
        if answer.status != 200:
            self.lost.append(f"{answer.status}: {answer.pieces}")
            return
        self.answered[answer.engine] += 1
        self.cached += answer.cached
        self.prompted += answer.prompt_tokens


@asynccontextmanager
async def traffic(url: str, model: str = "tiny") -> AsyncIterator[Traffic]:
    """One client for each way to ask: streams and short answers by the gateway's own policy, each on a connection of
    its own; short ones on a kept connection; and short ones to every engine in turn. In the end nothing is lost."""
    asked = Traffic(url, model)
    enough = asyncio.Event()
    turns = itertools.count()
    timeout = aiohttp.ClientTimeout(total=2 * DEADLINE)

    async def keep_asking(name: str, headers: Mapping[str, str], *, stream: bool = False, kept: bool = False) -> None:
        connector = aiohttp.TCPConnector(force_close=not kept)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            client = Client(session, url)
            while not enough.is_set():
                asked.asking[name] = asked.asking.get(name, 0) + 1
                prompt = asked.prompts[next(turns) % len(asked.prompts)]
                await asked.ask(client, headers, prompt, stream=stream)
                if asked.lost:
                    await asyncio.sleep(0.02)  # nobody hammers a port that refuses

    async with asyncio.TaskGroup() as group:
        group.create_task(keep_asking("streams", {}, stream=True))
        group.create_task(keep_asking("short", {}))
        group.create_task(keep_asking("kept", {}, kept=True))
        group.create_task(keep_asking("in turn", {"routing-strategy": "round-robin"}))
        try:
            yield asked
        finally:
            enough.set()
    assert not asked.lost, f"{len(asked.lost)} of {asked.answered.total()} lost: {asked.lost[:5]}"
