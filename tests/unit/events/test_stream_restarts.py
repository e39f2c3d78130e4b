"""Which process answers: new epochs and epochs followed anew, restarts that nothing on the connection shows, hints."""

from __future__ import annotations

import pytest

from kvsync.events.stream import (
    MAX_DISORDERS,
    MAX_RESTARTS,
    PROBE_INTERVAL,
    REMEMBERED,
    SILENCE,
)
from tests.unit.events.driver import S, batch

LATER = 0.001
"""The epoch of a batch 10 s younger than its number says: a pause that is long enough for a restart."""
EARLIER = -0.001


# -- new epoch or the same one anew ----------------------------------------------------------------------------------


def test_what_is_noted_of_a_process_ends_only_where_another_one_is_shown() -> None:
    """Nothing was applied yet, so nothing says that a process which began after a silence is another one."""
    s = S(can_replay=False)
    s.connected()
    assert s.live(0) == ["Relearn", 0]
    s.disconnected()
    s.connected()
    assert s.live(0, epoch=1) == ["NewEpoch", 0], "its number 0 had been published before"


def test_number_0_after_a_reconnect_is_another_process_although_its_stamp_is_long_forgotten() -> None:
    s = S(can_replay=False)
    s.connected()
    s.live(*range(REMEMBERED + 1))
    s.disconnected()
    s.connected()
    assert s.live(0, epoch=1) == ["NewEpoch", 0]
    assert s.live(1, epoch=1) == [1]


def test_an_epoch_that_is_picked_up_is_not_held_against_what_was_known_before() -> None:
    """Numbers go on, so it may be the same process or another: what is remembered of the old one proves nothing."""
    s = S(can_replay=False)
    s.connected()
    s.live(*range(10))
    s.disconnected()
    s.connected()
    assert s.live(20, epoch=1) == ["Forget", 20]
    assert s.live(21, epoch=1) == [21]
    assert s.counts.epochs == 0


def test_a_whole_replay_after_a_dead_one_is_the_same_epoch_anew() -> None:
    s = S().caught_up(2)
    s.disconnected()
    s.connected()
    assert s.dead_rounds() == ["StopReplay", "Forget"]
    assert s.later(PROBE_INTERVAL) == [("ask", 0)]
    assert s.round(0, 1, 2)[:4] == ["Relearn", 0, 1, 2], "the stamps agree"
    assert s.stream.whole
    assert (s.counts.relearned, s.counts.epochs) == (1, 0)


def test_a_whole_replay_of_another_process_is_a_new_epoch() -> None:
    s = S().caught_up(2)
    s.disconnected()
    s.connected()
    s.dead_rounds()
    s.later(PROBE_INTERVAL)
    assert s.round(0, 1, epoch=1) == ["StopReplay", "NewEpoch", ("ask", 0)]


def test_an_empty_replay_after_batches_were_applied_is_a_new_epoch() -> None:
    s = S().caught_up(2)
    s.disconnected()
    s.connected()
    s.dead_rounds()
    s.later(PROBE_INTERVAL)
    assert s.round() == ["StopReplay", "NewEpoch", ("ask", 0)]
    assert s.round() == ["StopReplay"]
    assert s.stream.whole


def test_an_empty_replay_where_nothing_was_ever_applied_is_no_new_epoch() -> None:
    s = S()
    s.connected()
    s.dead_rounds()
    s.later(PROBE_INTERVAL)
    assert s.round() == ["StopReplay", "Relearn"]
    assert s.stream.whole


def test_another_process_that_shows_after_it_was_applied_does_not_end_what_was_noted() -> None:
    """The last number known of the old process comes late in the replay: what was noted since may be the new one's."""
    s = S().caught_up(2 * REMEMBERED)
    s.disconnected()
    s.connected()
    s.dead_rounds()
    s.later(PROBE_INTERVAL)
    out = s.round(*range(2 * REMEMBERED + 2), epoch=1)
    assert out[:-2] == ["Relearn", *range(2 * REMEMBERED + 2)]
    assert s.stream.whole
    assert s.counts.epochs == 0


def test_a_lower_number_that_waits_when_rounds_are_given_up_is_where_it_goes_on() -> None:
    """Found by the model: the number known of the process before hid it, and its bytes were never given back."""
    s = S()
    s.connected()
    s.round(5)
    s.round(5)
    s.disconnected()
    s.connected()
    s.live(3, epoch=1)
    assert s.dead_rounds() == ["StopReplay", "Forget", 3]
    assert s.budget.used == 0


