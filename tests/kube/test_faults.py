"""An API server that fails in every way, on demand. What must hold each time: the fleet stays as it was, what happened
meanwhile is found, it is counted by its reason, and nothing is asked without a pause."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from aiohttp import web

from kvsync.discovery.kubernetes import reflector
from tests.faults.client import until

from .fake import FakeApiServer, Misdeed, endless, raw, reset, stall, status, trickle
from .following import Followed, following
from .pods import NAME, Json, Kube, pod, running

PODLIST = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}


async def watched(fake: FakeApiServer) -> None:
    """Return once a watch is open."""

    async def look() -> bool:
        return fake.watching == 1

    await until(look, "an open watch")


def last_watch(fake: FakeApiServer) -> Json:
    return [query for query in fake.queries if query.get("watch")][-1]


# ---- watches


async def test_a_watch_that_is_cut_goes_on_where_it_was(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        first = last_watch(fake)["resourceVersion"]
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)
        fake.silence()  # what is told from now on is lost with the connection
        await kube.delete("a")
        fake.cut()
        await followed.has(kube, b=True)
        assert int(last_watch(fake)["resourceVersion"]) > int(first)
        assert (fake.asked["list"], followed.count("cut")) == (1, 1)
        assert followed.source.status().scopes[0].failures == {}


async def test_half_a_line_is_no_line(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    """What it began to say comes again, whole, with the next watch."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        fake.silence()
        await kube.create(pod("b"), running("10.0.0.2"))
        fake.say(b'{"type":"ADDED","object":{"kind":"Pod","metadata":{"name":"b","na', then="end")
        await followed.has(kube, a=True, b=True)
        assert fake.asked["list"] == 1


@pytest.mark.parametrize("how", ["in the stream", "as a status"])
async def test_a_place_in_history_that_is_not_kept(fake: FakeApiServer, kube: Kube, tmp_path: Path, how: str) -> None:
    """410, as an event and as a status: a list, and its difference."""
    await kube.create(pod("a"), running("10.0.0.1"))
    await kube.create(pod("b"), running("10.0.0.2"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        await kube.create(pod("fence"))
        await followed.counted("events")
        fake.silence()
        await kube.delete("a")
        await kube.status("b", running("10.0.0.2", ready=False))
        await kube.create(pod("c"), running("10.0.0.3"))
        if how == "in the stream":
            fake.forget()
            fake.error(410)
        else:
            fake.next["watch"].append(status(410, "Expired"))
            fake.end()
        await followed.has(kube, b=False, c=True)
        assert [change.kind for change in followed.changes[2:]] == ["gone", "changed", "added"]
        assert (followed.count("expired"), followed.count("corrected")) == (1, 3)
        assert fake.asked["list"] == 2
        assert followed.source.status().scopes[0].failures == {}


async def test_another_error_in_the_stream(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        fake.error(500, "InternalError")
        await followed.counted("server_error")
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)
        await followed.state("synced")
        assert fake.asked["list"] == 1


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"{}\n",
        b"null\n",
        b'{"type":"NEWS","object":{"kind":"Pod","metadata":{"resourceVersion":"9999"}}}\n',
        b'{"type":"ADDED","object":{"kind":"Pod","metadata":{}}}\n',
        b'{"type":"ADDED","object":{"kind":"Pod","metadata":{"resourceVersion":"9999","name":"a"}}}\n',
        b'{"type":"ADDED","object":{"kind":"Node","metadata":{"resourceVersion":"9999","name":"a","uid":"u"}}}\n',
        b'{"type":"ADDED","object":{"kind":"Pod","metadata":{"resourceVersion":7,"name":"a","uid":"u"}}}\n',
        b'{"type":"ADDED","object":"pod"}\n',
        b'{"type":"ADDED"}\n',
        b'{"type":"ERROR","object":[]}\n',
        b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"' + b"9" * 1000 + b'"}}}\n',
        b'{"type":"ADDED","object":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001 + b"\n",
        b'{"type":"ADDED","object":{"kind":"Pod","metadata":{"name":"\xff"}}}\n',
        b"\x1f\x8b\x08\x00\x00\n",
    ],
)
async def test_a_line_that_can_not_be_read(fake: FakeApiServer, kube: Kube, tmp_path: Path, line: bytes) -> None:
    """What it said is lost, so a list has to say it; nothing else is."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        fake.silence()
        await kube.create(pod("b"), running("10.0.0.2"))
        fake.say(line)
        await followed.has(kube, a=True, b=True)
        assert (followed.count("garbage"), fake.asked["list"]) == (1, 2)
        await kube.delete("a")
        await followed.has(kube, b=True)


async def test_a_line_without_an_end(
    fake: FakeApiServer, kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "MAX_LINE_BYTES", 200_000)
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        fake.next["watch"].append(endless(b"x" * 50_000))
        fake.end()
        await followed.counted("too_large")
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)


async def test_a_huge_pod_is_a_pod(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    """More than etcd takes, and read beside the event loop."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        await kube.create(pod("b", annotations={"note": "n" * (3 << 20)}), running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)
        assert fake.asked["list"] == 1
        assert followed.source.status().scopes[0].failures == {}


