"""What answers, failures and faults do to what is believed: one gateway with real ports before scripted engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvsync.routing import breaker, evidence, policies
from tests.faults.client import until
from tests.faults.engine import Engine, reset, status
from tests.faults.serving import Serving, serving

PROMPT = [7 * i % 997 for i in range(321)]
WITHOUT_SYNC = {"enabled": False}


async def audited(gateway: Serving, worker: str, *, verdict: str) -> float:
    return (await gateway.metrics()).total("kvsync_audit_answers_total", worker=worker, verdict=verdict)


async def mode(gateway: Serving, wanted: str, model: str = "tiny") -> None:
    async def look() -> bool:
        return bool((await gateway.ready())["models"][model]["mode"] == wanted)

    await until(look, f"{model} is served by {wanted} knowledge")


async def asked(engine: Engine, requests: int) -> None:
    async def look() -> bool:
        return len(engine.served) == requests

    await until(look, f"request {requests} at engine {engine.name}")


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rest ends within the test, however slow the machine is."""
    monkeypatch.setattr(breaker, "FIRST_REST", 600.0)


# ---- audit


async def test_a_right_answer_is_right_and_nothing_follows(tmp_path: Path) -> None:
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        engine.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)
        for _ in range(5):
            await gateway.complete("tiny", PROMPT)
        assert await audited(gateway, "a", verdict="right") == 5
        row = (await gateway.workers())["a"]
        assert row["audit"] == {
            "verdicts": {"right": 5},
            "contradictions": 0,
            "proposal": None,
            "metrics_hits": None,
        }


async def test_credit_that_answers_contradict_is_taken_back_and_learnt_anew(tmp_path: Path) -> None:
    """The engine lost its cache and said nothing. Three answers show it; the replay brings the truth."""
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        engine.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)
        engine.evict(PROMPT, 64, lost=True)  # only a replay has it, and nothing shows that anything is missing
        for _ in range(3):
            answer, decision = await gateway.complete("tiny", PROMPT)
            assert decision.credited == 320
            assert answer.cached == 64
        await gateway.credited("a", PROMPT, 64)
        page = await gateway.metrics()
        assert page.total("kvsync_audit_contradictions_total", worker="a") == 1
        row = (await gateway.workers())["a"]
        assert row["index"]["reannouncing"]
        assert row["audit"]["contradictions"] == 1
        await gateway.complete("tiny", PROMPT)
        assert await audited(gateway, "a", verdict="right") == 1


