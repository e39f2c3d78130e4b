"""The model list, as OpenAI's API has it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvsync.requests import errors
from kvsync.requests.ports import JsonObject

_encode = msgspec.json.Encoder().encode


def model_list(models: Sequence[tuple[str, str | None]]) -> bytes:
    """The answer to ``GET /v1/models``."""
    return _encode({"object": "list", "data": [_model(name, base) for name, base in models]})


def one_model(models: Sequence[tuple[str, str | None]], name: str) -> bytes:
    """The answer to ``GET /v1/models/{id}``. Raises ``Problem`` (404)."""
    for served, base in models:
        if served == name:
            return _encode(_model(served, base))
    raise errors.no_such_model(name, status=404)


def _model(name: str, base: str | None) -> JsonObject:
    # ``parent`` as vLLM gives it: the model that an adapter adapts.
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvsync", "root": name, "parent": base}


__all__ = ["model_list", "one_model"]
