"""The stated time model, on a clock that passes at once."""

from __future__ import annotations

import asyncio

import pytest

from kvsync.engine_sim.rank import EngineGone, Rank, Running
from kvsync.engine_sim.request import Request
from kvsync.engine_sim.scheduler import Token
from kvsync.engine_sim.timing import LoopClock, Pace, TimeModel
from tests.unit.engine_sim.support import ask, make_scheduler


class InstantClock:
    """Sleeping lets other tasks run, then moves the time."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep_until(self, when: float) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.time = max(self.time, when)


class Bench:
    """A rank at work whose tokens are stamped with the clock's time."""

    def __init__(self, time: TimeModel, **options: int) -> None:
        self.clock = InstantClock()
        self.rank = Rank(0, make_scheduler(256, **options), None, time, self.clock)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.rank.run())

    async def times(self, running: Running) -> list[float]:
        stamps = []
        token: Token | None = None
        while token is None or token.finish is None:
            token = await running.next()
            stamps.append(round(self.clock.time - 100.0, 6))
        return stamps

    async def close(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


@pytest.mark.parametrize(("speed", "factor"), [(1.0, 1.0), (10.0, 0.1)])
async def test_one_request(speed: float, factor: float) -> None:
    bench = Bench(TimeModel(prefill_rate=100, decode_rate=10, speed=speed))
    stamps = await bench.times(bench.rank.submit(ask(range(50), 4)))
    assert stamps == pytest.approx([0.5 * factor, 0.6 * factor, 0.7 * factor, 0.8 * factor])
    await bench.close()


async def test_cached_tokens_take_no_time() -> None:
    bench = Bench(TimeModel(prefill_rate=100, decode_rate=10))
    await bench.times(bench.rank.submit(ask(range(50))))
    start = bench.clock.time
    again = bench.rank.submit(ask(range(50)))
    await bench.times(again)
    assert again.request.cached == 48
    assert bench.clock.time - start == pytest.approx(0.02)
    await bench.close()


async def test_a_prompt_slows_those_that_decode_by_its_chunks() -> None:
    bench = Bench(TimeModel(prefill_rate=100, decode_rate=10), max_tokens=20)
    first = bench.rank.submit(ask(range(10), 4))
    second = bench.rank.submit(ask(range(100, 130)))
    # Step 1: 10 + 10 prompt tokens; step 2: a decode and 19; step 3: a decode and 1; step 4: a decode.
    assert await bench.times(first) == pytest.approx([0.2, 0.49, 0.6, 0.7])
    assert await bench.times(second) == pytest.approx([0.7])
    await bench.close()


async def test_time_without_work_does_not_count() -> None:
    bench = Bench(TimeModel(prefill_rate=100, decode_rate=10))
    await bench.times(bench.rank.submit(ask(range(10))))
    bench.clock.time = 500.0
    await bench.times(bench.rank.submit(ask(range(100, 110))))
    assert bench.clock.time == pytest.approx(500.1)
    await bench.close()


async def test_steps_do_not_drift_and_a_long_stall_is_not_made_up_for() -> None:
    clock = InstantClock()
    pace = Pace(clock)
    await pace.pass_step(1.0)
    clock.time += 0.02  # The host wakes up late …
    await pace.pass_step(1.0)
    assert clock.time == pytest.approx(102.0)  # … and the next step makes up for it.
    clock.time += 50
    await pace.pass_step(1.0)
    assert clock.time == pytest.approx(152.95)


async def test_cancelling_frees_at_once() -> None:
    bench = Bench(TimeModel())
    running = bench.rank.submit(ask(range(40), 20))
    await running.next()
    assert bench.rank.scheduler.cache.pool.usage > 0
    bench.rank.cancel(running)
    bench.rank.cancel(running)
    assert bench.rank.load == 0
    assert bench.rank.scheduler.cache.pool.usage == 0
    assert bench.rank.scheduler.counters.finished["abort"] == 1
    await bench.close()


async def test_a_stopped_rank_tells_those_who_wait() -> None:
    bench = Bench(TimeModel())
    running = bench.rank.submit(ask(range(40), 20))
    assert (await running.next()).finish is None
    await bench.close()
    assert running.tokens.qsize() == 1
    with pytest.raises(EngineGone):
        await running.next()


async def test_a_frozen_rank_produces_nothing_until_thawed() -> None:
    bench = Bench(TimeModel())
    bench.rank.freeze()
    running = bench.rank.submit(ask(range(4)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert running.tokens.empty()
    bench.rank.thaw()
    assert (await running.next()).finish == "length"
    await bench.close()


async def test_the_real_clock_sleeps() -> None:
    clock = LoopClock()
    start = clock.now()
    await clock.sleep_until(start + 0.02)
    assert clock.now() >= start + 0.0199
    await clock.sleep_until(start)


@pytest.mark.parametrize("field", ["prefill_rate", "decode_rate", "speed"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_rates_that_are_none(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        TimeModel(**{field: value})


def test_a_preempted_sequence_computes_its_tokens_again() -> None:
    """A step that takes up more than one token of a sequence with output is prefill, not decode."""
    model = TimeModel(prefill_rate=100, decode_rate=10)
    scheduler = make_scheduler(64)
    request: Request = ask(range(10), 5)
    scheduler.add(request)
    scheduler.finish(scheduler.plan())
    plan = scheduler.plan()
    assert model.step(plan) == pytest.approx(0.1)
    scheduler.finish(plan)
    assert scheduler.reset_cache(preempt=True)
    assert model.step(scheduler.plan()) == pytest.approx(0.12)
