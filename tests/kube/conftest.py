"""One suite, two API servers: the fake in ``make test``, a real one in ``make test-kube`` (``KVSYNC_KUBETEST`` names
the binary). Each test has a namespace of its own."""

from __future__ import annotations

import os
import ssl
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypeAlias

import aiohttp
import pytest

from .fake import FakeApiServer
from .pods import Kube
from .real import RealApiServer

BINARY = os.environ.get("KVSYNC_KUBETEST")
HERE = Path(__file__).parent
Server: TypeAlias = FakeApiServer | RealApiServer


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests here, those that the server of this run can be asked for."""
    not_here = "fake" if BINARY else "api"
    out = [item for item in items if HERE in item.path.parents and not_here in getattr(item, "fixturenames", ())]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApiServer | None]:
    if not BINARY:
        yield None
        return
    with RealApiServer(Path(BINARY).absolute(), tmp_path_factory.mktemp("kube")) as server:
        yield server


@pytest.fixture
async def server(real: RealApiServer | None, tmp_path: Path) -> AsyncIterator[Server]:
    if real is not None:
        yield real
        return
    async with FakeApiServer(tmp_path) as server:
        yield server


@pytest.fixture
async def fake(server: Server) -> FakeApiServer:
    """For what can't be asked of a real one: such tests are in ``make test`` only."""
    assert isinstance(server, FakeApiServer)
    return server


@pytest.fixture
def api(server: Server) -> RealApiServer:
    """For what only a real one can show: such tests are in ``make test-kube`` only."""
    assert isinstance(server, RealApiServer)
    return server


@pytest.fixture
async def kube(server: Server) -> AsyncIterator[Kube]:
    tls = ssl.create_default_context(cafile=str(server.ca_file))
    timeout = aiohttp.ClientTimeout(total=90)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        kube = Kube(session, server.url, server.token, tls, f"t-{uuid.uuid4().hex[:8]}")
        await kube.namespaced()
        yield kube
