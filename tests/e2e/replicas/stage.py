"""Three replicas as processes, over simulated engines and a real Redis, behind a balancer or behind Envoy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from tests.faults.client import DEADLINE, Answer, Client, until
from tests.faults.fleet import SYNC, Listed, sim
from tests.faults.gateway import Gateway
from tests.faults.process import START, Process
from tests.faults.traffic import Traffic
from tests.integration.extproc.envoy import Envoy, cluster, envoy
from tests.valkey import Valkey

from .balancer import Balancer, Target

REPLICAS: Final = 3
ENGINES: Final = ("a", "b", "c", "d")
LIFETIME: Final = 5.0
"""Seconds that what a replica told of its load counts."""
NEVER: Final = 600
"""Seconds for what tests end themselves, once they have seen what they waited for."""


class Replica:
    """One replica over all its lives, each of which is a process."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession, command: str) -> None:
        self._folder = folder
        self._session = session
        self._command = command
        self._lives = 0
        self.process: Process
        self.door: Gateway
        self.port = 0
        self.admin_port = 0

    async def start(self, config: Mapping[str, object]) -> None:
        """Begin a life; returns once it listens. Envoy finds a processor at the port that it had, a balancer a gateway
        at a new one, as pods have new addresses."""
        port = self.port if self._command == "extproc" else 0
        self._lives += 1
        folder = self._folder / f"life-{self._lives}"
        folder.mkdir(parents=True)
        self.process = Process(folder, config, {}, ports=(port, 0), command=self._command)
        self.port, self.admin_port = await self.process.ports()
        url = f"http://127.0.0.1:{self.port}"
        admin = Client(self._session, f"http://127.0.0.1:{self.admin_port}")
        self.door = Gateway(Client(self._session, url), admin, url)

    async def running(self) -> Counter[str]:
        """Requests that it has at each engine."""
        return Counter({name: row["running"] for name, row in (await self.door.workers()).items()})

    async def counts(self) -> int:
        """Requests that it takes account of, the others' among them."""
        rows = (await self.door.workers()).values()
        return sum(row["running"] + row["running_elsewhere"] for row in rows)


class Front(Protocol):
    """What brings requests to replicas."""

    @property
    def url(self) -> str: ...

    async def uses(self, *replicas: Replica) -> None:
        """Return once it brings requests to these and to no other."""

    async def left(self, replica: Replica, asked: Traffic) -> None:
        """Return once nothing is open there that this brought, and nothing will be. ``asked``: what goes on."""


