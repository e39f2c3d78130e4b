"""The stream's rules, one at a time: connections, rounds, epochs, streams without replay, probes, the budget."""

from __future__ import annotations

import struct

import pytest

from kvsync.events.stream import (
    MAX_BARREN_ROUNDS,
    MAX_JUMPS,
    MAX_RESTARTS,
    MAX_ROUNDS,
    PROBE_INTERVAL,
    REMEMBERED,
    SETTLING,
    SILENCE,
    TRANSITIONS,
    Budget,
    Cause,
    State,
    Stream,
    stamp,
)
from kvsync.index.reference import ReferenceIndex
from tests import wire
from tests.unit.events.driver import S, batch, words

# -- the first connection --------------------------------------------------------------------------------------------


def test_nothing_is_asked_before_the_handshake() -> None:
    s = S()
    assert s.state == "connecting"
    assert s.later(1000) == []


def test_an_engine_that_has_published_nothing() -> None:
    s = S()
    assert s.connected() == [("ask", 0)]
    assert s.state == "catching_up"
    assert s.round() == ["StopReplay"]
    assert s.state == "live"
    assert s.stream.whole
    assert s.live(0, 1) == [0, 1]


def test_history_is_applied_while_it_streams_in_and_a_second_round_confirms_it() -> None:
    s = S()
    s.connected()
    s.stream.replay_started(s.now)
    assert words(s.stream.replayed(0, batch(0), s.now)) == [0]
    assert words(s.stream.replayed(1, batch(1), s.now)) == [1]
    assert words(s.stream.replay_ended(s.now)) == ["StopReplay", ("ask", 1)]
    assert s.state == "catching_up"
    assert s.round(1) == ["StopReplay"]
    assert s.state == "live"
    assert s.stream.last == 1


def test_live_batches_wait_for_the_replay_and_are_applied_once() -> None:
    s = S()
    s.connected()
    assert s.live(3, 4) == []
    assert s.round(0, 1, 2, 3, 4) == [0, 1, 2, 3, 4, "StopReplay"]  # 3 and 4 were waiting; joined: no second round
    assert s.state == "live"
    assert s.counts.received == 2
    assert s.counts.applied == 5


def test_live_batches_that_a_replay_brought_before_are_duplicates() -> None:
    s = S()
    s.connected()
    s.round(0, 1, 2)
    assert s.live(1, 2) == []
    assert s.counts.duplicates == 2
    s.round(2)
    assert s.live(3) == [3]


def test_a_truncated_buffer_makes_the_stream_partial_and_it_goes_on() -> None:
    s = S()
    s.connected()
    assert s.round(500, 501) == ["Forget", 500, 501, "StopReplay", ("ask", 501)]
    assert s.round(501) == ["StopReplay"]
    assert s.state == "live"
    assert not s.stream.whole
    assert s.counts.lost == 500


def test_a_first_number_that_is_not_0_is_a_loss_however_small() -> None:
    s = S()
    s.connected()
    assert s.round(1)[:2] == ["Forget", 1]


def test_what_came_live_on_an_earlier_connection_proves_nothing_on_the_next() -> None:
    s = S().caught_up(5)
    s.live(6)
    s.disconnected()
    s.connected()
    assert s.round(6, 7) == [7, "StopReplay", ("ask", 7)], "its tail may be missing"


def test_a_busy_engine_is_caught_up_once_the_replay_meets_the_live_batches() -> None:
    """Every round brings something new there, so waiting for an empty one would never end."""
    s = S()
    s.connected()
    s.live(2)
    assert s.round(0, 1, 2, 3) == [0, 1, 2, 3, "StopReplay"]
    assert s.state == "live"


def test_a_start_above_zero_takes_what_there_is() -> None:
    s = S(start=7)
    assert s.connected() == [("ask", 7)]
    assert s.round(7, 8)[:2] == [7, 8]
    beyond = S(start=7)
    beyond.connected()
    beyond.live(3)
    assert beyond.round() == ["StopReplay", 3]
    assert beyond.state == "live"


# -- rounds ----------------------------------------------------------------------------------------------------------


