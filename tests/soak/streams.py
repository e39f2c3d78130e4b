"""Long streams and long pauses: a thousand answers that trickle for twenty minutes, and keep-alive connections that are
used again just when the engine gives them up. Not one may fail."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.faults.client import Client
from tests.faults.http import SSE_HEAD, FakeEngine, Received, Script, Talk, chunk, reply

from .churn import part
from .figures import Part, Sample
from .watched import Watched, watched

ENGINES: Final = 4
STREAMS: Final = 1_000
PIECES: Final = 240
PERIOD: Final = 5.0
"""Seconds between two pieces of a trickling answer: 240 of them are twenty minutes."""
POSTS: Final = 1_000
AT_REST: Final = 12
"""Sockets of the gateway's process when nobody talks to it but the soak: two that listen, the loop's, one client's."""
ENGINE_KEEPS: Final = 5.0
"""Seconds after which the engine closes an idle connection, as uvicorn does."""


async def run(scale: float, folder: Path) -> list[Part]:
    """Both at the same time, through one gateway: each mostly waits."""
    slower = min(1.0, math.sqrt(scale))
    trickle = _Trickle(max(12, round(PIECES * scale)), PERIOD * slower)
    keeps = ENGINE_KEEPS * slower
    async with AsyncExitStack() as stack:
        entries: dict[str, list[dict[str, object]]] = {"trickle": [], "pauses": []}
        for model, script, count in (("trickle", trickle.script, ENGINES), ("pauses", _impatient(keeps), 2)):
            for number in range(count):
                engine = await stack.enter_async_context(_engine(f"{model}-{number}", script))
                url = f"http://127.0.0.1:{engine.port}"
                entries[model].append({"name": engine.name, "url": url, "kv_events": False})
        config: dict[str, Any] = {
            "gateway": {"upstream_idle": 4.0 * slower},
            "models": [{"name": name, "engines": listed} for name, listed in entries.items()],
        }
        gateway = await stack.enter_async_context(watched(folder, config))
        streams, posts = max(20, round(STREAMS * scale)), max(40, round(POSTS * scale))
        pauses = Part("pauses", "")
        found = await _trickling(gateway, trickle, streams, lambda: _pausing(gateway, posts, keeps, pauses))
        return [found, pauses]


@asynccontextmanager
async def _engine(name: str, script: Script) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(name, script)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


# ---- streams that trickle


