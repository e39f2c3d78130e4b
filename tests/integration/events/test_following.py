"""Following engines over real sockets."""

from __future__ import annotations

import pytest

from tests.integration.events.conftest import Fleet


@pytest.mark.parametrize("topic_frame", [True, False], ids=["since-0.26", "before-0.26"])
async def test_late_joiner_gets_all_of_the_history(fleet: Fleet, topic_frame: bool) -> None:
    publisher = fleet.publisher(topic_frame=topic_frame)
    for n in range(200):
        publisher.publish(n + 1)
    await fleet.follow(publisher)
    await fleet.live()
    await fleet.holds(range(1, 201))
    publisher.publish(201)
    await fleet.holds(range(1, 202))
    assert fleet.sink.trust["a"] == "exact"
    status = fleet.status()
    assert (status.last_sequence, status.whole, status.connected) == (200, True, True)
    assert status.counts.missed == status.counts.lost == 0
    assert publisher.requests[0] == 0
