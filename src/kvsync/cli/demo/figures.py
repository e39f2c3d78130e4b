"""What one play showed, in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from kvsync.cli.demo.play import Turn
from kvsync.routing.audit import Audit


@dataclass(frozen=True, slots=True)
class Figures:
    policy: str
    requests: int
    hit_rate: float
    """Share of all prompt tokens that engines served from their caches, by their own account."""
    best_hit_rate: float
    """What a router that knows everything could have reached (``bound``)."""
    first_token_p50: float
    """Seconds."""
    first_token_p90: float
    credit_right: float | None
    """Share of the credit given to the chosen engines that they confirmed; ``None``: none was given."""
    credited_tokens: int
    engines: dict[str, int]
    """Requests per engine."""


def figures(policy: str, turns: Sequence[Turn], audit: Audit, best_hits: int) -> Figures:
    prompt_tokens = sum(len(turn.prompt_tokens) for turn in turns)
    cuts = quantiles((turn.first_token for turn in turns), n=10)
    return Figures(
        policy=policy,
        requests=len(turns),
        hit_rate=sum(turn.cached_tokens for turn in turns) / prompt_tokens,
        best_hit_rate=best_hits / prompt_tokens,
        first_token_p50=cuts[4],
        first_token_p90=cuts[8],
        credit_right=audit.share_right,
        credited_tokens=audit.credited_tokens,
        engines=dict(sorted(Counter(turn.engine for turn in turns).items())),
    )


__all__ = ["Figures", "figures"]
