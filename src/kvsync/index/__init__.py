"""The global prefix index: the native core where it is installed, else the pure-Python reference.

Both show the face of :class:`~kvsync.index.match.Index` and pass the same contract suite; ``PrefixIndex`` is the one
that serves here.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import cast

from kvsync.index.match import Index, Match, Observation, Tier, Tokens, Trust
from kvsync.index.reference import ReferenceIndex


def _implementation() -> type[Index]:
    if find_spec("kvsync_core") is None:
        return ReferenceIndex
    return cast(type[Index], import_module("kvsync_core").PrefixIndex)


PrefixIndex: type[Index] = _implementation()
"""The implementation that serves in this installation."""

NATIVE = PrefixIndex is not ReferenceIndex
"""Whether it is the native core."""

__all__ = ["NATIVE", "Index", "Match", "Observation", "PrefixIndex", "Tier", "Tokens", "Trust"]