def test_lost_replies_are_asked_for_again_from_the_last_number_applied() -> None:
    s = S()
    s.connected()
    assert s.round(0, 1, 4, 5) == [0, 1, "StopReplay", ("ask", 1)]
    assert s.round(1, 2, 3, 4, 5) == [2, 3, 4, 5, "StopReplay", ("ask", 5)]
    assert s.round(5) == ["StopReplay"]
    assert s.stream.whole
    assert s.counts.lost == 0


def test_a_lost_end_marker_costs_a_timeout_and_another_round() -> None:
    s = S()
    s.connected()
    assert s.round(0, 1, end=False) == [0, 1, "StopReplay", ("ask", 1)]
    assert s.state == "catching_up"
    assert s.round(1) == ["StopReplay"]
    assert s.state == "live"
    assert (s.counts.replays, s.counts.replays_answered, s.counts.replays_failed) == (2, 1, 1)


def test_a_round_without_its_end_marker_proves_nothing_even_if_it_meets_the_live_batches() -> None:
    s = S()
    s.connected()
    s.live(1)
    assert s.round(0, 1, end=False) == [0, 1, "StopReplay", ("ask", 1)]
    assert s.round(1) == ["StopReplay"]
    assert s.state == "live"


def test_a_lost_tail_is_found_by_the_next_round() -> None:
    s = S()
    s.connected()
    s.round(0, 1)  # 2 and 3 were dropped, the end marker came
    assert s.round(1, 2, 3) == [2, 3, "StopReplay", ("ask", 3)]


def test_the_timeout_counts_from_the_last_frame_and_not_while_the_round_waits_for_its_turn() -> None:
    s = S()
    s.connected()
    assert s.later(50) == []
    s.stream.replay_started(s.now)
    assert s.later(0.9) == []
    assert words(s.stream.replayed(0, batch(0), s.now)) == [0]
    assert s.later(0.9) == []
    assert s.later(0.1) == ["StopReplay", ("ask", 0)]


def test_what_a_number_held_that_two_proper_rounds_step_over_is_lost() -> None:
    """The engine could not encode that batch: it may have told of removals."""
    s = S().caught_up(1)
    assert s.live(3) == [("ask", 1)]  # 2 was burned
    assert s.state == "repairing"
    assert s.round(1, 3) == ["StopReplay", ("ask", 1)]
    assert s.round(1, 3) == ["StopReplay", "Forget", 3]
    assert s.state == "live"
    assert not s.stream.whole
    assert s.counts.lost == 1
    assert s.live(4) == [4]
    assert s.later(PROBE_INTERVAL) == [("ask", 4)], "a replay from 0 has that hole, too"


def test_two_rounds_of_which_one_timed_out_prove_nothing() -> None:
    s = S().caught_up(1)
    s.live(3)
    assert s.round(1, 3, end=False) == ["StopReplay", ("ask", 1)]
    assert s.round(1, 3) == ["StopReplay", ("ask", 1)]
    assert s.round(1, 3) == ["StopReplay", "Forget", 3]


def test_holes_with_different_edges_prove_nothing(dropping: None) -> None:
    s = S().caught_up(0)
    s.live(9)
    assert s.round(0, 1, 4) == [1, "StopReplay", ("ask", 1)]
    assert s.round(1, 5) == ["StopReplay", ("ask", 1)]
    assert s.round(1, 2, 3, 4, 5, 6, 7, 8, 9) == [2, 3, 4, 5, 6, 7, 8, 9, "StopReplay"]


def test_rounds_without_an_answer_end_in_forgetting() -> None:
    s = S().caught_up(1)
    assert s.live(3, 4) == [("ask", 1)]
    for _ in range(MAX_BARREN_ROUNDS - 1):
        assert s.round(end=False) == ["StopReplay", ("ask", 1)]
    assert s.round(end=False) == ["StopReplay", "Forget", 3, 4]
    assert s.state == "live"
    assert not s.stream.whole
    assert s.counts.lost == 1
    assert s.live(5) == [5]


def test_rounds_are_limited_even_if_each_brings_something(dropping: None) -> None:
    s = S().caught_up(0)
    s.live(100)
    for n in range(MAX_ROUNDS - 1):
        assert s.round(n, n + 1, 50 + n)[-1] == ("ask", n + 1)
    out = s.round(MAX_ROUNDS - 1, MAX_ROUNDS, 60)
    assert out[-2:] == ["Forget", 100]
    assert s.counts.discarded > 0


