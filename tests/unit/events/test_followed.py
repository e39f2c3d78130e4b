"""When a worker may be relied on, when its batches tell of a cache that is gone, and what its alarms say."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from kvsync.events.contracts import Target
from kvsync.events.followed import RECONNECT_FIRST, RECONNECT_LAST, Followed
from kvsync.events.sockets import WorkerSockets
from kvsync.events.stream import PROBE_INTERVAL, SILENCE, Budget, State, Stream
from tests import wire

TARGET = Target("a", "a", "a", "m", 0, "tcp://127.0.0.1:5557", None)
CLEAR = wire.batch(wire.cleared(), ts=1.0, rank=0)


class NoSockets:
    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()


def followed(
    *, before: Followed | None = None, applied: int = 0, curve: bool = False, replay: bool = False
) -> Followed:
    """With a stream that has no replay, unless told, and got so many batches."""
    stream = Stream(can_replay=replay, budget=Budget(1 << 20), replay_timeout=1.0, replay_round_timeout=1.0)
    it = Followed(TARGET, stream, cast(WorkerSockets, NoSockets()), 0.0, before=before, curve=curve)
    if applied:
        stream.connected(0.0)
        for seq in range(applied):
            stream.live(seq, wire.batch(ts=float(seq), rank=0), 0.0)
    return it


def test_it_may_be_relied_on_when_its_stream_is_current_and_it_is_awake() -> None:
    it = followed()
    assert not it.usable, "no connection yet"
    it = followed(applied=1)
    assert it.usable
    it.fell_asleep()
    assert not it.usable
    it.asleep = False
    assert it.usable
    it.stream.disconnected(0.0)
    assert not it.usable


def test_it_is_mute_only_if_it_never_published_anything() -> None:
    it = followed(replay=True)
    it.stream.connected(0.0)
    it.stream.replay_started(0.0)
    it.stream.replay_ended(0.0)
    it.stream.tick(SILENCE, served_at=SILENCE)
    assert it.mute
    assert not it.usable
    assert it.status().alarm == "silent"

    it = followed(applied=1)
    assert it.stream.resync(1.0)  # it can't be replayed, so nothing is left of it
    it.stream.disconnected(1.0)
    it.stream.connected(1.0)
    assert it.stream.last is None
    it.stream.tick(2 * SILENCE, served_at=2 * SILENCE)
    assert it.stream.state is State.SILENT
    assert not it.mute
    assert it.usable


def test_after_a_sleep_a_clear_behind_all_that_was_known_ends_its_doubts() -> None:
    it = followed(applied=5)
    it.judge(3, CLEAR)
    assert not it.outdated, "nothing is in doubt"
    it.fell_asleep()
    it.judge(4, CLEAR)  # replayed: of before
    assert it.outdated
    it.judge(5, CLEAR)
    assert not it.outdated


def test_nothing_ends_the_doubts_before_all_is_known_that_was_published() -> None:
    it = followed()
    it.fell_asleep()
    it.judge(10, CLEAR)
    assert it.outdated
    it.stream.connected(0.0)
    it.stream.live(10, CLEAR, 0.0)
    it.caught_up()
    it.judge(10, CLEAR)
    assert it.outdated
    it.judge(11, CLEAR)
    assert not it.outdated


def test_a_clear_that_came_unnoticed_ends_them_with_the_next_batch() -> None:
    """The engine slept, woke and stored while its stream was behind: which clear is that of the sleep can't be told."""
    it = followed(replay=True)
    it.fell_asleep()
    it.stream.connected(0.0)
    for _ in range(2):  # the sleep was known before the first connection: the first round would do
        it.stream.replay_started(0.0)
        it.stream.replayed(0, CLEAR, 0.0)
        it.judge(0, CLEAR)
        it.stream.replay_ended(0.0)
        it.caught_up()
    assert it.stream.current
    it.judge(0, wire.batch(ts=1.0, rank=0))
    assert it.outdated, "nothing shows that the clear has come"
    it.judge(1, wire.batch(ts=2.0, rank=0))
    assert (it.outdated, it.overlooked) == (False, True)


