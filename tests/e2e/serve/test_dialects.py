"""Events of every dialect, as real vLLM sent them, steer requests over HTTP.

For each version there are two models of two engines: one pair publishes while the gateway looks on, the other had
published everything before the gateway was there. Engine ``a`` of a pair has the captured stream, engine ``b`` holds
one prompt of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.client import Answer, streamed, until
from tests.faults.engine import Engine
from tests.faults.fleet import SYNC
from tests.faults.gateway import Decision, Gateway
from tests.faults.process import running
from tests.faults.words import tokens
from tests.wire import ARRAY_LENGTHS, as_array, batch, stored

from .captured import HIDE_SALTS, Ask, Batch, Dialect, dialects, question

pytestmark = pytest.mark.asyncio(loop_scope="module")

DIALECTS = {dialect.version: dialect for dialect in dialects()}
OTHER = tokens(100)
"""The prompt that engine ``b`` holds."""
OTHER_HELD = 96
_ROUND_ROBIN = {"routing-strategy": "round-robin"}


@dataclass(frozen=True)
class Pair:
    """The two engines of one model."""

    model: str
    dialect: Dialect
    a: Engine
    b: Engine
    gateway: Gateway

    @property
    def worker_a(self) -> str:
        return f"{self.model}-a"

    @property
    def worker_b(self) -> str:
        return f"{self.model}-b"

    async def applied(self) -> None:
        await self.gateway.applied(
            {self.worker_a: self.a.publisher.published, self.worker_b: self.b.publisher.published}
        )

    async def ask(self, ask: Ask, *, stream: bool) -> tuple[Answer, Decision]:
        """Send one request; the engines report what vLLM reported."""
        self.a.cached, self.b.cached = ask.cached, 0
        body = {**ask.body, "model": ask.adapter or self.model}
        return await self.gateway.ask(ask.path, streamed(body) if stream else body)


@dataclass(frozen=True)
class Pairs:
    live: Mapping[str, Pair]
    late: Mapping[str, Pair]
    """Those that had published before the gateway was started."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pairs]:
    async with AsyncExitStack() as stack:
        started: list[tuple[bool, Dialect, str, Engine, Engine]] = []
        for dialect in DIALECTS.values():
            before, _ = dialect.until_most_is_cached()
            for late in (False, True):
                model = f"{'late' if late else 'live'}-{dialect.version}"
                a = await stack.enter_async_context(_engine(dialect, before if late else []))
                b = await stack.enter_async_context(_engine(dialect, [_others(dialect)]))
                started.append((late, dialect, model, a, b))
        section = {"models": [_model(*each) for each in started]}
        folder = tmp_path_factory.mktemp("dialects")
        gateway = await stack.enter_async_context(running(folder, SYNC | section))
        await gateway.live()
        found = {model: Pair(model, dialect, a, b, gateway) for _, dialect, model, a, b in started}
        for pair in found.values():
            await pair.applied()
        yield Pairs(
            {version: found[f"live-{version}"] for version in DIALECTS},
            {version: found[f"late-{version}"] for version in DIALECTS},
        )


def _engine(dialect: Dialect, already: Sequence[Batch]) -> Engine:
    tokens_of = {question(step.body): step.tokens for step in dialect.steps if isinstance(step, Ask)}
    engine = Engine(
        blocks=dialect.blocks,
        topic_frame=dialect.replay_topic,
        bodies=[batch.payload for batch in already],
        tokenizes=lambda body: tokens_of.get(question(body), []),
    )
    engine.cached = 0
    return engine


