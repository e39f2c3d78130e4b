"""What was lost and comes back: resync, partial streams that try again from number 0, rounds that lose replies, storms.

The histories at the end are those of well-known faults, applied to a real index.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvsync.events.stream import (
    MAX_BARREN_ROUNDS,
    MAX_RELEARNS,
    PROBE_INTERVAL,
    SETTLING,
    Action,
    Apply,
    Budget,
    Forget,
    State,
    Stream,
)
from kvsync.index.reference import ReferenceIndex
from tests.unit.events.driver import S
from tests.wire import batch as wire_batch
from tests.wire import removed, stored

# -- resync ----------------------------------------------------------------------------------------------------------


def test_resync_forgets_at_once_and_follows_the_epoch_anew() -> None:
    s = S().caught_up(5)
    s.live(6)
    assert s.resync() == ["Forget", ("ask", 0)]
    assert s.state == "catching_up"
    assert not s.stream.whole
    assert s.live(7) == [], "what comes live waits"
    assert s.round(*range(8)) == ["Relearn", *range(8), "StopReplay"]
    assert s.state == "live"
    assert s.stream.whole
    assert (s.counts.resyncs, s.counts.relearned, s.counts.epochs) == (1, 1, 0)
    assert s.live(8) == [8]
    assert s.budget.used == 0


def test_resync_of_an_engine_whose_buffer_no_longer_reaches_back_leaves_what_it_has() -> None:
    s = S().caught_up(5)
    s.resync()
    assert s.round(3, 4, 5) == ["Forget", 3, 4, 5, "StopReplay", ("ask", 5)]
    assert s.round(5) == ["StopReplay"]
    assert s.state == "live"
    assert not s.stream.whole
    assert s.counts.forgotten == 2
    assert s.counts.lost == 3


def test_resync_drops_what_a_replay_left_waiting() -> None:
    """Found by the model: nothing live came, so nothing was there to go on with, and its bytes stayed for ever."""
    s = S()
    s.connected()
    assert s.round(0, 2)[-1] == ("ask", 0)
    assert s.budget.used > 0
    s.resync()
    assert s.dead_rounds() == ["StopReplay", "Forget"]
    assert s.state == "live"
    assert s.budget.used == 0


def test_resync_without_an_answer_goes_on_behind_what_was_doubted() -> None:
    s = S().caught_up(5)
    s.live(6)
    s.resync()
    assert s.dead_rounds() == ["StopReplay", "Forget"]
    assert s.state == "live"
    assert s.live(7) == [7]
    assert not s.stream.whole


def test_resync_meets_another_process() -> None:
    for answer in ([], [0, 1]):
        s = S().caught_up(5)
        s.resync()
        assert s.round(*answer, epoch=1) == ["StopReplay", "NewEpoch", ("ask", 0)]
        assert s.stream.whole


def test_where_a_resync_went_on_is_forgotten_with_its_connection() -> None:
    """Found by the model: the number to go on with was taken over, and hid that nothing was published yet."""
    s = S().caught_up(0)
    s.live(1)
    s.resync()
    s.dead_rounds()
    s.disconnected()
    s.connected()
    assert s.round() == ["StopReplay", "Relearn"]
    assert s.stream.whole
    assert s.live(0, epoch=1) == [0]


def test_resync_without_replay_forgets_and_goes_on() -> None:
    s = S(can_replay=False)
    s.connected()
    s.live(0, 1)
    assert s.resync() == ["Forget"]
    assert s.state == "live"
    assert s.live(2) == [2]
    assert not s.stream.whole


def test_resync_before_the_first_connection_has_nothing_to_do() -> None:
    s = S()
    assert s.resync() == []
    assert s.connected() == [("ask", 0)]


def test_resync_while_the_connection_is_down_is_done_with_the_next() -> None:
    s = S().caught_up(5)
    s.disconnected()
    assert s.resync() == ["Forget"]
    assert s.connected() == [("ask", 0)]
    assert s.round(*range(6))[:7] == ["Relearn", *range(6)]


def test_resync_during_a_repair_takes_over() -> None:
    s = S().caught_up(5)
    s.live(8)
    assert s.resync() == ["StopReplay", "Forget", ("ask", 0)]
    assert s.state == "catching_up"
    assert s.round(*range(9)) == ["Relearn", *range(9), "StopReplay"]
    assert s.budget.used == 0


def test_resync_again_and_again_has_one_round_at_a_time() -> None:
    s = S().caught_up(5)
    for _ in range(50):
        s.resync()
    assert s.round(*range(6))[:7] == ["Relearn", *range(6)]
    assert s.round(5) == ["StopReplay"]
    assert s.stream.whole


# -- a partial stream ------------------------------------------------------------------------------------------------


def partial(last: int) -> S:
    """A stream that gave up on a gap because its replays did not answer for a while."""
    s = S().caught_up(last)
    s.live(last + 2)
    assert s.dead_rounds() == ["StopReplay", "Forget", last + 2]
    return s


def test_a_partial_stream_tries_again_from_number_0() -> None:
    s = partial(5)
    assert s.later(PROBE_INTERVAL) == [("ask", 0)]
    assert s.state == "live", "what it has counts until the buffer is known to reach back"
    assert s.live(8) == [8]
    assert s.round(*range(9)) == ["Relearn", *range(9), "StopReplay"]
    assert s.state == "live"
    assert s.stream.whole
    assert s.counts.epochs == 0


def test_after_a_truncated_replay_a_stream_stays_partial_until_a_restart() -> None:
    s = partial(5)
    s.later(PROBE_INTERVAL)
    s.started()
    assert s.replayed(2) == ["StopReplay"], "one reply is enough to see it"
    assert s.state == "live"
    for _ in range(3):
        assert s.later(PROBE_INTERVAL) == [("ask", 7)]
        assert s.round(7) == ["StopReplay"]
    assert not s.stream.whole
    s.disconnected()
    s.connected()
    s.round(7)
    assert s.later(PROBE_INTERVAL) == [("ask", 7)]
    assert s.round(epoch=1)[-1] == ("ask", 0)
    assert s.round() == ["StopReplay"]
    assert s.stream.whole


def test_that_a_buffer_no_longer_reaches_back_holds_for_its_process_only() -> None:
    """Found by the model: a process that burned the number asked for seems to have lost it, and is not known as new."""
    s = S()
    s.connected()
    assert s.round(1)[:2] == ["Forget", 1]
    s.round(1)
    s.disconnected()
    s.connected()
    assert s.round(2, epoch=1)[:2] == ["Forget", 2]
    s.round(2, epoch=1)
    s.later(SETTLING)
    assert s.round(0, 2, epoch=1)[:2] == ["Relearn", 0]


def test_a_stream_that_never_becomes_whole_does_not_throw_away_what_it_has_for_ever() -> None:
    s = partial(5)
    last = 7
    for _ in range(MAX_RELEARNS):
        assert s.later(PROBE_INTERVAL) == [("ask", 0)]
        s.started()
        assert s.replayed(0) == ["Relearn", 0]
        assert s.state == "catching_up"
        s.round(end=False)
        for _ in range(MAX_BARREN_ROUNDS):
            out = s.round(end=False)
        assert out == ["StopReplay", "Forget"]
        last += 1
        assert s.live(last) == [last]
    assert s.later(PROBE_INTERVAL) == [("ask", last)]


def test_a_probe_from_number_0_that_meets_another_process() -> None:
    s = partial(5)
    s.later(PROBE_INTERVAL)
    assert s.round(epoch=1) == ["StopReplay", "Relearn", ("ask", 0)]


def test_a_probe_from_number_0_that_lost_everything_in_between() -> None:
    """The buffer begins behind all that is known: a loss, although nothing live has shown it yet."""
    s = partial(5)
    s.later(PROBE_INTERVAL)
    s.started()
    assert s.replayed(20) == ["Forget", 20]
    assert s.state == "repairing"
    assert s.replayed(21) == [21]
    assert s.ended() == ["StopReplay"]
    assert s.state == "live"
    assert not s.stream.whole


def test_a_stream_that_starts_above_0_does_not_go_below() -> None:
    s = S(start=7)
    s.connected()
    s.round(9, 10)
    s.round(10)
    assert not s.stream.whole
    assert s.later(PROBE_INTERVAL) == [("ask", 10)]


# -- rounds that lose replies ----------------------------------------------------------------------------------------


def test_a_hole_where_replies_may_have_been_dropped_is_no_burned_number(dropping: None) -> None:
    """An engine with a full queue may drop the same reply twice; right behind the first reply it can't."""
    s = S()
    s.connected()
    assert s.round(0, 2, 5) == [0, "StopReplay", ("ask", 0)]
    assert s.round(0, 2, 5) == ["StopReplay", "Forget", 2, ("ask", 2)], (
        "1 was burned; 3 and 4 may have been dropped twice"
    )
    assert s.round(2, 3, 4, 5)[:3] == [3, 4, 5]
    assert s.counts.lost == 1