def test_all_rounds_together_are_limited_in_time() -> None:
    s = S()
    s.connected()
    s.stream.replay_started(s.now)
    for n in range(59):
        s.stream.replayed(n, batch(n), s.now)
        assert s.later(0.5) == []
    s.stream.replayed(59, batch(59), s.now)
    assert s.later(0.5) == ["StopReplay", "Forget"]
    assert s.live(60) == [60]


def test_a_probe_has_all_the_time_of_a_repair_however_long_the_last_one_took() -> None:
    s = S()
    s.connected()
    for first in (0, 19):
        s.stream.replay_started(s.now)
        for n in range(first, first + 20):
            s.stream.replayed(n, batch(n), s.now)
            assert s.later(0.9) == []
        s.stream.replay_ended(s.now)
        s.round(first + 19)
        assert s.state == "live"
        s.later(PROBE_INTERVAL)


def test_waiting_for_a_turn_is_not_counted_in_that_time() -> None:
    s = S()
    s.connected()
    s.later(100)
    assert s.round(0, 1)[-1] == ("ask", 1)
    s.later(100)
    assert s.round(1) == ["StopReplay"]
    assert s.state == "live"


def test_a_gap_whose_numbers_fell_out_of_the_buffer() -> None:
    s = S().caught_up(9)
    assert s.live(30) == [("ask", 9)]
    assert s.counts.missed == 20
    assert s.round(20, 21, end=False)[:3] == ["Forget", 20, 21]
    assert s.counts.lost == 10


def test_only_the_last_unbroken_run_survives_giving_up() -> None:
    s = S().caught_up(0)
    s.live(2, 3, 7, 8)
    for _ in range(MAX_BARREN_ROUNDS):
        out = s.round(end=False)
    assert out == ["StopReplay", "Forget", 7, 8]
    assert s.counts.discarded == 2
    assert s.budget.used == 0


def test_a_dead_replay_endpoint_at_the_start_means_partial_from_wherever_it_begins() -> None:
    s = S()
    s.connected()
    for _ in range(MAX_BARREN_ROUNDS):
        out = s.round(end=False)
    assert out == ["StopReplay", "Forget"]
    assert s.state == "live"
    assert s.live(7, 8) == ["Forget", 7, 8]


def test_a_dead_replay_endpoint_that_comes_alive_makes_an_idle_stream_whole_again() -> None:
    s = S()
    s.connected()
    for _ in range(MAX_BARREN_ROUNDS):
        s.round(end=False)
    assert s.later(PROBE_INTERVAL) == [("ask", 0)]
    out = s.round(0, 1)
    assert out[:3] == ["Relearn", 0, 1], "nothing shows that another process answers"
    assert s.stream.whole


def test_frames_of_no_open_round_are_stray() -> None:
    s = S().caught_up(1)
    assert words(s.stream.replayed(2, batch(2), s.now)) == []
    assert words(s.stream.replay_ended(s.now)) == []
    assert words(s.stream.replay_started(s.now)) == []
    assert s.counts.stray == 2


def test_frames_before_the_round_has_begun_are_stray() -> None:
    s = S()
    s.connected()
    assert words(s.stream.replayed(0, batch(0), s.now)) == []
    assert words(s.stream.replay_ended(s.now)) == []
    assert s.counts.stray == 2


def test_frames_out_of_order_in_a_round_are_stray() -> None:
    s = S().caught_up(5)
    s.live(9)
    assert s.round(3, 5, 6, 6, 4, 7, 8, 9) == [6, 7, 8, 9, "StopReplay"]
    assert s.counts.stray == 3


def test_an_engine_full_of_holes_costs_bounded_memory() -> None:
    s = S(budget=1 << 30)
    s.connected()
    s.stream.replay_started(s.now)
    for n in range(0, 4 * MAX_JUMPS, 2):
        s.stream.replayed(n, batch(n), s.now)
    assert s.stream._round is not None
    assert len(s.stream._round.jumps) == MAX_JUMPS


# -- epochs ----------------------------------------------------------------------------------------------------------


