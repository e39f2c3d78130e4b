"""What a tenant may not ask of an engine, because it reaches beyond that tenant.

- *Transfers.* vLLM's connectors for disaggregated serving take ``kv_transfer_params`` from a request's body, with a
  host, a port and block numbers. Whoever may send them reaches addresses that nobody listed, and others' blocks.
- *Full reports.* ``kv_cache_report_mode=full`` makes an engine announce blocks again that it announced before. From one
  such request on, until the engine restarts, its counts can't be relied on, for anybody's requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvsync.requests import errors
from kvsync.requests.ports import JsonObject

TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")


def refuse_beyond_tenant(asked: JsonObject) -> None:
    """Raises ``Problem`` (403) for a request that asks for one of these, or smuggles it in with the other ones."""
    given = asked.get("vllm_xargs")
    further: Mapping[str, object] = given if isinstance(given, Mapping) else {}
    for field in TRANSFERS:
        if asked.get(field) is not None or field in further:
            raise errors.transfer_params(field)
    if further.get("kv_cache_report_mode") == "full":
        raise errors.full_reports()


__all__ = ["TRANSFERS", "refuse_beyond_tenant"]
