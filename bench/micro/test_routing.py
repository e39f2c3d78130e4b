"""What choosing a worker takes, the lookup included; against the clock: ``make bench-micro``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.micro.held import MODEL, fill, names, prompt
from kvsync.app import App
from kvsync.config import Settings
from kvsync.discovery.model import Change, Engine
from kvsync.routing.decision import Query
from kvsync.tokenize.types import Prompt, TokenizedRequest


@pytest.mark.parametrize("policy", ["kv-aware", "least-request"])
@pytest.mark.parametrize(("tokens", "workers"), [(512, 64), (16_384, 8), (16_384, 64), (512, 1_000)])
async def test_choose(benchmark: Any, tokens: int, workers: int, policy: str) -> None:
    """A request and its end, with every worker holding the whole prompt."""
    app = App(Settings())
    fill(app.index, workers, tokens // 16)
    for name in names(workers):
        app.router.apply(Change("added", Engine(uid=name, name=name, url=f"http://{name}:80", model=MODEL)))
    asked = prompt(tokens // 16)
    request = TokenizedRequest((Prompt(asked.tobytes(), len(asked)),), "ids", comparable=True)
    numbers = itertools.count()

    def choose() -> int:
        decision, ticket = app.router.choose(Query(f"r{next(numbers)}", MODEL, None, request, policy))
        ticket.first_byte()
        ticket.end("ok")
        return decision.chosen.match.credit

    assert choose() == tokens
    benchmark(choose)