async def test_a_watch_at_a_revision_that_does_not_exist_is_silent(
    fake: FakeApiServer, kube: Kube, tmp_path: Path
) -> None:
    """Answered with 200 and nothing, whatever happens: as after a store came back from a backup."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path, watch_timeout=1.0) as followed:
        await watched(fake)
        fake.rewind()
        fake.end()
        await followed.counted("watches", 2)
        await kube.delete("a")
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, b=True)
        assert followed.count("silent") >= 1
        assert followed.count("corrected") == 2


async def test_a_watch_that_neither_speaks_nor_ends(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    """A connection that is dead without saying so, and one that is kept busy with blanks: both are given up."""
    await kube.create(pod("a"), running("10.0.0.1"))
    for misdeed in (stall, trickle(0.05)):
        asked = fake.asked["watch"]
        fake.next["watch"].append(misdeed)
        async with following(fake, kube, tmp_path, watch_timeout=0.6, list_timeout=0.8) as followed:
            await followed.counted("timeout")
            assert fake.asked["watch"] >= asked + 1
            await kube.status("a", running("10.0.0.1", ready=False))
            await followed.has(kube, a=False)
            await kube.status("a", running("10.0.0.1"))


async def test_watches_that_end_at_once_do_not_turn_a_loop(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    """Lists are all there is then, further and further apart; that is told, and it degrades."""
    await kube.create(pod("a"), running("10.0.0.1"))
    fake.always["watch"] = raw(b"")
    started = time.monotonic()
    async with following(fake, kube, tmp_path, listed=False, degraded_after=1.0) as followed:
        await followed.has(kube, a=True)
        await followed.state("degraded")
        assert fake.asked["watch"] < 5 + 5 * (time.monotonic() - started)
        await kube.delete("a")
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, b=True)
        fake.always["watch"] = None
        await followed.state("synced")


@pytest.mark.parametrize("then", [b"", b'{"type":"ERROR","object":{"code":410}}\n'])
async def test_watches_that_say_something_and_end_at_once_do_not_turn_a_loop(
    fake: FakeApiServer, kube: Kube, tmp_path: Path, then: bytes
) -> None:
    """The same each time, perhaps, so that it is no sign of getting anywhere; and no watch ends for a while then."""
    line = json.dumps({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "1"}}})
    fake.always["watch"] = raw(line.encode() + b"\n" + then)
    started = time.monotonic()
    async with following(fake, kube, tmp_path, listed=False) as followed:
        await followed.counted("watches", 4)
        lasted = time.monotonic() - started
        assert lasted > 0.5 * (0.2 + 0.4 + 0.8)
        assert fake.asked["list"] <= fake.asked["watch"]
        await kube.create(pod("a"), running("10.0.0.1"))
        fake.always["watch"] = None
        await followed.has(kube, a=True)


async def test_a_flood_of_news_keeps_nobody_from_the_event_loop(
    fake: FakeApiServer, kube: Kube, tmp_path: Path
) -> None:
    """(F2) Whatever came in one piece."""
    line = json.dumps({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "1"}}})
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        fake.say(2000 * (line.encode() + b"\n"))
        turns = set()
        async with asyncio.timeout(20):
            while (done := followed.count("bookmarks")) < 2000:
                turns.add(done)
                await asyncio.sleep(0)
        assert len(turns) > 100


async def test_objects_that_no_one_asked_for_cost_only_themselves(
    fake: FakeApiServer, kube: Kube, tmp_path: Path
) -> None:
    """Those of another namespace, and names that could be mistaken for a part of something else."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        made = await kube.get("a")
        metas: list[Json] = [
            {"namespace": "elsewhere"},
            {"namespace": ""},
            {"name": "b/c", "uid": "other"},
            {"name": "b\r\nX: y", "uid": "other"},
            {"name": "B", "uid": "other"},
            {"name": "b", "uid": "other#1"},
            {"name": "b" * 254, "uid": "other"},
        ]
        for kind in ("ADDED", "DELETED"):
            for meta in metas:
                told = {"kind": "Pod", **made, "metadata": made["metadata"] | meta}
                fake.say(json.dumps({"type": kind, "object": told}).encode() + b"\n")
        await followed.counted("unreadable", 2 * len(metas))
        await kube.create(pod("fence"), running("10.0.0.99"))
        await followed.has(kube, a=True, fence=True)
        assert _kinds(followed) == ["added", "added"]
        assert fake.asked["list"] == 1


