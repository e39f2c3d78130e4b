"""A fault inside the router costs a choice its quality, never the request; and what a choice may cost at most."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvsync.discovery.model import Change
from kvsync.index.match import Match, MatchTable
from kvsync.routing import expected, knowledge, policies
from kvsync.routing.errors import NoReadyEngine, NoTarget
from kvsync.tokenize.types import ImageSpan, Prompt, TokenizedRequest
from tests.unit.routing.world import UNKNOWN, World, engine, tokenized, tokens

PROMPT = tokenized(range(100), reannounces=True)


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a fault of ours")


def _policy(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(policies.POLICIES, "kv-aware", broken)


def _expected(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world.router._knowledge.expected, "lookup", broken)


def _observed(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world.router._knowledge.observed, "lookup", broken)


def _keys(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(knowledge, "prefix_keys", broken)


def _nonsense(world: World, patch: pytest.MonkeyPatch) -> None:
    world.index.answer = lambda _: {"a": None}  # type: ignore[dict-item]


def _pools(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world.router._pools, "of", broken)


@pytest.mark.parametrize("fault", [_policy, _expected, _observed, _keys, _nonsense, _pools])
def test_a_fault_in_choosing_sends_the_request_where_least_runs(
    fault: Callable[[World, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(engine("a"), engine("b"), engine("c", model="n"))
    world.ask(exclude=frozenset({"b"}))
    fault(world, monkeypatch)
    with caplog.at_level(logging.WARNING, "kvsync.routing"):
        decision, ticket = world.ask(PROMPT, request_id="r")
    assert (decision.chosen.worker, decision.policy, decision.mode) == ("b", "least-request", "load-only")
    assert "the log says why" in decision.why
    assert world.router.get("r") is decision
    assert world.sample("kvsync_routing_faults_total") == 1
    assert world.index.told == [("reannouncing", "b")], "the index must know of it all the same"
    (record,) = caplog.records
    assert record.exc_info is not None
    assert {name: load.running for name, load in world.loads.snapshot().items() if load.running} == {"a": 1, "b": 1}
    ticket.first_byte()
    ticket.end("ok")
    assert world.loads.snapshot()["b"] == type(world.loads.snapshot()["b"])(0, 0)


def test_faults_in_a_row_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world = World(engine("a"))
    _policy(world, monkeypatch)
    for _ in range(50):
        world.worker(PROMPT)
    assert world.sample("kvsync_routing_faults_total") == 50
    assert len(caplog.records) == 1


@pytest.mark.parametrize("broken_part", ["_records", "_metrics"])
def test_a_choice_that_can_not_be_recorded_stands(broken_part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(engine("a"), engine("b"))
    world.index.answer = lambda _: {"a": Match(0), "b": Match(96)}
    part = getattr(world.router, broken_part)
    monkeypatch.setattr(part, "add" if broken_part == "_records" else "decided", broken)
    decision, ticket = world.ask(PROMPT)
    assert (decision.chosen.worker, decision.policy) == ("b", "kv-aware")
    assert world.sample("kvsync_routing_faults_total") == 1
    assert world.loads.snapshot()["b"].running == 1
    ticket.end("ok")


def test_the_fallback_keeps_to_the_filter_and_to_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(engine("a", labels={"zone": "x"}), engine("b", labels={"zone": "x"}), engine("c"))
    _policy(world, monkeypatch)
    decision, _ = world.ask(label_filter="zone=x", exclude=frozenset({"a"}))
    assert decision.chosen.worker == "b"
    with pytest.raises(NoTarget):
        world.ask(label_filter="zone=x", exclude=frozenset({"a", "b"}))
    assert world.sample("kvsync_routing_refused_total", reason="no_target") == 1
    world.router.apply(Change("changed", engine("a", ready=False, model="z")))
    with pytest.raises(NoReadyEngine):
        world.ask(model="z")


# ---- what a choice costs


def test_a_choice_costs_what_its_workers_and_grid_points_cost_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """240,000 tokens, 96 workers: one lookup, one pass of hashing, about 80 keys, one candidate; memory in proportion
    to the workers, none to the prompt (F1)."""
    world = World(*[engine(f"e{i}") for i in range(96)])
    found = MatchTable({f"e{i}": Match(16 * i, 0, {"gpu": 16 * i}) for i in range(96)})
    world.index.answer = lambda _: found
    asked = TokenizedRequest((Prompt(tokens(*range(240_000)), 240_000),), "ids")
    hashed: list[int] = []
    real = expected.prefix_keys

    def counting(prompt: bytes, seed: int) -> list[int]:
        keys = real(prompt, seed)
        hashed.append(len(keys))
        return keys

    monkeypatch.setattr(knowledge, "prefix_keys", counting)
    monkeypatch.setattr(type(world.index), "match", lambda self, *_, **__: found)
    world.ask(asked)[1].end("ok")
    hashed.clear()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        decision, ticket = world.ask(asked, request_id="r")
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert decision.chosen.worker == "e95"
    assert len(hashed) == 1
    assert hashed[0] < 80
    assert peak < 60_000
    ticket.end("ok")


def test_a_decision_kept_costs_a_few_kilobytes() -> None:
    world = World(*[engine(f"e{i}") for i in range(64)], decisions=200)
    found = MatchTable({f"e{i}": Match(16 * i, 0, {"gpu": 16 * i}) for i in range(64)})
    world.index.match = lambda *_, **__: found  # type: ignore[method-assign]
    asked = TokenizedRequest((Prompt(tokens(*range(8192)), 8192, (ImageSpan("cat", 5, 3),)),), "ids")
    world.index.sizes = dict.fromkeys(found, 16)
    for _ in range(10):
        world.ask(asked)[1].end("ok")
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(200):
            world.ask(asked)[1].end("ok")
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept / 200 < 8_000


# ---- nothing stays


def test_churn_of_engines_leaves_nothing() -> None:
    """Loads, breakers, expected and observed prefixes, pools, turns and series go with their engine (L2)."""
    world = World(engine("stays"))
    router = world.router
    what = tokenized(range(640))

    def size() -> tuple[int, ...]:
        known = router._knowledge
        return (
            len(world.loads.snapshot()),
            len(router.breakers()),
            len(router._breakers._engines),
            len(router._breakers.resting),
            len(known.expected),
            known.expected.keys,
            len(known.observed),
            len(router._pools._pools),
            len(router._turns),
            len(router._workers),
            len(list(world.fleet)),
            len(world.metrics.render().splitlines()),
        )

    def life(i: int) -> None:
        each = engine(f"e{i}", data_parallel_size=2, adapters=(f"x{i}",))
        router.apply(Change("added", each))
        for outcome in ("ok", "engine_error", "connect_refused"):
            decision, ticket = world.ask(what, adapter=f"x{i}")
            ticket.end(outcome)
            router.answered(decision, what, None)
        late = world.ask(what, adapter=f"x{i}")
        router.apply(Change("gone", each))
        late[1].first_byte()
        late[1].end("upstream_died")
        router.answered(late[0], what, 0)
        world.worker()

    for i in range(20):
        life(i)
    before = size()
    for i in range(20, 500):
        life(i)
    assert size() == before


def test_unknown_prompts_cost_no_keys() -> None:
    world = World(engine("a"))
    world.ask(UNKNOWN)
    assert len(world.router._knowledge.expected) == 0
    assert world.index.asked == []
