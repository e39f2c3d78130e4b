"""The engine's own names for blocks: a chain of XXH3-128 digests.

A block's hash covers its parent's hash, its tokens and its extra keys, so that equal prefixes have equal hashes inside
one engine. Two engines agree only when they share a seed; a client that tries to predict hashes instead of learning
them from events fails on the first engine with another seed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

BlockHash = bytes
"""16 bytes; what is put on the wire is made from it by the dialect."""


class BlockHasher:
    """Chains block hashes. The same seed gives the same hashes in every process."""

    def __init__(self, seed: int) -> None:
        self._root = xxhash.xxh3_128_digest(f"root {seed}".encode())

    def block(self, parent: BlockHash | None, tokens: Sequence[int], extra: tuple[str, ...] | None) -> BlockHash:
        """The hash of one full block; ``extra`` are its adapter and salt, already tagged by kind."""
        state = xxhash.xxh3_128(parent or self._root)
        state.update(array("I", tokens).tobytes())
        for key in extra or ():
            encoded = key.encode()
            state.update(len(encoded).to_bytes(4, "little"))
            state.update(encoded)
        return state.digest()


def as_unsigned(block_hash: BlockHash) -> int:
    """The wire form of vLLM ≥ 0.10.2: the last 8 bytes, big-endian."""
    return int.from_bytes(block_hash[-8:], "big")


def as_signed(block_hash: BlockHash) -> int:
    """The wire form of vLLM ≤ 0.10.1 with its ``builtin`` hash: a signed 64-bit int, negative half of the time."""
    return int.from_bytes(block_hash[-8:], "big", signed=True)


def as_bytes(block_hash: BlockHash) -> bytes:
    """The wire form with ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``: 32 bytes, as a SHA-256 would give."""
    return block_hash + xxhash.xxh3_128_digest(block_hash)
