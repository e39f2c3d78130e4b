"""Random lives of an engine whose events come late or are lost, against what it truly holds.

The engine serves requests as vLLM does: it says how much of a prompt it had, computes the rest and stores it. It evicts
copies in any order, may offload, announce hits again, be cleared. Its events come in order and late; sometimes all that
are under way are lost, and then the worker is forgotten, as its stream would. Answers come late too, and in any order.

Whenever all events that were sent and not lost have come: credit ⊆ what the engine would serve; under ``exact`` of an
engine that does not announce hits again, credit = that. And an answer that is ``steady`` had at least its credit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from kvsync.index.match import Index, Match
from tests.contract.conftest import IMPLEMENTATIONS
from tests.contract.test_oracle import BLOCK, MODEL, Path
from tests.wire import batch, cleared, removed, stored

DEPTH = 4
TIME = 4.0
"""How long an answer counts."""


@dataclass(frozen=True)
class Kind:
    """What sort of engine it is."""

    offloads: bool = False
    """Blocks are copied to a CPU tier."""
    reannounces: bool = False
    """Some requests make it announce their hits."""
    eagle: bool = False


@dataclass
class Asked:
    """A request under way."""

    path: Path
    match: Match
    up_to_date: bool
    """All events had come when its worker was chosen."""
    cached: int | None = None
    """Tokens; ``None`` until it is served."""


class LossyLife:
    """One worker's life, and the index that follows it."""

    def __init__(self, index: Index, kind: Kind, seed: int) -> None:
        self.rng = Random(seed)
        self.kind = kind
        self.index = index
        self.index.add_worker("w", MODEL)
        if kind.eagle:
            self.index.drops_last_block("w")
        self.held: Counter[tuple[str, Path]] = Counter()
        self.under_way: list[bytes] = []
        self.requests: list[Asked] = []
        self.paths: set[Path] = set()
        self.now = 0.0
        self.marked = False
        self.credited = 0
        """Blocks credited under ``partial``: how much there was to be wrong about."""
        self.show_block_size()
        for _ in range(self.rng.randrange(4)):
            self.serve_somebody_elses()
        if self.rng.random() < 0.7:
            self.lose()

    def step(self) -> None:
        rules: dict[Callable[[], None], int] = {
            self.serve_somebody_elses: 3,
            self.evict: 3,
            self.offload: 3 if self.kind.offloads else 0,
            self.clear: 1,
            self.lose: 1,
            self.restart: 1,
            self.learn_anew: 1,
            self.suspend_and_resume: 1,
            self.deliver: 6,
            self.choose: 4,
            self.serve_ours: 4,
            self.answer: 4,
            self.ask_at_once: 8,
            self.wait: 3,
        }
        self.rng.choices(list(rules), list(rules.values()))[0]()
        if not self.under_way:
            self.credit_is_held()

    def a_path(self) -> Path:
        letters = self.rng.choices((0, 1), k=self.rng.randint(1, DEPTH))
        adapter, salt = ("A" if self.rng.random() < 0.1 else None for _ in range(2))
        return Path(adapter, salt, tuple(letters))

    def show_block_size(self) -> None:
        self.index.apply("w", batch(stored(["elsewhere"], [9] * BLOCK, block_size=BLOCK)))

    # -- the engine

    def send(self, *events: Any) -> None:
        self.under_way.append(batch(*events))

    def blocks_had(self, path: Path) -> int:
        """Blocks of a prompt with this path and one token more that it can serve: the GPU's run, then the CPU's."""
        run, tiers = 0, ["gpu", "cpu"]
        while run < len(path.letters) and tiers:
            if self.held[tiers[0], path.head(run + 1)]:
                run += 1
            else:
                tiers.pop(0)
        return max(0, run - 1) if self.kind.eagle else run

    def store(self, path: Path, first: int, medium: str = "GPU") -> Any:
        blocks = [path.head(i + 1) for i in range(first, len(path.letters))]
        shown = [path.adapter] if path.adapter else []
        keys = [[*shown, *([path.salt] if path.salt and first + i == 0 else [])] or None for i in range(len(blocks))]
        parent = repr(path.head(first)) if first else None
        return stored(
            [repr(block) for block in blocks],
            path.tokens[first * BLOCK :],
            parent,
            BLOCK,
            lora_name=path.adapter,
            lora_id=1 if path.adapter else None,
            extra_keys=keys,
            medium=medium,
        )

    def serve(self, path: Path, announce: bool) -> int:
        had = self.blocks_had(path)
        on_gpu = next((i for i in range(had) if not self.held["gpu", path.head(i + 1)]), had)
        events = [self.store(path.head(on_gpu), 0)] if announce and on_gpu else []
        if on_gpu < len(path.letters):
            events.append(self.store(path, on_gpu))
        for i in range(on_gpu, len(path.letters)):
            self.held["gpu", path.head(i + 1)] += 1
        self.paths.add(path)
        if events:
            self.send(*events)
        return had * BLOCK

    def serve_somebody_elses(self) -> None:
        """A request that the gateway does not see."""
        self.serve(self.a_path(), announce=False)

    def evict(self) -> None:
        for tier, path in self.rng.sample(sorted(self.held, key=repr), min(len(self.held), self.rng.randrange(3))):
            self.held[tier, path] -= 1
            if not self.held[tier, path]:
                del self.held[tier, path]
            self.send(removed([repr(path)], medium=tier.upper()))

    def offload(self) -> None:
        on_gpu = sorted({path for tier, path in self.held if tier == "gpu"}, key=repr)
        if on_gpu:
            path = self.rng.choice(on_gpu)
            self.held["cpu", path] += 1
            event = self.store(path, len(path.letters) - 1, "CPU")
            self.send(event if self.rng.random() < 0.5 else event | {"extra_keys": None})

    def clear(self) -> None:
        self.held.clear()
        self.send(cleared())

    # -- the stream

    def deliver(self) -> None:
        count = self.rng.choice([1, 2, 99])
        for payload in self.under_way[:count]:
            self.index.apply("w", payload)
        del self.under_way[:count]

    def lose(self) -> None:
        self.under_way.clear()
        self.index.forget("w")

    def restart(self) -> None:
        self.held.clear()
        self.under_way.clear()
        self.requests.clear()
        for _ in range(2):  # marks that no batch followed outlive the first: their requests are gone with the process
            self.index.new_epoch("w")
        self.marked = False
        self.show_block_size()

    def learn_anew(self) -> None:
        """Its batches come again from the first one on: here those of an engine that was emptied just before."""
        self.clear()
        self.under_way.clear()
        self.index.relearn("w")
        self.show_block_size()

    def suspend_and_resume(self) -> None:
        self.index.suspend("w")
        self.deliver()
        assert not any(self.look(path).credit for path in self.paths)
        self.index.resume("w")

    # -- the gateway

    def look(self, path: Path) -> Match:
        return self.index.match([*path.tokens, 99], MODEL, adapter=path.adapter, cache_salt=path.salt)["w"]

    def choose(self) -> None:
        path = self.a_path()
        self.requests.append(Asked(path, self.look(path), not self.under_way))

    def serve_ours(self) -> None:
        waiting = [request for request in self.requests if request.cached is None]
        if waiting:
            request = self.rng.choice(waiting)
            announce = self.kind.reannounces and self.rng.random() < 0.5
            if announce:
                self.index.mark_reannouncing("w")
                self.marked = True
            request.cached = self.serve(request.path, announce)

    def answer(self) -> None:
        served = [request for request in self.requests if request.cached is not None]
        if served:
            self.observe(self.rng.choice(served))

    def ask_at_once(self) -> None:
        """The usual case: everything in order; the events come before the answer or after it."""
        for _ in range(self.rng.randint(1, 3)):
            self.choose()
            request = self.requests[-1]
            request.cached = self.serve(request.path, announce=False)
            if self.rng.random() < 0.5:
                self.deliver()
            self.observe(request)

    def observe(self, request: Asked) -> None:
        assert request.cached is not None
        self.requests.remove(request)
        path, match = request.path, request.match
        found = self.index.observe(
            "w",
            [*path.tokens, 99],
            MODEL,
            request.cached,
            match.credit,
            match.as_of,
            self.now + TIME,
            adapter=path.adapter,
            cache_salt=path.salt,
        )
        assert found in ("steady", "evicted")
        if found == "steady" and request.up_to_date and not self.under_way:
            assert request.cached >= match.credit, path

    def wait(self) -> None:
        self.now += self.rng.choice([1.0, 2.0])
        self.index.expire(self.now)

    # -- what must always hold

    def credit_is_held(self) -> None:
        for path in self.paths:
            match, had = self.look(path), self.blocks_had(path) * BLOCK
            assert match.credit <= had, path
            if match.trust == "exact" and not self.marked:
                assert match.credit == had, path
            assert sum(match.by_tier.values()) == match.credit
            self.credited += match.credit // BLOCK if match.trust == "partial" else 0


KINDS = {
    "plain": Kind(),
    "offloads": Kind(offloads=True),
    "reannounces": Kind(reannounces=True),
    "reannounces and offloads": Kind(offloads=True, reannounces=True),
    "eagle": Kind(eagle=True),
}
WORDS = ("observed_runs", "adopted")
"""What has to come up often, lest the test says nothing."""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_credit_is_held_whatever_was_lost(implementation: str, kind: str) -> None:
    seen: Counter[str] = Counter()
    credited = 0
    for seed in range(80):
        life = LossyLife(IMPLEMENTATIONS[implementation](), KINDS[kind], seed)
        for number in range(60):
            try:
                life.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {number}: {error}") from error
        counts = life.index.stats()["workers"]["w"]["counts"]  # type: ignore[index]
        seen.update(word for word in counts if word in WORDS)
        credited += life.credited
    assert min(seen[word] for word in WORDS) > 20, seen
    assert credited > 300
