"""The small parts: cache, breaker, pool, single flight, proof, first blocks, truncation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.breaker import Breaker
from kvsync.tokenize.block0 import DELAY, MOST, MOST_TOKENS, PATIENCE, FirstBlocks
from kvsync.tokenize.cache import OVERHEAD, TokenCache
from kvsync.tokenize.errors import QueueFull
from kvsync.tokenize.flight import SingleFlight
from kvsync.tokenize.pool import BoundedPool
from kvsync.tokenize.prove import Proof, common_tokens
from kvsync.tokenize.truncate import cut, cut_text
from tests.unit.tokenize.support import pack, unpack


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestCache:
    def test_the_least_recently_used_goes_first(self) -> None:
        cache = TokenCache(2 * (OVERHEAD + 4))
        cache.put(b"a", b"aaaa")
        cache.put(b"b", b"bbbb")
        assert cache.get(b"a") == b"aaaa"
        cache.put(b"c", b"cccc")
        assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == (b"aaaa", None, b"cccc")
        assert cache.stats() == {"entries": 2, "bytes": 2 * (OVERHEAD + 4), "hits": 3, "misses": 1, "evictions": 1}

    def test_putting_again_replaces(self) -> None:
        cache = TokenCache(10_000)
        cache.put(b"a", b"a" * 400)
        cache.put(b"a", b"b" * 40)
        assert cache.get(b"a") == b"b" * 40
        assert cache.stats()["bytes"] == OVERHEAD + 40

    def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing(self) -> None:
        cache = TokenCache(OVERHEAD + 10)
        cache.put(b"a", b"a" * 10)
        cache.put(b"b", b"b" * 11)
        assert (cache.get(b"a"), cache.get(b"b")) == (b"a" * 10, None)

    def test_age(self) -> None:
        clock = Clock()
        cache = TokenCache(1000, max_age=5, clock=clock)
        cache.put(b"a", b"a")
        clock.now += 5
        assert cache.get(b"a") == b"a"
        clock.now += 0.1
        assert cache.get(b"a") is None
        assert cache.stats()["bytes"] == 0

    @given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.binary(max_size=300))))
    def test_never_beyond_its_limit(self, puts: list[tuple[bytes, bytes]]) -> None:
        cache = TokenCache(1000)
        for key, value in puts:
            cache.put(key, value)
            assert cache.stats()["bytes"] <= 1000
        held = [v for k in (b"a", b"b", b"c", b"d") if (v := cache.get(k)) is not None]
        assert cache.stats()["bytes"] == sum(len(v) + OVERHEAD for v in held)


class TestBreaker:
    def breaker(self, clock: Clock) -> Breaker:
        return Breaker(3, 5.0, clock)

    def fail(self, breaker: Breaker, times: int) -> None:
        for _ in range(times):
            breaker.begin()
            breaker.failure()

    def test_opens_after_a_row_of_failures(self) -> None:
        breaker = self.breaker(Clock())
        self.fail(breaker, 2)
        breaker.begin()
        breaker.success()
        self.fail(breaker, 2)
        assert breaker.state == "closed"
        self.fail(breaker, 1)
        assert (breaker.state, breaker.permits) == ("open", False)

    def test_a_trip_needs_no_row_and_is_one_opening(self) -> None:
        clock = Clock()
        breaker = self.breaker(clock)
        for openings in (1, 2):
            breaker.begin()
            breaker.trip()
            assert (breaker.state, breaker.permits, breaker.openings) == ("open", False, openings)
            clock.now += 5.0
            assert breaker.permits

    def test_what_says_nothing_neither_counts_nor_clears_the_row(self) -> None:
        breaker = self.breaker(Clock())
        for _ in range(10):
            breaker.begin()
            breaker.release()
        assert breaker.permits
        self.fail(breaker, 2)
        breaker.begin()
        breaker.release()
        self.fail(breaker, 1)
        assert not breaker.permits

    def test_half_open_lets_one_through(self) -> None:
        clock = Clock()
        breaker = self.breaker(clock)
        self.fail(breaker, 3)
        clock.now += 5
        assert (breaker.state, breaker.permits) == ("half-open", True)
        breaker.begin()
        assert not breaker.permits
        breaker.release()
        assert breaker.permits
        self.fail(breaker, 1)
        assert breaker.state == "open"
        clock.now += 5
        breaker.begin()
        breaker.success()
        assert (breaker.state, breaker.permits, breaker.openings) == ("closed", True, 2)


class TestPool:
    async def test_refuses_what_would_wait_too_long(self) -> None:
        pool = BoundedPool(threads=1, queue=1)
        go = threading.Event()
        try:
            running = [asyncio.ensure_future(pool.run(go.wait, 30)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await pool.run(go.wait)
            assert pool.stats() == {"pending": 2, "limit": 2, "refused": 1}
            go.set()
            assert await asyncio.gather(*running) == [True, True]
            assert await pool.run(len, b"abc") == 3
        finally:
            go.set()
            pool.close()

    async def test_a_cancelled_job_gives_its_place_back_and_never_runs(self) -> None:
        pool = BoundedPool(threads=1, queue=1)
        go, ran = threading.Event(), threading.Event()
        try:
            first = asyncio.ensure_future(pool.run(go.wait, 30))
            second = asyncio.ensure_future(pool.run(ran.set))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            third = asyncio.ensure_future(pool.run(len, b"ab"))
            await asyncio.sleep(0)
            go.set()
            assert await first is True
            assert await third == 2
            assert not ran.is_set()
        finally:
            go.set()
            pool.close()

    async def test_what_a_job_raises_reaches_its_caller(self) -> None:
        pool = BoundedPool(1, 1)
        with pytest.raises(ValueError, match="invalid literal"):
            await pool.run(int, "x")
        pool.close()


class TestSingleFlight:
    async def test_equal_calls_share_one(self) -> None:
        flights: SingleFlight[bytes] = SingleFlight()
        calls: list[bytes] = []
        go = asyncio.Event()

        async def call(key: bytes) -> bytes:
            calls.append(key)
            await go.wait()
            return key

        keys = [b"k", b"k", b"other", b"k"]
        waiting = [asyncio.ensure_future(flights.run(key, partial(call, key))) for key in keys]
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(*waiting) == keys
        assert (sorted(calls), flights.shared, len(flights)) == ([b"k", b"other"], 2, 0)

    async def test_a_cancelled_waiter_takes_nothing_from_the_others(self) -> None:
        flights: SingleFlight[str] = SingleFlight()
        go = asyncio.Event()

        async def call() -> str:
            await go.wait()
            return "answer"

        first, second = (asyncio.ensure_future(flights.run(b"k", call)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        assert await second == "answer"

    async def test_the_last_waiter_gone_ends_the_call_and_the_next_begins_anew(self) -> None:
        flights: SingleFlight[str] = SingleFlight()
        ended = asyncio.Event()

        async def hang() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return "never"

        async def answer() -> str:
            return "answer"

        waiting = [asyncio.ensure_future(flights.run(b"k", hang)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await flights.run(b"k", answer) == "answer"
        await asyncio.wait_for(ended.wait(), 5)
        assert len(flights) == 0

    async def test_a_failure_is_everybodys_and_not_remembered(self) -> None:
        flights: SingleFlight[str] = SingleFlight()

        async def fail() -> str:
            raise ValueError("no")

        results = await asyncio.gather(*(flights.run(b"k", fail) for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [ValueError] * 3
        assert len(flights) == 0


class TestProof:
    def proof(self, chance: Callable[[], float] = lambda: 1.0) -> Proof:
        return Proof(3, 0.1, chance=chance)

    def test_equal_answers_prove_one_shape_of_one_name(self) -> None:
        proof = self.proof()
        for _ in range(2):
            proof.compared("m", "plain", b"same", b"same")
        assert proof.state("m", "plain") == "unproved"
        proof.compared("m", "plain", b"same", b"same")
        assert proof.state("m", "plain") == "proved"
        assert proof.state("m", "tools") == "unproved"
        assert proof.state("adapter", "plain") == "unproved"

    def test_a_share_stays_compared(self) -> None:
        chances = iter([0.05, 0.5])
        proof = self.proof(lambda: next(chances))
        assert proof.wants_comparison("m", "plain"), "all before the proof"
        for _ in range(3):
            proof.compared("m", "plain", b"same", b"same")
        assert [proof.wants_comparison("m", "plain") for _ in range(2)] == [True, False]

    @pytest.mark.parametrize("before", [0, 2, 5])
    def test_one_difference_ends_it(self, before: int, caplog: pytest.LogCaptureFixture) -> None:
        proof = self.proof()
        for _ in range(before):
            proof.compared("m", "plain", b"same", b"same")
        proof.compared("m", "plain", pack(1, 2, 3), pack(1, 2, 4))
        for _ in range(10):
            proof.compared("m", "plain", b"same", b"same")
        assert proof.state("m", "plain") == "disabled"
        assert not proof.wants_comparison("m", "plain")
        assert "first difference at 2" in caplog.text
        assert len(caplog.records) == 1

    def test_a_suspicion_asks_for_a_new_proof(self) -> None:
        proof = self.proof()
        for _ in range(5):
            proof.compared("m", "plain", b"same", b"same")
        proof.suspect("m", "plain")
        assert proof.state("m", "plain") == "unproved"
        for _ in range(3):
            proof.compared("m", "plain", b"same", b"same")
        assert proof.state("m", "plain") == "proved"
        assert proof.stats() == {"m:plain": {"state": "proved", "compared": 8, "equal": 3, "suspicions": 1}}

    @given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
    def test_common_tokens(self, one: list[int], other: list[int]) -> None:
        naive = 0
        for a, b in zip(one, other, strict=False):
            if a != b:
                break
            naive += 1
        assert common_tokens(pack(*one), pack(*other)) == naive


class TestFirstBlocks:
    """Rows of three absences are a suspicion."""

    def blocks(self, row: int = 3) -> None:
        self.clock = Clock()
        self.suspected: list[tuple[str, str]] = []
        self.asked: list[tuple[object, ...]] = []
        self.held: bool | None = False

        def held(worker: str, model: str, adapter: str | None, cache_salt: str | None, tokens: bytes) -> bool | None:
            self.asked.append((worker, model, adapter, cache_salt, tokens))
            return self.held

        suspect = lambda name, shape: self.suspected.append((name, shape))  # noqa: E731
        self.first = FirstBlocks(held, suspect, self.clock, row=row)

    def sample(self, shape: str = "plain") -> int | None:
        return self.first.sample("m", None, None, shape, pack(7, 8, 9))

    def look(self, times: int, held: bool | None, shape: str = "plain") -> None:
        """So many requests, each answered and looked up."""
        for _ in range(times):
            self.held = held
            number = self.sample(shape)
            assert number is not None
            self.first.answered(number, "w")
            self.clock.now += DELAY
            spare = self.first.sample("m", None, None, shape, bytes(4 * MOST_TOKENS + 4))
            assert spare is None, "too long to be a sample: this call only has the last one looked up"

    def test_a_request_is_looked_up_a_moment_after_its_answer(self) -> None:
        self.blocks()
        number = self.first.sample("m", "x", "s", "plain", pack(7, 8))
        assert number is not None
        self.clock.now += 10
        self.sample()
        assert self.asked == [], "it is not answered yet"
        self.first.answered(number, "w")
        self.clock.now += DELAY / 2
        self.sample()
        assert self.asked == [], "its events may be on their way"
        self.clock.now += DELAY / 2
        self.sample()
        assert self.asked == [("w", "m", "x", "s", pack(7, 8))]
        self.clock.now += 10
        self.sample()
        assert len(self.asked) == 1

    def test_presence_confirms(self) -> None:
        self.blocks()
        self.look(20, True)
        assert self.suspected == []
        assert self.first.stats() == {"confirmed": 20, "absent": 0, "unknown": 0, "unanswered": 0}

    def test_a_long_row_of_absences_is_suspicious_and_the_next_row_is_longer(self) -> None:
        self.blocks()
        self.look(2, False)
        assert self.suspected == []
        self.look(1, False)
        assert self.suspected == [("m", "plain")]
        self.look(5, False)
        assert len(self.suspected) == 1
        self.look(1, False)
        assert len(self.suspected) == 2
        assert self.first.stats()["absent"] == 9

    def test_one_presence_ends_the_row_and_not_knowing_does_not(self) -> None:
        self.blocks()
        for _ in range(5):
            self.look(2, False)
            self.look(1, True)
        assert self.suspected == []
        self.look(2, False)
        self.look(9, None)
        self.look(1, False)
        assert self.suspected == [("m", "plain")]
        assert self.first.stats()["unknown"] == 9

    def test_shapes_have_rows_of_their_own(self) -> None:
        self.blocks()
        for _ in range(3):
            self.look(1, False, "tools")
            self.look(1, True)
        assert self.suspected == [("m", "tools")]

    def test_an_adapter_is_suspected_by_its_name(self) -> None:
        self.blocks(row=1)
        number = self.first.sample("m", "x", None, "plain", pack(1))
        assert number is not None
        self.first.answered(number, "w")
        self.clock.now += DELAY
        self.sample()
        assert self.suspected == [("x", "plain")]

    def test_few_are_kept_and_those_without_an_answer_give_way(self) -> None:
        self.blocks()
        numbers = [self.sample() for _ in range(MOST)]
        assert None not in numbers
        assert self.sample() is None
        self.clock.now += PATIENCE / 2
        for number in numbers[:2]:
            assert number is not None
            self.first.answered(number, "w")
        assert self.sample() is None, "answered ones keep their place until they are looked up"
        self.clock.now += DELAY
        assert self.sample() is not None
        assert self.sample() is not None
        assert self.sample() is None
        self.clock.now += PATIENCE / 2
        assert self.sample() is not None
        assert self.first.stats()["unanswered"] == MOST - 2

    def test_an_answer_that_comes_too_late_or_twice_changes_nothing(self) -> None:
        self.blocks(row=1)
        numbers = [self.sample() for _ in range(MOST)]
        self.clock.now += PATIENCE
        fresh = self.sample()
        assert (numbers[0], fresh) == (0, MOST)
        self.first.answered(0, "w")
        self.first.answered(MOST, "w")
        self.first.answered(MOST, "w")
        self.clock.now += DELAY
        self.sample()
        assert len(self.asked) == 1

    def test_long_prompts_are_no_samples(self) -> None:
        self.blocks()
        assert self.first.sample("m", None, None, "plain", bytes(4 * MOST_TOKENS)) is not None
        assert self.first.sample("m", None, None, "plain", bytes(4 * MOST_TOKENS + 4)) is None


class TestTruncation:
    """``cut`` and ``cut_text`` against what the engine's library does (left by default, special tokens kept)."""

    @pytest.mark.parametrize(
        ("keep", "side", "left"),
        [(2, None, [2, 3]), (2, "left", [2, 3]), (2, "right", [1, 2]), (3, None, [1, 2, 3]), (9, "right", [1, 2, 3])],
    )
    def test_cut(self, keep: int, side: Any, left: list[int]) -> None:
        assert unpack(cut(pack(1, 2, 3), keep, side)) == left

    @pytest.mark.parametrize("keep", range(1, 12))
    @pytest.mark.parametrize("around", ["<s> $A", "$A </s>", "<s> $A </s>", "$A"])
    def test_a_text_keeps_its_special_tokens(self, keep: int, around: str) -> None:
        from tokenizers import processors

        from tests.unit.tokenize.test_local import byte_level

        tokenizer = byte_level()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[("<s>", 2), ("</s>", 3)]
        )
        text = "hello world"
        whole, bare = (tokenizer.encode(text, add_special_tokens=special).ids for special in (True, False))
        kept = cut_text(pack(*whole), pack(*bare), keep)
        special = len(whole) - len(bare)
        if keep <= special:
            assert kept is None
            return
        tokenizer.enable_truncation(keep, direction="left")
        assert kept is not None
        assert unpack(kept) == tokenizer.encode(text).ids

    def test_texts_that_do_not_fit_are_unknown(self) -> None:
        assert cut_text(pack(1, 2, 3), pack(2, 9), 2) is None
        assert cut_text(pack(1, 2, 3), pack(1, 2, 3, 4), 2) is None
        assert cut_text(pack(1, 2, 3), pack(1, 2, 4), 2) is None
        assert cut_text(pack(1, 2, 3), pack(9), 3) == pack(1, 2, 3), "nothing to cut"