def test_two_holes_far_apart_are_each_looked_at_from_near(dropping: None) -> None:
    s = S()
    s.connected()
    assert s.round(0, 1, 3, 4, 6) == [0, 1, "StopReplay", ("ask", 1)]
    assert s.round(1, 3, 4, 6) == ["StopReplay", "Forget", 3, 4, ("ask", 4)], "2 was burned, 5 may have been dropped"
    assert s.round(4, 5, 6) == [5, 6, "StopReplay", ("ask", 6)]
    assert s.counts.lost == 1


def test_a_live_batch_fills_the_hole_of_a_probe_and_nothing_stays_behind(dropping: None) -> None:
    s = S().caught_up(1)
    s.later(PROBE_INTERVAL)
    s.started()
    s.replayed(1)
    s.replayed(3)
    assert s.live(2) == [2, 3]
    assert s.ended() == ["StopReplay"]
    assert s.state == "live"
    assert s.budget.used == 0


def test_a_replay_that_repeats_and_goes_back_costs_nothing_but_a_count() -> None:
    s = S()
    s.connected()
    assert s.round(0, 1, 1, 0, 0, 1, 2)[:3] == [0, 1, 2]
    assert s.counts.stray == 4


def test_a_replay_that_denies_what_came_live_leaves_nothing_behind() -> None:
    s = S().caught_up(1)
    s.live(3)
    assert s.round(1, 4) == ["StopReplay", ("ask", 1)]
    assert s.round(1, 4) == ["StopReplay", "Forget", 4]
    assert s.state == "live"
    assert s.budget.used == 0


