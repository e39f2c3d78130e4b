"""Short ways to ask an index with one worker ``W`` of model ``M``."""

from __future__ import annotations

from typing import Any

from kvsync.index.match import Index, Match, Observation
from tests.wire import stored

M = "model"
W = "w"
LATER = 100.0
"""When what an answer teaches ends, where a test does not say otherwise."""

ELSEWHERE: Any = stored(["elsewhere"], range(900, 904))
"""A block of something else: it tells the block size, and that extra keys are shown."""


def look(index: Index, tokens: Any, **keys: Any) -> Match:
    return index.match(tokens, M, **keys)[W]


def credit(index: Index, tokens: Any, **keys: Any) -> int:
    return look(index, tokens, **keys).credit


def tell(
    index: Index, tokens: Any, cached: int, since: Match | None = None, until: float = LATER, **keys: Any
) -> Observation:
    """An answer: the engine had ``cached`` tokens. ``since``: the match that chose the worker (else one of now)."""
    found = look(index, tokens, **keys) if since is None else since
    return index.observe(W, tokens, M, cached, found.credit, found.as_of, until, **keys)


def states(index: Index) -> dict[str, Any]:
    return index.stats()["workers"][W]  # type: ignore[index, no-any-return]


def counts(index: Index) -> dict[str, int]:
    return states(index)["counts"]  # type: ignore[no-any-return]
