"""What fails between client, Envoy, external processor and engine, and what becomes of the request, its load and what
is known of its engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvsync.app import App
from tests.faults.client import until
from tests.faults.http import SSE_HEAD, FakeEngine, Talk, chunk, reply
from tests.faults.process import Process
from tests.integration.extproc.envoy import cluster, envoy, filter_of, manager
from tests.integration.extproc.harness import good, note, post, settings, street
from tests.integration.gateway.harness import BODY, Client, eventually


def impatient(config: dict[str, Any]) -> None:
    filter_of(config)["message_timeout"] = "1s"


def watchful(config: dict[str, Any]) -> None:
    """It notices in a fifth of a second what it has two and a half for: other tests have the machine, too."""
    (check,) = cluster(config, "kvsync")["health_checks"]
    check |= {"interval": "0.2s", "no_traffic_interval": "0.2s", "unhealthy_threshold": 1}


# ---- engines


async def reset(engine: FakeEngine, talk: Talk) -> None:
    await talk.request()
    talk.reset()


async def nonsense(engine: FakeEngine, talk: Talk) -> None:
    await talk.request()
    await talk.send(b"this is no HTTP\r\n\r\n")
    await talk.closed()


async def stalls(engine: FakeEngine, talk: Talk) -> None:
    await talk.request()
    await talk.closed()
    engine.left.set()


@pytest.mark.parametrize(
    ("script", "status", "outcome"),
    [(reset, 502, "reset"), (nonsense, 502, "bad_answer"), (stalls, 504, "first_byte_timeout")],
    ids=["reset", "nonsense", "stalls"],
)
async def test_an_engine_that_gives_no_answer(
    tmp_path: Path, script: Callable[[FakeEngine, Talk], Awaitable[None]], status: int, outcome: str
) -> None:
    """Envoy makes up the answer; it is told in the gateway's words, and is the engine's failure."""

    def changes(config: dict[str, Any]) -> None:
        manager(config)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["timeout"] = "0.5s"

    async with street(tmp_path, script, changes=changes) as made:
        answer = await made.ask()
        assert answer.status == status
        code = "engine_timeout" if status == 504 else "engine_unreachable"
        assert answer.json["error"] == {"message": answer.message, "type": "api_error", "code": code, "param": None}
        assert made.figure("kvsync_worker_tries_total", worker="engine-0", outcome=outcome) == 1
        assert made.figure("kvsync_requests_total", path="/v1/completions", status=str(status), reason=outcome) == 1
        assert made.running() == 0


async def test_a_dead_engine_gets_one_request_and_then_none(tmp_path: Path) -> None:
    async with street(tmp_path, good, urls=("http://127.0.0.1:1",), routing={"policy": "round-robin"}) as made:
        answers = [await made.ask() for _ in range(6)]
        failed = [answer for answer in answers if answer.status != 200]
        assert [answer.message for answer in failed] == ["no engine could answer (connect_failed)"]
        assert made.figure("kvsync_worker_breaker", worker="at-http://127.0.0.1:1", state="open") == 1
        assert len(made.engines[0].requests) == 5


async def test_an_engine_whose_answers_fail_rests(tmp_path: Path) -> None:
    async def failing(engine: FakeEngine, talk: Talk) -> None:
        while await talk.request() is not None:
            await talk.send(reply(b"broken", b"500 Internal Server Error"))

    async with street(tmp_path, failing, good, routing={"policy": "round-robin"}) as made:
        answers = [await made.ask() for _ in range(10)]
        assert [(a.status, a.body) for a in answers if a.status != 200] == [(500, b"broken")] * 3
        assert made.figure("kvsync_worker_tries_total", worker="engine-0", outcome="engine_error") == 3


async def test_an_answer_that_breaks_off_does_not_look_whole(tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def breaking(engine: FakeEngine, talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD, chunk(b"data: 1\n\n"))
        await seen.wait()
        talk.reset()

    async with street(tmp_path, breaking) as made:
        client = await made.client()
        await client.send(post())
        assert await client.chunk_after_head() == b"data: 1\n\n"
        seen.set()
        with pytest.raises(asyncio.IncompleteReadError):
            await client.chunk()
        await eventually(lambda: made.running() == 0)


# ---- clients


async def test_clients_that_leave(tmp_path: Path) -> None:
    """(P4) Before the body's end, before the answer and within it: nothing of the request stays anywhere."""

    async def slow(engine: FakeEngine, talk: Talk) -> None:
        request = await talk.request()
        if request is not None and b"streamed" in request.body:
            await talk.send(SSE_HEAD, chunk(b"data: 1\n\n"))
        await talk.closed()
        engine.left.set()

    async with street(tmp_path, slow) as made:
        (engine,), extproc = made.engines, made.app.extproc
        assert extproc is not None
        client = await made.client()
        await client.send(post(BODY[:10], framing=b"Content-Length: 30"))
        await eventually(lambda: extproc.streams == 1)
        client.reset()
        await eventually(lambda: extproc.streams == 0)
        assert made.figure("kvsync_requests_cut_total", path="/v1/completions", outcome="client_gone") == 0
        assert made.figure("kvsync_extproc_streams_total", event="incomplete_request") == 1
        for number, body in enumerate((BODY, BODY.replace(b"hello", b"streamed")), 1):
            client = await made.client()
            await client.send(post(body))
            await eventually(lambda: made.running() == 1)
            if number == 2:
                await client.chunk_after_head()
            client.reset()
            await eventually(lambda: made.running() == extproc.streams == 0)
            await asyncio.wait_for(engine.left.wait(), 10)
            engine.left.clear()
        assert made.figure("kvsync_requests_cut_total", path="/v1/completions", outcome="client_gone") == 1
        assert made.figure("kvsync_worker_tries_total", worker="engine-0", outcome="ok") == 1


