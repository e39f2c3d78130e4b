"""A small fleet for routing tests: engines, a clock that is set by hand, an index that answers what it is told."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from kvsync.config import RoutingSettings
from kvsync.discovery.model import Change, Engine
from kvsync.events.types import ExtraKey
from kvsync.index.match import Match, MatchTable, Observation, Tokens
from kvsync.routing.decision import Decision, Query
from kvsync.routing.fleet import Fleet
from kvsync.routing.load import LoadTable
from kvsync.routing.router import RoutedTicket, Router
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import Prompt, TokenizedRequest

MODEL = "m"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Index:
    """Answers by a function of the prompt's tokens, and remembers what it was told."""

    def __init__(self, max_blocks: int | None = None) -> None:
        self.answer: Callable[[array[int]], Mapping[str, Match]] = lambda _: {}
        self.sizes: Mapping[str, int] = {}
        self.observation: Observation | Exception = "steady"
        self.told: list[tuple[str, str]] = []
        self.asked: list[dict[str, object]] = []
        self.observed: list[dict[str, Any]] = []

    def match(
        self,
        tokens: Tokens,
        model: str,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    ) -> MatchTable:
        assert isinstance(tokens, bytes)
        self.asked.append({"model": model, "adapter": adapter, "cache_salt": cache_salt, "block_keys": block_keys})
        return MatchTable(self.answer(array("I", tokens)))

    def observe(
        self,
        worker: str,
        tokens: Tokens,
        model: str,
        cached: int,
        credit: int,
        as_of: int,
        until: float,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    ) -> Observation:
        self.observed.append({name: value for name, value in locals().items() if name != "self"})
        if isinstance(self.observation, Exception):
            raise self.observation
        return self.observation

    def block_sizes(self, model: str) -> dict[str, int]:
        return dict(self.sizes)

    def mark_reannouncing(self, worker: str) -> None:
        self.told.append(("reannouncing", worker))

    def mark_hidden_keys(self, worker: str) -> None:
        self.told.append(("hidden_keys", worker))

    def drops_last_block(self, worker: str) -> None:
        self.told.append(("drops_last_block", worker))

    def add_worker(self, worker: str, model: str, **facts: object) -> None:
        raise AssertionError("routing follows no events")

    def remove_worker(self, worker: str) -> None:
        raise AssertionError("routing follows no events")

    def apply(self, worker: str, payload: object) -> None:
        raise AssertionError("routing follows no events")

    def apply_many(self, batches: Iterable[tuple[str, object]]) -> None:
        raise AssertionError("routing follows no events")

    def forget(self, worker: str) -> None:
        self.told.append(("forget", worker))

    def new_epoch(self, worker: str) -> None:
        raise AssertionError("routing follows no events")

    def relearn(self, worker: str) -> None:
        raise AssertionError("routing follows no events")

    def suspend(self, worker: str) -> None:
        raise AssertionError("routing follows no events")

    def resume(self, worker: str) -> None:
        raise AssertionError("routing follows no events")

    def expire(self, now: float) -> None:
        raise AssertionError("routing has no ticks")

    def dump(self, worker: str) -> bytes | None:
        raise NotImplementedError

    def restore(self, worker: str, image: bytes) -> None:
        raise NotImplementedError

    def stats(self) -> dict[str, object]:
        return {}


def engine(name: str, **fields: Any) -> Engine:
    described: dict[str, Any] = {"uid": name, "name": name, "url": f"http://{name}:80", "model": MODEL, **fields}
    return Engine(**described)


def tokens(*prompt: int) -> bytes:
    return array("I", prompt).tobytes()


def tokenized(*prompts: Sequence[int], **fields: Any) -> TokenizedRequest:
    made = tuple(Prompt(tokens(*prompt), len(prompt)) for prompt in prompts)
    described: dict[str, Any] = {"prompts": made, "source": "ids", **fields}
    return TokenizedRequest(**described)


UNKNOWN = TokenizedRequest((), "none", "tokenizer_failed")


class World:
    """A router and all that it works with."""

    def __init__(
        self,
        *engines: Engine,
        seed: int = 1,
        index: Index | None = None,
        without_index: bool = False,
        prefix_cache_metrics: bool = False,
        **settings: Any,
    ) -> None:
        self.clock = Clock()
        self.index = index or Index()
        self.fleet = Fleet()
        made = RoutingSettings(**settings)
        self.loads = LoadTable(made.decode_cost)
        self.metrics = Metrics(prefix_cache=prefix_cache_metrics)
        self.asleep: Collection[str] = ()
        self.router = Router(
            None if without_index else self.index,
            self.fleet,
            self.loads,
            made,
            self.metrics,
            self.clock,
            Random(seed),
            wall=lambda: 1.7e9,
            asleep=lambda: self.asleep,
        )
        for each in engines:
            self.router.apply(Change("added", each))
        self._count = 0

    def ask(self, what: TokenizedRequest = UNKNOWN, **fields: Any) -> tuple[Decision, RoutedTicket]:
        self._count += 1
        described: dict[str, Any] = {
            "request_id": f"r{self._count}",
            "model": MODEL,
            "adapter": None,
            "tokenized": what,
            **fields,
        }
        return self.router.choose(Query(**described))

    def worker(self, what: TokenizedRequest = UNKNOWN, **fields: Any) -> str:
        """Who is chosen; the request ends at once."""
        decision, ticket = self.ask(what, **fields)
        ticket.end("ok")
        return decision.chosen.worker

    def sample(self, name: str, **labels: str) -> float | None:
        self.metrics.render()
        return self.metrics.registry.get_sample_value(name, labels)
