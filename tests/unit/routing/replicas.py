"""Several gateways over one fleet, in simulated time: each with a router and a load table of its own, which tell each
other what they have sent every now and then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

from kvsync.discovery.model import Change
from kvsync.routing.decision import Load
from tests.unit.routing.world import World, engine, tokenized


class Replicas:
    """Args:
    gateways: how many.
    workers: how many engines, each of which prefills one prompt after the other and decodes any number at once.
    interval: seconds between two times of telling; ``None``: they do not.
    prefill: tokens per second and engine.
    """

    def __init__(
        self, gateways: int, workers: int, interval: float | None, *, prefill: float = 10_000, seed: int = 1
    ) -> None:
        names = [f"w{n}" for n in range(workers)]
        self.worlds = [World(*map(engine, names), seed=seed + n, without_index=True) for n in range(gateways)]
        self.now = 0.0
        self.running: defaultdict[str, int] = defaultdict(int)
        """By worker, of all gateways: the truth."""
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.waits: list[float] = []
        """Seconds from each request's arrival to its first byte."""
        self._asked = 0
        self._prefill = prefill
        self._free_at: defaultdict[str, float] = defaultdict(float)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._rng = Random(seed)
        if interval is not None:
            self._tell(interval)

    def add_worker(self, name: str) -> None:
        """A new engine: its pod came up."""
        for world in self.worlds:
            world.router.apply(Change("added", engine(name)))

    def at(self, seconds: float, step: Callable[[], None]) -> None:
        heappush(self._queue, (seconds, next(self._order), step))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, step = heappop(self._queue)
            for world in self.worlds:
                world.clock.now = 1000.0 + self.now
            step()

    def traffic(self, rates: Sequence[float], until: float, *, prompt: int, decode: float) -> None:
        """Requests of that many tokens, per gateway so many a second, at random moments."""
        for gateway, rate in enumerate(rates):
            moment = 0.0
            while rate and (moment := moment + self._rng.expovariate(rate)) < until:
                self.at(moment, partial(self._arrive, gateway, prompt, decode))

    def _arrive(self, gateway: int, prompt: int, decode: float) -> None:
        arrived = self.now
        self._asked += prompt  # no two prompts are alike
        decision, ticket = self.worlds[gateway].ask(tokenized(range(self._asked, self._asked + prompt)))
        worker = decision.chosen.worker
        self.running[worker] += 1
        self.peaks[worker] = max(self.peaks[worker], self.running[worker])
        done = self._free_at[worker] = max(self._free_at[worker], self.now) + prompt / self._prefill

        def end() -> None:
            ticket.end("ok")
            self.running[worker] -= 1

        def first_byte() -> None:
            ticket.first_byte()
            self.waits.append(self.now - arrived)
            self.at(self.now + decode, end)

        self.at(done, first_byte)

    def _tell(self, interval: float) -> None:
        """Each at a moment of its own; what it hears of the others is as old as their last telling."""
        told: list[dict[str, Load]] = [{} for _ in self.worlds]

        def exchange(gateway: int) -> None:
            table = self.worlds[gateway].loads
            told[gateway] = table.own()
            sums: dict[str, Load] = {}
            for other, loads in enumerate(told):
                if other != gateway:
                    for worker, load in loads.items():
                        before = sums.get(worker, Load())
                        sums[worker] = Load(
                            before.running + load.running, before.queued_prefill_tokens + load.queued_prefill_tokens
                        )
            table.others(sums)
            self.at(self.now + interval, partial(exchange, gateway))

        for gateway in range(len(self.worlds)):
            self.at(interval * gateway / len(self.worlds), partial(exchange, gateway))
