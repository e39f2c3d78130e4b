"""What the index knows of engines that are followed over real sockets, held against what they published."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvsync.discovery.model import Engine
from kvsync.index import PrefixIndex
from kvsync.index.match import Index, Match
from tests.faults.publisher import neighbours, payload
from tests.integration.events.conftest import SETTINGS, Fleet, engine_of


class Known:
    """A fleet with the index that serves."""

    def __init__(self, fleet: Fleet, index: Index) -> None:
        self.fleet = fleet
        self.index = index

    def match(self, value: int, worker: str = "a") -> Match:
        """For a prompt of what a publisher's batch with this one hash stores."""
        return self.index.match([value] * 4 + [0], "m")[worker]

    def state(self, worker: str = "a") -> Mapping[str, Any]:
        workers: Any = self.index.stats()["workers"]
        found: Mapping[str, Any] = workers[worker]
        return found

    async def holds(self, blocks: int, worker: str = "a") -> None:
        workers: Any = lambda: self.index.stats()["workers"]  # noqa: E731
        await self.fleet.until(lambda: worker in workers() and self.state(worker)["blocks"] == blocks)


@pytest_asyncio.fixture
async def known() -> AsyncIterator[Known]:
    index = PrefixIndex()
    async with Fleet(SETTINGS, sink=index) as fleet:
        yield Known(fleet, index)


@pytest.mark.faults
@pytest.mark.parametrize("topic_frame", [True, False], ids=["since-0.26", "before-0.26"])
async def test_a_late_joiner_knows_what_one_from_the_beginning_knows(known: Known, topic_frame: bool) -> None:
    """(S2, S4) Join at 200 with 0–199 in the engine's buffer, removals among them, in both layouts of replies."""
    publisher = known.fleet.publisher(topic_frame=topic_frame)
    await known.fleet.follow(publisher, "early")
    await known.fleet.live("early")
    for n in range(200):
        publisher.publish(*([n - 1] if n % 3 == 2 else [n]), removed=n % 3 == 2)
    await known.fleet.until(lambda: known.fleet.status("early").last_sequence == 199)
    await known.holds(68, "early")
    await known.fleet.follow(publisher, "late")
    await known.holds(68, "late")
    publisher.publish(500)
    for worker in ("early", "late"):
        await known.holds(69, worker)
        await known.fleet.live(worker)
        credits = [known.match(n, worker).credit for n in (*range(200), 500)]
        assert credits == [4 if n % 3 == 0 or n in (199, 500) else 0 for n in (*range(200), 500)]
        assert known.match(0, worker).trust == "exact"
    assert publisher.refused == []


@pytest.mark.faults
async def test_a_replay_that_overlaps_live_batches_counts_each_once(known: Known) -> None:
    """(S7) Replay 0–10, live 8–12, then one removal ⇒ gone."""
    publisher = known.fleet.publisher(already=range(1, 12))
    publisher.silent_replay = True
    await known.fleet.follow(publisher)
    await known.fleet.until(lambda: publisher.requests == [0])
    publisher.resend(8, 9, 10)
    publisher.publish(12)
    publisher.publish(13)
    await known.fleet.until(lambda: known.fleet.status().counts.received == 5)
    assert known.match(9).credit == 0, "nothing counts before the epoch is proved"
    publisher.silent_replay = False
    await known.holds(13)
    await known.fleet.live()
    assert known.fleet.status().counts.replayed >= 13
    assert known.state()["copies"] == 13
    assert (known.match(9).credit, known.match(9).trust) == (4, "exact")
    publisher.publish(9, removed=True)
    await known.holds(12)
    assert known.match(9).credit == known.match(9).expected == 0


@pytest.mark.faults
async def test_what_can_not_be_decoded_costs_no_connection(known: Known) -> None:
    """(W2) It may have been a removal, so trust goes; the stream goes on, and the next batch applies."""
    publisher = known.fleet.publisher()
    await known.fleet.follow(publisher)
    await known.fleet.live()
    publisher.publish(1)
    await known.holds(1)
    publisher.send(b"\xc1 no msgpack")
    publisher.publish(3)
    await known.fleet.until(lambda: known.fleet.status().last_sequence == 2)
    await known.fleet.until(lambda: known.match(3).credit == 4)
    counts = known.state()["counts"]
    assert (counts["stored"], counts["undecodable_not_a_batch"]) == (2, 1)
    assert known.match(3).trust == "partial"
    status = known.fleet.status()
    assert (status.connections, status.disconnections, status.counts.replays_failed) == (1, 0, 0)


