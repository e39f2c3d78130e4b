"""The port that Envoy asks, by a gRPC client of the tests': health, limits, TLS, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from kvsync.app import App
from kvsync.extproc import server
from kvsync.extproc.health import SERVICE
from kvsync.extproc.protocol import messages as pb
from kvsync.extproc.replies import PIECE
from tests.integration.extproc.harness import settings
from tests.integration.gateway.harness import BODY, eventually

DEADLINE = 20.0
Health = pb.HealthCheckResponse


@asynccontextmanager
async def serving(engines: list[dict[str, Any]] | None = None, **sections: Any) -> AsyncIterator[App]:
    """An application whose port is open; without engines of its own it has one that nobody is at."""
    entries = [{"name": "e", "url": "http://127.0.0.1:1"}] if engines is None else engines
    app = App(settings(entries, **sections))
    await app.start()
    try:
        yield app
    finally:
        app.hurry()
        await app.stop()


def address(app: App) -> str:
    assert app.extproc is not None
    return f"127.0.0.1:{app.extproc.port}"


def process(channel: grpc.aio.Channel) -> Any:
    """An open stream, messages as bytes."""
    return channel.stream_stream(f"/{SERVICE}/Process")(timeout=DEADLINE)


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    call: Any = channel.unary_unary("/grpc.health.v1.Health/Check", response_deserializer=Health.FromString)
    answer = await call(pb.HealthCheckRequest(service=service).SerializeToString(), timeout=DEADLINE)
    return int(answer.status)


def head(path: str = "/v1/completions") -> bytes:
    named = [(":method", "POST"), (":path", path)]
    headers = pb.HeaderMap(headers=[pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in named])
    return pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=headers)).SerializeToString()


def body(raw: bytes = BODY) -> bytes:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=raw, end_of_stream=True)).SerializeToString()


async def test_health() -> None:
    async with serving() as app, grpc.aio.insecure_channel(address(app)) as channel:
        for service in ("", "readiness", "liveness", SERVICE):
            assert await check(channel, service) == Health.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(channel, "another")
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    async with serving([]) as app, grpc.aio.insecure_channel(address(app)) as channel:
        assert await check(channel) == Health.NOT_SERVING
        assert await check(channel, "liveness") == Health.SERVING


async def test_shutdown_says_no_first_and_serves_on() -> None:
    async with (
        serving(extproc={"drain_delay": 30}, gateway={"drain_timeout": 30}) as app,
        grpc.aio.insecure_channel(address(app)) as channel,
    ):
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch", response_deserializer=Health.FromString)
        watching = watch(pb.HealthCheckRequest().SerializeToString(), timeout=DEADLINE)
        assert (await watching.read()).status == Health.SERVING
        stopping = asyncio.create_task(app.stop())
        assert (await watching.read()).status == Health.NOT_SERVING
        assert await check(channel) == Health.NOT_SERVING
        assert await check(channel, "liveness") == Health.SERVING
        call = process(channel)
        await call.write(head())
        assert pb.ProcessingResponse.FromString(await call.read()).HasField("request_headers")
        await call.write(body())
        assert pb.ProcessingResponse.FromString(await call.read()).HasField("request_body")
        assert app.router._loads.total() == 1
        app.hurry()
        await asyncio.wait_for(stopping, DEADLINE)
        assert app.router._loads.total() == 0
        app.metrics.render()
        labels = {"path": "/v1/completions", "outcome": "shutdown"}
        assert app.metrics.registry.get_sample_value("kvsync_requests_cut_total", labels) == 1


async def test_who_watches_health_keeps_no_shutdown_waiting() -> None:
    async with serving(gateway={"drain_timeout": 60}) as app, grpc.aio.insecure_channel(address(app)) as channel:
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch", response_deserializer=Health.FromString)
        watching = watch(pb.HealthCheckRequest().SerializeToString(), timeout=DEADLINE)
        assert (await watching.read()).status == Health.SERVING
        await asyncio.wait_for(app.stop(), 10)
        assert (await watching.read()).status == Health.NOT_SERVING
        assert await watching.read() is grpc.aio.EOF


async def test_streams_are_bounded() -> None:
    async with serving(extproc={"max_streams": 2}) as app, grpc.aio.insecure_channel(address(app)) as channel:
        calls = [process(channel) for _ in range(2)]
        for call in calls:
            await call.write(head())
            await call.read()
        third = process(channel)
        await third.write(head())
        assert await third.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await eventually(lambda: app.extproc is not None and app.extproc.streams == 0)
        fourth = process(channel)
        await fourth.write(head())
        assert await fourth.read()
        events = {"turned_away": 1, "opened": 3}
        for event, count in events.items():
            found = app.metrics.registry.get_sample_value("kvsync_extproc_streams_total", {"event": event})
            assert found == count


async def test_a_burst_is_taken() -> None:
    """More at once than gRPC lets wait by default."""
    async with serving() as app, grpc.aio.insecure_channel(address(app)) as channel:
        calls = [process(channel) for _ in range(4000)]
        await asyncio.gather(*(call.write(head("/unlisted")) for call in calls))
        answers = await asyncio.gather(*(call.read() for call in calls))
        assert all(pb.ProcessingResponse.FromString(answer).HasField("immediate_response") for answer in answers)
        for call in calls:
            call.cancel()


async def test_an_envoy_that_does_not_read_and_leaves(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits to be written to it is dropped without a word in the log."""
    said: list[float] = []
    say = server._say

    def noted(replies: Sequence[pb.ProcessingResponse]) -> Iterator[pb.ProcessingResponse]:
        for reply in replies:
            said.append(asyncio.get_running_loop().time())
            yield reply

    monkeypatch.setattr(server, "_say", lambda replies, context: say(noted(replies), context))  # type: ignore[arg-type]
    async with serving() as app, grpc.aio.insecure_channel(address(app)) as channel:
        call = process(channel)
        message = pb.ProcessingRequest.FromString(head())
        message.protocol_config.request_body_mode = pb.ProcessingMode.FULL_DUPLEX_STREAMED
        await call.write(message.SerializeToString())
        await call.write(body(b'{"model": "m", "prompt": "%b"}' % (b"x" * 16_000_000)))
        await eventually(lambda: bool(said) and asyncio.get_running_loop().time() - said[-1] > 0.2)
        assert len(said) < 16_000_000 // PIECE
        assert app.router._loads.total() == 1
        call.cancel()
        await eventually(lambda: app.extproc is not None and app.extproc.streams == 0)
        assert app.router._loads.total() == 0
        app.metrics.render()
        labels = {"path": "/v1/completions", "outcome": "client_gone"}
        assert app.metrics.registry.get_sample_value("kvsync_requests_cut_total", labels) == 1
    assert [record for record in caplog.records if record.name.startswith("grpc")] == []


