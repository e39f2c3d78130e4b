"""Small builders for the engine's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvsync.engine_sim.cache import KVCache
from kvsync.engine_sim.groups import FullAttention, GroupSpec
from kvsync.engine_sim.hashing import BlockHasher
from kvsync.engine_sim.request import Request
from kvsync.engine_sim.scheduler import Scheduler

BLOCK = 4


def make_scheduler(
    blocks: int, groups: Sequence[GroupSpec] = (FullAttention(),), *, max_running: int = 8, max_tokens: int = 64
) -> Scheduler:
    cache = KVCache(
        blocks=blocks, block_size=BLOCK, groups=groups, hasher=BlockHasher(1), longest=64, in_flight=max_tokens
    )
    return Scheduler(cache, max_running=max_running, max_tokens=max_tokens)


def ask(prompt: Iterable[int], outputs: int = 1, **options: object) -> Request:
    """A request whose output tokens are 900, 901, …"""
    return Request(tuple(prompt), tuple(range(900, 900 + outputs)), **options)  # type: ignore[arg-type]


def drain(scheduler: Scheduler, *requests: Request) -> None:
    """Run these to their end."""
    for request in requests:
        scheduler.add(request)
    while not scheduler.idle:
        plan = scheduler.plan()
        assert plan.work
        scheduler.finish(plan)
