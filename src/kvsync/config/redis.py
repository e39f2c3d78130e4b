"""What can be set about Redis: where it is, how it is spoken to, and what replicas share through it.

Nothing here is needed: without ``redis.url`` a gateway works alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from kvsync.config.access import EngineTlsSettings, Seconds, Section
from kvsync.config.addresses import redis_address
from kvsync.config.warm import ReplayTurnSettings, SnapshotSettings


def _redis(text: str) -> str:
    return str(redis_address(text))


class LoadSharingSettings(Section):
    """What each replica tells the others of the requests that it has sent and that have not ended."""

    enabled: bool = True
    """Where ``redis.url`` is set."""
    interval: Annotated[float, Field(ge=0.02, le=60)] = 0.05
    """Between two times of telling and of reading the others'."""
    lifetime: Annotated[float, Field(ge=0.1, le=600)] = 2.0
    """A replica that told nothing new for this long counts nothing any more."""


class RedisSettings(Section):
    """What replicas share, and where."""

    url: Annotated[str, AfterValidator(_redis)] | None = None
    """``redis://host:port/db`` or ``rediss://`` for TLS; several ``host:port`` with commas between for a cluster's
    nodes and for sentinels. Secrets do not stand in it."""
    mode: Literal["single", "cluster", "sentinel"] = "single"
    """What is at the address: one server, nodes of a cluster, or sentinels that know where the server is."""
    sentinel_service: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    """The name that the sentinels know the server by."""
    username: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    password: SecretStr | None = None
    """``REDIS_PASSWORD``."""
    password_file: Path | None = None
    """A file with it, and nothing else. Read again when it changes."""
    tls: EngineTlsSettings = EngineTlsSettings()
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "kvsync"
    """What the keys of this fleet begin with: another one for each fleet that uses the same server."""
    budget: Annotated[float, Field(gt=0, le=5)] = 0.05
    """How long a request waits for Redis."""
    timeout: Seconds = 1.0
    """How long everything else waits, connecting included; a server that takes longer counts as down."""
    connections: Annotated[int, Field(ge=1, le=1024)] = 16
    """Open connections, to each node of a cluster; what finds none free waits within its budget."""
    load: LoadSharingSettings = LoadSharingSettings()
    snapshots: SnapshotSettings = SnapshotSettings()
    replays: ReplayTurnSettings = ReplayTurnSettings()


__all__ = ["LoadSharingSettings", "RedisSettings"]