def test_a_live_number_that_goes_back_is_a_new_epoch() -> None:
    s = S().caught_up(5)
    s.live(6)
    assert s.live(2, epoch=1) == ["NewEpoch", ("ask", 0)]
    assert s.state == "catching_up"
    assert s.round(0, 1, 2, epoch=1) == [0, 1, 2, "StopReplay"]
    assert s.state == "live"
    assert s.counts.epochs == 1


def test_a_live_number_known_with_another_timestamp_is_a_new_epoch() -> None:
    s = S().caught_up(5)  # nothing came live yet, so no number goes back
    assert s.live(3, epoch=1) == ["NewEpoch", ("ask", 0)]


def test_a_restart_seen_only_by_the_reconnect() -> None:
    """The new process has come exactly as far: its next number looks like the next one."""
    s = S().caught_up(5)
    s.live(6)
    assert s.disconnected() == []
    assert s.state == "down"
    assert s.connected() == [("ask", 6)]
    assert s.live(7, epoch=1) == []  # waits for the proof
    out = s.round(6, 7, epoch=1)
    assert out[:3] == ["StopReplay", "NewEpoch", ("ask", 0)]
    assert s.round(*range(8), epoch=1)[:8] == [*range(8)]
    assert s.stream.whole


def test_a_restart_seen_by_the_end_marker_alone() -> None:
    s = S().caught_up(5)
    s.disconnected()
    s.connected()
    assert s.round() == ["StopReplay", "NewEpoch", ("ask", 0)]
    assert s.round(0, 1, epoch=1)[:2] == [0, 1]


def test_the_same_process_after_a_reconnect_goes_on() -> None:
    s = S().caught_up(5)
    s.disconnected()
    s.connected()
    assert s.live(8) == []
    assert s.round(5, 6, 7, 8) == [6, 7, 8, "StopReplay"]
    assert s.state == "live"
    assert s.stream.whole
    assert s.counts.epochs == 0


def test_a_reconnect_whose_replay_does_not_answer_forgets() -> None:
    s = S().caught_up(5)
    s.disconnected()
    s.connected()
    for _ in range(MAX_BARREN_ROUNDS):
        out = s.round(end=False)
    assert out == ["StopReplay", "Forget"]
    assert s.live(6, epoch=1) == ["Forget", 6]  # whatever it is, nothing older is believed any more


def test_a_reconnect_whose_buffer_begins_right_behind_proves_nothing() -> None:
    s = S().caught_up(5)
    s.disconnected()
    s.connected()
    assert s.round(6, 7)[:3] == ["Forget", 6, 7]
    assert s.counts.lost == 0


def test_what_is_read_late_or_waits_when_the_connection_ends_is_dropped() -> None:
    s = S().caught_up(5)
    s.live(8)
    assert s.disconnected() == ["StopReplay"]
    assert s.live(9) == []
    assert s.counts.discarded == 2
    assert s.budget.used == 0
    s.connected()
    assert s.round(5, 6, 7, 8, 9)[:4] == [6, 7, 8, 9]


def test_a_restart_during_catching_up_begins_again() -> None:
    s = S()
    s.connected()
    s.live(8)
    s.stream.replay_started(s.now)
    s.stream.replayed(0, batch(0), s.now)
    # Which of the two the replayed batch is of is open, so nobody may drop what he noted of either.
    assert s.live(1, epoch=1) == ["StopReplay", "Relearn", ("ask", 0)]
    assert s.round(0, 1, epoch=1) == [0, 1, "StopReplay"]


def test_what_waited_belongs_to_the_epoch_that_ended() -> None:
    s = S().caught_up(0)
    s.live(3, 5)
    assert s.live(2, epoch=1) == ["StopReplay", "Relearn", ("ask", 0)]
    assert s.round(0, 1, 2, epoch=1) == [0, 1, 2, "StopReplay"]
    assert s.live(3, 4, epoch=1) == [3, 4]
    assert s.budget.used == 0


def test_numbers_of_an_earlier_connection_are_no_measure_for_the_next() -> None:
    s = S()
    s.connected()
    s.live(8)  # never applied: nothing of that epoch is known
    s.disconnected()
    s.connected()
    s.round(0, 1, epoch=1)
    assert s.live(2, epoch=1) == [2]
    assert s.counts.epochs == 0


