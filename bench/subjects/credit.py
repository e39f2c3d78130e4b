"""What kvsync's index credits workers with: asked alike of one that is fed and of one that follows engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.work import BLOCK, Chain, tokens
from kvsync.index.match import Index

MODEL: Final = "m"


def held(index: Index, chains: Sequence[Chain]) -> list[dict[str, int]]:
    """Credit in blocks per worker that has any, for the prompt of each chain."""
    found = []
    for seed, blocks in chains:
        prompt = tokens(seed, blocks)
        prompt.append(0)  # a block is never credited with the prompt's last token in it
        matches = index.match(prompt, MODEL)
        found.append({worker: match.credit // BLOCK for worker, match in matches.items() if match.credit})
    return found