# ---- the external processor


@pytest.mark.parametrize("name", ["envoy.yaml", "envoy-fail-open.yaml"])
async def test_dead(tmp_path: Path, name: str) -> None:
    async with street(tmp_path, good, name=name) as made:
        assert (await made.ask()).get(b"target-pod") == [b"engine-0"]
        assert made.app.extproc is not None
        await made.app.extproc.stop()
        raw = post(BODY, b"/v1/completions", b"target-pod: 127.0.0.1:%d" % made.app.admin.port)
        answer, other = await made.say(raw), await made.say(post(BODY, b"/sleep"))
        if "open" in name:
            assert (answer.status, answer.body, answer.get(b"target-pod")) == (200, b'{"ok":true}', [])
            assert (other.status, other.message) == (501, "unknown request path")
        else:
            assert answer.status == other.status == 503
            text = "the gateway could not ask where this request goes; try again"
            error = {"message": text, "type": "api_error", "code": "ext_proc_error", "param": None}
            assert answer.json == {"error": error}
        assert len(made.engines[0].requests) == (2 if "open" in name else 1)


@pytest.mark.parametrize("name", ["envoy.yaml", "envoy-fail-open.yaml"])
async def test_frozen(tmp_path: Path, name: str) -> None:
    """Stopped as by SIGSTOP: alive to the kernel, silent to everybody. It goes on as if nothing had been."""
    engine = FakeEngine("engine", good)
    await engine.start()
    config = {"models": [{"name": "m", "engines": [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]}]}
    processor = Process(tmp_path, config | {"extproc": {"host": "127.0.0.1"}}, {}, command="extproc")
    try:
        port, _ = await processor.ports()
        fallback = (engine.port,) if "open" in name else ()
        async with envoy(tmp_path, port, name=name, fallback=fallback, changes=impatient) as made:
            await made.healthy(processors=1)

            async def ask() -> Any:
                client = await Client.open(made.port)
                answer = await client.ask()
                client.close()
                return answer

            assert (await ask()).status == 200
            processor.signal(signal.SIGSTOP)
            answer = await ask()
            if "open" in name:
                assert (answer.status, answer.get(b"target-pod")) == (200, [])
            else:
                assert answer.status in (503, 504)
                assert b'"type":"api_error"' in answer.body
            processor.signal(signal.SIGCONT)
            await made.healthy(processors=1)
            answer = await ask()
            while answer.get(b"target-pod") != [b"e"]:
                answer = await ask()
    finally:
        processor.signal(signal.SIGCONT)
        await processor.stop()
        await engine.stop()