def test_what_is_too_much_to_wait_when_rounds_are_given_up_is_stepped_over() -> None:
    """Found by the model: the newest lower number had no room, and those before it stayed for ever."""
    s = S(budget=30)
    s.connected()
    s.round(50)
    s.round(50)
    s.disconnected()
    s.connected()
    s.live(3, 4, 5, epoch=1)
    assert s.counts.over_budget == 1
    assert s.dead_rounds() == ["StopReplay", "Forget"]
    assert s.budget.used == 0
    assert s.live(6, epoch=1) == [6]
    assert s.counts.lost == 50, "numbers of another process are none of these"


def test_a_contradiction_to_what_is_older_than_the_last_batches_applied_ends_no_note() -> None:
    """Found by the model: batches of the new process were applied and dropped again before a live one contradicts the
    old process's; and stamps of the old one, of higher numbers, were still remembered."""
    s = S().caught_up(2 * REMEMBERED)
    s.live(2 * REMEMBERED + 1)
    s.resync()
    assert s.round(0, 1, 2, epoch=1)[:4] == ["Relearn", 0, 1, 2]
    s.resync()
    assert s.live(2 * REMEMBERED + 1, epoch=1)[:2] == ["StopReplay", "Relearn"]


def test_a_live_number_that_only_an_abandoned_epoch_knows_differently_is_just_a_batch() -> None:
    """Found by the model: the anchor of an epoch that was left is not evidence against the one that is followed."""
    s = S()
    s.connected()
    assert s.round(3, 4)[:3] == ["Forget", 3, 4]
    s.resync()
    s.disconnected()
    s.connected()  # somebody else answers, and has come less far
    assert s.round(0, epoch=1)[:2] == ["Relearn", 0]
    assert s.round(0, epoch=1) == ["StopReplay"]
    assert s.live(1, 2, 3, 4, epoch=1) == [1, 2, 3, 4]
    assert s.counts.epochs == 0


# -- restarts that no lost connection shows --------------------------------------------------------------------------


def test_a_batch_older_than_its_predecessor_waits_for_the_proof() -> None:
    s = S().caught_up(5)
    s.live(6)
    assert s.live(7, epoch=EARLIER) == [("ask", 6)]
    assert s.state == "repairing"
    assert s.counts.disorders == 1
    assert s.round(6, epoch=1) == ["StopReplay", "NewEpoch", ("ask", 0)], "another process, whose clock is behind"


def test_a_clock_that_was_set_back_costs_a_round() -> None:
    s = S().caught_up(5)
    s.live(6)
    s.live(7, epoch=EARLIER)
    s.started()
    assert s.replayed(6) == []
    assert s.replayed(7, epoch=EARLIER) == [7]
    assert s.ended() == ["StopReplay"]
    assert s.state == "live"
    assert s.stream.whole
    assert s.live(8, epoch=EARLIER) == [8]
    assert s.budget.used == 0


def test_timestamps_that_never_rise_are_looked_into_a_few_times_only() -> None:
    s = S().caught_up(0)
    for n in range(1, MAX_DISORDERS + 1):
        assert s.live(n, epoch=-n) == [("ask", n - 1)]
        s.started()
        s.replayed(n - 1, epoch=1 - n)
        assert s.replayed(n, epoch=-n) == [n]
        assert s.ended() == ["StopReplay"]
    last = MAX_DISORDERS + 1
    assert s.live(last, epoch=-last) == [last], "here they say nothing"
    s.disconnected()
    s.connected()
    s.round(last, epoch=-last)
    assert s.live(last + 1, epoch=-last - 1) == [("ask", last)], "on another connection they may"


def test_without_replay_a_batch_older_than_its_predecessor_forgets() -> None:
    s = S(can_replay=False)
    s.connected()
    s.live(0, 1)
    assert s.live(2, epoch=EARLIER) == ["Forget", 2]
    assert s.state == "live"
    assert not s.stream.whole


def test_a_lower_number_that_is_younger_is_no_duplicate() -> None:
    """The replay ran ahead of the live batches, and both are too far apart to compare stamps."""
    s = S().caught_up(3 * REMEMBERED)
    assert s.live(5) == []
    assert s.counts.duplicates == 1
    assert s.live(6, epoch=1) == [("ask", 3 * REMEMBERED)]
    assert s.round(epoch=1) == ["StopReplay", "NewEpoch", ("ask", 0)]


def test_a_restart_that_lands_on_the_next_number_shows_within_a_round() -> None:
    """A publisher behind a forwarder: no connection is lost, and its first number heard is just the next one."""
    s = S().caught_up(5)
    s.live(6)
    assert s.live(7, epoch=1) == [7, ("ask", 6)], "believed for the time of one round"
    assert s.state == "live"
    assert s.round(6, 7, epoch=1) == ["StopReplay", "Relearn", ("ask", 0)], "what was noted may be of either"
    assert s.round(*range(8), epoch=1)[:8] == [*range(8)]
    assert s.counts.epochs == 1


