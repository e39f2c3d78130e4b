"""What users and operators touch: headers of the data port, the admin API, the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from kvsync.engine_sim.config import TINY_LLAMA
from tests.faults.fleet import SYNC, Batches, Listed, sim
from tests.faults.gateway import Gateway
from tests.faults.process import running
from tests.faults.words import asks, text, tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLICIES = ("kv-aware", "prefix-cache", "least-request", "power-of-two", "random", "round-robin")
ADAPTER = "tiny-sql"


@dataclass(frozen=True)
class Place:
    gateway: Gateway
    engines: list[Listed]
    batches: Batches

    async def applied(self) -> None:
        await self.gateway.applied(self.batches.of(*self.engines))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(batches: Batches, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        engines = [
            Listed(name, await stack.enter_async_context(sim("tiny", adapters=(ADAPTER,), seed=seed)))
            for seed, name in enumerate(("a", "b"))
        ]
        entries = [listed.entry | {"labels": {"zone": zone}} for listed, zone in zip(engines, ("x", "y"), strict=True)]
        config = SYNC | {"models": [{"name": "tiny", "tokenizer": str(TINY_LLAMA), "engines": entries}]}
        folder = tmp_path_factory.mktemp("surface")
        gateway = await stack.enter_async_context(running(folder, config))
        await gateway.live()
        yield Place(gateway, engines, batches)


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": tokens(), "max_tokens": 1, **fields}


# ---- the data port


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_routing_strategy_header_chooses_the_policy(place: Place, policy: str) -> None:
    engines: Counter[str] = Counter()
    for _ in range(4):
        answer, decision = await place.gateway.ask("/v1/completions", _body(), {"routing-strategy": policy})
        assert decision.record["policy"] == answer.headers["routing-strategy"] == policy
        assert answer.engine == decision.worker
        assert answer.headers["target-pod-ip"] in {each.engine.url.removeprefix("http://") for each in place.engines}
        engines[answer.engine] += 1
    if policy == "round-robin":
        assert engines == {"a": 2, "b": 2}


@pytest.mark.parametrize("policy", ["kv-aware", "prefix-cache"])
async def test_cache_aware_policies_go_to_the_cache(place: Place, policy: str) -> None:
    body = _body()
    first, _ = await place.gateway.ask("/v1/completions", body, {"routing-strategy": "random"})
    await place.applied()
    for _ in range(4):
        answer, decision = await place.gateway.ask("/v1/completions", body, {"routing-strategy": policy})
        assert (answer.engine, answer.cached, decision.credited) == (first.engine, 96, 96)


async def test_an_unknown_policy_is_refused(place: Place) -> None:
    answer = await place.gateway.post("/v1/completions", _body(), {"routing-strategy": "fastest"})
    assert answer.status == 400
    assert answer.headers["x-error-routing"] == "true"
    assert answer.error["message"] == "incorrect routing strategy fastest"


async def test_a_client_cannot_choose_its_target(place: Place) -> None:
    other = {"a": place.engines[1], "b": place.engines[0]}
    body = _body()
    home, _ = await place.gateway.ask("/v1/completions", body)
    await place.applied()
    target = other[home.engine].engine.url.removeprefix("http://")
    for name in ("target-pod", "target-pod-ip", "x-gateway-destination-endpoint", "Target-Pod"):
        answer, decision = await place.gateway.ask("/v1/completions", body, {name: target})
        assert answer.engine == decision.worker == home.engine, name
        assert answer.headers["target-pod-ip"] != target


@pytest.mark.parametrize(
    ("selector", "engine"),
    [("zone=x", "a"), ("zone=y", "b"), ("zone!=x", "b"), ("zone in (y, z)", "b"), ("!colour,zone notin (y)", "a")],
)
async def test_the_external_filter_narrows_the_choice(place: Place, selector: str, engine: str) -> None:
    body = _body()
    for _ in range(3):
        answer, decision = await place.gateway.ask("/v1/completions", body, {"external-filter": selector})
        assert answer.engine == engine
        assert set(decision.credit) == {engine}


@pytest.mark.parametrize(
    ("selector", "status", "message"),
    [("zone=nowhere", 503, "error on selecting target pod"), ("zone in x", 400, "incorrect external filter")],
)
async def test_a_filter_that_leaves_nobody_or_is_none(place: Place, selector: str, status: int, message: str) -> None:
    answer = await place.gateway.post("/v1/completions", _body(), {"external-filter": selector})
    assert answer.status == status
    assert answer.headers["x-error-routing"] == "true"
    assert answer.error["message"].startswith(message)


async def test_a_clients_request_id_is_kept(place: Place) -> None:
    answer, decision = await place.gateway.ask("/v1/completions", _body(), {"request-id": "my-request.1"})
    assert answer.request_id == decision.record["request_id"] == "my-request.1"
    answer, _ = await place.gateway.ask("/v1/completions", _body(), {"request-id": "no good"})
    assert answer.request_id != "no good"


async def test_models_and_adapters_are_listed(place: Place) -> None:
    status, content = await place.gateway.get("/v1/models")
    assert status == 200
    for name in ("tiny", ADAPTER):
        assert f'"id":"{name}"'.encode() in content
    assert (await place.gateway.get("/v1/models/nobody"))[0] == 404


@pytest.mark.parametrize("path", ["/tokenize", "/reset_prefix_cache", "/sim/fault", "/v1/workers", "/metrics"])
async def test_what_is_not_listed_does_not_exist(place: Place, path: str) -> None:
    answer = await place.gateway.post(path, _body())
    assert (answer.status, answer.error["message"]) == (501, "unknown request path")


# ---- the admin port


async def test_workers_are_listed_with_all_that_is_known(place: Place) -> None:
    await place.gateway.ask("/v1/completions", _body(), {"routing-strategy": "round-robin"})
    await place.gateway.ask("/v1/completions", _body(), {"routing-strategy": "round-robin"})
    await place.applied()
    rows = await place.gateway.workers()
    assert set(rows) == {"a", "b"}
    published = place.batches.of(*place.engines)
    for listed in place.engines:
        row = rows[listed.name]
        known = {"state": "live", "trust": "exact", "breaker": "closed", "block_size": 16, "ready": True}
        assert known.items() <= row.items()
        assert row["last_sequence"] == published[listed.name] - 1
        assert row["blocks"] > 0
        assert (row["running"], row["queued_prefill_tokens"]) == (0, 0)
        assert (row["model"], row["adapters"], row["url"]) == ("tiny", [ADAPTER], listed.engine.url)


async def test_match_answers_for_tokens_text_messages_adapter_and_salt(place: Place) -> None:
    ids, prompt, messages = tokens(), text(), asks(text())
    questions: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("/v1/completions", {"prompt": ids}, {"tokens": ids}),
        ("/v1/completions", {"prompt": prompt}, {"prompt": prompt}),
        ("/v1/chat/completions", {"messages": messages}, {"messages": messages}),
    ]
    for path, asked, question in questions:
        for model, salt in (("tiny", None), (ADAPTER, None), ("tiny", "alpha")):
            named = question | ({"model": "tiny", "adapter": ADAPTER} if model == ADAPTER else {"model": "tiny"})
            if salt:
                named["cache_salt"] = salt
            before = await place.gateway.match(**named)
            assert not any(row["credit"] for row in before["workers"].values()), named
            body = {"model": model, "max_tokens": 1, **asked, **({"cache_salt": salt} if salt else {})}
            answer, _ = await place.gateway.ask(path, body)
            await place.applied()
            after = await place.gateway.match(**named)
            held = (answer.prompt_tokens - 1) // 16 * 16
            assert after["tokens"] == answer.prompt_tokens
            for worker, row in after["workers"].items():
                credit = held if worker == answer.engine else 0
                by_tier = {"gpu": credit} if credit else {}
                assert row == {"credit": credit, "by_tier": by_tier, "expected": 0, "trust": "exact"}, named


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ({"model": "nobody", "tokens": [1]}, 404),
        ({"model": "tiny", "adapter": "nobody", "tokens": [1]}, 404),
        ({"model": "tiny"}, 400),
        ({"model": "tiny", "tokens": [1], "prompt": "x"}, 400),
        ({"model": "tiny", "tokens": [-1]}, 400),
        ({"model": "tiny", "tokens": "x"}, 400),
        ({"tokens": [1]}, 400),
    ],
)
async def test_a_bad_question_is_told_what_is_wrong(place: Place, question: Mapping[str, Any], status: int) -> None:
    answer = await place.gateway.admin.post("/v1/match", question)
    assert answer.status == status
    assert answer.error["message"]


async def test_a_decision_explains_itself(place: Place) -> None:
    body = _body()
    home, _ = await place.gateway.ask("/v1/completions", body)
    await place.applied()
    answer, decision = await place.gateway.ask("/v1/completions", body)
    record = decision.record
    assert record["worker"] == answer.engine == home.engine
    assert record["why"] == "least work: of 100 prompt tokens 96 credited, 0 expected"
    assert (record["prompt_tokens"], record["tokens"]["source"]) == (100, "ids")
    candidates = {each["worker"]: each for each in record["candidates"]}
    assert set(candidates) == {"a", "b"}
    assert candidates[home.engine]["score"] == 4
    assert candidates["b" if home.engine == "a" else "a"]["score"] == 100
    assert str(body["prompt"][:3])[1:-1] not in str(record), "what was asked is in the record"


async def test_a_decision_that_is_not_kept_is_not_found(place: Place) -> None:
    status, content = await place.gateway.admin.get("/v1/decisions/never-was")
    assert status == 404
    assert b"no decision is kept" in content


async def test_metrics_have_the_names_of_aibrix_and_our_own(place: Place) -> None:
    await place.gateway.chat("tiny", asks(text()), max_tokens=1)
    await place.applied()
    page = await place.gateway.metrics()
    zmq = ("connections", "disconnections", "reconnect_attempts", "missed_events", "replay_requests", "replay_success")
    assert {f"aibrix_kvcache_zmq_{name}_total" for name in (*zmq, "replay_failures")} <= page.names
    assert {"aibrix_gateway_request_total", "aibrix_gateway_in_flight_requests"} <= page.names
    assert not [name for name in page.names if name.startswith("aibrix_prefix_cache_")], "the switch is off"
    published = place.batches.of(*place.engines)
    for worker, batches in published.items():
        assert page.total("aibrix_kvcache_zmq_connection_status", pod_key=worker) == 1
        assert page.total("aibrix_kvcache_zmq_last_sequence_id", pod_key=worker) == batches - 1
        processed = page.total("aibrix_kvcache_zmq_events_processed_total", pod_key=worker, event_type="BlockStored")
        assert processed >= 1
        assert page.total("kvsync_worker_blocks", worker=worker) > 0
        assert page.total("kvsync_worker_trust", worker=worker, trust="exact") == 1
    before = page.total("aibrix_gateway_request_model_success_total", model="tiny")
    await place.gateway.ask("/v1/completions", _body())
    page = await place.gateway.metrics()
    assert page.total("aibrix_gateway_request_model_success_total", model="tiny") == before + 1
    assert page.total("aibrix_gateway_in_flight_requests") == 0
    assert page.total("aibrix_tokenizer_pool_requests_total", model="tiny") >= 1