def _others(dialect: Dialect) -> Batch:
    """A batch that stores :data:`OTHER`, in the dialect's form, in blocks of its size."""
    size = 32 if dialect.version == "0.32" else 16
    event = stored(range(1, OTHER_HELD // size + 1), OTHER[:OTHER_HELD], block_size=size)
    forms = {"0.9.2": "0.9.0", "0.11.2": "0.10.2", "0.23.0": "0.22.0"}
    assert set(forms.values()) <= set(ARRAY_LENGTHS)
    form = forms.get(dialect.version)
    return Batch(b"", 0, batch(as_array(event, form) if form else event))


def _model(late: bool, dialect: Dialect, model: str, a: Engine, b: Engine) -> dict[str, Any]:
    adapters = [] if late else dialect.adapters  # an adapter's name says which model it is of
    engines = [e.entry | {"name": f"{model}-{name}", "adapters": list(adapters)} for name, e in (("a", a), ("b", b))]
    return {"name": model, "engines": engines}


@pytest.fixture(params=DIALECTS)
def live(request: pytest.FixtureRequest, pairs: Pairs) -> Pair:
    return pairs.live[request.param]


@pytest.fixture(params=DIALECTS)
def late(request: pytest.FixtureRequest, pairs: Pairs) -> Pair:
    return pairs.late[request.param]


async def test_requests_follow_the_captured_stream(live: Pair) -> None:
    """Through stores, evictions and clears: credit is at every moment what vLLM itself found in its cache."""
    found = 0
    blind = False
    """A salted request went to engine ``a``, whose events hide that: nothing is credited any more, clear or not."""
    audited: Counter[bool] = Counter()
    """Comparable answers of workers that were trusted, by whether the engine reported what was credited."""
    for number, step in enumerate(live.dialect.steps):
        if isinstance(step, Batch):
            assert live.a.publisher.send(step.payload) == step.sequence
            continue
        await live.applied()
        answer, decision = await live.ask(step, stream=bool(number % 2))
        if decision.record["tokens"]["comparable"] and decision.record["mode"] in ("exact", "partial"):
            audited[decision.credited == answer.cached] += 1
        if not step.foreseeable:
            continue
        assert decision.credit[live.worker_a] == (0 if blind else step.cached), step.label
        assert decision.credit[live.worker_b] == 0, step.label
        if step.cached and not blind:
            found += 1
            assert answer.engine == live.worker_a, step.label
        blind |= live.dialect.version in HIDE_SALTS and "cache_salt" in step.body and answer.engine == live.worker_a
    assert found >= (10 if live.dialect.version == "0.32" else 3 - blind)

    async def judged() -> bool:
        page = await live.gateway.metrics()
        return all(
            answers
            == sum(
                page.total("kvsync_audit_answers_total", worker=worker, verdict=verdict)
                for worker in (live.worker_a, live.worker_b)
                for verdict in verdicts
            )
            for verdicts, answers in (
                (["right"], audited[True]),
                (["over", "under", "evicted_meanwhile"], audited[False]),
            )
        )

    await until(judged, f"the audit of {audited}")
    row = (await live.gateway.workers())[live.worker_a]
    skipped = {word: count for word, count in row["index"]["counts"].items() if word.startswith(("skip", "undecod"))}
    assert not skipped


@pytest.mark.parametrize("stream", [False, True])
async def test_what_only_a_replay_brings_steers_as_well(late: Pair, stream: bool) -> None:
    _, ask = late.dialect.until_most_is_cached()
    assert ask.cached >= 48
    for _ in range(2):
        before = len(late.a.served)
        answer, decision = await late.ask(ask, stream=stream)
        assert answer.text == "o k"
        assert answer.cached == ask.cached
        assert answer.engine == decision.worker == late.worker_a
        assert len(late.a.served) == before + 1
        assert decision.credit == {late.worker_a: ask.cached, late.worker_b: 0}
        assert decision.record["mode"] == "exact"


async def test_the_other_engine_gets_what_it_holds(late: Pair) -> None:
    answer, decision = await late.gateway.complete(late.model, OTHER, max_tokens=1)
    assert answer.engine == late.worker_b
    assert decision.credit == {late.worker_a: 0, late.worker_b: OTHER_HELD}


async def test_a_prompt_that_nobody_holds_goes_where_less_runs(late: Pair) -> None:
    """Four at once, none of them answered before all are sent: two for each engine."""
    engines = {late.worker_a: late.a, late.worker_b: late.b}
    before = {name: len(engine.served) for name, engine in engines.items()}

    async def arrived(count: int) -> None:
        async def look() -> bool:
            return sum(len(engine.served) - before[name] for name, engine in engines.items()) == count

        await until(look, f"{count} requests at the engines")

    for engine in engines.values():
        engine.open.clear()
    sent = []
    try:
        for count in range(1, 5):
            body = {"model": late.model, "prompt": tokens(100), "max_tokens": 1}
            sent.append(asyncio.create_task(late.gateway.ask("/v1/completions", body)))
            await arrived(count)
    finally:
        for engine in engines.values():
            engine.open.set()
    answers = await asyncio.gather(*sent)
    assert sorted(answer.engine for answer, _ in answers) == sorted(2 * list(engines))
    assert all(decision.credited == 0 for _, decision in answers)


async def test_a_salted_request_ends_trust_where_the_dialect_hides_salts(late: Pair) -> None:
    """Blocks of a salted prompt would look like anybody's. Runs last: there is no clear that restores trust."""
    hides = late.dialect.version in HIDE_SALTS
    body = {"model": late.model, "prompt": tokens(100), "max_tokens": 1, "cache_salt": "alpha"}
    served = {(await late.gateway.ask("/v1/completions", body, _ROUND_ROBIN))[0].engine for _ in range(2)}
    assert served == {late.worker_a, late.worker_b}
    _, ask = late.dialect.until_most_is_cached()
    _, decision = await late.ask(ask, stream=False)
    assert decision.credit[late.worker_a] == (0 if hides else ask.cached)
    assert decision.record["mode"] == ("load-only" if hides else "exact")
