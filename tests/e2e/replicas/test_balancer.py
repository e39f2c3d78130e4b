"""Several gateways behind a balancer that looks at ``/readyz``."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from . import plays
from .stage import Stage, stage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with stage(tmp_path_factory.mktemp("replicas"), "balancer") as made:
        yield made


async def test_shared_load_prevents_herding_and_a_rolling_restart_loses_no_request(replicas: Stage) -> None:
    """(M1) Each knows what the others sent, from the restart on that switches it on."""
    await plays.herding(replicas)


async def test_a_killed_replicas_share_moves_on_with_the_same_affinity(replicas: Stage) -> None:
    """(M2) At least 95 % of known prefixes, and what it had under way counts no more within the lifetime."""
    await plays.death(replicas)