def test_a_restart_between_a_replay_and_the_live_batches_that_wait_for_it() -> None:
    """Found by the model: the process was replaced while its replay was read, and cut off by that."""
    s = S()
    s.connected()
    s.live(3, 4, epoch=1)
    assert s.round(0, 1, 2, end=False) == [0, 1, 2, 3, 4, "StopReplay", ("ask", 4)]
    assert s.round(4, epoch=1) == ["StopReplay", ("ask", 2)]
    assert s.round(2, 3, epoch=1)[:2] == ["StopReplay", "Relearn"]


def test_a_pause_of_the_same_process_costs_a_probe() -> None:
    s = S().caught_up(5)
    assert s.live(6, epoch=LATER) == [6, ("ask", 5)]
    assert s.live(7, epoch=LATER) == [7]
    s.started()
    assert s.replayed(5) == []
    assert s.replayed(6, epoch=LATER) == []
    assert s.replayed(7, epoch=LATER) == []
    assert s.ended() == ["StopReplay"]
    assert s.state == "live"
    assert s.stream.whole


def test_a_probe_after_a_pause_that_fails_is_made_again_from_the_same_place() -> None:
    s = S().caught_up(5)
    assert s.live(6, epoch=1) == [6, ("ask", 5)]
    assert s.round(end=False) == ["StopReplay"]
    assert s.live(7, epoch=1) == [7]
    assert s.later(PROBE_INTERVAL) == [("ask", 5)]
    assert s.round(5, 6, 7, epoch=1)[:2] == ["StopReplay", "Relearn"]


def test_a_gap_that_breaks_such_a_probe_off_does_not_settle_it() -> None:
    """Found by the model: the repair asks from the new process's own number, which proves nothing of the old one's."""
    s = S().caught_up(5)
    s.live(6, epoch=1)
    assert s.live(8, epoch=1) == ["StopReplay", ("ask", 6)]
    assert s.round(6, 7, 8, epoch=1) == [7, 8, "StopReplay", ("ask", 5)]
    assert s.round(5, 6, epoch=1)[:2] == ["StopReplay", "Relearn"]


def test_the_stamp_of_the_asked_number_outlasts_the_memory_of_stamps() -> None:
    """Found by the model: hundreds of batches may come before a probe has its turn."""
    s = S().caught_up(5)
    s.live(6, epoch=1)
    s.live(*range(7, 7 + REMEMBERED), epoch=1)
    s.started()
    assert s.replayed(5, epoch=1)[:2] == ["StopReplay", "Relearn"]


def test_such_a_restart_is_not_seen_where_the_buffer_lacks_the_number_before() -> None:
    """A known limit, as is such a restart without a replay endpoint."""
    s = S().caught_up(5)
    s.live(6, epoch=1)
    assert s.round(6, epoch=1) == ["StopReplay"]
    assert s.state == "live"


def test_waiting_batches_that_short_rounds_lack_are_of_a_process_that_is_gone() -> None:
    """Found by the model: given up on, they were applied, although the engine that answers never published them."""
    s = S()
    s.connected()
    s.live(8, 9)
    assert s.round(0, 1, epoch=1) == [0, 1, "StopReplay", ("ask", 1)]
    assert s.round(1, epoch=1) == ["StopReplay", ("ask", 1)]
    assert s.round(1, epoch=1) == ["StopReplay", ("ask", 1)]
    assert s.round(1, epoch=1) == ["StopReplay", "Relearn", ("ask", 0)]
    assert s.round(0, 1, epoch=1)[:2] == [0, 1]
    assert s.round(1, epoch=1) == ["StopReplay"]
    assert s.stream.whole
    assert s.budget.used == 0


def test_a_waiting_batch_older_than_what_the_replay_brings_before_it_is_not_applied() -> None:
    s = S()
    s.connected()
    s.live(2)
    assert s.round(0, 1, epoch=1) == [0, 1, "StopReplay", ("ask", 1)]
    assert s.counts.disorders == 1
    assert s.budget.used == 0


def test_a_run_that_waits_ends_where_its_timestamps_go_back() -> None:
    s = S()
    s.connected()
    s.live(3)
    s.live(4, 5, epoch=EARLIER)
    assert s.dead_rounds() == ["StopReplay", "Forget", 4, 5]
    assert s.budget.used == 0


def test_a_run_that_waits_is_joined_only_where_the_replay_overlaps_it() -> None:
    """Found by the model: live batches of the old process, and a buffer of the new one that begins right behind."""
    s = S()
    s.connected()
    s.live(0, 1, 2)
    assert s.round(3, epoch=1)[:2] == ["Forget", 3]
    s = S()
    s.connected()
    s.live(0, 1, 2)
    assert s.round(2) == [0, 1, 2, "StopReplay"]
    assert s.stream.whole


# -- hints -----------------------------------------------------------------------------------------------------------


