"""What can be set about a replica's start: what it takes from others, and when it says that it is ready."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvsync.config.access import Section


class SnapshotSettings(Section):
    """What one replica tells of each worker's cache, for those that start."""

    enabled: bool = True
    """Where ``redis.url`` is set."""
    interval: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    """Between two snapshots of one worker, whichever replica writes them. Engines remember the batches of a while only
    (their ``buffer_steps``): a snapshot that is older than that is of no use."""
    lifetime: Annotated[float, Field(ge=1, le=86_400)] = 600.0
    """Redis drops a snapshot that nobody renewed for this long."""
    max_bytes: Annotated[int, Field(ge=1 << 10, le=1 << 30)] = 64 << 20
    """A larger one is not written, and not read. A block takes 20 bytes, one in several tiers or groups some 40."""
    patience: Annotated[float, Field(gt=0, le=60)] = 2.0
    """How long a stream waits for its snapshot before it is replayed from the beginning."""


class ReplayTurnSettings(Section):
    """How replicas share an engine's replays when they catch up: each holds up the engine's live events."""

    at_once: Annotated[int, Field(ge=1, le=64)] = 2
    """Of one engine, over all replicas."""
    patience: Annotated[float, Field(gt=0, le=300)] = 10.0
    """How long a stream waits for its turn; then it goes on without."""


class ReadySettings(Section):
    """When a replica that has started says that it is ready (``/readyz``)."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Once so many of its workers' streams have caught up …"""
    patience: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """… or after so many seconds, whatever is missing."""


__all__ = ["ReadySettings", "ReplayTurnSettings", "SnapshotSettings"]
