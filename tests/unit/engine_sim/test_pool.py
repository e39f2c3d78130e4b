"""The block pool's order of reuse, copies and refusals."""

from __future__ import annotations

import pytest

from kvsync.engine_sim.pool import BlockKey, BlockPool

A, B, C = (b"a", 0), (b"b", 0), (b"c", 0)


def numbers(pool: BlockPool, count: int) -> list[int]:
    return [block.number for block in pool.allocate(count)]


def make(blocks: int) -> tuple[BlockPool, list[BlockKey]]:
    evicted: list[BlockKey] = []
    return BlockPool(blocks, evicted.append), evicted


def test_first_allocation_is_in_order_without_the_null_block() -> None:
    pool, evicted = make(5)
    assert pool.free == 4
    assert numbers(pool, 4) == [1, 2, 3, 4]
    assert pool.free == 0
    assert evicted == []


def test_uncached_blocks_go_to_the_head_and_cached_ones_to_the_tail() -> None:
    pool, evicted = make(7)
    first, second, third = pool.allocate(3)
    pool.register(first, A)
    pool.register(second, B)
    pool.release([third, second, first])  # A request's tail comes first.
    assert numbers(pool, 6) == [3, 4, 5, 6, 2, 1]
    assert evicted == [B, A]


def test_several_uncached_blocks_keep_their_order_at_the_head() -> None:
    pool, _ = make(6)
    blocks = pool.allocate(3)
    pool.release(reversed(blocks))
    assert numbers(pool, 5) == [3, 2, 1, 4, 5]


def test_a_hit_saves_a_block_from_eviction() -> None:
    pool, evicted = make(3)
    first, second = pool.allocate(2)
    pool.register(first, A)
    pool.register(second, B)
    pool.release([first, second])
    pool.touch([first])
    assert numbers(pool, 1) == [2]
    assert evicted == [B]
    assert pool.find(b"a", [0]) == [first]
    assert pool.find(b"b", [0]) is None
    with pytest.raises(ValueError, match="1 blocks asked, 0 free"):
        pool.allocate(1)


def test_copies_are_found_oldest_first_and_evicted_one_by_one() -> None:
    pool, evicted = make(4)
    first, second, _ = pool.allocate(3)
    pool.register(first, A)
    pool.register(second, A)
    assert pool.copies(b"a", 0) == 2
    assert pool.find(b"a", [0]) == [first]
    pool.release([first])
    assert numbers(pool, 1) == [1]
    assert evicted == [A]
    assert pool.find(b"a", [0]) == [second]
    pool.release([second])
    assert numbers(pool, 1) == [2]
    assert evicted == [A, A]
    assert pool.copies(b"a", 0) == 0


def test_groups_share_hashes_but_not_blocks() -> None:
    pool, _ = make(4)
    first, second = pool.allocate(2)
    pool.register(first, (b"a", 0))
    assert pool.find(b"a", [0, 1]) is None
    pool.register(second, (b"a", 1))
    assert pool.find(b"a", [0, 1]) == [first, second]


def test_a_block_with_two_users_stays_until_both_are_gone() -> None:
    pool, _ = make(3)
    [block] = pool.allocate(1)
    pool.touch([block])
    pool.release([block])
    assert pool.free == 1
    assert pool.usage == pytest.approx(0.5)
    pool.release([block])
    assert pool.free == 2
    assert pool.usage == 0


def test_the_null_block_is_never_touched_or_freed() -> None:
    pool, _ = make(3)
    pool.touch([pool.null])
    pool.release([pool.null, pool.null])
    assert pool.free == 2
    assert numbers(pool, 2) == [1, 2]


def test_reset_is_refused_while_a_block_is_in_use_and_keeps_the_queue() -> None:
    pool, evicted = make(4)
    blocks = pool.allocate(2)
    pool.register(blocks[0], A)
    assert not pool.reset()
    pool.release(blocks)
    assert pool.reset()
    assert pool.find(b"a", [0]) is None
    assert numbers(pool, 3) == [2, 3, 1]
    assert evicted == []


@pytest.mark.parametrize("blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block(blocks: int) -> None:
    with pytest.raises(ValueError, match="at least one more"):
        make(blocks)