class BehindBalancer:
    """``kvsync serve``."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    @property
    def url(self) -> str:
        return self._balancer.url

    async def uses(self, *replicas: Replica) -> None:
        known = {target.port for target in self._balancer.targets}
        self._balancer.targets += [Target(each.port, each.admin_port) for each in replicas if each.port not in known]
        wanted = {each.port for each in replicas}

        async def look() -> bool:
            return {target.port for target in self._balancer.targets if target.ready} == wanted

        await until(look, "the balancer brings requests to these replicas", START)

    async def left(self, replica: Replica, asked: Traffic) -> None:
        (target,) = (each for each in self._balancer.targets if each.port == replica.port)

        async def look() -> bool:
            return not target.ready and target.open == 0

        await until(look, "no connection is left")


class BehindEnvoy:
    """``kvsync extproc``."""

    def __init__(self, envoy: Envoy) -> None:
        self._envoy = envoy

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._envoy.port}"

    async def uses(self, *replicas: Replica) -> None:
        await self._envoy.healthy(processors=len(replicas))

    async def left(self, replica: Replica, asked: Traffic) -> None:
        await self._envoy.healthy(processors=REPLICAS - 1)
        await asked.round()  # what had been under way to it when that was seen

        async def look() -> bool:
            return (await replica.door.metrics()).total("kvsync_extproc_open_streams") == 0

        await until(look, "no stream is left")


class Stage:
    """All of it."""

    def __init__(self, engines: Sequence[Listed], valkey: Valkey, replicas: Sequence[Replica]) -> None:
        self.engines = engines
        self.valkey = valkey
        self.replicas = replicas
        self.front: Front
        self.client: Client
        """To the front."""
        self.shared = False
        """Whether the replicas tell each other their load."""

    def config(self) -> dict[str, object]:
        """Of each replica's next life."""
        limits: Mapping[str, Any] = {
            "timeout": 10,
            "load": {"enabled": self.shared, "interval": 0.02, "lifetime": LIFETIME},
            "snapshots": {"interval": 0.2, "patience": 20},
        }
        return {
            **SYNC,
            "gateway": {"drain_delay": NEVER, "drain_timeout": 60},
            "extproc": {"host": "127.0.0.1", "drain_delay": NEVER},
            "redis": {"url": self.valkey.url, **limits},
            "models": [{"name": "tiny", "engines": [listed.entry for listed in self.engines]}],
        }

    async def ask(self, prompt: Sequence[int], **fields: Any) -> Answer:
        """One request, whatever becomes of it."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1, **fields}
        return await self.client.post("/v1/completions", body)

    def freeze(self) -> None:
        """No engine answers until :meth:`thaw`."""
        for listed in self.engines:
            listed.engine.ranks[0].freeze()

    def thaw(self) -> None:
        for listed in self.engines:
            listed.engine.ranks[0].thaw()

    async def held(self, count: int) -> Counter[str]:
        """Return once the replicas have so many requests at engines, and, where they share, each knows of all; says at
        which."""
        found: Counter[str] = Counter()

        async def look() -> bool:
            found.clear()
            for running in await asyncio.gather(*(replica.running() for replica in self.replicas)):
                found.update(running)
            if found.total() != count:
                return False
            return not self.shared or await self._count(count, self.replicas)

        await until(look, f"{count} requests at the engines")
        return found

    async def counting(self, count: int, *replicas: Replica) -> None:
        """Return once each of these takes account of so many requests, the others' among them."""

        async def look() -> bool:
            return await self._count(count, replicas)

        await until(look, f"{count} requests count")

    async def _count(self, count: int, replicas: Sequence[Replica]) -> bool:
        return set(await asyncio.gather(*(replica.counts() for replica in replicas))) == {count}

    async def known(self) -> None:
        """Return once every replica knows all that the engines have published."""
        publishers = {listed.name: listed.engine.ranks[0].publisher for listed in self.engines}

        async def look() -> bool:
            ends = {name: publisher.published - 1 for name, publisher in publishers.items() if publisher is not None}
            for replica in self.replicas:
                if {name: row["last_sequence"] for name, row in (await replica.door.workers()).items()} != ends:
                    return False
            return True

        await until(look, "all replicas know all batches")

    async def snapshots(self) -> None:
        """Return once Redis has one of each worker."""
        async with self.valkey.client() as client:

            async def look() -> bool:
                return bool(await client.exists(*(f"kvsync:snapshot:{name}" for name in ENGINES)) == len(ENGINES))

            await until(look, "a snapshot of each worker")


@asynccontextmanager
async def _behind_balancer(folder: Path, replicas: Sequence[Replica]) -> AsyncIterator[Front]:
    async with Balancer() as balancer:
        yield BehindBalancer(balancer)


@asynccontextmanager
async def _behind_envoy(folder: Path, replicas: Sequence[Replica]) -> AsyncIterator[Front]:
    def changes(config: dict[str, Any]) -> None:
        asked = cluster(config, "kvsync")
        asked["lb_policy"] = "ROUND_ROBIN"  # so that every replica has a part in every test
        (check,) = asked["health_checks"]
        check |= {"interval": "0.1s", "no_traffic_interval": "0.1s", "unhealthy_threshold": 1}

    async with envoy(folder, *(replica.port for replica in replicas), changes=changes) as made:
        yield BehindEnvoy(made)


@asynccontextmanager
async def stage(folder: Path, kind: str) -> AsyncIterator[Stage]:
    """``kind``: ``balancer`` or ``envoy``. The replicas do not share their load at first."""
    command, behind = {"balancer": ("serve", _behind_balancer), "envoy": ("extproc", _behind_envoy)}[kind]
    async with AsyncExitStack() as stack:
        valkey = await stack.enter_async_context(Valkey(folder))
        engines = []
        for seed, name in enumerate(ENGINES):
            engines.append(Listed(name, await stack.enter_async_context(sim("tiny", blocks=2000, seed=seed))))
        connector = aiohttp.TCPConnector(force_close=True)  # so that each request is brought to the next replica
        timeout = aiohttp.ClientTimeout(total=3 * DEADLINE)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        replicas = [Replica(folder / f"replica-{n}", session, command) for n in range(REPLICAS)]
        made = Stage(engines, valkey, replicas)
        try:
            await asyncio.gather(*(replica.start(made.config()) for replica in replicas))
            made.front = await stack.enter_async_context(behind(folder, replicas))
            made.client = Client(session, made.front.url)
            await asyncio.gather(*(replica.door.live() for replica in replicas))
            await made.front.uses(*replicas)
            yield made
        finally:
            made.thaw()
            for replica in replicas:
                replica.process.kill()
