"""What only a real API server can show: a store that dies behind it, and a history that is dropped there."""

from __future__ import annotations

import asyncio
from pathlib import Path

from .following import following
from .pods import Kube, pod, running
from .real import RealApiServer


async def test_a_store_that_dies_and_comes_back(api: RealApiServer, kube: Kube, tmp_path: Path) -> None:
    """The watch stays open and silent, and lists hang: what is due then is trouble, and changes nothing."""
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(api, kube, tmp_path, relist_interval=1.0, list_timeout=2.0, degraded_after=1.0) as followed:
        await followed.has(kube, a=True)
        await api.stop_etcd()
        await followed.state("degraded")
        assert len(followed.engines) == 1
        await api.start()
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)
        await followed.state("synced")
        assert [change.kind for change in followed.changes if change.kind != "changed"] == ["added", "added"]


async def test_a_history_that_is_dropped_ends_no_watch(api: RealApiServer, kube: Kube, tmp_path: Path) -> None:
    await kube.create(pod("a"), running("10.0.0.1"))
    async with following(api, kube, tmp_path) as followed:
        await followed.has(kube, a=True)
        await asyncio.to_thread(api.compact)
        await kube.create(pod("b"), running("10.0.0.2"))
        await followed.has(kube, a=True, b=True)
        assert followed.count("lists") == 1
