"""What pods become, seen through a list and a watch: the same on the fake and on a real API server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.client import until

from .conftest import Server
from .following import following
from .pods import EVENTS, NAME, Kube, Refused, own_address, pod, running


async def test_what_is_there_and_what_comes(server: Server, kube: Kube, tmp_path: Path) -> None:
    uid = await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        (a,) = followed.engines.values()
        assert (a.uid, a.name) == (f"{kube.namespace}/a@{uid}", f"{kube.namespace}/a")
        assert (a.url, a.model) == ("http://10.0.0.1:8000", "m")
        assert (a.kv_events, a.events, a.replay) == (True, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
        await kube.create(pod("b", labels={NAME: "m"}))
        await kube.create(pod("other", labels={"app": "web"}), running("10.0.0.9"))
        await kube.status("b", running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)
        assert not followed.named(kube)["b"].kv_events
        await kube.delete("a")
        await followed.has(kube, b=True)


async def test_followed_from_running_with_an_address_and_ready_only_when_ready(
    server: Server, kube: Kube, tmp_path: Path
) -> None:
    async with following(server, kube, tmp_path) as followed:
        await kube.create(pod("a"))
        await kube.create(pod("fence"), running("10.0.0.99"))
        await followed.has(kube, fence=True)
        assert followed.source.status().pods == {"not_running": 1, "ready": 1}
        await kube.status("a", running(None, ready=False))
        await kube.status("fence", running("10.0.0.99", ready=False))
        await followed.has(kube, fence=False)
        assert followed.source.status().pods == {"no_address": 1, "followed": 1}
        await kube.status("a", running("10.0.0.1", ready=False))
        await followed.has(kube, a=False, fence=False)
        await kube.status("a", running("10.0.0.1"))
        await followed.has(kube, a=True, fence=False)
        await kube.status("a", running("10.0.0.1", ready=False))
        await followed.has(kube, a=False, fence=False)
        await kube.status("a", running("10.0.0.1", phase="Failed", ready=False))
        await followed.has(kube, fence=False)


async def test_an_address_that_is_taken_away_ends_the_engine(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K2) An evicted pod's status says blank for its address, and nothing else tells."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        await kube.status("a", running(None))
        await followed.has(kube)
        assert followed.source.status().pods == {"no_address": 1}
        await kube.status("a", running("10.0.0.7"))
        await followed.has(kube, a=True)
        assert followed.named(kube)["a"].url == "http://10.0.0.7:8000"


async def test_a_terminating_pod_is_followed_and_not_ready(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K3) Its Ready condition stays true; the deletion timestamp alone says that it ends."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        uid = followed.named(kube)["a"].uid
        await kube.delete("a", now=False)
        await followed.has(kube, a=False)
        assert [change.kind for change in followed.changes] == ["added", "changed"]
        assert (await kube.get("a"))["status"]["conditions"][0]["status"] == "True"
        await kube.delete("a")
        await followed.has(kube)
        assert followed.changes[-1].engine.uid == uid


async def test_events_end_with_the_label_and_come_back_with_it(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K4) The engine is the same, so nothing but following changes."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        before = followed.named(kube)["a"]
        for value, expected in ((None, False), ("true", True), ("True", False), ("true", True), ("false", False)):
            await kube.label("a", kv_events_enabled=value)

            async def told(expected: bool = expected) -> bool:
                return followed.named(kube)["a"].kv_events is expected

            await until(told, f"kv_events {expected}")
            assert followed.named(kube)["a"].ready
        assert {change.kind for change in followed.changes[1:]} == {"changed"}
        assert followed.named(kube)["a"].uid == before.uid


async def test_the_models_label_is_removed_and_restored(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K4) Without its name it is no engine; what is left of the labels says why."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        await kube.label("a", name=None)
        await followed.has(kube)
        assert followed.source.status().pods == {"no_model": 1}
        await kube.label("a", name="m")
        await followed.has(kube, a=True)
        await kube.label("a", name="n")

        async def other() -> bool:
            return bool(followed.named(kube) and followed.named(kube)["a"].model == "n")

        await until(other, "the other model")
        assert [change.kind for change in followed.changes] == ["added", "gone", "added", "gone", "added"]


async def test_a_selector_shows_and_hides(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K4) A pod that leaves the selector is told of as deleted, with the labels that it had and without a deletion
    timestamp; one that comes back, as added."""
    await kube.create(pod("a"), running("10.0.0.1"))
    await kube.create(pod("b", labels={NAME: "m", "tier": "x"}), running("10.0.0.2"))
    async with following(server, kube, tmp_path, selector=f"{NAME},{EVENTS}=true") as followed:
        await followed.has(kube, a=True)
        await kube.label("a", kv_events_enabled=None)
        await followed.has(kube)
        await kube.label("a", kv_events_enabled="true")
        await followed.has(kube, a=True)
        await kube.label("b", kv_events_enabled="true")
        await followed.has(kube, a=True, b=True)


