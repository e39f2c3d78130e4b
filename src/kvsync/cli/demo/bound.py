"""What a router that knows everything could have reached.

The bound: one engine that owns all the engines' blocks together serves the same requests one after the other, in the
order in which they were sent. No block is ever held twice there and none is on the wrong engine, so no way of routing
can be expected to hit more.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsync.cli.demo.play import Turn
from kvsync.engine_sim.cache import KVCache
from kvsync.engine_sim.groups import FullAttention
from kvsync.engine_sim.hashing import BlockHasher
from kvsync.engine_sim.request import Request
from kvsync.engine_sim.scheduler import Scheduler


def all_knowing_hits(turns: Sequence[Turn], usable_blocks: int, block_size: int) -> int:
    """Prompt tokens that the one big cache serves, over all turns in the order given."""
    longest = max(len(turn.prompt_tokens) + len(turn.answer_tokens) for turn in turns)
    cache = KVCache(
        blocks=usable_blocks + 1,
        block_size=block_size,
        groups=(FullAttention(),),
        hasher=BlockHasher(0),
        longest=longest,
        in_flight=longest,
    )
    scheduler = Scheduler(cache, max_running=1, max_tokens=longest)
    hits = 0
    for turn in turns:
        request = Request(turn.prompt_tokens, turn.answer_tokens)
        scheduler.add(request)
        while not scheduler.idle:
            scheduler.finish(scheduler.plan())
        hits += request.cached
    return hits


def distinct_blocks(turns: Sequence[Turn], block_size: int) -> int:
    """The working set: blocks that differ in what they hold, over all prompts and answers."""
    hasher = BlockHasher(0)
    seen = set()
    for turn in turns:
        request = Request(turn.prompt_tokens + turn.answer_tokens, (0,))
        request.extend_hashes(hasher, block_size)
        seen.update(request.hashes)
    return len(seen)


__all__ = ["all_knowing_hits", "distinct_blocks"]
