"""What a worker holds, by its own events: a second opinion that shares no code with the gateway.

It knows one dialect (vLLM 0.32: maps), one block size and two kinds of KV-cache group, and refuses all else. A block
is held while its copies, stored minus removed, are above zero. A prompt's cached prefix is the unbroken run of held
blocks from its start, never with the last token's block; where the model has a sliding-window group, the run is
shortened until the blocks of the window that ends with it are held too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

Name = tuple[int | None, tuple[int, ...], str | None]
"""Parent's hash, tokens and salt of a block."""


class Cache:
    """The blocks of one worker."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: dict[Name, int] = {}
        """The engine's hash of each block ever stored: it depends on the content alone and outlives the block."""
        self._copies: dict[int, Counter[int]] = {}
        """Group → hash → copies."""
        self._window_blocks: dict[int, int] = {}
        """Sliding-window group → blocks that must be held before a position."""

    def apply(self, batches: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Take in the events of ``batches``, in order."""
        for batch in batches:
            for event in batch:
                match event["type"]:
                    case "BlockStored":
                        self._store(event)
                    case "BlockRemoved":
                        self._copies[event["group_idx"]].subtract(event["block_hashes"])
                    case _:
                        raise AssertionError(f"the scenarios cause no such event: {event}")

    def _store(self, event: Mapping[str, Any]) -> None:
        assert event["block_size"] == self._block_size, event
        group, hashes = event["group_idx"], event["block_hashes"]
        self._copies.setdefault(group, Counter()).update(hashes)
        match event["kv_cache_spec_kind"]:
            case "sliding_window":
                self._window_blocks[group] = ceil((event["kv_cache_spec_sliding_window"] - 1) / self._block_size)
            case "full_attention":
                keys = event["extra_keys"] or [None] * len(hashes)
                parent = event["parent_block_hash"]
                for tokens, key, block in zip(self._split(event["token_ids"]), keys, hashes, strict=True):
                    self._hashes[parent, tokens, key[0] if key else None] = block
                    parent = block
            case kind:
                raise AssertionError(f"no rule for {kind}")

    def cached(self, prompt: Sequence[int], salt: str | None) -> int:
        """How many tokens of ``prompt`` this worker would serve from its cache now."""
        run: list[int] = []
        parent: int | None = None
        full = [copies for group, copies in self._copies.items() if group not in self._window_blocks]
        for tokens in self._split(prompt[: (len(prompt) - 1) // self._block_size * self._block_size]):
            block = self._hashes.get((parent, tokens, None if run else salt))
            if block is None or not all(copies[block] > 0 for copies in full):
                break
            run.append(block)
            parent = block
        length = len(run)
        while length and not all(
            self._copies[group][block] > 0
            for group, blocks in self._window_blocks.items()
            for block in run[max(0, length - blocks) : length]
        ):
            length -= 1
        return length * self._block_size

    def _split(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        assert len(tokens) % self._block_size == 0
        return [tuple(tokens[i : i + self._block_size]) for i in range(0, len(tokens), self._block_size)]