class _Trickle:
    """Engines' answers of so many pieces, one each period. A request for ``short`` gets all at once, but for the end,
    which comes when ``together`` of them are open."""

    def __init__(self, pieces: int, period: float) -> None:
        self.pieces = pieces
        self.period = period
        self.together = 0
        self._open = 0
        self._all_open = asyncio.Condition()

    @property
    def body(self) -> bytes:
        return b"".join(b'data: {"choices":[{"index":0,"text":"%d"}]}\n\n' % n for n in range(self.pieces)) + _DONE

    async def script(self, engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            await talk.send(SSE_HEAD)
            for n in range(self.pieces):
                await talk.send(chunk(b'data: {"choices":[{"index":0,"text":"%d"}]}\n\n' % n))
                if b'"short"' not in request.body:
                    await asyncio.sleep(self.period)
            if b'"short"' in request.body:
                await self._others()
            await talk.send(chunk(_DONE), b"0\r\n\r\n")

    async def _others(self) -> None:
        async with self._all_open:
            self._open += 1
            turn = -(-self._open // self.together)
            self._all_open.notify_all()
            await self._all_open.wait_for(lambda: self._open >= turn * self.together)


_DONE: Final = b"data: [DONE]\n\n"


async def _trickling(gateway: Watched, trickle: _Trickle, count: int, meanwhile: Callable[[], Awaitable[None]]) -> Part:
    length = trickle.pieces * trickle.period
    work = f"{count:,} streams at once, {trickle.pieces} pieces in {length:,.0f} s each"
    async with part("trickle", work) as found:
        ends: Counter[str] = Counter()

        async def one(prompt: str, delay: float) -> None:
            await asyncio.sleep(delay)
            try:
                ends["whole" if await _stream(gateway, prompt) == trickle.body else "other bytes"] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                ends[type(error).__name__] += 1

        # As many at once as will be: what a thousand streams need is no growth afterwards.
        for policy in ("round-robin", "round-robin", "kv-aware"):
            body = {"model": "pauses", "prompt": "x"}
            await gateway.gateway.post("/v1/completions", body, {"routing-strategy": policy})
        trickle.together = count
        for _ in range(2):
            await asyncio.gather(*(one("short", n / count) for n in range(count)))
        found.require(ends == {"whole": 2 * count}, f"short streams ended {dict(ends)}")
        ends.clear()
        found.samples.append(await _at_rest(gateway, 0))
        ramp = min(30.0, length / 20)
        running = asyncio.gather(*(one("long", ramp * n / count) for n in range(count)), meanwhile())
        middle = []
        while not running.done():
            await asyncio.wait([running], timeout=length / 6)
            if not running.done():
                middle.append(await gateway.look())
        await running
        found.samples.append(await _at_rest(gateway, count))
        found.require(ends == {"whole": count}, f"streams ended {dict(ends)}")
        most = max((look["sockets"] for look in middle), default=0)
        found.require(most >= 2 * count, f"only {most} sockets were open at once")
        found.facts = {"ends": dict(ends), "sockets_at_once": most, "rss_while_open": [look["rss"] for look in middle]}
        steady = [look["rss"] for look in middle[1:]]
        if steady:
            # The end of each answer is remembered (up to 64 KiB), since its usage is there; these are shorter.
            most_remembered = count * len(trickle.body)
            found.require(
                max(steady) <= 1.05 * steady[0] + most_remembered, f"memory grew while streams were open: {steady}"
            )
    return found


async def _stream(gateway: Watched, prompt: str) -> bytes:
    """The body of one streamed answer, over a connection of its own."""
    host, _, port = gateway.gateway.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        body = b'{"model":"trickle","prompt":"%b","stream":true}' % prompt.encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise OSError(head.decode())
        content = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            content += (await reader.readexactly(size + 2))[:-2]
        return content
    finally:
        writer.close()


async def _at_rest(gateway: Watched, done: int) -> Sample:
    """A sample once nothing is under way and no connection is kept for later; after two minutes in any case."""

    loop = asyncio.get_running_loop()
    end = loop.time() + 120
    while loop.time() < end:
        await asyncio.sleep(0.5)
        rows = await gateway.gateway.workers()
        if not any(row["running"] for row in rows.values()) and (await gateway.look())["sockets"] <= AT_REST:
            break
    return await gateway.sample(done)


# ---- connections that are used again late


def _impatient(keeps: float) -> Script:
    """Answers, and closes a connection on which nothing came for a while."""

    async def script(engine: FakeEngine, talk: Talk) -> None:
        while True:
            try:
                async with asyncio.timeout(keeps):
                    request: Received | None = await talk.request()
            except TimeoutError:
                return
            if request is None:
                return
            await talk.send(reply(b'{"choices":[]}', b"200 OK", b"content-type: application/json"))

    return script


async def _pausing(gateway: Watched, posts: int, keeps: float, found: Part) -> None:
    """Each client pauses for 5 to 6 s between two of its requests, around the engine's 5 s."""
    clients = min(50, posts // 2)
    each = posts // clients
    found.work = f"{clients * each:,} requests over kept connections, {keeps:g} to {keeps * 1.2:g} s apart"
    started = time.monotonic()
    statuses: Counter[int] = Counter()

    async def one(client: Client, number: int) -> None:
        source = random.Random(number)
        for _ in range(each):
            answer = await client.post("/v1/completions", {"model": "pauses", "prompt": "x"})
            statuses[answer.status] += 1
            await asyncio.sleep(source.uniform(keeps, keeps * 1.2))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, gateway.gateway.url)
        await asyncio.gather(*(one(client, number) for number in range(clients)))
    found.require(statuses == {200: clients * each}, f"answers by status: {dict(statuses)}")
    page = await gateway.gateway.metrics()
    tries: Counter[str] = Counter()
    for sample in page.about("pauses-0") + page.about("pauses-1"):
        if sample.name == "kvsync_worker_tries_total":
            tries[sample.labels["outcome"]] += round(sample.value)
    found.facts = {"statuses": dict(statuses), "tries": dict(tries)}
    found.seconds = round(time.monotonic() - started, 1)