async def test_what_is_no_message_and_what_is_too_long() -> None:
    limits = {"max_message_bytes": 1 << 16}
    async with serving(extproc=limits) as app, grpc.aio.insecure_channel(address(app)) as channel:
        call = process(channel)
        await call.write(b"\xff\xff\xff")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        call = process(channel)
        await call.write(head())
        await call.read()
        await call.write(body(b" " * (1 << 16)))
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        silent = process(channel)
        await eventually(lambda: app.extproc is not None and app.extproc.streams == 1)
        silent.cancel()  # before its first message
        empty = process(channel)
        await empty.write(b"")
        await empty.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders()).SerializeToString())
        assert pb.ProcessingResponse.FromString(await empty.read()).HasField("response_headers")
        empty.cancel()
        await eventually(lambda: app.extproc is not None and app.extproc.streams == 0)
        for event, count in {"opened": 4, "malformed": 1, "incomplete_request": 3}.items():
            found = app.metrics.registry.get_sample_value("kvsync_extproc_streams_total", {"event": event})
            assert found == count, event


async def test_an_address_that_is_taken() -> None:
    async with serving() as app:
        assert app.extproc is not None
        other = App(settings([], extproc={"port": app.extproc.port}))
        with pytest.raises(OSError, match="can't be listened on"):
            await other.start()


async def test_tls_with_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "client_ca")}

    def issue(by: trustme.CA) -> None:
        made = by.issue_cert("localhost")
        made.private_key_pem.write_to_path(files["key"])
        files["cert"].write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))

    async def asked(by: trustme.CA, client: trustme.LeafCert | None) -> int:
        credentials = grpc.ssl_channel_credentials(
            by.cert_pem.bytes(),
            None if client is None else client.private_key_pem.bytes(),
            None if client is None else client.cert_chain_pems[0].bytes(),
        )
        assert app.extproc is not None
        async with grpc.aio.secure_channel(f"localhost:{app.extproc.port}", credentials) as channel:
            return await check(channel)

    issue(authority)
    clients.cert_pem.write_to_path(files["client_ca"])
    client = clients.issue_cert("envoy")
    async with serving(extproc={"tls": {name: str(path) for name, path in files.items()}}) as app:
        assert await asked(authority, client) == Health.SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await asked(authority, None)
        renewed = trustme.CA()
        issue(renewed)
        assert app.extproc is not None
        assert app.extproc.tls is not None
        assert app.extproc.tls.live.check() == "applied"
        assert await asked(renewed, client) == Health.SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await asked(authority, client)