def test_a_number_without_end_is_held_and_given_back() -> None:
    """A hostile replay names a number that never existed; its bytes wait, and the stream comes back to the truth."""
    s = S()
    s.connected()
    assert s.round(0, 2**63 - 1) == [0, "StopReplay", ("ask", 0)]
    out: list[Any] = []
    while out[-1:] != ["StopReplay"]:
        asked = out[-1][1] if out else 0
        out = s.round(*range(asked, 2))
        assert s.counts.replays < 10
    assert s.state == "live"
    assert s.live(2) == [2]
    assert s.stream.whole
    assert s.budget.used == 0


# -- storms ----------------------------------------------------------------------------------------------------------


def test_a_storm_of_reconnections_forgets_nothing_and_holds_nothing() -> None:
    s = S().caught_up(5)
    for n in range(1000):
        assert s.disconnected() in ([], ["StopReplay"])
        assert s.connected() == [("ask", 5)]
        s.live(7 + n % 3)
        if n % 2:
            s.started()
            s.replayed(5)
    assert s.budget.used <= 200
    assert s.round(5, 6, 7, 8, 9)[-2:] != []
    assert s.stream.whole
    assert (s.counts.forgotten, s.counts.epochs, s.counts.lost) == (0, 0, 0)


def test_hundreds_of_streams_that_wait_for_their_turn_share_the_budget_and_lose_nothing() -> None:
    """Few replays run at a time, for minutes perhaps: what comes live meanwhile is bounded and found again."""
    budget = Budget(10_000)
    streams = [Stream(can_replay=True, budget=budget, replay_timeout=1, replay_round_timeout=30) for _ in range(300)]
    payloads = [wire_batch(stored([n], [n] * 4), ts=float(n)) for n in range(20)]
    for one in streams:
        one.connected(0.0)
    for n in range(10, 20):
        for one in streams:
            one.live(n, payloads[n], 1.0)
        assert budget.used <= budget.limit
    assert sum(one.counts.over_budget for one in streams) > 0
    now = 1000.0
    for one in streams:
        applied: list[int] = []
        for _ in range(3):
            if one.state is State.LIVE:
                break
            first = applied[-1] if applied else 0
            one.tick(now)
            actions: list[Action] = one.replay_started(now)
            for n in range(first, 20):
                actions += one.replayed(n, payloads[n], now)
            actions += one.replay_ended(now)
            applied += [a.seq for a in actions if isinstance(a, Apply)]
        assert one.state is State.LIVE
        assert applied == [*range(20)]
        assert one.whole
    assert budget.used == 0


