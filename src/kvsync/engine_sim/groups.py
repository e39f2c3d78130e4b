"""The kinds of KV-cache groups: what each can reuse, must keep, and bothers to store.

A model with one kind of attention has one group; a hybrid has several, which share the pool and the block hashes but
not the blocks. ``places`` count blocks from the start of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvsync.engine_sim.hashing import BlockHash
from kvsync.engine_sim.pool import Block, BlockPool


class GroupSpec(Protocol):
    """A kind of group. Equal specs are looked up together: they must all hold a block for it to count."""

    @property
    def kind(self) -> str:
        """As events name it (``kv_cache_spec_kind``)."""

    @property
    def window(self) -> int | None:
        """As events give it (``kv_cache_spec_sliding_window``)."""

    def find(
        self, pool: BlockPool, hashes: Sequence[BlockHash], places: int, groups: Sequence[int], block_size: int
    ) -> list[list[Block]]:
        """The longest reusable prefix of at most ``places`` blocks, per group; null blocks where none is needed."""

    def skipped(self, computed: int) -> int:
        """How many of the first ``computed`` tokens the next one can no longer see."""

    def kept(self, start: int, end: int, boundaries: Sequence[int], block_size: int) -> list[bool] | None:
        """Which of the places ``start … end`` are worth storing; ``None`` for all. ``boundaries`` are the token
        positions at which a later request may take over."""

    def most_blocks(self, in_flight: int, longest: int, block_size: int) -> int | None:
        """The most blocks that one request ever holds, or ``None`` without such a bound."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token sees all before it: a hit is the longest unbroken run, and everything is stored."""

    @property
    def kind(self) -> str:
        return "full_attention"

    @property
    def window(self) -> int | None:
        return None

    def find(
        self, pool: BlockPool, hashes: Sequence[BlockHash], places: int, groups: Sequence[int], block_size: int
    ) -> list[list[Block]]:
        found: list[list[Block]] = [[] for _ in groups]
        for block_hash in hashes[:places]:
            blocks = pool.find(block_hash, groups)
            if blocks is None:
                break
            for run, block in zip(found, blocks, strict=True):
                run.append(block)
        return found

    def skipped(self, computed: int) -> int:
        return 0

    def kept(self, start: int, end: int, boundaries: Sequence[int], block_size: int) -> list[bool] | None:
        return None

    def most_blocks(self, in_flight: int, longest: int, block_size: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A token sees the ``size`` − 1 before it and itself.

    A hit of length L needs only the blocks that the window at L covers, so those are all that is stored: the tail that
    ends where the same prompt would be taken up again, and the tail at a junction (vLLM's
    ``prefix_cache_retention_interval`` 0). Blocks that fill while decoding are not stored.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"a window of {self.size} tokens sees nothing")

    @property
    def kind(self) -> str:
        return "sliding_window"

    @property
    def window(self) -> int | None:
        return self.size

    def _needed(self, block_size: int) -> int:
        return -(-(self.size - 1) // block_size)

    def find(
        self, pool: BlockPool, hashes: Sequence[BlockHash], places: int, groups: Sequence[int], block_size: int
    ) -> list[list[Block]]:
        needed = self._needed(block_size)
        places = min(places, len(hashes))
        found: list[list[Block]] = [[pool.null] * places for _ in groups]
        run = 0
        length = 0
        for place in range(places - 1, -1, -1):
            blocks = pool.find(hashes[place], groups)
            if blocks is None:
                run = 0
                continue
            for table, block in zip(found, blocks, strict=True):
                table[place] = block
            run += 1
            if run == needed:
                length = place + run
                break
        else:
            # A run that reaches the start serves, however short: there is nothing before it to see.
            length = run
        return [table[:length] for table in found]

    def skipped(self, computed: int) -> int:
        return max(0, computed - self.size + 1)

    def kept(self, start: int, end: int, boundaries: Sequence[int], block_size: int) -> list[bool] | None:
        needed = self._needed(block_size)
        mask = [False] * (end - start)
        for boundary in boundaries:
            tail_end = boundary // block_size
            for place in range(max(start, tail_end - needed), min(end, tail_end)):
                mask[place - start] = True
        return mask

    def most_blocks(self, in_flight: int, longest: int, block_size: int) -> int | None:
        # One more than the tokens need: a window rarely begins where a block does.
        return -(-min(self.size - 1 + in_flight, longest) // block_size) + 1