def test_an_engine_may_restart_as_often_as_it_likes_if_its_live_and_replayed_sides_agree_in_between() -> None:
    s = S().caught_up(1)
    for n in range(1, 2 * MAX_RESTARTS):
        s.later(PROBE_INTERVAL)
        assert s.round(epoch=n)[-1] == ("ask", 0)
        s.round(0, 1, epoch=n)
        s.round(1, epoch=n)
        assert s.live(2, epoch=n) == [2]
        s.later(PROBE_INTERVAL)
        s.round(2, epoch=n)
        assert s.state == "live"
    assert s.stream.whole


def test_a_publisher_that_restamps_its_replays_is_not_asked_forever() -> None:
    s = S()
    s.connected()
    s.round(0, 1, epoch=0)
    for n in range(1, MAX_RESTARTS + 1):
        assert s.round(1, epoch=10 + n)[-1] == ("ask", 0)
        s.round(0, 1, epoch=20 + n)
    assert s.round(1, epoch=50)[-1] == "Forget"
    assert s.state == "live"
    assert s.live(2, epoch=60) == ["Forget", 2]


def test_timestamps_are_remembered_for_a_bounded_number_of_batches() -> None:
    s = S().caught_up(2 * REMEMBERED)
    assert s.live(0, epoch=-1) == []  # too long ago to tell: taken for a duplicate …
    assert s.live(0, epoch=-1)[0] == "NewEpoch"  # … until it shows that numbers go back


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"\x93\xcb" + struct.pack(">d", 1.0), b"\x93\xcb" + struct.pack(">d", 1.0000001)),
        (b"\x92\xca" + struct.pack(">f", 1.0), b"\x92\xca" + struct.pack(">f", 2.0)),
        (b"\x83\xa2ts\xcb" + struct.pack(">d", 1.0), b"\x83\xa2ts\xcb" + struct.pack(">d", 1.0000001)),
        (b"\x93\xce\x00\x00\x00\x01", b"\x93\xce\x00\x00\x00\x02"),
        (b"", b"\x93"),
    ],
    ids=["array", "float32", "map", "int", "empty"],
)
def test_stamps_differ_with_the_time(one: bytes, other: bytes) -> None:
    assert stamp(one) != stamp(other)
    assert stamp(one + b"tail" * 20) == stamp(one + b"tail" * 20)


def test_the_stamp_of_an_array_batch_is_its_float_alone() -> None:
    head = b"\x93\xcb" + struct.pack(">d", 5.0)
    assert stamp(head + b"\x91\x80") == stamp(head + b"\xdc\x00\x01\x80")


# -- without replay --------------------------------------------------------------------------------------------------


def test_without_replay_a_stream_is_partial_unless_it_begins_at_zero() -> None:
    s = S(can_replay=False)
    assert s.connected() == ["Forget"]
    assert s.state == "live"
    assert s.live(4, 5) == ["Forget", 4, 5]
    assert not s.stream.whole
    whole = S(can_replay=False)
    whole.connected()
    assert whole.live(0, 1) == ["Relearn", 0, 1]
    assert whole.stream.whole


def test_without_replay_a_gap_forgets() -> None:
    s = S(can_replay=False)
    s.connected()
    s.live(0)
    assert s.live(3, 4) == ["Forget", 3, 4]
    assert s.state == "live"
    assert (s.counts.missed, s.counts.lost) == (2, 2)


def test_without_replay_a_reconnect_forgets() -> None:
    s = S(can_replay=False)
    s.connected()
    s.live(0, 1)
    s.disconnected()
    assert s.connected() == ["Forget"]
    assert s.live(2) == ["Forget", 2]
    assert not s.stream.whole


