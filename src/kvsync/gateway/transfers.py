"""Requests that tell an engine to load a cache from an address that they name: not for tenants.

vLLM's connectors for disaggregated serving take ``kv_transfer_params`` from a request's body, with a host, a port and
block numbers. Whoever may send them reaches addresses that nobody listed, and blocks of other tenants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvsync.gateway import errors
from kvsync.gateway.ports import JsonObject

FIELDS: Final = ("kv_transfer_params", "ec_transfer_params")


def refuse_transfers(asked: JsonObject) -> None:
    """Raises ``Problem`` (403) for a request that carries such parameters, or smuggles them in with the other ones."""
    further = asked.get("vllm_xargs")
    for field in FIELDS:
        if asked.get(field) is not None or (isinstance(further, Mapping) and field in further):
            raise errors.transfer_params(field)


__all__ = ["FIELDS", "refuse_transfers"]