async def test_a_deletion_that_is_told_late_hits_nobody_else(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    """(K5) It is of another uid than the pod that has the name now."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        await followed.has(kube, a=True)
        old = await kube.get("a")
        await kube.delete("a")
        await kube.create(pod("a"), running("10.0.0.1"))
        await followed.counted("events", 4)
        old["metadata"]["resourceVersion"] = (await kube.get("a"))["metadata"]["resourceVersion"]
        late = {"type": "DELETED", "object": {"kind": "Pod", **old}}
        fake.say(json.dumps(late).encode() + b"\n")
        await kube.create(pod("fence"), running("10.0.0.99"))
        await followed.has(kube, a=True, fence=True)


async def test_a_pod_that_is_none_hides_no_other(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    for name, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        await kube.create(pod(name), running(ip))
    async with following(fake, kube, tmp_path) as followed:
        await watched(fake)
        fake.replace(kube.namespace, "a", "status.podIP", 7)
        await followed.has(kube, b=True)
        assert (followed.count("unreadable"), fake.asked["list"]) == (1, 1)
        fake.replace(kube.namespace, "a", "status.podIP", "10.0.0.1")
        await followed.has(kube, a=True, b=True)
        fake.replace(kube.namespace, "a", "spec.containers", None)
        await kube.create(pod("fence"), running("10.0.0.99"))
        await followed.has(kube, a=True, b=True, fence=True)


# ---- lists


LISTS: dict[str, tuple[Misdeed, str]] = {
    "500": (status(500), "server_error"),
    "503": (status(503, "ServiceUnavailable"), "server_error"),
    "429": (status(429, "TooManyRequests"), "throttled"),
    "401": (status(401, "Unauthorized"), "unauthorized"),
    "403": (status(403, "Forbidden"), "forbidden"),
    "404": (status(404, "NotFound"), "status"),
    "302": (status(302, "Found", Location="https://127.0.0.1:1/"), "status"),
    "410": (status(410, "Expired"), "garbage"),
    "reset": (reset, "unreachable"),
    "stall": (stall, "timeout"),
    "trickle": (trickle(0.05), "timeout"),
    "endless": (endless(b" " * 65536), "too_large"),
    "not JSON": (raw(b"<html>"), "garbage"),
    "nothing": (raw(b""), "garbage"),
    "null": (raw(b"null"), "garbage"),
    "half": (raw(json.dumps(PODLIST).encode()[:-10]), "garbage"),
    "deep": (raw(b'{"items":' + b"[" * 100_000), "garbage"),
    "not UTF-8": (raw(b'{"kind":"\xff"}'), "garbage"),
    "other kind": (raw(json.dumps(PODLIST | {"kind": "NodeList"}).encode()), "garbage"),
    "no revision": (raw(json.dumps(PODLIST | {"metadata": {}}).encode()), "garbage"),
    "long revision": (raw(json.dumps(PODLIST | {"metadata": {"resourceVersion": "9" * 1000}}).encode()), "garbage"),
    "nameless": (raw(json.dumps(PODLIST | {"items": [{"metadata": {}}]}).encode()), "garbage"),
}


@pytest.mark.parametrize("name", LISTS)
async def test_a_list_that_can_not_be_had_changes_nothing(
    fake: FakeApiServer, kube: Kube, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one, and one that is due while a watch works."""
    monkeypatch.setattr(reflector, "MAX_PAGE_BYTES", 1 << 20)
    monkeypatch.setattr(reflector, "PAGE_OBJECTS", 1)
    misdeed, reason = LISTS[name]
    await kube.create(pod("a"), running("10.0.0.1"))
    fake.next["list"] += [misdeed, misdeed] if name == "reset" else [misdeed]  # aiohttp tries a GET once more itself
    async with following(fake, kube, tmp_path, listed=False, list_timeout=0.4, relist_interval=0.4) as followed:
        await followed.has(kube, a=True)
        assert followed.count(reason) == 1
        fake.always["list"] = misdeed
        await followed.counted(reason, 3)
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)  # by the watch, which goes on between tries
        fake.always["list"] = None
        await followed.state("synced")
        assert [change.kind for change in followed.changes] in (["added", "added"], ["added", "added", "changed"])


