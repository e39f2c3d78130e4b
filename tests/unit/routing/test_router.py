"""The router: who is asked, who is chosen, what is written down."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.discovery.model import Change
from kvsync.index.match import Match
from kvsync.requests import ports
from kvsync.routing.decision import Query
from kvsync.routing.errors import BadFilter, BadPolicy, NoReadyEngine, NoSuchModel, NoTarget
from kvsync.routing.knowledge import PLACES
from kvsync.routing.records import as_json
from kvsync.tokenize.types import ImageSpan, Prompt, TokenizedRequest
from tests.unit.routing.world import UNKNOWN, World, engine, tokenized, tokens

PROMPT = tokenized(range(100))


def credit(**tokens: int) -> Mapping[str, Match]:
    return {worker: Match(n, 0, {"gpu": n} if n else {}, "exact") for worker, n in tokens.items()}


def test_the_worker_that_holds_the_prompt_is_chosen_and_the_record_says_why() -> None:
    world = World(engine("a"), engine("b"))
    world.index.answer = lambda _: credit(a=0, b=96)
    decision, _ = world.ask(PROMPT, request_id="r-1")
    assert decision.chosen.worker == "b"
    assert decision.mode == "exact"
    assert decision.policy == "kv-aware"
    assert decision.prompt_tokens == 100
    assert dict(decision.scores) == {"a": 100, "b": 4}
    assert "96 credited" in decision.why
    assert world.router.get("r-1") is decision
    assert world.loads.snapshot()["b"].queued_prefill_tokens == 4
    shown = json.loads(json.dumps(as_json(decision)))
    assert shown["worker"] == "b"
    assert shown["candidates"][1] == {
        "worker": "b",
        "engine": "b",
        "rank": 0,
        "credit": 96,
        "by_tier": {"gpu": 96},
        "expected": 0,
        "trust": "exact",
        "running": 0,
        "queued_prefill_tokens": 0,
        "score": 4,
    }
    assert shown["tokens"] == {"source": "ids", "reason": None, "reads_cache": True, "comparable": False}


def test_a_record_holds_nothing_of_what_was_asked() -> None:
    world = World(engine("a"))
    decision, _ = world.ask(tokenized(range(100), cache_salt="secret"))
    assert decision.tokenized.prompts == ()
    assert "secret" not in repr(decision)


def test_records_are_bounded_the_oldest_goes_first_and_a_retry_replaces() -> None:
    world = World(engine("a"), engine("b"), decisions=2)
    for name in ("r1", "r2", "r1", "r3"):
        world.ask(request_id=name)
    assert [world.router.get(name) is not None for name in ("r1", "r2", "r3")] == [True, False, True]
    none = World(engine("a"), decisions=0)
    none.ask(request_id="r")
    assert none.router.get("r") is None


@pytest.mark.parametrize(("header", "used"), [(None, "least-request"), ("random", "random"), ("kv-aware", "kv-aware")])
def test_the_header_beats_the_settings(header: str | None, used: str) -> None:
    world = World(engine("a"), policy="least-request")
    assert world.ask(policy=header)[0].policy == used


@pytest.mark.parametrize(
    ("locked", "header", "used"),
    [
        (False, None, "random"),
        (False, "round-robin", "round-robin"),
        (True, None, "random"),
        (True, "round-robin", "random"),
        (True, "no-such", "random"),
    ],
)
def test_a_models_own_policy(locked: bool, header: str | None, used: str) -> None:
    """It beats the settings, and where it is locked, the header; a model beside it has none of it."""
    own = engine("a", policy="random", policy_locked=locked)
    world = World(own, engine("b", model="other"), policy="least-request")
    assert world.ask(policy=header)[0].policy == used
    assert world.ask(model="other")[0].policy == "least-request"
    world.router.apply(Change("changed", engine("a")))
    assert world.ask()[0].policy == "least-request"


@pytest.mark.parametrize("header", ["", "Random", "least-latency", "prefix-cache:1,random:2", "x\n"])
def test_an_unknown_policy_is_refused(header: str) -> None:
    world = World(engine("a"))
    with pytest.raises(BadPolicy, match="incorrect routing strategy"):
        world.ask(policy=header)
    assert world.sample("kvsync_routing_refused_total", reason="bad_policy") == 1


def test_who_can_not_be_served() -> None:
    world = World(engine("a", ready=False), engine("b", model="n", adapters=("x",)))
    with pytest.raises(NoSuchModel, match="model zzz does not exist"):
        world.ask(model="zzz")
    with pytest.raises(NoReadyEngine, match="error on getting pods for model m"):
        world.ask()
    with pytest.raises(NoReadyEngine, match="error on getting pods for model y"):
        world.ask(model="n", adapter="y")
    with pytest.raises(NoTarget, match="error on selecting target pod"):
        world.ask(model="n", exclude=frozenset({"b"}))
    with pytest.raises(NoTarget):
        world.ask(model="n", label_filter="tier=gold")
    with pytest.raises(BadFilter):
        world.ask(model="n", label_filter="tier in")
    assert world.loads.snapshot().get("b", None) is None or world.loads.snapshot()["b"].running == 0
    assert world.sample("kvsync_routing_refused_total", reason="no_target") == 2


def test_adapters_go_where_they_are_served() -> None:
    world = World(engine("a"), engine("b", adapters=("x",)))
    assert {world.worker(adapter="x") for _ in range(20)} == {"b"}
    world.worker(PROMPT, adapter="x")
    assert world.index.asked[-1]["adapter"] == "x"


def test_filters_and_exclusion_narrow_the_candidates() -> None:
    world = World(
        engine("a", labels={"tier": "gold"}), engine("b", data_parallel_size=2), engine("c", labels={"tier": "gold"})
    )

    def seen(**fields: Any) -> set[str]:
        decision, ticket = world.ask(**fields)
        ticket.end("ok")
        return {candidate.worker for candidate in decision.candidates}

    assert seen() == {"a", "b#0", "b#1", "c"}
    assert seen(label_filter="tier=gold") == {"a", "c"}
    assert seen(label_filter="tier=gold", exclude=frozenset({"a"})) == {"c"}
    assert seen(exclude=frozenset({"a", "b#0", "c"})) == {"b#1"}


@given(
    st.sets(st.sampled_from("abcdef"), max_size=5),
    st.sampled_from(["kv-aware", "prefix-cache", "least-request", "power-of-two", "random", "round-robin"]),
    st.integers(),
)
def test_an_excluded_worker_is_never_chosen(excluded: set[str], policy: str, seed: int) -> None:
    world = World(*map(engine, "abcdef"), policy=policy, seed=seed)
    world.index.answer = lambda _: credit(**dict.fromkeys(excluded, 100))
    for _ in range(6):
        decision, _ = world.ask(PROMPT, exclude=frozenset(excluded))
        assert decision.chosen.worker not in excluded
        assert not {candidate.worker for candidate in decision.candidates} & excluded


def test_a_retry_is_a_new_choice_and_says_who_was_tried() -> None:
    world = World(engine("a"), engine("b"))
    world.index.answer = lambda _: credit(a=96, b=0)
    first, ticket = world.ask(PROMPT, request_id="r")
    ticket.end("reset")
    second, ticket = world.ask(PROMPT, request_id="r", exclude=frozenset({first.chosen.worker}))
    ticket.end("ok")
    assert (first.chosen.worker, second.chosen.worker) == ("a", "b")
    assert second.extra["excluded"] == ["a"]
    assert as_json(second)["excluded"] == ["a"]
    assert world.sample("kvsync_worker_tries_total", worker="a", outcome="reset") == 1
    assert world.sample("kvsync_worker_tries_total", worker="b", outcome="ok") == 1


def test_a_ticket_ends_once() -> None:
    world = World(engine("a"))
    _, ticket = world.ask()
    ticket.end("ok")
    ticket.end("client_gone")
    assert world.sample("kvsync_worker_tries_total", worker="a", outcome="ok") == 1
    assert world.sample("kvsync_worker_tries_total", worker="a", outcome="client_gone") is None
    assert world.sample("kvsync_worker_running", worker="a") == 0


@pytest.mark.parametrize(
    ("what", "fields", "mode"),
    [
        (PROMPT, {}, "partial"),
        (PROMPT, {"policy": "random"}, "load-only"),
        (UNKNOWN, {}, "load-only"),
        (tokenized(range(100), reads_cache=False, reason="skips_cache"), {}, "load-only"),
    ],
)
def test_the_mode_says_what_knowledge_served(what: Any, fields: dict[str, Any], mode: str) -> None:
    world = World(engine("a"))
    world.index.answer = lambda _: {"a": Match(64, 0, {"gpu": 64}, "partial")}
    assert world.ask(what, **fields)[0].mode == mode


def test_an_index_without_workers_is_load_only_and_an_unknown_worker_has_no_trust() -> None:
    world = World(engine("a"), engine("b"))
    assert world.ask(PROMPT)[0].mode == "load-only"
    world.index.answer = lambda _: credit(a=0)
    decision, _ = world.ask(PROMPT, exclude=frozenset({"a"}))
    assert (decision.chosen.worker, decision.mode) == ("b", "load-only")


def test_a_prompt_with_images_is_matched_per_block_size_and_expected_by_its_images() -> None:
    def prompt(image: str) -> TokenizedRequest:
        span = ImageSpan(image, 128, 64)
        return TokenizedRequest((Prompt(tokens(*range(256)), 256, (span,)),), "remote")

    world = World(engine("a"), engine("b"))
    world.index.sizes = {"a": 16, "b": 32}
    world.index.answer = lambda _: credit(a=0, b=0)
    first, _ = world.ask(prompt("cat"))
    keys = [asked["block_keys"] for asked in world.index.asked]
    assert [len(each) for each in keys if isinstance(each, list)] == [12, 6]
    assert first.prompt_tokens == 256

    def expected(image: str) -> int:
        decision, ticket = world.ask(prompt(image))
        ticket.end("ok")
        return {c.worker: c.expected for c in decision.candidates}[first.chosen.worker]

    assert expected("dog") == 128, "what stands before the image is the same"
    assert expected("cat") == 256


def test_the_second_look_goes_to_the_index() -> None:
    world = World(engine("a"))
    world.index.sizes = {"a": 4}
    world.index.answer = lambda _: credit(a=4)
    assert world.router.held("a", "m", None, None, tokens(*range(9))) is True
    assert World(engine("a"), without_index=True).router.held("a", "m", None, None, tokens(*range(9))) is None


def test_a_second_look_at_an_index_that_raises_says_nothing() -> None:
    world = World(engine("a"))
    world.index.sizes = {"a": 4}

    def broken(_: array[int]) -> Mapping[str, Match]:
        raise RuntimeError("broken")

    world.index.answer = broken
    assert world.router.held("a", "m", None, None, tokens(*range(9))) is None
    assert world.sample("kvsync_routing_index_failures_total") == 1


def test_without_an_index_requests_go_by_load() -> None:
    world = World(engine("a"), engine("b"), without_index=True)
    first, _ = world.ask(tokenized(range(40), reannounces=True, hides_keys=True))
    second, _ = world.ask(tokenized(range(40)))
    assert {first.chosen.worker, second.chosen.worker} == {"a", "b"}
    assert first.mode == "load-only"


def test_a_request_that_skips_the_cache_gets_no_credit() -> None:
    world = World(engine("a"), engine("b"))
    world.index.answer = lambda _: credit(a=96, b=0)
    world.ask(exclude=frozenset({"b"}))
    decision, _ = world.ask(tokenized(range(100), reads_cache=False))
    assert decision.chosen.worker == "b"
    assert decision.chosen.match.credit == 0
    assert world.index.asked == []
    assert world.loads.snapshot()["b"].queued_prefill_tokens == 100


def test_a_failing_index_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    world = World(engine("a"), engine("b"), prefix_cache_metrics=True)

    def fail(_: array[int]) -> Mapping[str, Match]:
        raise RuntimeError("broken")

    world.index.answer = fail
    with caplog.at_level(logging.WARNING, "kvsync.routing"):
        for _ in range(5):
            decision, _ = world.ask(PROMPT)
    assert decision.mode == "load-only"
    assert world.sample("kvsync_routing_index_failures_total") == 5
    assert (
        world.sample(
            "aibrix_prefix_cache_routing_errors_total",
            model="m",
            reason="sync_indexer_unavailable",
            using_kv_sync="true",
        )
        == 5
    )
    (record,) = caplog.records
    assert "broken" in record.getMessage()
    assert record.exc_info is not None


def test_the_index_is_told_what_the_chosen_worker_will_do() -> None:
    world = World(engine("a"), engine("b"))
    world.index.answer = lambda _: credit(a=0, b=96)
    world.ask(tokenized(range(100), reannounces=True))
    world.ask(tokenized(range(100), hides_keys=True, cache_salt="s"))
    world.ask(PROMPT)
    assert world.index.told == [("reannouncing", "b"), ("hidden_keys", "b")]
    assert world.index.asked[1]["cache_salt"] == "s"


def test_an_index_that_has_a_worker_anew_is_told_again_until_the_worker_is_gone() -> None:
    """As after KV sync was off, when the index knew nobody and the requests went on."""
    world = World(engine("a"), engine("b"))
    world.index.answer = lambda _: credit(a=0, b=96)
    world.ask(tokenized(range(100), reannounces=True))
    world.ask(tokenized(range(100), hides_keys=True, cache_salt="s"))
    world.index.told.clear()
    world.router.introduced("a")
    assert world.index.told == []
    world.router.forget("b")
    world.router.introduced("b")
    assert world.index.told == [("reannouncing", "b"), ("hidden_keys", "b")]
    world.router.apply(Change("gone", engine("b")))
    world.index.told.clear()
    world.router.introduced("b")
    assert world.index.told == []
    World(engine("a"), without_index=True).router.introduced("a")


def test_a_process_that_is_listed_anew_is_still_what_it_was_told_to_be() -> None:
    """Another setting of a listed engine makes it another one, with the same process behind it."""
    world = World(engine("a"))
    world.ask(tokenized(range(100), reannounces=True))
    world.ask(tokenized(range(100), hides_keys=True, cache_salt="s"))
    world.router.apply(Change("gone", engine("a")))
    again = replace(engine("a"), uid="a#life2")
    elsewhere = replace(engine("a"), uid="other", url="http://other:8000")
    world.router.apply(Change("added", elsewhere))
    world.router.apply(Change("added", again))
    world.index.told.clear()
    world.router.introduced("other")
    assert world.index.told == []
    world.router.introduced("a#life2")
    assert world.index.told == [("reannouncing", "a#life2"), ("hidden_keys", "a#life2")]


def test_what_is_remembered_of_addresses_is_bounded() -> None:
    world = World()
    for number in range(PLACES + 2):
        one = engine(f"e{number}")
        world.router.apply(Change("added", one))
        world.ask(tokenized(range(100), reannounces=True))
        world.router.apply(Change("gone", one))
    world.index.told.clear()
    for number in (0, 1, 2, PLACES + 1):
        again = replace(engine(f"e{number}"), uid="again")
        world.router.apply(Change("added", again))
        world.router.introduced("again")
        assert bool(world.index.told) is (number > 1)
        world.router.apply(Change("gone", replace(again, url="http://nowhere:1")))
        world.index.told.clear()


def test_several_prompts_are_routed_by_their_summed_credit() -> None:
    world = World(engine("a"), engine("b"))

    def answer(prompt: array[int]) -> Mapping[str, Match]:
        if prompt[0] == 0:
            return {"a": Match(80, 0, {"gpu": 80}, "exact"), "b": Match(48, 2, {"gpu": 32, "cpu": 16}, "exact")}
        return {"b": Match(64, 3, {"gpu": 64}, "partial")}

    world.index.answer = answer
    decision, _ = world.ask(tokenized(range(100), range(1, 101)))
    assert decision.chosen.worker == "b"
    assert decision.chosen.match == Match(112, 5, {"gpu": 96, "cpu": 16}, "partial")
    assert decision.prompt_tokens == 200


def test_expected_prefixes_of_several_prompts_are_summed() -> None:
    world = World(engine("a"), engine("b"))
    world.ask(tokenized(range(200), range(1000, 1200)), exclude=frozenset({"b"}))
    decision, _ = world.ask(tokenized(range(200), range(1000, 1200)))
    by_worker = {candidate.worker: candidate.expected for candidate in decision.candidates}
    assert by_worker == {"a": 384, "b": 0}


def test_expected_prefixes_count_beyond_the_credit_only() -> None:
    world = World(engine("a"))
    world.ask(tokenized(range(640)))
    world.index.answer = lambda _: {"a": Match(512, 7, {"gpu": 512})}
    decision, _ = world.ask(tokenized(range(640)))
    assert decision.chosen.expected == 640 - 512
    world.index.answer = lambda _: {"a": Match(624, 7, {"gpu": 624})}
    decision, _ = world.ask(tokenized([*range(639), 1]))
    assert decision.chosen.expected == 7  # what the index itself expects


def test_expectations_of_other_contexts_do_not_count() -> None:
    world = World(engine("a", adapters=("x",)), engine("b", model="n"))
    world.ask(tokenized(range(640)))
    for what, fields in [
        (tokenized(range(640)), {"adapter": "x"}),
        (tokenized(range(640), cache_salt="s"), {}),
        (tokenized(range(640)), {"model": "n"}),
    ]:
        assert world.ask(what, **fields)[0].chosen.expected == 0


def test_an_answer_ends_the_expectation() -> None:
    world = World(engine("a"))
    _, ticket = world.ask(tokenized(range(640)))
    ticket.end("ok")
    assert world.ask(tokenized(range(640)))[0].chosen.expected == 0


def test_a_worker_that_is_gone_takes_everything_with_it() -> None:
    old = engine("b", data_parallel_size=2)
    world = World(engine("a"), old)
    tickets = [world.ask(tokenized(range(640)), exclude=frozenset({"a", "b#0"}))[1] for _ in range(2)]
    assert world.sample("kvsync_worker_running", worker="b#1") == 2
    world.router.apply(Change("gone", old))
    assert world.sample("kvsync_worker_running", worker="b#1") is None
    world.router.apply(Change("added", old))
    decision, _ = world.ask(tokenized(range(640)), exclude=frozenset({"a", "b#0"}))
    assert (decision.chosen.expected, decision.chosen.load.running) == (0, 0)
    for ticket in tickets:
        ticket.end("ok")
    assert world.sample("kvsync_worker_running", worker="b#1") == 1


def test_a_change_is_seen_by_the_next_choice() -> None:
    world = World(engine("a"))
    assert world.worker() == "a"
    world.router.apply(Change("added", engine("b")))
    world.router.apply(Change("changed", engine("a", ready=False)))
    assert {world.worker() for _ in range(5)} == {"b"}


def test_choices_are_counted() -> None:
    world = World(engine("a"), prefix_cache_metrics=True, policy="prefix-cache")
    world.index.answer = lambda _: credit(a=48)
    world.ask(PROMPT)
    assert world.sample("kvsync_decisions_total", model="m", policy="prefix-cache", mode="exact") == 1
    assert world.sample("kvsync_prompt_tokens_total", model="m") == 100
    assert world.sample("kvsync_credited_tokens_total", model="m") == 48
    assert world.sample("kvsync_routing_seconds_count") == 1
    assert world.sample("aibrix_gateway_in_flight_requests") == 1
    labels = {"model": "m", "using_kv_sync": "true"}
    assert world.sample("aibrix_prefix_cache_routing_decisions_total", match_percent_bucket="26-50", **labels) == 1
    assert world.sample("aibrix_prefix_cache_routing_selection_total", selection="prefix_match", **labels) == 1


def test_round_robin_takes_turns() -> None:
    world = World(engine("a"), engine("b"), engine("c"), policy="round-robin")
    assert [world.worker() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_names_that_nobody_serves_are_not_remembered() -> None:
    world = World(engine("a"))
    before = len(world.metrics.render())
    for i in range(100):
        with pytest.raises(NoSuchModel):
            world.ask(model=f"made-up-{i}")
    assert len(world.metrics.render()) < before + 300


def test_a_request_that_outlives_its_worker_leaves_no_series() -> None:
    old = engine("b")
    world = World(old)
    _, ticket = world.ask()
    world.router.apply(Change("gone", old))
    ticket.end("client_gone")
    assert world.sample("kvsync_worker_tries_total", worker="b", outcome="client_gone") is None
    assert world.sample("kvsync_worker_tries_total", worker="gone", outcome="client_gone") == 1


def test_the_router_and_the_fleet_fit_the_gateway_s_doors() -> None:
    world = World(engine("a"))
    routing: ports.Routing = world.router
    fleet: ports.Fleet = world.fleet
    telemetry: ports.Telemetry = world.metrics
    assert fleet.resolve("m") == ("m", None)
    decision, ticket = routing.choose(Query("r", "m", None, UNKNOWN))
    ticket.end("ok")
    telemetry.answered("/v1/completions", 200, 0.1, "engine")
    assert decision.chosen.worker == "a"


def test_a_worker_that_sleeps_is_chosen_only_when_all_sleep() -> None:
    world = World(engine("a"), engine("b"), engine("c"))
    world.asleep = {"a", "c", "somebody-else"}
    for _ in range(5):
        decision, _ = world.ask()
        assert (decision.chosen.worker, decision.extra["asleep"]) == ("b", ["a", "c"])
    world.asleep = {"a", "b", "c"}
    decision, _ = world.ask()
    assert decision.chosen.worker in ("a", "c"), "b is busy"
    assert "asleep" not in decision.extra
    world.asleep = ()
    assert "asleep" not in world.ask()[0].extra


def test_who_sleeps_is_passed_over_whatever_its_cache_and_for_whom_failed_as_well() -> None:
    world = World(engine("a"), engine("b"), engine("c"), policy="round-robin")
    world.asleep = {"a"}
    failed, ticket = world.ask()
    ticket.end("connect_refused")
    assert failed.chosen.worker != "a"
    second, ticket = world.ask(exclude=frozenset({failed.chosen.worker}))
    assert second.chosen.worker == ({"b", "c"} - {failed.chosen.worker}).pop()
    assert second.extra == {"excluded": [failed.chosen.worker], "asleep": ["a"]}
    ticket.end("connect_refused")
    third, _ = world.ask()
    assert third.chosen.worker in ("b", "c"), "either may be back; who sleeps is not"
    assert third.extra == {"asleep": ["a"]}
    last, _ = world.ask(exclude=frozenset({"b", "c"}))
    assert last.chosen.worker == "a", "of those that are left all sleep"
