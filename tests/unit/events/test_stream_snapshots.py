"""A stream that begins where another one stood, and what may be told of where a stream stands."""

from __future__ import annotations

from kvsync.events.stream import RESTART_TIME, Position, stamp
from tests.unit.events.driver import S, batch, words


def at(seq: int, epoch: float = 0) -> Position:
    return Position(seq, stamp(batch(seq, epoch)))


def test_it_asks_from_there_and_is_current_once_the_same_process_has_shown_itself() -> None:
    s = S(since=at(7))
    assert not s.stream.current
    assert s.connected() == [("ask", 7)]
    assert s.live(10) == [], "what comes live waits"
    assert not s.stream.current
    assert s.round(7, 8, 9, 10) == [8, 9, 10, "StopReplay"]
    assert (s.state, s.stream.whole, s.stream.last) == ("live", True, 10)
    assert (s.counts.applied, s.counts.lost, s.counts.epochs) == (3, 0, 0)


def test_nothing_new_since() -> None:
    s = S(since=at(7))
    s.connected()
    assert s.round(7) == ["StopReplay"]
    assert (s.state, s.stream.last, s.counts.applied) == ("live", 7, 0)
    assert s.live(8) == [8]


def test_another_process_answers_with_that_number() -> None:
    s = S(since=at(7))
    s.connected()
    assert s.round(7, epoch=1, end=False)[:3] == ["StopReplay", "NewEpoch", ("ask", 0)]
    assert s.round(0, 1, 2, epoch=1)[:3] == [0, 1, 2]
    assert s.round(2, epoch=1) == ["StopReplay"]
    assert (s.state, s.stream.whole, s.counts.epochs) == ("live", True, 1)


def test_another_process_has_not_come_so_far() -> None:
    s = S(since=at(7))
    s.connected()
    assert s.round() == ["StopReplay", "NewEpoch", ("ask", 0)]
    assert s.round(0, epoch=1)[:1] == [0]


def test_the_engine_remembers_only_what_came_later() -> None:
    s = S(since=at(7))
    s.connected()
    assert s.round(9, 10)[:3] == ["Forget", 9, 10]
    assert s.round(10) == ["StopReplay"]
    assert (s.state, s.stream.whole, s.counts.lost) == ("live", False, 1)


def test_nobody_answers_replays() -> None:
    s = S(since=at(7))
    s.connected()
    assert "Forget" in s.dead_rounds()
    assert not s.stream.whole


def test_without_replays_nothing_shows_who_answers() -> None:
    s = S(can_replay=False, since=at(7))
    assert s.connected() == ["Forget"]
    assert s.live(8) == ["Forget", 8]


def test_a_live_batch_contradicts_it_before_the_round_is_answered() -> None:
    s = S(since=at(7))
    s.connected()
    assert s.live(7, epoch=1) == ["StopReplay", "NewEpoch", ("ask", 0)]


def test_it_is_doubted_before_anybody_answered() -> None:
    s = S(since=at(7))
    assert s.resync() == ["Forget"]
    assert s.connected() == [("ask", 0)]
    assert s.round(*range(9))[:2] == ["Relearn", 0]
    assert s.round(8) == ["StopReplay"]
    assert (s.state, s.stream.whole, s.stream.last) == ("live", True, 8)


def test_the_connection_is_lost_before_the_round_is_answered() -> None:
    s = S(since=at(7))
    s.connected()
    assert s.disconnected() == ["StopReplay"]
    assert s.connected() == [("ask", 7)]
    assert s.round(7, 8)[:1] == [8]


def test_stamps_of_other_forms_tell_processes_apart_as_well() -> None:
    mark = stamp(b"\x93\x01\x90\x00 a time as an integer, the first 32 bytes of it")
    s = S(since=Position(7, mark))
    s.connected()
    s.stream.replay_started(s.now)
    assert words(s.stream.replayed(7, b"\x93\x02\x90\x00 another", s.now))[1] == "NewEpoch"


# -- where a stream stands


def test_a_live_stream_stands_at_its_last_number() -> None:
    s = S().caught_up(5)
    assert s.stream.position == at(5)
    s.live(6)
    assert s.stream.position == at(6)
    s.stream.took(2, 8, b"".join(stamp(batch(n))[1:] for n in (7, 8)), s.now)
    assert s.stream.position == at(8)


def test_nothing_stands_before_it_is_live_or_while_anything_is_open() -> None:
    s = S()
    assert s.stream.position is None
    s.connected()
    s.started()
    s.replayed(0)
    assert s.stream.position is None, "catching up"
    s = S().caught_up(5)
    s.live(7)
    assert s.stream.position is None, "a gap"
    s = S().caught_up(5)
    s.disconnected()
    assert s.stream.position is None, "down"
    s = S().caught_up(5)
    s.later(60.0)
    assert s.stream.position is None, "a probe: it may find another process"
    assert s.round(5) == ["StopReplay"]
    assert s.stream.position == at(5)
    assert s.hint() == [("ask", 0)], "from the oldest number that is remembered"
    assert s.stream.position is None, "a hint"


def test_a_batch_after_a_pause_may_be_another_process_s_until_a_round_has_shown() -> None:
    s = S().caught_up(5)
    late = 5 + int(RESTART_TIME) + 1
    payload = batch(late)
    assert words(s.stream.live(6, payload, s.now)) == [6, ("ask", 5)]
    assert s.stream.position is None
    s.started()
    s.stream.replayed(5, batch(5), s.now)
    s.stream.replayed(6, payload, s.now)
    s.ended()
    assert s.stream.position == Position(6, stamp(payload))


def test_a_stream_that_lost_something_or_began_later_stands_nowhere() -> None:
    s = S()
    s.connected()
    s.round(500)
    s.round(500)
    assert s.state == "live"
    assert s.stream.position is None
    later = S(start=7)
    later.connected()
    later.round(7)
    later.round(7)
    assert later.state == "live"
    assert later.stream.position is None
    silent = S()
    silent.connected()
    silent.round()
    assert silent.state == "live"
    assert silent.stream.position is None, "nothing was published"


def test_one_goes_on_where_the_other_stood() -> None:
    s = S().caught_up(5)
    position = s.stream.position
    assert position is not None
    other = S(since=position)
    other.connected()
    assert other.round(5, 6)[:1] == [6]