def test_a_hint_is_looked_into_at_once_and_as_far_back_as_can_be_compared() -> None:
    s = S().caught_up(5)
    s.live(6, 7)
    assert s.hint() == [("ask", 0)]
    assert s.state == "live"
    assert s.round(*range(8)) == ["StopReplay"]
    assert s.state == "live"
    big = S().caught_up(2 * REMEMBERED)
    assert big.hint() == [("ask", REMEMBERED + 1)]


def test_a_hint_reaches_over_burned_numbers_and_does_not_outshine_a_doubt() -> None:
    """Found by the model."""
    s = S().caught_up(1)
    s.live(3)
    s.round(1, 3)
    s.round(1, 3)
    assert s.hint() == [("ask", 0)]
    assert s.live(4, epoch=1) == [4]
    assert s.round(end=False) == ["StopReplay"]
    assert s.live(*range(5, 5 + REMEMBERED), epoch=1)[:1] == [5]
    assert s.later(PROBE_INTERVAL) == [("ask", 3)]


def test_a_hint_that_was_right() -> None:
    s = S().caught_up(5)
    s.hint()
    assert s.round(epoch=1) == ["StopReplay", "Relearn", ("ask", 0)]
    s = S().caught_up(5)
    s.hint()
    assert s.round(0, epoch=1) == ["StopReplay", "Relearn", ("ask", 0)]


def test_a_hint_while_a_round_is_open_is_looked_into_behind_it() -> None:
    """The open round may have been answered by the process before."""
    s = S().caught_up(5)
    s.later(PROBE_INTERVAL)
    assert s.hint() == []
    assert s.round(5) == ["StopReplay", ("ask", 0)]
    s = S().caught_up(5)
    s.live(7)
    assert s.hint() == []
    assert s.round(5, 6, 7) == [6, 7, "StopReplay", ("ask", 0)]


def test_a_hint_that_can_not_be_looked_into_waits_for_the_next_probe() -> None:
    s = S().caught_up(5)
    s.hint()
    assert s.round(end=False) == ["StopReplay"]
    assert s.later(PROBE_INTERVAL) == [("ask", 0)]


def test_a_hint_without_connection_or_replay_changes_nothing() -> None:
    s = S()
    assert s.hint() == []
    s.caught_up(5)
    s.disconnected()
    assert s.hint() == []
    assert s.connected() == [("ask", 5)]
    mute = S(can_replay=False)
    mute.connected()
    mute.live(0)
    assert mute.hint() == []
    assert mute.stream.whole


def test_hints_that_never_end_ask_for_one_round_at_a_time() -> None:
    s = S().caught_up(5)
    asked = [w for _ in range(100) for w in s.hint()]
    assert asked == [("ask", 0)]


# -- engines whose replays can not be right ----------------------------------------------------------------------------


def test_a_replay_endpoint_of_another_engine_is_found_out() -> None:
    """Two streams that contradict each other for ever: after a few new epochs only the live one is believed."""
    s = S()
    s.connected()
    s.round(0, 1, 2, epoch=1)
    s.round(2, epoch=1)
    seq, rounds = 1, 0
    while s.counts.replays and rounds < 50:
        out = s.live(seq, epoch=2)
        seq += 1
        while out and isinstance(out[-1], tuple):
            rounds += 1
            first = out[-1][1]
            out = s.round(*range(first, 3), epoch=1)
        if not s.stream.whole:
            break
    assert rounds < 20
    assert s.state == "live"
    assert s.live(seq, epoch=2) == ["Forget", seq]
    assert s.later(PROBE_INTERVAL) == []
    s.disconnected()
    assert s.connected() != [], "another connection, another try"


def test_an_engine_that_keeps_no_buffer_is_found_out() -> None:
    """``buffer_steps: 0``: its replays always end at once, so they seem to show a process that published nothing."""
    s = S()
    s.connected()
    seq, rounds = 7, 0
    out = s.round()
    while s.stream.whole and rounds < 50:
        out = s.live(seq)
        seq += 1
        while out and isinstance(out[-1], tuple):
            rounds += 1
            out = s.round()
    assert rounds < 20
    assert s.counts.epochs <= MAX_RESTARTS + 1
    assert s.live(seq, seq + 1) == ["Forget", seq, seq + 1]
    assert s.later(PROBE_INTERVAL, served=s.now + SILENCE) == []


@pytest.mark.parametrize("can_replay", [True, False])
def test_numbers_to_and_fro_cost_bounded_rounds(can_replay: bool) -> None:
    s = S(can_replay=can_replay)
    s.connected()
    if can_replay:
        s.round()
    for n in range(50):
        s.live(0, 1, epoch=n)
    assert s.counts.replays <= MAX_RESTARTS + 2
    assert s.budget.used <= 2 * len(batch(0))