async def test_a_change_that_means_nothing_tells_nothing(server: Server, kube: Kube, tmp_path: Path) -> None:
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        path = f"/api/v1/namespaces/{kube.namespace}/pods/a"
        merge = "application/merge-patch+json"
        await kube.ask("PATCH", path, {"metadata": {"annotations": {"note": "1"}}}, merge)
        await kube.ask("PATCH", path, {"metadata": {"annotations": {"note": "1"}}}, merge)
        await kube.create(pod("fence"), running("10.0.0.99"))
        await followed.has(kube, a=True, fence=True)
        assert [change.engine.name for change in followed.changes if change.kind == "changed"] in (
            [],
            [f"{kube.namespace}/fence"],
        )


async def test_a_pod_that_is_deleted_and_made_again_at_once(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(K5) A storm of deletes and adds under one name and one address ends followed, as the last of them."""
    async with following(server, kube, tmp_path) as followed:
        uid = ""
        for turn in range(25):
            uid = await kube.create(pod("a"), running(f"10.0.0.{1 + turn % 2}"))
            if turn < 24:
                await kube.delete("a", now=True)
        await followed.has(kube, a=True)

        async def last() -> bool:
            return followed.named(kube)["a"].uid.endswith(uid)

        await until(last, "the last pod")
        assert len({change.engine.uid for change in followed.changes}) > 1


async def test_two_pods_with_one_address(server: Server, kube: Kube, tmp_path: Path) -> None:
    """A pod whose end was never told keeps its address in the API; the one whose container was started later has it,
    and the first gets it back."""
    late = running("10.0.0.1") | {"startTime": "2026-01-02T00:00:00Z"}
    await kube.create(pod("stuck"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, stuck=True)
        await kube.create(pod("late"), late)
        await followed.has(kube, late=True)
        assert followed.source.status().pods == {"ready": 1, "address_taken": 1}
        await kube.delete("late")
        await followed.has(kube, stuck=True)
        await kube.delete("stuck", now=False)
        await followed.has(kube, stuck=False)
        early = running("10.0.0.1") | {"startTime": "2025-01-01T00:00:00Z"}
        await kube.create(pod("early"), early)
        await kube.create(pod("fence"), running("10.0.0.99"))
        await followed.has(kube, stuck=False, fence=True)  # it may still answer there, and publish its events
        early["containerStatuses"][0]["state"] = {"running": {"startedAt": "2026-01-03T00:00:00Z"}}
        await kube.status("early", early)  # after its node's restart
        await followed.has(kube, early=True, fence=True)


async def test_one_name_in_two_namespaces(server: Server, kube: Kube, tmp_path: Path) -> None:
    other = kube.inside(f"{kube.namespace}-b")
    third = kube.inside(f"{kube.namespace}-c")
    await other.namespaced()
    await third.namespaced()
    for each in (kube, other, third):
        await each.create(pod("a"), running(own_address()))
    async with following(server, kube, tmp_path, namespaces=(kube.namespace, other.namespace)) as followed:
        await followed.has(kube, a=True)
        await followed.has(other, a=True)
        assert set(followed.named()) == {f"{kube.namespace}/a", f"{other.namespace}/a"}
        await kube.delete("a")
        await followed.has(kube)
        await followed.has(other, a=True)
    async with following(server, kube, tmp_path, namespaces=("*",)) as everywhere:
        await everywhere.has(other, a=True)
        await everywhere.has(third, a=True)


async def test_addresses_of_every_kind(server: Server, kube: Kube, tmp_path: Path) -> None:
    """(D2) IPv6 stands in brackets; the first address of a dual stack counts."""
    dual = running("fd00::12") | {"podIPs": [{"ip": "fd00::12"}, {"ip": "10.0.0.12"}]}
    await kube.create(pod("four"), running("127.0.0.12"))
    await kube.create(pod("six"), running("fd00::11"))
    await kube.create(pod("dual"), dual)
    await kube.create(pod("link"), running("fe80::1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, four=True, six=True, dual=True)
        urls = {name: engine.url for name, engine in followed.named(kube).items()}
        assert urls == {
            "four": "http://127.0.0.12:8000",
            "six": "http://[fd00::11]:8000",
            "dual": "http://[fd00::12]:8000",
        }
        assert followed.named(kube)["six"].events == "tcp://[fd00::11]:5557"
        assert followed.source.status().pods == {"ready": 3, "bad_setting": 1}
    for ip in ("010.0.0.1", "::ffff:10.0.0.1"):
        with pytest.raises(Refused, match="422"):
            await kube.status("four", running(ip))


async def test_a_container_that_is_started_anew_is_another_engine(server: Server, kube: Kube, tmp_path: Path) -> None:
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        before = followed.named(kube)["a"]
        await kube.status("a", running("10.0.0.1", restarts=1))

        async def another() -> bool:
            return bool((found := followed.named(kube).get("a")) and found.uid != before.uid)

        await until(another, "another engine")
        assert [change.kind for change in followed.changes] == ["added", "gone", "added"]
        assert replace(followed.named(kube)["a"], uid=before.uid) == before


async def test_more_pods_than_a_page_holds(server: Server, kube: Kube, tmp_path: Path) -> None:
    count = 603
    made = [kube.create(pod(f"p{n:04}", labels={NAME: "m"}), None) for n in range(count)]
    for start in range(0, count, 50):
        await asyncio.gather(*made[start : start + 50])
    await kube.status("p0000", running("10.0.0.1"))
    await kube.status(f"p{count - 1:04}", running("10.0.0.2"))
    async with following(server, kube, tmp_path) as followed:
        assert set(followed.named(kube)) == {"p0000", f"p{count - 1:04}"}
        assert followed.source.status().pods == {"ready": 2, "not_running": count - 2}
        assert followed.count("lists") == 1


async def test_watches_end_and_go_on_by_themselves(server: Server, kube: Kube, tmp_path: Path) -> None:
    """Every one of these ends after four seconds, with a bookmark before; what happens between two is not lost."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path, watch_timeout=4.0) as followed:
        ready = True
        while followed.count("watches") < 3:
            ready = not ready
            await kube.status("a", running("10.0.0.1", ready=ready))
            await followed.has(kube, a=ready)
            await asyncio.sleep(0.05)  # so that not every event is the first of its watch
        assert followed.count("bookmarks") >= 1
        assert followed.count("expired") == 0
        assert followed.source.status().scopes[0].failures == {}


async def test_lists_come_now_and_then_whatever_the_watch_says(server: Server, kube: Kube, tmp_path: Path) -> None:
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path, relist_interval=0.5) as followed:
        await followed.counted("lists", 4)
        assert followed.count("corrected") == 0
        assert [change.kind for change in followed.changes] == ["added"]


async def test_an_api_server_that_is_killed_and_comes_back(server: Server, kube: Kube, tmp_path: Path) -> None:
    """The fleet stays as it was; what happened meanwhile is found. Its revisions have expired, so a list finds it."""
    await kube.create(pod("a"), running("10.0.0.1"))
    await kube.create(pod("b"), running("10.0.0.2"))
    async with following(server, kube, tmp_path, degraded_after=0.5) as followed:
        await followed.has(kube, a=True, b=True)
        told = len(followed.changes)
        await server.stop(kill=True)
        await followed.state("degraded")
        assert "can't be reached" in (followed.source.status().scopes[0].problem or "")
        assert len(followed.changes) == told
        assert len(followed.engines) == 2
        await server.start()
        await kube.delete("a")
        await followed.has(kube, b=True)
        await kube.create(pod("c"), running("10.0.0.3"))
        await followed.has(kube, b=True, c=True)
        await followed.state("synced")


async def test_an_api_server_that_is_restarted_properly(server: Server, kube: Kube, tmp_path: Path) -> None:
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        await server.stop()
        await server.start()
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)
        await followed.state("synced")