@pytest.mark.parametrize("replay", [True, False], ids=["with-replay", "without"])
async def test_a_worker_that_is_doubted_is_learned_anew(known: Known, replay: bool) -> None:
    """From any thread; what was noted of the engine itself stays."""
    publisher = known.fleet.publisher(replay_port=0 if replay else None)
    await known.fleet.follow(publisher)
    await known.fleet.live()
    for n in range(3):
        publisher.publish(n)
    await known.holds(3)
    assert known.match(0).trust == "exact"
    known.index.mark_reannouncing("a")
    known.index.apply("a", payload(1.0, 77))  # what no batch of the engine says
    assert known.match(77).credit == 4
    await asyncio.to_thread(known.fleet.manager.resync, "a")
    known.fleet.manager.resync("nobody")
    await known.fleet.until(lambda: known.match(77).credit == 0)
    if replay:
        await known.holds(3)
        await known.fleet.live()
        await known.fleet.until(lambda: known.match(0).trust == "exact")
    else:
        await known.fleet.until(lambda: known.match(0).trust == "partial")
        assert known.state()["blocks"] == 0
    assert known.state()["reannouncing"]
    publisher.publish(5)
    await known.fleet.until(lambda: known.match(5).credit == 4)


@pytest.mark.faults
async def test_ranks_are_told_apart_and_one_that_dies_takes_only_itself(known: Known) -> None:
    """(I13) Two ranks with prefixes of their own; a batch that names the other rank is nobody's."""
    ranks = neighbours(2)
    known.fleet.publishers.extend(ranks)
    await known.fleet.manager.add(replace(engine_of(ranks[0]), data_parallel_size=2, replay=None))
    for rank in (0, 1):
        await known.fleet.live(f"a#{rank}")
        await known.fleet.until(ranks[rank].subscribed.is_set)  # no replay brings what comes before that
        ranks[rank].publish(10 + rank, rank=rank)
        await known.holds(1, f"a#{rank}")
    ranks[0].publish(11, rank=1)
    await known.fleet.until(lambda: known.state("a#0")["counts"].get("wrong_rank") == 1)
    found = {(value, worker): known.match(value, worker).credit for value in (10, 11) for worker in ("a#0", "a#1")}
    assert found == {(10, "a#0"): 4, (10, "a#1"): 0, (11, "a#0"): 0, (11, "a#1"): 4}
    ranks[0].close()
    known.fleet.publishers.remove(ranks[0])
    await known.fleet.until(lambda: known.match(10, "a#0").trust == "none")
    assert known.match(10, "a#0").credit == 0
    assert known.match(11, "a#1").credit == 4
    assert known.match(11, "a#1").trust == known.match(10, "a#1").trust != "none"
    assert known.fleet.status("a#1").state == "live"


@pytest.mark.faults
async def test_an_engine_on_ipv6_scores_as_one_on_ipv4(known: Known) -> None:
    """(D2) Its HTTP pages, its events and its replays, with and without ports in the configuration."""
    six = known.fleet.publisher(host="::1", already=[1, 2, 3])
    four = known.fleet.publisher(already=[1, 2, 3])
    assert six.replay is not None
    assert six.events.startswith("tcp://[::1]:")

    async def sources(request: web.Request) -> web.Response:
        endpoints = [f"tcp://*:{endpoint.rpartition(':')[2]}" for endpoint in (six.events, str(six.replay))]
        answer = {"enable_kv_cache_events": True, "publisher": "zmq"}
        return web.json_response({"0": answer | {"endpoint": endpoints[0], "replay_endpoint": endpoints[1]}})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text='vllm:cache_config_info{engine="0",num_gpu_blocks="64"} 1.0\n')

    app = web.Application()
    app.router.add_get("/kv_event_sources", sources)
    app.router.add_get("/metrics", metrics)
    async with TestServer(app, host="::1") as server:
        url = f"http://[::1]:{server.port}"
        await known.fleet.manager.add(Engine(uid="told", name="told", url=url, model="m"))
        await known.fleet.manager.add(replace(engine_of(six, "listed"), url=url))
        await known.fleet.follow(four, "four")
        workers = ("told", "listed", "four")
        for worker in workers:
            await known.holds(3, worker)
            await known.fleet.live(worker)
        six.publish(4)
        four.publish(4)
        for worker in workers:
            await known.holds(4, worker)
        for value in range(1, 6):
            scores = {(m.credit, m.expected, m.trust) for m in (known.match(value, worker) for worker in workers)}
            assert scores == {(4 if value < 5 else 0, 0, "exact")}
        assert known.fleet.status("told").endpoint == known.fleet.status("listed").endpoint == six.events
