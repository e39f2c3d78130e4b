"""Where the API server is, and how long a reflector waits after what."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from kvsync.config import KubernetesSettings
from kvsync.config.credentials import BadFile
from kvsync.discovery.access import EngineAccess, NoPage, fetch
from kvsync.discovery.kubernetes.api import ApiServer, Place, Trouble, place
from kvsync.discovery.kubernetes.reflector import PAUSE_FIRST, PAUSE_LAST, Reflector
from kvsync.discovery.kubernetes.source import KubernetesSource

HERE = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "namespace").write_text("llm\n")
    return tmp_path


def test_in_a_cluster_nothing_has_to_be_said(account: Path) -> None:
    found = place(KubernetesSettings(enabled=True), HERE, account)
    assert found == Place("https://10.96.0.1:443", account / "token", account / "ca.crt", ("llm",))


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]"])
def test_a_cluster_of_ipv6(account: Path, host: str) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "6443"}
    assert place(KubernetesSettings(enabled=True), environ, account).url == "https://[fd00::1]:6443"


def test_what_is_said_beats_what_is_found(account: Path) -> None:
    said = KubernetesSettings(
        enabled=True, namespaces=("a", "b"), token_file=account / "mine", ca_file=account / "mine.crt"
    )
    found = place(said, HERE, account / "absent")
    assert found == Place("https://10.96.0.1:443", account / "mine", account / "mine.crt", ("a", "b"))


def test_an_address_of_ones_own_takes_nothing_from_the_pod(account: Path) -> None:
    said = KubernetesSettings(enabled=True, api_server="https://api.example:6443/prefix/", namespaces=("*",))
    assert place(said, HERE, account) == Place("https://api.example:6443/prefix", None, None, ("*",))


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({}, "api_server"),
        ({"KUBERNETES_SERVICE_HOST": ""}, "api_server"),
        ({**HERE, "KUBERNETES_SERVICE_PORT": "https"}, "api_server"),
        ({**HERE, "KUBERNETES_SERVICE_PORT": "tcp://10.96.0.1:443"}, "api_server"),
        ({**HERE, "KUBERNETES_SERVICE_HOST": "0.0.0.0"}, "api_server"),
        (HERE, "namespaces"),
    ],
)
def test_what_is_missing_is_named_with_its_mend(tmp_path: Path, environ: dict[str, str], field: str) -> None:
    with pytest.raises(BadFile) as refused:
        place(KubernetesSettings(enabled=True), environ, tmp_path)
    assert refused.value.field == field
    assert refused.value.mend


def test_authorities_that_are_none_are_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.write_text("none")
    settings = KubernetesSettings(enabled=True, api_server="https://h:1", namespaces=("a",), ca_file=file)
    with pytest.raises(BadFile, match=r"kubernetes\.ca_file"):
        KubernetesSource(settings, {}, lambda _: None)


async def _watch(api: ApiServer) -> None:
    async with api.stream("/p", {}) as pieces:
        async for _ in pieces:
            pass


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\x15\x03\x01\x00\x02\x02\x46", "garbage"),
        (HEAD + b"X: " + b"y" * 100_000 + b"\r\n\r\n", "garbage"),
        (HEAD + b"X: \x00\r\n\r\n", "garbage"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", "garbage"),
        (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}", "garbage"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}", "garbage"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n50\r\n{}", "cut"),
        (HEAD + b"Content-Length: 50\r\n\r\n{}", "cut"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, "unreachable"),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", "status"),
        (b"HTTP/1.1 429 No\r\nRetry-After: \xc2\xb2\r\nContent-Length: 0\r\n\r\n", "throttled"),
        (b'HTTP/1.1 500 No\r\nContent-Length: 28\r\n\r\n{"message":"a\\u001b[31m\\nb"}', "server_error"),
    ],
)
async def test_what_is_no_http_is_trouble_in_one_line(answer: bytes, reason: str) -> None:
    """Of whoever asks: for pods, or for an engine's page."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with ApiServer(Place(url, None, None, ("n",)), 1.0, 5.0, 2) as api, aiohttp.ClientSession() as session:
            with pytest.raises(Trouble) as caught:
                await api.get("/p", {}, 1000)
            assert caught.value.reason == reason
            with pytest.raises(Trouble) as watched:
                await _watch(api)
            assert watched.value.reason == reason
            said = [str(caught.value), str(watched.value)]
            try:
                assert await fetch(session, EngineAccess(), url, "/v1/models", 1000, 5.0) is None
            except NoPage as error:
                said.append(str(error))
    assert all(text.isprintable() and len(text) < 500 for text in said)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_pauses_grow_to_half_a_minute_and_a_spread_is_in_them() -> None:
    """Nobody listens there, so every step fails at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    settings = KubernetesSettings(enabled=True, api_server=url, namespaces=("n",), degraded_after=60.0)
    clock = Clock()
    for chance, share in ((_most, 1.0), (_least, 0.5)):
        async with ApiServer(Place(url, None, None, ("n",)), 1.0, 1.0, 2) as api:
            reflector: Reflector[bytes] = Reflector(
                api, "n", "/p", "Pod", settings, lambda raw: raw, _nothing, clock=clock, chance=chance
            )
            pauses = [await reflector.step() for _ in range(10)]
            assert pauses == [min(PAUSE_FIRST * 2**n, PAUSE_LAST) * share for n in range(10)]
            assert reflector.status().state == "starting"
            assert reflector.status().age is None
            clock.now += 60.0
            assert reflector.status().state == "degraded"
            assert reflector.status().failures == {"unreachable": 10}


def _most() -> float:
    return 1.0


def _least() -> float:
    return 0.0


def _nothing(*_: object) -> None:
    raise AssertionError("nothing was listed, so nothing is told")
