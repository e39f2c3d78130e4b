"""What choosing a worker takes, the lookup included; against the clock: ``make bench-micro``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.micro.held import MODEL, holding, names, prompt
from kvsync.config import RoutingSettings
from kvsync.discovery.model import Change, Engine
from kvsync.routing.decision import Query
from kvsync.routing.fleet import Fleet
from kvsync.routing.load import LoadTable
from kvsync.routing.router import Router
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.types import Prompt, TokenizedRequest


@pytest.mark.parametrize("policy", ["kv-aware", "least-request"])
@pytest.mark.parametrize(("tokens", "workers"), [(512, 64), (16_384, 8), (16_384, 64), (512, 1_000)])
def test_choose(benchmark: Any, tokens: int, workers: int, policy: str) -> None:
    """A request and its end, with every worker holding the whole prompt."""
    router = Router(holding(workers, tokens // 16), Fleet(), LoadTable(), RoutingSettings(), Metrics())
    for name in names(workers):
        router.apply(Change("added", Engine(uid=name, name=name, url=f"http://{name}:80", model=MODEL)))
    asked = prompt(tokens // 16)
    request = TokenizedRequest((Prompt(asked.tobytes(), len(asked)),), "ids", comparable=True)
    numbers = itertools.count()

    def choose() -> int:
        decision, ticket = router.choose(Query(f"r{next(numbers)}", MODEL, None, request, policy))
        ticket.first_byte()
        ticket.end("ok")
        return decision.chosen.match.credit

    assert choose() == tokens
    benchmark(choose)