async def test_the_servers_own_word_is_told_and_its_wait_is_kept(
    fake: FakeApiServer, kube: Kube, tmp_path: Path
) -> None:
    fake.next["list"].append(status(429, "TooManyRequests", Retry_After="1"))
    started = time.monotonic()
    async with following(fake, kube, tmp_path, listed=False) as followed:
        await followed.counted("throttled")
        assert followed.source.status().scopes[0].problem == (
            "the API server answers 429: injected (it asks for fewer requests)"
        )
        await followed.state("synced")
        assert time.monotonic() - started >= 1.0


async def test_a_list_in_pages_whose_rest_is_not_kept(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    """410 for a ``continue`` token: all of it in one answer then, so that it is of one moment."""
    fake.fill(kube.namespace, 1_100)
    await kube.create(pod("zz"), running("10.0.0.1"))

    async def first(request: web.Request) -> web.StreamResponse:
        answer = await fake.answer(request)
        fake.forget()
        return answer

    fake.next["list"].append(first)
    async with following(fake, kube, tmp_path) as followed:
        await followed.has(kube, zz=True)
        assert [("limit" in query, "continue" in query) for query in fake.queries[:3]] == [
            (True, False),
            (True, True),
            (False, False),
        ]
        assert followed.count("lists") == 1


async def test_pages_that_are_too_large_get_smaller(
    fake: FakeApiServer, kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "MAX_PAGE_BYTES", 400_000)
    fake.fill(kube.namespace, 40, annotations={"note": "n" * 50_000})
    await kube.create(pod("zz"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path) as followed:
        await followed.has(kube, zz=True)
        assert [query["limit"] for query in fake.queries[:5]] == ["250", "62", "15", "3", "3"]


async def test_more_pods_than_there_may_be(
    fake: FakeApiServer, kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "MAX_OBJECTS", 10)
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path, relist_interval=0.3) as followed:
        await followed.has(kube, a=True)
        fake.silence()
        fake.fill(kube.namespace, 10, labels={NAME: "m"})
        await followed.counted("too_many")
        assert "narrow kubernetes.selector or namespaces" in (followed.source.status().scopes[0].problem or "")
        await followed.has(kube, a=True)


async def test_a_list_that_does_not_end(
    fake: FakeApiServer, kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page is there in time, and there is always another one. No watch is open meanwhile: that is told as what it
    is, and given up."""
    monkeypatch.setattr(reflector, "LIST_PATIENCE", 3)
    pages = 0

    async def page(_: web.Request) -> web.StreamResponse:
        nonlocal pages
        pages += 1
        await asyncio.sleep(0.02)
        return web.json_response(PODLIST | {"metadata": {"resourceVersion": "1", "continue": str(pages)}})

    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(
        fake, kube, tmp_path, list_timeout=0.5, relist_interval=0.3, degraded_after=0.3, watch_timeout=20.0
    ) as followed:
        fake.always["list"] = page
        await followed.state("degraded")
        assert "a list is not at its end after" in (followed.source.status().scopes[0].problem or "")
        await followed.counted("timeout")
        fake.always["list"] = None
        await followed.state("synced")
        assert _kinds(followed) == ["added"]


async def test_a_list_that_goes_round_in_circles(fake: FakeApiServer, kube: Kube, tmp_path: Path) -> None:
    again = PODLIST | {"metadata": {"resourceVersion": "1", "continue": "there"}}
    fake.always["list"] = raw(json.dumps(again).encode())
    async with following(fake, kube, tmp_path, listed=False) as followed:
        await followed.counted("garbage")
        assert fake.asked["list"] <= 4


async def test_discovery_degrades_when_it_is_dead_for_long_and_says_why(
    fake: FakeApiServer, kube: Kube, tmp_path: Path
) -> None:
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(fake, kube, tmp_path, degraded_after=1.0) as followed:
        await watched(fake)
        assert followed.source.status().state == "synced"
        await fake.stop(kill=True)
        await followed.state("failing")
        await followed.state("degraded")
        status = followed.source.status()
        assert status.pods == {"ready": 1}
        assert status.scopes[0].age is not None
        assert status.scopes[0].age > 1.0
        await fake.start()
        await followed.state("synced")
        assert followed.source.status().scopes[0].problem is None
        assert _kinds(followed) == ["added"]


def _kinds(followed: Followed) -> list[str]:
    return [change.kind for change in followed.changes]