async def test_credit_that_the_same_events_would_give_again_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter was replaced under its name: its old blocks are there, and serve nobody. Learning the same events
    anew credits them again; the second time they are forgotten (I18)."""
    monkeypatch.setattr(evidence, "PAUSE", 0.0)
    async with Engine("a") as engine, serving(tmp_path, {**engine.entry, "adapters": ["x"]}) as gateway:
        engine.store(PROMPT, lora_name="x", lora_id=1)
        await gateway.credited("a", PROMPT, 320, model="x")
        engine.cached = 0

        for times, done in ((1, "relearned"), (2, "forgotten")):
            for _ in range(3):
                _, decision = await gateway.complete("x", PROMPT)
                assert decision.credited == 320

            async def followed(times: int = times, done: str = done) -> bool:
                row = (await gateway.workers())["a"]
                return bool(row["audit"]["contradictions"] == times and row["index"]["counts"].get(done, 0))

            await until(followed, f"contradiction {times}, {done}")
            await gateway.credited("a", PROMPT, 320 if times == 1 else 0, model="x")
        assert (await gateway.workers())["a"]["trust"] == "partial"


async def test_blocks_evicted_between_choice_and_answer_are_no_contradiction(tmp_path: Path) -> None:
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        for number in range(1, 5):
            engine.store(PROMPT)
            await gateway.credited("a", PROMPT, 320)
            engine.open.clear()
            asking = asyncio.create_task(gateway.complete("tiny", PROMPT))
            await asked(engine, number)
            engine.evict(PROMPT)
            await gateway.credited("a", PROMPT, 0)
            engine.open.set()
            answer, decision = await asking
            assert (decision.credited, answer.cached) == (320, 0)

        async def judged() -> bool:
            return await audited(gateway, "a", verdict="evicted_meanwhile") == 4

        await until(judged, "four answers judged")
        assert (await gateway.workers())["a"]["audit"]["contradictions"] == 0


async def test_an_engine_with_eagle_is_found_out_and_proposed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        engine.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)
        engine.cached = 304
        for _ in range(20):
            await gateway.complete("tiny", PROMPT)
        await gateway.credited("a", PROMPT, 304)
        row = (await gateway.workers())["a"]
        assert row["audit"]["proposal"] == "set spec_decode: eagle for engine a"
        assert row["audit"]["contradictions"] == 0
        assert "set spec_decode: eagle for engine a" in caplog.text
        await gateway.complete("tiny", PROMPT)
        assert await audited(gateway, "a", verdict="right") == 1


async def test_after_a_loss_answers_heal_what_no_event_says_again(tmp_path: Path) -> None:
    """Hits emit nothing: what the engine said it had is credit again, and stays it until an event speaks against it."""
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        engine.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)
        gateway.app.index.forget("a")
        assert await gateway.credit("a", model="tiny", tokens=PROMPT) == 0
        await gateway.complete("tiny", PROMPT)
        await gateway.credited("a", PROMPT, 320)
        engine.evict(PROMPT)
        await gateway.credited("a", PROMPT, 0)


async def test_what_engines_count_themselves_is_shown_beside_and_changes_nothing(tmp_path: Path) -> None:
    queries = 'vllm:prefix_cache_queries_total{engine="0"}'
    hits = 'vllm:prefix_cache_hits_total{engine="0"}'
    async with Engine("a") as engine:
        engine.gauges |= {queries: 1000, hits: 900}
        async with serving(tmp_path, engine, events={"metrics_interval": 0.1}) as gateway:
            await gateway.complete("tiny", PROMPT)

            async def shown() -> bool:
                engine.gauges[queries] += 500
                compared = (await gateway.workers())["a"]["audit"]["metrics_hits"]
                return compared is not None and compared["engine"]["queries"] >= 1000

            await until(shown, "the engine's own figures")
            row = (await gateway.workers())["a"]
            assert row["audit"]["metrics_hits"]["engine"]["hits"] == 0
            assert row["audit"]["metrics_hits"]["here"] == {"prompt_tokens": 321, "credited": 0}
            assert row["trust"] == "exact"


# ---- modes


async def test_the_mode_is_told_in_readyz_workers_and_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvsync")
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        await mode(gateway, "exact")
        assert (await gateway.ready())["models"] == {"tiny": {"mode": "exact", "workers": {"exact": 1}}}
        assert (await gateway.workers())["a"]["mode"] == "exact"
        page = await gateway.metrics()
        assert page.total("kvsync_worker_mode", worker="a", mode="exact") == 1
        assert page.total("kvsync_model_mode", model="tiny", mode="exact") == 1
        assert page.total("kvsync_model_mode", model="tiny", mode="load-only") == 0
        gateway.app.index.forget("a")
        await mode(gateway, "partial")
        assert "model tiny is served by partial knowledge (before: exact): 1 of 1 workers partial" in caplog.text
        assert (
            "worker a is served by partial knowledge (before: exact): something of its events was lost" in caplog.text
        )


async def test_without_kv_sync_answers_serve(tmp_path: Path) -> None:
    async with (
        Engine("a") as a,
        Engine("b") as b,
        serving(tmp_path, a, b, events=WITHOUT_SYNC) as gateway,
    ):
        assert (await gateway.ready())["models"]["tiny"]["mode"] == "load-only"
        a.caches = b.caches = True
        prompts = [[number, *PROMPT] for number in range(6)]
        first = [(await gateway.complete("tiny", prompt))[1] for prompt in prompts]
        again = [(await gateway.complete("tiny", prompt))[1] for prompt in prompts]
        assert [decision.worker for decision in again] == [decision.worker for decision in first]
        assert {decision.record["mode"] for decision in again} == {"observed"}
        assert all(decision.record["observed"] == 320 for decision in again)
        assert all(decision.credited == 0 for decision in again)
        await mode(gateway, "observed")


async def test_the_index_is_bounded_and_says_who_lost_something(tmp_path: Path) -> None:
    """Above ``index.max_blocks`` ends of prefixes go, what is left is sound, and its worker is partial (I17)."""
    async with Engine("a") as engine, serving(tmp_path, engine, index={"max_blocks": 32}) as gateway:
        long = [*range(1000, 1000 + 40 * 16 + 1)]
        engine.store(long)
        await gateway.trusted("a", "partial")
        row = (await gateway.workers())["a"]
        assert row["blocks"] <= 32
        assert row["index"]["counts"]["capped"] == 40 - row["blocks"]
        assert await gateway.credit("a", model="tiny", tokens=long) == 16 * row["blocks"]
        answer, decision = await gateway.complete("tiny", long)
        assert (answer.cached, decision.credited) == (640, 16 * row["blocks"])
        await gateway.credited("a", long, 640)  # what the answer said that it has


# ---- failures and faults


@pytest.mark.usefixtures("long_rests")
async def test_an_engine_that_answers_500_is_left_alone_and_comes_back(tmp_path: Path) -> None:
    """The best prefix is there all the while: three failures, and then the others serve (R7)."""
    async with Engine("a") as a, Engine("b") as b, serving(tmp_path, a, b) as gateway:
        a.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)
        a.always = status(500)
        body = {"model": "tiny", "prompt": PROMPT}
        answers = [await gateway.post("/v1/completions", body) for _ in range(8)]
        assert [(answer.status, answer.engine) for answer in answers] == [(500, "a")] * 3 + [(200, "b")] * 5
        assert (await gateway.workers())["a"]["breaker"] == "open"
        assert (await gateway.metrics()).total("kvsync_worker_breaker", worker="a", state="open") == 1
        a.always, b.always = None, reset
        for state in ("half-open", "closed"):  # nobody else is left: it is tried for all that
            answer = await gateway.post("/v1/completions", body)
            assert (answer.status, answer.engine) == (200, "a")
            assert (await gateway.workers())["a"]["breaker"] == state


@pytest.mark.usefixtures("long_rests")
async def test_an_engine_whose_connections_are_reset_is_left_alone_at_once(tmp_path: Path) -> None:
    async with Engine("a") as a, Engine("b") as b, serving(tmp_path, a, b) as gateway:
        a.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)
        a.always = reset
        for _ in range(5):
            answer = await gateway.post("/v1/completions", {"model": "tiny", "prompt": PROMPT})
            assert (answer.status, answer.engine) == (200, "b")
        assert len(a.served) == 1


async def test_requests_that_are_refused_do_not_take_an_engine_out(tmp_path: Path) -> None:
    """100 prompts that are too long, each a 400 (R7)."""
    async with Engine("a") as a, Engine("b") as b, serving(tmp_path, a, b) as gateway:
        a.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)
        a.always = status(400)
        for _ in range(100):
            answer = await gateway.post("/v1/completions", {"model": "tiny", "prompt": PROMPT})
            assert (answer.status, answer.engine) == (400, "a")
        assert (await gateway.workers())["a"]["breaker"] == "closed"


async def test_a_fault_in_a_policy_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setitem(policies.POLICIES, "kv-aware", broken)
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        _, decision = await gateway.complete("tiny", PROMPT)
        assert (decision.record["policy"], decision.record["mode"]) == ("least-request", "load-only")
        assert (await gateway.metrics()).total("kvsync_routing_faults_total") == 1


async def test_an_answer_does_not_tell_what_was_known_of_its_prompt(tmp_path: Path) -> None:
    """Its fields are the same whether nothing of it, a part or all was credited; only the request's name differs. (What
    the engine's body reports is the engine's.) Match lengths are on the admin port alone (X3)."""
    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        seen = []
        for held, prompt in ((0, [9, *PROMPT]), (160, [*PROMPT[:160], *PROMPT]), (320, PROMPT)):
            if held:
                engine.store(prompt[:held])
                await gateway.credited("a", prompt, held)
            answer, decision = await gateway.complete("tiny", prompt)
            assert decision.credited == held
            names = {name.lower(): value for name, value in answer.headers.items()}
            seen.append({name: value for name, value in names.items() if name not in ("request-id", "content-length")})
        assert seen[0] == seen[1] == seen[2]


# ---- forgetting by order, and going


async def test_an_adapter_s_blocks_can_be_forgotten_by_order(tmp_path: Path) -> None:
    """It was replaced by another one under its name, and the engine's cache was cleared without a word (I18)."""
    async with Engine("a") as engine, serving(tmp_path, {**engine.entry, "adapters": ["x"]}) as gateway:
        engine.store(PROMPT, lora_name="x", lora_id=1)
        await gateway.credited("a", PROMPT, 320, model="x")
        answer = await gateway.admin.post("/v1/workers/a/forget", {})
        assert answer.status == 200
        assert await gateway.credit("a", model="x", tokens=PROMPT) == 0
        row = (await gateway.workers())["a"]
        assert row["trust"] == "partial"
        assert row["index"]["counts"]["forgotten"] == 1
        assert (await gateway.admin.post("/v1/workers/nobody/forget", {})).status == 404


