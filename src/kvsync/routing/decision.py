"""A question to the router, and the decision that explains itself.

One of each is made for every request, so these are structs whose making costs a quarter of a dataclass's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvsync.discovery.model import Engine
from kvsync.index.match import Match
from kvsync.tokenize.types import TokenizedRequest


class Query(msgspec.Struct, frozen=True):
    """One request, as far as choosing a worker needs it."""

    request_id: str
    model: str
    """The served (base) model's name."""
    adapter: str | None
    tokenized: TokenizedRequest
    policy: str | None = None
    """From the ``routing-strategy`` header."""
    label_filter: str | None = None
    """From the ``external-filter`` header: a Kubernetes label selector."""
    exclude: frozenset[str] = frozenset()
    """Workers already tried for this request."""


class Load(msgspec.Struct, frozen=True):
    """What a worker is busy with, as this gateway counts it and, where they tell, other replicas too."""

    running: int = 0
    """Requests sent and not finished."""
    queued_prefill_tokens: int = 0
    """Uncached prompt tokens of requests whose first byte has not come."""


class Candidate(msgspec.Struct, frozen=True):
    """One worker as the policy saw it."""

    worker: str
    engine: Engine
    rank: int
    match: Match
    expected: int
    """Tokens beyond the credit that the worker may well have: the match's and those of choices just made."""
    load: Load


class Decision(msgspec.Struct, frozen=True):
    """Who gets the request, and why."""

    request_id: str
    model: str
    adapter: str | None
    policy: str
    chosen: Candidate
    candidates: Sequence[Candidate]
    scores: Mapping[str, float]
    """Per worker, the figure that the policy compared (``kv-aware``: estimated work in prefill tokens)."""
    why: str
    """One sentence."""
    prompt_tokens: int
    """0 when the tokens are unknown."""
    mode: str
    """What knowledge of the chosen worker served: ``exact``, ``partial``, ``observed`` or ``load-only``
    (:mod:`kvsync.routing.modes`, without its hysteresis)."""
    tokenized: TokenizedRequest
    """Without its prompts: records are kept, and neither their size nor what people wrote belongs in them."""
    time: float
    """Seconds since the epoch."""
    observed: int = 0
    """Of the chosen worker's expected tokens, those that its answers of late let expect."""
    extra: Mapping[str, object] = msgspec.field(default_factory=dict)


__all__ = ["Candidate", "Decision", "Load", "Query"]
