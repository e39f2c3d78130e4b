"""What an account may do, and what happens when that changes: the same on the fake and on a real API server."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from .accounts import GatewayAccount
from .conftest import Server
from .fake import FakeApiServer
from .following import following
from .pods import Kube, Refused, own_address, pod, running


async def test_the_manifest_is_enough_and_gives_nothing_more(server: Server, kube: Kube, tmp_path: Path) -> None:
    account = GatewayAccount(server, kube)
    (tmp_path / "token").write_text(await account.grant())
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        await kube.status("a", running("10.0.0.1", ready=False))
        await followed.has(kube, a=False)  # by the watch
    own = kube.holding(account.token)
    for method, path in (
        ("GET", f"/api/v1/namespaces/{kube.namespace}/pods/a"),
        ("DELETE", f"/api/v1/namespaces/{kube.namespace}/pods/a"),
        ("GET", "/api/v1/pods"),
    ):
        with pytest.raises(Refused, match="403"):
            await own.ask(method, path)


async def test_all_namespaces_need_the_cluster_role(server: Server, kube: Kube, tmp_path: Path) -> None:
    other = kube.inside(f"{kube.namespace}-b")
    await other.namespaced()
    await other.create(pod("b"), running(own_address()))
    account = GatewayAccount(server, kube)
    (tmp_path / "token").write_text(await account.grant())
    async with following(server, kube, tmp_path, namespaces=("*",), listed=False) as followed:
        await followed.counted("forbidden")
        status = followed.source.status()
        assert status.state == "starting"
        assert "needs a Role with list and watch of pods" in (status.scopes[0].problem or "")
        wide = GatewayAccount(server, kube, wide=True)
        if isinstance(server, FakeApiServer):
            wide.token = account.token
        await wide.grant()  # to the same account
        await followed.has(other, b=True)


async def test_a_namespace_that_may_not_be_seen_hides_no_other(server: Server, kube: Kube, tmp_path: Path) -> None:
    other = kube.inside(f"{kube.namespace}-b")
    await other.namespaced()
    account = GatewayAccount(server, kube)
    (tmp_path / "token").write_text(await account.grant())
    await kube.create(pod("a"), running("10.0.0.1"))
    namespaces = (kube.namespace, other.namespace)
    async with following(server, kube, tmp_path, namespaces=namespaces, listed=False, degraded_after=0.5) as followed:
        await followed.has(kube, a=True)
        await followed.state("degraded")
        by_scope = {scope.scope: scope for scope in followed.source.status().scopes}
        assert by_scope[kube.namespace].state == "synced"
        assert by_scope[other.namespace].failures["forbidden"] > 0


async def test_a_right_that_is_withdrawn_is_noticed_though_the_watch_goes_on(
    server: Server, kube: Kube, tmp_path: Path
) -> None:
    """An open watch outlives the right to it, so a watch that works proves nothing: the next list does."""
    account = GatewayAccount(server, kube)
    (tmp_path / "token").write_text(await account.grant())
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path, relist_interval=3.0, degraded_after=0.5) as followed:
        await followed.has(kube, a=True)
        await followed.counted("lists", 2)  # the next one is nearly three seconds away …
        heard = followed.count("events")
        await kube.create(pod("fence"))
        await followed.counted("events", heard + 1)  # … and a watch is open
        await account.withdraw()
        await kube.status("a", running("10.0.0.1", ready=False))
        await followed.has(kube, a=False)
        await followed.state("degraded")
        assert followed.count("forbidden") > 0
        assert len(followed.engines) == 1  # the fleet stays as it was
        await account.grant()
        (tmp_path / "token").write_text(account.token)
        await followed.state("synced")
        await kube.status("a", running("10.0.0.1"))
        await followed.has(kube, a=True)


async def test_the_token_is_read_again(server: Server, kube: Kube, tmp_path: Path) -> None:
    """One that is not accepted, none at all, and one that is: as kubelets renew them."""
    token = tmp_path / "token"
    token.write_text("no-such-token")
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path, listed=False) as followed:
        await followed.counted("unauthorized")
        token.unlink()
        await followed.counted("credentials")
        assert str(token) in (followed.source.status().scopes[0].problem or "")
        token.write_text("two lines\nof it")
        before = followed.count("credentials")
        await followed.counted("credentials", before + 1)
        token.unlink()
        os.mkfifo(token)  # a pipe that nobody writes to is not waited for
        before = followed.count("credentials")
        await followed.counted("credentials", before + 1)
        beside = tmp_path / "next"
        beside.write_text(server.token + "\n")
        beside.replace(token)
        await followed.has(kube, a=True)
        assert "two lines" not in str(followed.source.status())


async def test_a_certificate_of_somebody_else_is_refused(server: Server, kube: Kube, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = FakeApiServer(other)
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(server, kube, tmp_path, listed=False, ca_file=stranger.ca_file) as followed:
        await followed.counted("credentials")
        assert "kubernetes.ca_file does not vouch for" in (followed.source.status().scopes[0].problem or "")
        assert not followed.engines
        await asyncio.to_thread(shutil.copy, server.ca_file, stranger.ca_file)
        (authorities,) = followed.source.renewed
        assert authorities.check() == "applied"
        await followed.has(kube, a=True)
