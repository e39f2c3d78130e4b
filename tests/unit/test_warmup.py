"""When a start is over, and what is said of it."""

from __future__ import annotations

import logging

import pytest

from kvsync.config.warm import ReadySettings
from kvsync.events.contracts import WorkerStatus
from kvsync.events.stream import State
from kvsync.warmup import WarmUp


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def status(worker: str, caught_up: bool = True, restored: bool = False) -> WorkerStatus:
    return WorkerStatus(
        engine=worker,
        name=worker,
        worker=worker,
        rank=0,
        state=State.LIVE,
        whole=True,
        last_sequence=1,
        endpoint=None,
        replay_endpoint=None,
        connected=True,
        connected_since=None,
        restored=restored,
        caught_up_in=0.5 if caught_up else None,
    )


def test_enough_is_nine_tenths() -> None:
    clock = Clock()
    warmup = WarmUp(ReadySettings(), clock)
    workers = {f"w{n}" for n in range(20)}
    some = [status(f"w{n}", restored=n < 5) for n in range(17)]
    start = warmup.look(workers, some)
    assert (start.workers, start.warm, start.cold, start.behind, start.seconds) == (20, 5, 12, 3, None)
    clock.now += 2.5
    start = warmup.look(workers, [*some, status("w17"), status("w18", caught_up=False)])
    assert (start.cold, start.behind, start.seconds) == (13, 2, 2.5)


def test_patience_ends_whatever_is_missing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    warmup = WarmUp(ReadySettings(), clock)
    clock.now += 29.9
    assert warmup.look({"a", "b"}, [status("a")]).seconds is None
    clock.now += 0.1
    assert warmup.look({"a", "b"}, [status("a")]).seconds == pytest.approx(30.0)
    assert "caught up after 30.0 s; 1 of 2 workers have not caught up" in caplog.text


def test_once_ready_it_stays_so() -> None:
    clock = Clock()
    warmup = WarmUp(ReadySettings(), clock)
    assert warmup.look({"a"}, [status("a")]).seconds == 0.0
    clock.now += 5
    start = warmup.look({"a", "b", "c"}, [status("a", caught_up=False)])
    assert (start.behind, start.seconds) == (3, 0.0)


def test_nobody_to_follow_is_nobody_to_wait_for() -> None:
    assert WarmUp(ReadySettings(), Clock()).look(set(), [status("a")]).seconds == 0.0


def test_one_of_one_is_needed_and_no_share_needs_none() -> None:
    assert WarmUp(ReadySettings(), Clock()).look({"a"}, []).seconds is None
    assert WarmUp(ReadySettings(share=0), Clock()).look({"a"}, []).seconds == 0.0