async def test_a_worker_that_is_gone_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its requests may end later; nothing of it comes back (L2)."""
    async with Engine("a") as a, Engine("b") as b, serving(tmp_path, a, b) as gateway:
        a.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)
        a.open.clear()
        asking = asyncio.create_task(gateway.post("/v1/completions", {"model": "tiny", "prompt": PROMPT}))
        await asked(a, 1)
        gateway.list(b.entry)

        async def gone() -> bool:
            return "a" not in {engine.name for engine in gateway.app.fleet}

        await until(gone, "the engine is gone")
        assert await gateway.credit("a", model="tiny", tokens=PROMPT) == 0
        a.open.set()
        answer = await asking
        assert (answer.status, answer.cached) == (200, 320)
        _, page = await gateway.admin.get("/metrics")
        assert b'"a"' not in page
        assert set(await gateway.workers()) == {"b"}
        assert gateway.app.audit.describe("a") is None
        assert not gateway.app.router.observes("a")
        assert "a" not in gateway.app.modes.workers
        assert "a" not in gateway.app.router.breakers()


async def test_an_engine_that_sleeps_is_left_alone_while_another_is_awake(tmp_path: Path) -> None:
    """A request to it would wait until somebody wakes it."""
    awake = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"}'
    body = {"model": "tiny", "prompt": PROMPT}
    async with (
        Engine("a") as a,
        Engine("b") as b,
        serving(tmp_path, a, b, events={"metrics_interval": 0.1}) as gateway,
    ):
        a.store(PROMPT)
        await gateway.credited("a", PROMPT, 320)

        async def told(engine: Engine, asleep: bool) -> None:
            engine.gauges[awake] = 0 if asleep else 1

            async def look() -> bool:
                return bool((await gateway.workers())[engine.name]["asleep"] is asleep)

            await until(look, f"{engine.name} is known to sleep: {asleep}")

        await told(a, True)
        answers = [await gateway.post("/v1/completions", body) for _ in range(6)]
        assert {answer.engine for answer in answers} == {"b"}
        assert (await gateway.decision(answers[0].request_id)).record["asleep"] == ["a"]
        await told(b, True)
        answers = [await gateway.post("/v1/completions", body) for _ in range(6)]
        assert {answer.status for answer in answers} == {200}, "when all sleep, any may be woken any moment"
        await told(a, False)
        answers = [await gateway.post("/v1/completions", body) for _ in range(6)]
        assert {answer.engine for answer in answers} == {"a"}
        await told(b, False)
        await told(a, True)
        assert set(gateway.app.kv_sync.asleep()) == {"a"}
        gateway.deliver("gone", gateway.discovered("a"))

        async def nobody() -> bool:
            return not gateway.app.kv_sync.asleep()

        await until(nobody, "who is gone does not sleep")
