"""The block pool: physical blocks, the free queue and the map from hash to cached blocks.

What vLLM 0.32's pool does, and therefore what must always hold here:

- Blocks have ids 1 … N−1; id 0 is the null block, which stands for a place that holds nothing and is never freed.
- A block with no users is in the free queue, whether its content is cached or not; a block with users never is.
- Allocation takes the queue's head. Where that block is cached, it is evicted first and a removal is reported: every
  physical copy is reported by itself.
- Blocks come back in the order given (callers pass a request's tail first): cached ones to the queue's tail, so that
  the least recently used go first, others to its head.
- One hash may name several physical blocks (second copies); a lookup gives the oldest of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvsync.engine_sim.hashing import BlockHash

BlockKey = tuple[BlockHash, int]
"""A hash inside one KV-cache group: groups share hashes, not blocks."""


class Block:
    """One physical block."""

    __slots__ = ("key", "number", "users")

    def __init__(self, number: int) -> None:
        self.number = number
        self.users = 0
        self.key: BlockKey | None = None
        """Set while the block's content can be found in the cache."""

    @property
    def is_null(self) -> bool:
        return self.number == 0


class BlockPool:
    """All blocks of one data-parallel rank.

    Args:
        blocks: size of the pool, the null block included (vLLM's ``num_gpu_blocks``).
        on_evicted: told of each cached block that leaves the cache by reallocation.
    """

    def __init__(self, blocks: int, on_evicted: Callable[[BlockKey], None]) -> None:
        if blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {blocks}")
        self.size = blocks
        self.null = Block(0)
        self._on_evicted = on_evicted
        self._all = [Block(number) for number in range(1, blocks)]
        self._free: OrderedDict[int, Block] = OrderedDict((b.number, b) for b in self._all)
        self._cached: dict[BlockKey, dict[int, Block]] = {}

    @property
    def free(self) -> int:
        """Blocks that could be allocated now, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 … 1: cached blocks without users do not count."""
        return 1.0 - len(self._free) / (self.size - 1)

    def find(self, block_hash: BlockHash, groups: Sequence[int]) -> list[Block] | None:
        """The cached block of each of ``groups``, or ``None`` where one of them lacks it."""
        found = []
        for group in groups:
            copies = self._cached.get((block_hash, group))
            if not copies:
                return None
            found.append(next(iter(copies.values())))
        return found

    def allocate(self, count: int) -> list[Block]:
        """Take ``count`` blocks from the head of the queue, evicting what they held.

        Raises:
            ValueError: fewer than ``count`` blocks are free; callers ask first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked, {len(self._free)} free")
        taken = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            if block.key is not None:
                key = block.key
                self._forget(block)
                self._on_evicted(key)
            block.users = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a user to each block, as a hit does: it leaves the free queue."""
        for block in blocks:
            if block.is_null:
                continue
            if block.users == 0:
                del self._free[block.number]
            block.users += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop a user of each block. The first given is the first to be reused."""
        reuse_last: list[Block] = []
        reuse_first: list[Block] = []
        for block in blocks:
            if block.is_null:
                continue
            block.users -= 1
            if block.users == 0:
                (reuse_first if block.key is None else reuse_last).append(block)
        for block in reversed(reuse_first):
            self._free[block.number] = block
            self._free.move_to_end(block.number, last=False)
        for block in reuse_last:
            self._free[block.number] = block

    def register(self, block: Block, key: BlockKey) -> None:
        """Make a full block's content findable."""
        block.key = key
        self._cached.setdefault(key, {})[block.number] = block

    def reset(self) -> bool:
        """Forget all cached content; refused (``False``) while any block has a user. The queue keeps its order."""
        if len(self._free) != self.size - 1:
            return False
        self._cached.clear()
        for block in self._all:
            block.key = None
        return True

    def copies(self, block_hash: BlockHash, group: int) -> int:
        """How many physical blocks of a group hold this content."""
        return len(self._cached.get((block_hash, group), ()))

    def _forget(self, block: Block) -> None:
        assert block.key is not None
        copies = self._cached[block.key]
        del copies[block.number]
        if not copies:
            del self._cached[block.key]
        block.key = None
