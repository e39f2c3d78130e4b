"""Prompts that differ from each other from the first word on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

_WORDS = (
    *("river", "stone", "lantern", "market", "copper", "window", "garden", "letter", "winter", "harbor", "silver"),
    *("bridge", "thunder", "orchard", "candle", "meadow", "pepper", "saddle", "compass", "marble", "velvet"),
)
_seeds = itertools.count()


def text(words: int = 60) -> str:
    """A text that no other call gives."""
    source = random.Random(f"prompt {next(_seeds)}")
    return " ".join(source.choice(_WORDS) for _ in range(words))


def tokens(count: int = 100) -> list[int]:
    """Ordinary token ids that no other call gives."""
    source = random.Random(f"prompt {next(_seeds)}")
    return [source.randrange(300, 4000) for _ in range(count)]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def asks(content: str) -> Sequence[dict[str, str]]:
    """A conversation of one question."""
    return [user(content)]