# -- faults that others met --------------------------------------------------------------------------------------------


class Followed:
    """A stream whose batches reach a real index."""

    def __init__(self) -> None:
        self.index = ReferenceIndex()
        self.index.add_worker("w", "m")
        self.budget = Budget(1 << 20)
        self.stream = Stream(can_replay=True, budget=self.budget, replay_timeout=1.0, replay_round_timeout=30.0)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self.index.apply("w", action.payload)
            elif isinstance(action, Forget):
                self.index.forget("w")

    def round(self, published: list[bytes], first: int) -> None:
        self.take(self.stream.replay_started(0.0))
        for seq in range(first, len(published)):
            self.take(self.stream.replayed(seq, published[seq], 0.0))
        self.take(self.stream.replay_ended(0.0))

    def blocks(self, count: int) -> list[int]:
        return [b for b in range(count) if self.index.match([b] * 4 + [9], "m")["w"].credit]


def stores(count: int) -> list[bytes]:
    return [wire_batch(stored([n + 1], [n] * 4), ts=float(n)) for n in range(count)]


def test_a_late_joiner_knows_all_of_the_history() -> None:
    """(S4) joined at 200 with 0 – 199 in the buffer, it knows what one from the beginning knows."""
    published = stores(201)
    late, early = Followed(), Followed()
    for followed in (late, early):
        followed.take(followed.stream.connected(0.0))
    early.round([], 0)
    for seq in range(201):
        early.take(early.stream.live(seq, published[seq], 0.0))
    late.take(late.stream.live(200, published[200], 0.0))
    assert late.blocks(201) == [], "the first number above 0 is a gap"
    late.round(published, 0)
    assert late.blocks(201) == early.blocks(201) == [*range(201)]
    assert late.stream.whole


def test_a_replay_that_overlaps_live_batches_counts_no_copy_twice() -> None:
    """(S7) replay 0 – 10 over live 8 – 12: one removal, and each block is gone."""
    published = stores(13)
    followed = Followed()
    followed.take(followed.stream.connected(0.0))
    for seq in range(8, 13):
        followed.take(followed.stream.live(seq, published[seq], 0.0))
    followed.round(published[:11], 0)
    followed.round(published, 12)
    assert followed.blocks(13) == [*range(13)]
    for n in range(13):
        followed.take(followed.stream.live(13 + n, wire_batch(removed([n + 1]), ts=13.0 + n), 0.0))
    assert followed.blocks(13) == []


def test_batches_dropped_at_a_full_queue_are_found_by_the_next_one_and_by_a_probe() -> None:
    """(S9) what a publisher drops unseen is a gap at the next batch, and a longer replay where there is none."""
    published = stores(100)
    followed = Followed()
    followed.take(followed.stream.connected(0.0))
    followed.round([], 0)
    followed.take(followed.stream.live(0, published[0], 0.0))
    followed.take(followed.stream.live(60, published[60], 0.0))
    followed.round(published[:61], 0)
    assert followed.blocks(100) == [*range(61)]
    assert followed.stream.state is State.LIVE
    followed.take(followed.stream.tick(PROBE_INTERVAL))
    followed.round(published, 60)
    assert followed.blocks(100) == [*range(100)]
    assert followed.stream.whole
    assert followed.budget.used == 0


@pytest.mark.parametrize("answer", ["late", "half", "never"])
def test_replays_that_do_not_end_as_they_should(answer: str) -> None:
    s = S()
    s.connected()
    if answer == "late":
        s.later(120.0)
        assert s.round(0, 1)[:2] == [0, 1]
    elif answer == "half":
        assert s.round(0, 1, end=False) == [0, 1, "StopReplay", ("ask", 1)]
    else:
        s.started()
        seq = 0
        while s.stream.whole:
            s.replayed(seq)
            s.later(0.5)
            seq += 1
            assert seq < 100, "it ends after replay_round_timeout"
        assert s.state == "live"
        return
    assert s.round(1) == ["StopReplay"]
    assert s.state == "live"
    assert s.later(SETTLING) == [("ask", 1)]