@pytest.mark.parametrize("can_replay", [False, True])
def test_what_answers_told_before_the_first_batch_of_a_connection_is_forgotten(can_replay: bool) -> None:
    """What was published between the handshake and the subscription never comes: here, the removal of a block that an
    answer had told of."""
    index = ReferenceIndex()
    index.add_worker("w", "m")
    index.apply("w", wire.batch(wire.stored([9], [9] * 4)))
    s = S(can_replay=can_replay)
    index_actions = {"Forget": index.forget, "NewEpoch": index.new_epoch, "Relearn": index.relearn}

    def carry_out(*actions: object) -> None:
        for action in actions:
            if action in index_actions:
                index_actions[str(action)]("w")

    carry_out(*s.connected())
    for _ in range(MAX_BARREN_ROUNDS if can_replay else 0):
        carry_out(*s.round(end=False))
    assert s.stream.current
    match = index.match([1] * 5, "m")["w"]
    assert index.observe("w", [1] * 5, "m", 4, match.credit, match.as_of, 120.0) == "steady"
    assert index.match([1] * 5, "m")["w"].credit == 4
    later = index.match([2] * 5, "m")["w"].as_of
    carry_out(*s.live(7))
    assert index.match([1] * 5, "m")["w"].credit == 0
    assert index.observe("w", [2] * 5, "m", 4, 0, later, 120.0) == "evicted"


def test_without_replay_a_restart_is_whole_again_from_zero_only() -> None:
    s = S(can_replay=False)
    s.connected()
    s.live(4, 5)
    assert s.live(0, epoch=1) == ["NewEpoch", 0]
    assert s.stream.whole
    assert s.live(1, 2, epoch=1) == [1, 2]
    assert s.live(1, epoch=2) == ["NewEpoch", "Forget", 1]
    assert not s.stream.whole


def test_without_replay_nothing_is_ever_asked() -> None:
    s = S(can_replay=False)
    s.connected()
    s.live(0)
    assert s.later(PROBE_INTERVAL, served=s.now + SILENCE) == []
    assert s.state == "silent"


def test_without_replay_what_came_before_the_connection_is_not_used() -> None:
    s = S(can_replay=False)
    assert s.live(3) == []
    assert s.connected() == ["Forget"]
    assert s.counts.discarded == 1
    assert s.live(2) == ["Forget", 2]


# -- probes and silence ----------------------------------------------------------------------------------------------


def test_a_batch_published_before_the_subscription_took_effect_is_found_soon() -> None:
    s = S()
    s.connected()
    s.round(0)
    s.round(0)
    assert s.later(SETTLING) == [("ask", 0)]
    assert s.round(0, 1)[:1] == [1]


@pytest.mark.parametrize("seq", [1, 2])
def test_a_connection_that_brought_something_needs_no_such_proof(seq: int) -> None:
    s = S()
    s.connected()
    if seq == 2:
        s.live(2)
    s.round(0, 1)
    s.round(1, 2)
    if seq == 1:
        s.round(2)
        s.live(3)
    assert s.state == "live"
    assert s.later(SETTLING) == []
    assert s.later(PROBE_INTERVAL) != []


def test_every_stream_is_probed_now_and_then() -> None:
    s = S().caught_up(5)
    assert s.later(PROBE_INTERVAL - 1) == []
    assert s.later(1) == [("ask", 5)]
    assert s.state == "live"
    assert s.round(5) == ["StopReplay"]
    assert s.state == "live"


def test_a_probe_brings_a_lost_tail() -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    assert s.round(5, 6, 7) == [6, 7, "StopReplay"]
    assert s.state == "live"
    assert s.stream.whole


def test_a_probe_that_may_have_lost_replies_repairs(dropping: None) -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    assert s.round(5, 6, 7) == [6, 7, "StopReplay", ("ask", 7)]
    assert s.state == "repairing"
    assert s.round(7) == ["StopReplay"]
    assert s.state == "live"


def test_a_probe_that_ends_without_its_marker_repairs_what_it_began() -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    assert s.round(5, 6, end=False) == [6, "StopReplay", ("ask", 6)]
    assert s.state == "repairing"


def test_a_probe_with_a_hole_is_the_first_round_of_a_repair(dropping: None) -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    s.stream.replay_started(s.now)
    assert words(s.stream.replayed(5, batch(5), s.now)) == []
    assert words(s.stream.replayed(8, batch(8), s.now)) == []
    assert s.state == "repairing", "6 and 7 are known to exist and not applied"
    assert s.live(6) == [6]
    assert s.live(7) == [7, 8]
    assert words(s.stream.replay_ended(s.now)) == ["StopReplay"]
    assert s.state == "live"
    assert s.budget.used == 0