async def test_restarted(tmp_path: Path) -> None:
    """Of two, one at a time goes as asked to (SIGTERM) and comes back: no request fails."""
    engine = FakeEngine("engine", good)
    await engine.start()
    entries = [{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}]
    apps = [App(settings(entries, extproc={"drain_delay": 2.5})) for _ in range(2)]
    for app in apps:
        await app.start()
    ports = [app.extproc.port for app in apps if app.extproc is not None]
    statuses: list[int] = []
    over = asyncio.Event()
    try:
        async with envoy(tmp_path, *ports, changes=watchful) as made:
            await made.healthy(processors=2)

            async def traffic() -> None:
                client = await Client.open(made.port)
                while not over.is_set():
                    statuses.append((await client.ask()).status)
                client.close()

            asking = asyncio.create_task(traffic())
            for number, port in enumerate(ports):
                await apps[number].stop()
                apps[number] = App(settings(entries, extproc={"drain_delay": 2.5, "port": port}))
                await apps[number].start()
                await made.healthy(processors=2)
            over.set()
            await asking
        assert set(statuses) == {200}
        assert len(statuses) > 50
    finally:
        for app in apps:
            app.hurry()
            await app.stop()
        await engine.stop()


async def test_one_of_several_that_died_is_not_asked_again(tmp_path: Path) -> None:
    """(M2) One connection that failed is enough, health checks find it later. One of three is asked alone: by default
    Envoy asks all of them where fewer than half are healthy."""

    def patient(config: dict[str, Any]) -> None:
        (check,) = cluster(config, "kvsync")["health_checks"]
        check |= {"interval": "600s", "no_traffic_interval": "600s"}

    engine = FakeEngine("engine", good)
    await engine.start()
    apps = [App(settings([{"name": "e", "url": f"http://127.0.0.1:{engine.port}"}])) for _ in range(3)]
    for app in apps:
        await app.start()
    try:
        async with envoy(tmp_path, *(a.extproc.port for a in apps if a.extproc), changes=patient) as made:
            await made.healthy(processors=3)

            async def ask() -> int:
                client = await Client.open(made.port)
                answer = await client.ask()
                client.close()
                return answer.status

            for left in (2, 1):
                extproc = apps[left].extproc
                assert extproc is not None
                await extproc.stop()

                async def out(left: int = left) -> bool:
                    assert await ask() in (200, 503)
                    return await made.figure("cluster.kvsync.membership_healthy") == left

                await until(out, "it is not asked any more")
                assert {await ask() for _ in range(20)} == {200}
    finally:
        for app in apps:
            await app.stop()
        await engine.stop()


async def test_who_sends_no_more_of_a_request_holds_no_stream(tmp_path: Path) -> None:
    """(P4) As at the gateway's own port; the engine has as long as ever, to begin and to go on."""

    def hurried(config: dict[str, Any]) -> None:
        manager(config)["stream_idle_timeout"] = "0.3s"

    async def thinking(engine: FakeEngine, talk: Talk) -> None:
        while await talk.request() is not None:
            await asyncio.sleep(0.6)  # twice as long as clients have
            await talk.send(SSE_HEAD)
            await asyncio.sleep(0.6)
            await talk.send(chunk(b"data: 1\n\n"), chunk(b""))

    async with street(tmp_path, thinking, changes=hurried) as made:
        extproc = made.app.extproc
        assert extproc is not None
        client = await made.client()
        await client.send(post(BODY[:10], framing=b"Content-Length: 30"))
        answer = await client.answer()
        error = {
            "message": "stream timeout",
            "type": "invalid_request_error",
            "code": "stream_idle_timeout",
            "param": None,
        }
        assert (answer.status, answer.json["error"]) == (408, error)
        await eventually(lambda: extproc.streams == 0)
        assert made.figure("kvsync_extproc_streams_total", event="incomplete_request") == 1
        assert (await made.ask()).body == b"data: 1\n\n"