def test_a_round_asked_before_the_sleep_was_known_does_not_show_what_was_published_before_it() -> None:
    it = followed(replay=True)
    it.stream.connected(0.0)
    it.stream.replay_started(0.0)
    it.fell_asleep()
    it.stream.replay_ended(0.0)
    it.caught_up()
    assert it.stream.current
    it.judge(0, wire.batch(ts=1.0, rank=0))
    assert it.outdated, "it may have been under way before the sleep"
    it.stream.live(0, wire.batch(ts=1.0, rank=0), 0.0)
    it.stream.tick(PROBE_INTERVAL)
    it.stream.replay_started(PROBE_INTERVAL)
    it.stream.replayed(0, wire.batch(ts=1.0, rank=0), PROBE_INTERVAL)
    it.stream.replay_ended(PROBE_INTERVAL)
    it.caught_up()
    it.numbered_anew()
    it.judge(1, wire.batch(ts=2.0, rank=0))
    assert it.outdated, "another process's, perhaps, with numbers of its own"


def test_another_process_ends_them_and_a_new_registration_does_not() -> None:
    it = followed(applied=1)
    it.fell_asleep()
    again = followed(before=it)
    assert (again.asleep, again.outdated) == (True, True)
    again.renewed()
    assert (again.asleep, again.outdated) == (True, False)
    again.asleep = False
    assert not followed(before=again).asleep


@pytest.mark.parametrize(
    "payload",
    [
        wire.batch(wire.cleared(), ts=1.0, rank=1),
        wire.batch(wire.stored(["AllBlocksCleared"], [1, 2, 3, 4]), ts=1.0, rank=0),
        wire.batch(ts=1.0, rank=0),
        CLEAR[:-1],
        b"AllBlocksCleared",
        b"",
    ],
    ids=["of-another-rank", "in-a-name", "empty", "cut", "no-batch", "nothing"],
)
def test_what_is_no_clear_ends_nothing(payload: bytes) -> None:
    it = followed(applied=1)
    it.fell_asleep()
    it.judge(1, payload)
    assert it.outdated


@pytest.mark.parametrize("payload", [CLEAR, wire.batch(["AllBlocksCleared"], ts=1.0, rank=None)], ids=["map", "array"])
def test_a_clear_of_any_dialect_ends_them(payload: bytes) -> None:
    it = followed(applied=1)
    it.fell_asleep()
    it.judge(1, payload)
    assert not it.outdated


def test_the_pause_before_a_new_connection_grows_until_one_lasts() -> None:
    it = followed()
    pauses = []
    for n in range(9):
        it.went_up(float(n))
        it.went_down(float(n))
        it.pause(float(n))
        pauses.append(round(it.reconnect_at - n, 3))
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == RECONNECT_LAST
    it.went_up(100.0)
    it.went_down(100.0 + RECONNECT_LAST)
    it.pause(0.0)
    assert it.reconnect_at == RECONNECT_FIRST


def test_alarms_say_what_to_do() -> None:
    it = followed()
    assert (it.status().alarm, it.status().problem) == (None, None), "it may still come"
    it.overdue = True

    def says(alarm: str, *words: str) -> None:
        status: Any = it.status()
        assert status.alarm == alarm
        for word in (TARGET.events, *words):
            assert word in status.problem

    says("no_connection", "--kv-events-config", "* or ::")
    it.refused = True
    says("handshake", "the port of the events endpoint", "events.curve")
    it.went_up(0.0)
    assert it.status().alarm is None
    it.went_down(0.0)
    it.overdue = True
    says("no_connection", "it was connected before")
    it = followed(curve=True)
    it.overdue = it.refused = True
    says("handshake", "events.curve.server_key", "events.curve.public_key")
