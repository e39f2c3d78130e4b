"""Prompts of token ids that stay packed from JSON to the lookup: no Python object is made of an id.

Always holds: what :func:`lift` takes out of a text is exactly what decoding it would have found. It never raises, and
where anything is in doubt it finds nothing; then the text is decoded as any other. Without the native core it never
finds anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Final, TypeAlias, cast

_Lift: TypeAlias = Callable[[bytes, str, int], tuple[bytes, list[bytes]] | None]


class PackedIds:
    """Stands in a decoded body where its text has token ids: packed native-endian uint32, a value for each prompt."""

    __slots__ = ("prompts",)

    def __init__(self, prompts: Sequence[bytes]) -> None:
        self.prompts = tuple(prompts)


def lift(text: bytes, member: str, most: int = 1) -> tuple[bytes, list[bytes]] | None:
    """Take the prompts out of a JSON object whose ``member`` is an array of ids, or of at most ``most`` such arrays.

    Returns:
        The text with ``[]`` in the member's place, which is JSON exactly if ``text`` is, and the prompts, packed
        native-endian uint32, none of them empty. ``None`` where there are none for certain.
    """
    return None if _native is None else _native(text, member, most)


def _natively() -> _Lift | None:
    if find_spec("kvsync_core") is None:
        return None
    return cast(_Lift | None, getattr(import_module("kvsync_core"), "lift_ids", None))


_native: Final = _natively()

__all__ = ["PackedIds", "lift"]
