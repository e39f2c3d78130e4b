"""What can be set about limits: how many requests and tokens users may have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvsync.config.access import Section


class LimitsSettings(Section):
    """Per user and minute, shared by all replicas through Redis, in AIBrix's keys."""

    users: bool = False
    """Limit users: tenants where there are any, else whoever the ``user`` header names."""
    requests_per_minute: Annotated[int, Field(ge=1, le=1 << 40)] = 100
    """For users whose record in Redis says nothing else."""
    tokens_per_minute: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """The same for tokens, prompt and answer together; a thousand times their requests when not set."""


__all__ = ["LimitsSettings"]