# ---- Envoy


async def test_envoy_killed_and_started_anew(tmp_path: Path) -> None:
    """Its requests end with it, and nothing of them is held against the engine."""

    async def slow(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            if b"slow" in request.body:
                await talk.send(SSE_HEAD, chunk(b"data: 1\n\n"))
                await talk.closed()
                return
            await talk.send(reply(b"{}"))

    async with street(tmp_path, slow) as made:
        client = await made.client()
        await client.send(post(b'{"model": "m", "prompt": "slow"}'))
        await client.chunk_after_head()
        assert made.running() == 1
        made.envoy.kill()
        await eventually(lambda: made.running() == 0)
        await made.envoy.start()
        assert (await made.ask()).status == 200
        assert made.figure("kvsync_worker_breaker", worker="engine-0", state="closed") == 1


# ---- targets that a client names

SPELLINGS = [
    b"target-pod",
    b"Target-Pod",
    b"TARGET-POD",
    b"target_pod",
    b"target-pod-ip",
    b"x-gateway-destination-endpoint",
    b"X_Gateway_Destination_Endpoint",
]


@pytest.mark.parametrize("name", ["envoy.yaml", "envoy-fail-open.yaml"])
@pytest.mark.parametrize("alive", [True, False], ids=["alive", "dead"])
async def test_no_client_chooses_its_target(tmp_path: Path, name: str, alive: bool) -> None:
    """(X2) In no spelling, on no path, whether anybody is there to ask or not."""
    forbidden = FakeEngine("forbidden", good)
    await forbidden.start()
    async with street(tmp_path, good, name=name) as made:
        assert made.app.extproc is not None
        if not alive:
            await made.app.extproc.stop()
        address = b"127.0.0.1:%d" % forbidden.port
        for spelling in SPELLINGS:
            field = b"%b: %b" % (spelling, address)
            for raw in (
                post(BODY, b"/v1/completions", field),
                post(BODY, b"/v1/completions", field, field),
                post(BODY, b"/v1/completions", field, b"%b: 127.0.0.1:1" % spelling),
                post(BODY, b"/v1/completions", field, b"connection: %b" % spelling),
                post(BODY, b"/metrics", field),
                b"GET /v1/models HTTP/1.1\r\nHost: h\r\n%b\r\n\r\n" % field,
                b"GET /stats HTTP/1.1\r\nHost: h\r\n%b\r\n\r\n" % field,
            ):
                answer = await made.say(raw)
                assert answer.status in (200, 501, 503), raw
        assert forbidden.connections == 0
        assert all(not request.get(b"target_pod") for request in made.engines[0].requests)
    await forbidden.stop()


async def test_no_client_has_its_request_sent_again_or_sets_time_limits(tmp_path: Path) -> None:
    """(R7) Whom Envoy holds for internal could: one request was eight for a failing engine, and three with a limit of
    some milliseconds opened the breaker of a healthy one."""

    def internal(config: dict[str, Any]) -> None:
        manager(config)["internal_address_config"] = {}  # loopback is

    async def thinking(engine: FakeEngine, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            note(engine, request)
            await asyncio.sleep(0.05)  # longer than the limits below
            await talk.send(reply(b"broken", b"500 Internal Server Error"))

    again = [b"x-envoy-retry-on: 5xx,reset", b"x-envoy-max-retries: 7"]
    async with street(tmp_path, thinking, changes=internal) as made:
        for limit in (b"x-envoy-upstream-rq-timeout-ms: 1", b"x-envoy-upstream-rq-per-try-timeout-ms: 1"):
            answer = await made.ask(BODY, b"/v1/completions", limit, *again)
            assert (answer.status, answer.body) == (500, b"broken")
        tries = {"worker": "engine-0", "outcome": "engine_error"}
        await eventually(lambda: made.figure("kvsync_worker_tries_total", **tries) == 2)
        assert len(made.engines[0].requests) == 2
