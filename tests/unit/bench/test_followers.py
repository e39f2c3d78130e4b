"""The way of the events rows, small: publishers in a process, kvsync in another, real sockets between them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
from bench.followers import Kvsync, following, verify
from bench.model import Wrong
from bench.process import Subject, until

from kvsync.index import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE, reason="the benchmarks are of the native core")


@pytest.fixture
def publisher() -> Iterator[Subject]:
    with Subject("publisher", python=sys.executable) as subject:
        yield subject


def test_what_is_published_is_found_and_what_is_not_is_wrong(publisher: Subject) -> None:
    scripts = [{"kind": "store", "wanted": [(n, 40), (n + 10, 16)], "per_batch": 16} for n in range(2)]
    assert publisher.ask("load", scripts=scripts) == 8
    with Kvsync() as follower, following(follower, [publisher], 2):
        told = publisher.ask("publish", rate=1000, times=True)
        assert (told["messages"], len(told["times"])) == (8, 8)
        assert told["times"] == sorted(told["times"])
        assert told["seconds"] >= 7 / 1000
        until(lambda: follower.held([(10, 16), (11, 16)]) == [{"w0": 16}, {"w1": 16}], 30)
        verify(follower, [(0, 40), (1, 40)], ["w0", "w1"])
        follower.check([4, 4])
        with pytest.raises(Wrong, match="chain 0 of 40 blocks at w1"):
            verify(follower, [(0, 40)], ["w1"])
        with pytest.raises(Wrong, match="after 5 messages"):
            follower.check([5, 4])


def test_a_fleets_events_become_visible_while_lookups_run(publisher: Subject) -> None:
    publisher.ask("load", scripts=[{"kind": "store", "wanted": [(1, 64), (2, 16)], "per_batch": 16}])
    with Kvsync() as follower, following(follower, [publisher], 1):
        publisher.ask("publish")
        until(lambda: follower.held([(2, 16)]) == [{"w0": 16}], 30)
        start = time.monotonic() + 0.5
        publisher.ask("load", scripts=[{"kind": "store", "wanted": [(3, 16), (4, 16)], "per_batch": 16}])
        probes = [(start, "w0", 3, 16), (start + 0.1, "w0", 4, 16), (start + 0.2, "w0", 5, 16)]
        follower.tell("watch", probes=probes, looked_up=[(1, 64)], until=start + 0.6)
        sent = publisher.ask("publish", rate=10, at=start, times=True)["times"]
        watched = follower.answer()
    seen = watched["seen"]
    assert sent[0] <= seen[0] < float("inf")
    assert sent[1] <= seen[1] < float("inf")
    assert seen[2] == float("inf")
    assert watched["match"]
    assert min(watched["match"]) > 0
    assert watched["late"]
