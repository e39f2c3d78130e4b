"""The little that the gateway must know of OpenAI's API: a request's model, and the model list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from kvsync.gateway import errors
from kvsync.gateway.ports import JsonObject

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def read_body(raw: bytes) -> tuple[JsonObject, str]:
    """A request's JSON object and the model that it names. Raises ``Problem``.

    Of duplicate keys the last counts, as for the engine. Nothing else is looked at: the engine judges the rest.
    """
    try:
        body = _decode(raw)
    except msgspec.DecodeError as error:
        raise errors.bad_json(str(error)) from None
    except RecursionError:
        raise errors.bad_json("nested too deeply") from None
    if not isinstance(body, dict):
        raise errors.body_not_object()
    model = body.get("model")
    if model is None or model == "":
        raise errors.no_model()
    if not isinstance(model, str):
        raise errors.model_not_string()
    return cast(JsonObject, body), model


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


__all__ = ["model_list", "one_model", "read_body"]
