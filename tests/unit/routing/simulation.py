"""A fleet in simulated time: enough of an engine to see where a router's choices lead.

An engine prefills one prompt after the other at a fixed rate, decodes any number at once for a fixed time, caches every
prompt's blocks when it begins to prefill them, and tells the index a moment later.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from kvsync.index.match import Match
from kvsync.tokenize.types import TokenizedRequest
from tests.unit.routing.world import World

BLOCK = 16


def block_keys(tokens: Sequence[int]) -> list[int]:
    keys, chain = [], 0
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hash((chain, tuple(tokens[begin : begin + BLOCK])))
        keys.append(chain)
    return keys


class Simulation:
    """Requests through a :class:`World`'s router.

    Args:
        prefill: tokens per second and engine.
        decode: seconds from the first token to the last.
        event_delay: seconds until a stored block is in the index.
    """

    def __init__(
        self, world: World, *, prefill: float = 10_000, decode: float = 1.0, event_delay: float = 0.01
    ) -> None:
        self.world = world
        self.chosen: Counter[str] = Counter()
        self.waits: defaultdict[str, list[float]] = defaultdict(list)
        """Per worker, seconds from arrival to first byte."""
        self.hits = 0
        self.asked = 0
        self._prefill = prefill
        self._decode = decode
        self._event_delay = event_delay
        self._cached: defaultdict[str, set[int]] = defaultdict(set)
        self._indexed: defaultdict[str, set[int]] = defaultdict(set)
        self._free_at: defaultdict[str, float] = defaultdict(float)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        world.index.answer = self._answer

    def at(self, seconds: float, step: Callable[[], None]) -> None:
        heappush(self._queue, (seconds, next(self._order), step))

    def run(self) -> None:
        while self._queue:
            moment, _, step = heappop(self._queue)
            self.world.clock.now = moment
            step()

    def request(self, seconds: float, what: TokenizedRequest, **fields: Any) -> None:
        self.at(seconds, lambda: self._arrive(what, **fields))

    def warm(self, worker: str, what: TokenizedRequest) -> None:
        """The worker holds the prompt already, and the index knows."""
        keys = block_keys(array("I", what.prompts[0].tokens))
        self._cached[worker].update(keys)
        self._indexed[worker].update(keys)

    def _arrive(self, what: TokenizedRequest, **fields: Any) -> None:
        now = self.world.clock.now
        decision, ticket = self.world.ask(what, **fields)
        worker = decision.chosen.worker
        self.chosen[worker] += 1
        keys = block_keys(array("I", what.prompts[0].tokens))

        def scheduled() -> None:
            held = BLOCK * _run(keys[: (what.prompts[0].length - 1) // BLOCK], self._cached[worker])
            self.hits += held
            self.asked += what.prompts[0].length
            self._cached[worker].update(keys)
            done = self.world.clock.now + (what.prompts[0].length - held) / self._prefill
            self._free_at[worker] = done
            self.at(self.world.clock.now + self._event_delay, lambda: self._indexed[worker].update(keys))
            self.at(done, first_byte)

        def first_byte() -> None:
            self.waits[worker].append(self.world.clock.now - now)
            ticket.first_byte()
            self.at(self.world.clock.now + self._decode, lambda: ticket.end("ok"))

        def turn() -> None:
            free = self._free_at[worker]
            if free <= self.world.clock.now:
                scheduled()
            else:
                self.at(free, turn)

        turn()

    def _answer(self, tokens: array[int]) -> dict[str, Match]:
        keys = block_keys(tokens)[: (len(tokens) - 1) // BLOCK]
        found = {}
        for slot in self.world.fleet.slots("m"):
            credit = BLOCK * _run(keys, self._indexed[slot.worker])
            found[slot.worker] = Match(credit, 0, {"gpu": credit} if credit else {}, "exact")
        return found


def _run(keys: Sequence[int], held: set[int]) -> int:
    return next((place for place, key in enumerate(keys) if key not in held), len(keys))