def test_a_probe_that_finds_another_process() -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    assert s.round(5, 6, epoch=1)[:3] == ["StopReplay", "NewEpoch", ("ask", 0)]


def test_a_probe_without_an_answer_changes_nothing() -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    assert s.round(end=False) == ["StopReplay"]
    assert s.state == "live"
    assert s.stream.whole
    assert s.live(6) == [6]


def test_live_batches_pass_while_a_probe_is_open() -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    assert s.live(6) == [6]
    assert s.round(5, 6) == ["StopReplay"]


def test_a_probe_whose_anchor_fell_out_of_the_buffer_meanwhile_loses_nothing() -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    s.live(6, 7, 8)
    assert s.round(7, 8) == ["StopReplay"]
    assert s.stream.whole


def test_a_gap_during_a_probe_takes_over() -> None:
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    assert s.live(8) == ["StopReplay", ("ask", 5)]
    assert s.state == "repairing"


def test_a_stream_is_silent_when_its_engine_serves_and_it_says_nothing() -> None:
    s = S().caught_up(5)
    s.live(6)
    heard = s.now
    assert s.later(SILENCE - 1, served=heard + 2) == []
    assert s.later(1, served=heard + 2) == [("ask", 6)]
    assert s.state == "live", "one answer without a batch, a pure hit perhaps, and then nothing: it is idle"
    assert s.round(6) == ["StopReplay"]
    assert s.later(SILENCE, served=heard + 2) == [], "that answer has been looked into"
    assert s.later(1, served=s.now + 1) == [("ask", 6)]
    assert s.state == "silent"
    assert s.round(6) == ["StopReplay"]
    assert s.state == "silent"
    assert s.live(7) == [7]
    assert s.state == "live"


def test_an_idle_engine_is_not_silent() -> None:
    s = S().caught_up(5)
    s.live(6)
    assert s.later(SILENCE, served=s.now - 1) == []
    assert s.state == "live"


def test_a_gap_ends_silence_too() -> None:
    s = S().caught_up(5)
    s.later(SILENCE, served=s.now + SILENCE)
    assert s.live(9) == ["StopReplay", ("ask", 5)]
    assert s.state == "repairing"


# -- the budget ------------------------------------------------------------------------------------------------------


def test_what_waits_is_bounded_and_what_is_dropped_is_found_missing() -> None:
    s = S(budget=250)
    s.connected()
    s.live(2, 3, 4, size=88)  # 100 bytes each: two fit
    assert s.counts.over_budget == 1
    assert s.budget.used == 200
    out = s.round(0, 1)
    assert out == [0, 1, 2, 3, "StopReplay", ("ask", 3)]  # 4 is known to exist
    assert s.round(3, 4, size=88) == [4, "StopReplay"]
    assert s.budget.used == 0


def test_what_is_dropped_during_a_repair_is_not_given_up_silently() -> None:
    s = S(budget=50).caught_up(0)
    s.live(2, 3, size=88)
    for _ in range(MAX_BARREN_ROUNDS):
        out = s.round(end=False)
    assert out == ["StopReplay", "Forget"]
    assert s.live(4) == [4]


def test_the_budget_is_shared() -> None:
    budget = Budget(150)
    one, other = (Stream(can_replay=True, budget=budget, replay_timeout=1, replay_round_timeout=30) for _ in range(2))
    one.connected(0)
    other.connected(0)
    one.live(1, batch(1, size=88), 0)
    other.live(1, batch(1, size=88), 0)
    assert (one.counts.over_budget, other.counts.over_budget) == (0, 1)
    one.close()
    assert budget.used == 0


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_state_has_its_row_and_leads_on() -> None:
    assert set(TRANSITIONS) == set(State)
    for state, row in TRANSITIONS.items():
        connected = state not in (State.CONNECTING, State.DOWN)
        assert (Cause.DISCONNECTED in row) is connected
        assert (Cause.CONNECTED in row) is not connected
        assert (Cause.RESTARTED in row) is connected
        assert set(row.values()) <= set(State)


def test_what_the_table_does_not_have_is_refused() -> None:
    s = S()
    with pytest.raises(KeyError):
        s.disconnected()
    s.connected()
    with pytest.raises(KeyError):
        s.connected()
