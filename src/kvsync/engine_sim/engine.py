"""A simulated engine as one object: start it, use its addresses, break it, stop it.

    async with SimEngine(SimConfig(model="tiny", blocks=64)) as engine:
        ...  # engine.url, engine.events, engine.replay

Its addresses stay the same over faults and restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import zmq
from aiohttp import web

from kvsync.engine_sim.cache import KVCache
from kvsync.engine_sim.calls import Calls
from kvsync.engine_sim.config import SimConfig
from kvsync.engine_sim.faults import (
    Armed,
    CutReplays,
    DropBatches,
    Fault,
    Freeze,
    Heal,
    Refuse,
    Restart,
)
from kvsync.engine_sim.hashing import BlockHasher
from kvsync.engine_sim.outputs import Outputs
from kvsync.engine_sim.publisher import Publisher
from kvsync.engine_sim.rank import Rank
from kvsync.engine_sim.scheduler import Scheduler
from kvsync.engine_sim.server import KEEP_ALIVE, Server
from kvsync.engine_sim.timing import Clock, LoopClock
from kvsync.engine_sim.tokens import ModelTokenizer

_PORT_TRIES = 50


class SimEngine:
    """See the module.

    Raises:
        OSError, ValueError: the tokenizer can't be used.
    """

    def __init__(self, config: SimConfig, *, clock: Clock | None = None) -> None:
        self.config = config
        self.armed = Armed()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._clock = clock or LoopClock()
        self._tokenizer = ModelTokenizer(config.tokenizer)
        self._calls = Calls(config, self._tokenizer, Outputs(self._tokenizer, config.answer_tokens))
        self._ranks: list[Rank] = []
        self._work: list[asyncio.Task[None]] = []
        self._later: dict[str, asyncio.Task[None]] = {}
        """Ends of faults that last a while; a fault that is armed again lasts anew."""
        self._next_rank = 0
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._port = config.port
        self._events_port = config.events_port
        self._replay_port = config.replay_port

    @property
    def url(self) -> str:
        """Base URL of the HTTP server."""
        return f"http://{self.config.host}:{self._port}"

    @property
    def events(self) -> str | None:
        """Rank 0's event endpoint (rank r: port + r), or ``None`` with events switched off."""
        return f"tcp://{self.config.host}:{self._events_port}" if self.config.kv_events else None

    @property
    def replay(self) -> str | None:
        """Rank 0's replay endpoint (rank r: port + r)."""
        return f"tcp://{self.config.host}:{self._replay_port}" if self.config.kv_events else None

    @property
    def ranks(self) -> Sequence[Rank]:
        return self._ranks

    async def start(self) -> None:
        """Bind everything and begin to serve.

        Raises:
            OSError: an address is taken.
        """
        self._start_ranks()
        server = Server(self.config, self._tokenizer, self._calls, self, int(time.time()))
        self._runner = web.AppRunner(
            server.application(), handler_cancellation=True, keepalive_timeout=KEEP_ALIVE, access_log=None
        )
        try:
            await self._runner.setup()
            await self._listen()
        except OSError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Cut what is open and free the ports."""
        for task in self._later.values():
            task.cancel()
        self.thawed.set()
        await self._stop_ranks()
        if self._runner is not None:
            self._cut_connections()
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def choose_rank(self) -> Rank:
        """The least loaded rank; of equal ones, each in turn."""
        count = len(self._ranks)
        order = [self._ranks[(self._next_rank + step) % count] for step in range(count)]
        chosen = min(order, key=lambda rank: rank.load)
        self._next_rank = (chosen.number + 1) % count
        return chosen

    async def inject(self, fault: Fault, *, spare: asyncio.BaseTransport | None = None) -> None:
        """Let something go wrong (or, with :class:`Heal`, right again). ``spare`` is a connection that a restart does
        not cut: the one that asked for it.

        Raises:
            ValueError: the fault names a rank that is not there, or needs events that are switched off.
        """
        match fault:
            case DropBatches():
                faults = self._publisher(fault.rank).faults
                if fault.forever:
                    faults.lose_next += fault.count
                else:
                    faults.drop_next += fault.count
            case CutReplays():
                self._publisher(fault.rank).faults.replay_frames = fault.after
            case Refuse():
                await self._refuse()
                self._after(fault.kind, fault.seconds, self._listen())
            case Freeze():
                self.thawed.clear()
                for rank in self._ranks:
                    rank.freeze()
                if fault.seconds is not None:
                    self._after(fault.kind, fault.seconds, self._thaw())
            case Restart():
                await self._restart(spare)
            case Heal():
                await self._heal()
            case _:
                self.armed.arm(fault)

    async def _restart(self, spare: asyncio.BaseTransport | None) -> None:
        await self._refuse()
        await self._stop_ranks()
        self._cut_connections(spare)
        await self._thaw()
        self.armed.disarm()
        self._start_ranks()
        await self._listen()

    async def _heal(self) -> None:
        self.armed.disarm()
        for rank in self._ranks:
            if rank.publisher:
                rank.publisher.faults.drop_next = rank.publisher.faults.lose_next = 0
                rank.publisher.faults.replay_frames = None
        await self._thaw()
        await self._listen()

    async def _thaw(self) -> None:
        self.thawed.set()
        for rank in self._ranks:
            rank.thaw()

    def _publisher(self, rank: int) -> Publisher:
        if not 0 <= rank < len(self._ranks):
            raise ValueError(f"there is no rank {rank}")
        publisher = self._ranks[rank].publisher
        if publisher is None:
            raise ValueError("events are switched off")
        return publisher

    def _start_ranks(self) -> None:
        config = self.config
        publishers = self._bind_publishers() if config.kv_events else [None] * config.data_parallel_size
        for number, publisher in enumerate(publishers):
            cache = KVCache(
                blocks=config.blocks,
                block_size=config.block_size,
                groups=config.groups,
                hasher=BlockHasher(config.seed),
                longest=config.max_model_len,
                in_flight=config.max_num_batched_tokens,
            )
            scheduler = Scheduler(cache, max_running=config.max_num_seqs, max_tokens=config.max_num_batched_tokens)
            rank = Rank(number, scheduler, publisher, config.time, self._clock)
            self._ranks.append(rank)
            self._work.append(asyncio.create_task(rank.run(), name=f"rank-{number}"))

    async def _stop_ranks(self) -> None:
        for rank, task in zip(self._ranks, self._work, strict=True):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if rank.publisher:
                rank.publisher.close()
        self._ranks.clear()
        self._work.clear()

    def _bind_publishers(self) -> list[Publisher]:
        """A publisher per rank, on consecutive ports. With port 0 rank 0 takes any port, and all start over when the
        next ones are taken."""
        for attempt in range(_PORT_TRIES):
            publishers: list[Publisher] = []
            events, replay = self._events_port, self._replay_port
            try:
                for rank in range(self.config.data_parallel_size):
                    publisher = self._bind_publisher(rank, events and events + rank, replay and replay + rank)
                    publishers.append(publisher)
                    if rank == 0:
                        events, replay = (_port(publisher.endpoint), _port(publisher.replay_endpoint))
            except zmq.ZMQError as error:
                for publisher in publishers:
                    publisher.close()
                fixed = self._events_port and self._replay_port
                if fixed or attempt + 1 == _PORT_TRIES:
                    raise OSError(error.errno, f"no ports for events and replay: {error}") from error
            else:
                self._events_port, self._replay_port = events, replay
                return publishers
        raise AssertionError("unreachable")

    def _bind_publisher(self, rank: int, events: int, replay: int) -> Publisher:
        return Publisher(
            self.config.dialect,
            rank,
            endpoint=f"tcp://{self.config.host}:{events}",
            replay_endpoint=f"tcp://{self.config.host}:{replay}",
            topic=self.config.topic,
            buffer_steps=self.config.buffer_steps,
        )

    async def _listen(self) -> None:
        if self._site is not None or self._runner is None:
            return
        self._site = web.TCPSite(self._runner, self.config.host, self._port)
        await self._site.start()
        self._port = self._runner.addresses[0][1]

    async def _refuse(self) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None

    def _cut_connections(self, spare: asyncio.BaseTransport | None = None) -> None:
        assert self._runner is not None
        for connection in self._runner.server.connections if self._runner.server else ():
            if connection.transport is not None and connection.transport is not spare:
                connection.transport.abort()

    def _after(self, kind: str, seconds: float, what: Coroutine[Any, Any, None]) -> None:
        async def later() -> None:
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                what.close()
                raise
            await what

        if earlier := self._later.get(kind):
            earlier.cancel()
        self._later[kind] = asyncio.create_task(later())


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
