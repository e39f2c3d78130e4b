"""A request's JSON body: its object and the model that it names, at a bounded cost.

What must always hold: whatever the body, decoding it makes a bounded number of Python objects. Decoding holds the
interpreter, so a thread would not spare the event loop: the bound does, and large bodies come one per turn of the loop
(:mod:`.turns`). Numbers are cheap and prompts of token ids hold many; texts and containers are dear. With the native
core a completion's token ids never become objects: they are lifted out of the text beforehand.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

import msgspec

from kvsync.requests import errors
from kvsync.requests.ports import JsonObject
from kvsync.tokenize.ids import PackedIds, lift
from kvsync.tokenize.request import MAX_PROMPTS

LARGE: Final = 256 << 10
"""Bytes from which a body is decoded in a turn of its own. Smaller ones can't hold too much."""
MAX_TEXTS: Final = 250_000
"""Texts (keys included), arrays and objects of one body."""
MAX_VALUES: Final = 4_000_000
"""Values of any kind behind a comma."""
_SLICE: Final = 64 << 10
_IDS_AT: Final = "/v1/completions"
_IDS: Final = "prompt"

_decode = msgspec.json.Decoder().decode


class Lifted(NamedTuple):
    """A body whose token ids were taken out of its text."""

    rest: bytes
    """The text without them."""
    prompts: PackedIds


def may_hold_ids(path: str) -> bool:
    """Whether :func:`lift_ids` may find anything there."""
    return path == _IDS_AT


def lift_ids(raw: bytes, path: str) -> Lifted | None:
    """Take a completion's token ids out of its text; ``None`` where there are none for certain. Never raises, and lets
    go of the interpreter where that takes long, so that a thread may do it."""
    if not may_hold_ids(path) or (lifted := lift(raw, _IDS, MAX_PROMPTS)) is None:
        return None
    return Lifted(lifted[0], PackedIds(lifted[1]))


def read_body(raw: bytes, lifted: Lifted | None = None) -> tuple[JsonObject, str]:
    """A request's JSON object and the model that it names. Raises ``Problem``.

    Of duplicate keys the last counts, as for the engine. Nothing else is looked at: the engine judges the rest.

    Args:
        lifted: what :func:`lift_ids` made of it. Its prompts stand in the object as they are.
    """
    if lifted is not None and sum(map(len, lifted.prompts.prompts)) > 4 * MAX_VALUES:
        raise errors.too_many_values("values", MAX_VALUES)
    body = decode(raw if lifted is None else lifted.rest)
    if not isinstance(body, dict):
        raise errors.body_not_object()
    model = body.get("model")
    if model is None or model == "":
        raise errors.no_model()
    if not isinstance(model, str):
        raise errors.model_not_string()
    if lifted is not None:
        body[_IDS] = lifted.prompts
    return cast(JsonObject, body), model


def decode(raw: bytes) -> object:
    """A JSON value of any kind, of bounded cost. Raises ``Problem``."""
    if len(raw) <= LARGE:
        return _decoded(raw)
    _bound(raw)
    # Without the collector, which would look at the growing result again and again: JSON holds no cycles.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _decoded(raw)
    finally:
        if enabled:
            gc.enable()


def _decoded(raw: bytes) -> object:
    try:
        return _decode(raw)
    except msgspec.DecodeError as error:
        raise errors.bad_json(str(error)) from None
    except RecursionError:
        raise errors.bad_json("nested too deeply") from None


def _bound(raw: bytes) -> None:
    """Raises ``Problem`` for a body that holds too much. What is no JSON may pass or be refused for that."""
    marks = len(raw) - len(raw.translate(None, b'"[{'))
    if marks <= MAX_TEXTS and raw.count(b",") <= MAX_VALUES:
        return  # whatever stands in texts was counted too: a bound, found at the speed of memory
    quotes = containers = values = 0
    for here, outside in _slices(raw):
        quotes += here
        containers += outside.count(b"[") + outside.count(b"{")
        values += outside.count(b",")
        if quotes // 2 + containers > MAX_TEXTS:
            raise errors.too_many_values("texts, arrays and objects", MAX_TEXTS)
        if values > MAX_VALUES:
            raise errors.too_many_values("values", MAX_VALUES)


def _slices(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Per slice, the quotes that begin or end a text, and the bytes outside of texts."""
    inside = start = 0
    while start < len(raw):
        stop = start + _SLICE
        piece = raw[start:stop]
        if (len(piece) - len(piece.rstrip(b"\\"))) & 1:  # an escape is not cut in two
            stop += 1
            piece = raw[start:stop]
        start = stop
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield len(parts) - 1, b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1


__all__ = ["LARGE", "MAX_TEXTS", "MAX_VALUES", "Lifted", "decode", "lift_ids", "may_hold_ids", "read_body"]
