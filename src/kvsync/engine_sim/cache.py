"""The prefix cache of one rank: groups over one pool, and the events that tell of every change.

What must always hold, as in vLLM 0.32 (``tests/integration/engine_sim`` proves it on captures):

- A prompt of n tokens hits at most floor((n − 1) / block_size) blocks: the last token is always computed.
- Blocks are offered to the cache when their tokens are *scheduled*, before they are computed, so a request that is
  admitted later in the same step can hit them. n prompt and m output tokens fill floor((n + m − 1) / block_size).
- Events are in the order of the changes: what an allocation evicts comes before what it stores, group by group.
- A hit takes its blocks out of the free queue and emits nothing (except in report mode ``full``).
- Clearing is refused while any block is in use; its event leaves with the next step's, whenever that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsync.engine_sim.events import CacheEvent, Cleared, Removed, Stored
from kvsync.engine_sim.groups import FullAttention, GroupSpec
from kvsync.engine_sim.hashing import BlockHasher
from kvsync.engine_sim.pool import Block, BlockKey, BlockPool
from kvsync.engine_sim.request import Request


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request found."""

    tables: tuple[list[Block], ...]
    """Per group, the blocks of the hit."""
    tokens: int
    junction: int
    """Where the longest hit of a single group ended, if that was further than all could go; else 0."""


class KVCache:
    """See the module.

    Args:
        blocks: pool size, the null block included.
        block_size: tokens per block, the same in all groups.
        groups: the model's groups, in the order of their ``group_idx``.
        hasher: names the blocks.
        longest: ``max_model_len``.
        in_flight: the most tokens that one step schedules.
    """

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        groups: Sequence[GroupSpec],
        hasher: BlockHasher,
        longest: int,
        in_flight: int,
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.hasher = hasher
        self.pool = BlockPool(blocks, self._evicted)
        self._longest = longest
        self._in_flight = in_flight
        self._events: list[CacheEvent] = []
        kinds: dict[GroupSpec, list[int]] = {}
        for index, spec in enumerate(self.groups):
            kinds.setdefault(spec, []).append(index)
        # Full attention first: its run bounds what the others have to look at.
        self._kinds = sorted(kinds.items(), key=lambda item: not isinstance(item[0], FullAttention))

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def lookup(self, request: Request) -> Hit:
        """The longest prefix that every group can serve."""
        nothing = Hit(tuple([] for _ in self.groups), 0, 0)
        if request.skip_cache:
            return nothing
        request.extend_hashes(self.hasher, self.block_size)
        limit = (len(request.tokens) - 1) // self.block_size
        tables: list[list[Block]] = [[] for _ in self.groups]
        full_runs: dict[int, int] = {}
        longest = 0
        while True:
            places = limit
            for spec, members in self._kinds:
                if members[0] in full_runs:
                    # Any prefix of a full run is one: no need to look again.
                    places = min(places, full_runs[members[0]])
                    continue
                found = spec.find(self.pool, request.hashes, places, members, self.block_size)
                places = len(found[0])
                longest = max(longest, places)
                for group, table in zip(members, found, strict=True):
                    tables[group] = table
                if isinstance(spec, FullAttention):
                    full_runs[members[0]] = places
            if places >= limit:
                break
            limit = places
        for group in range(len(self.groups)):
            del tables[group][limit:]
        hit = Hit(tuple(tables), limit * self.block_size, longest * self.block_size if longest > limit else 0)
        if request.report_full and hit.tokens:
            for group in range(len(self.groups)):
                self._store_event(request, group, 0, limit, range(limit))
        return hit

    def allocate(self, request: Request, new: int, hit: Hit | None = None, *, whole: bool = False) -> bool:
        """Give ``request`` room for ``new`` more tokens, after adopting ``hit`` where it was just looked up.

        With ``whole``, only if its whole sequence would fit now. ``False``: not enough free blocks, nothing changed
        (but blocks that its windows have left are free in any case).
        """
        computed = hit.tokens if hit is not None else request.computed
        if whole and self._missing(request, len(request.tokens), hit, computed, capped=True) > self.pool.free:
            return False
        if request.admitted:
            self._drop_skipped(request, computed)
        end = computed + new
        if self._missing(request, end, hit, computed) > self.pool.free:
            return False
        if hit is not None:
            self._adopt(request, hit)
        for table in request.tables:
            missing = -(-end // self.block_size) - len(table)
            if missing > 0:
                table.extend(self.pool.allocate(missing))
        self._register(request, min(end, len(request.tokens)))
        return True

    def release(self, request: Request) -> None:
        """Give back all blocks of a request, its tail first."""
        for table in request.tables:
            self.pool.release(reversed(table))
        request.tables = []
        request.registered = []

    def reset(self) -> bool:
        """Forget everything; refused while a request holds blocks."""
        if not self.pool.reset():
            return False
        self._events.append(Cleared())
        return True

    def _missing(self, request: Request, end: int, hit: Hit | None, computed: int, *, capped: bool = False) -> int:
        """Free blocks needed to hold tokens 0 … ``end``, those included that a hit takes out of the free queue."""
        total = 0
        for group, spec in enumerate(self.groups):
            required = -(-end // self.block_size)
            most = spec.most_blocks(self._in_flight, self._longest, self.block_size)
            if capped and most is not None:
                required = min(required, most)
            if request.admitted:
                total += max(required - len(request.tables[group]), 0)
                continue
            found = hit.tables[group] if hit is not None else []
            skipped = spec.skipped(computed) // self.block_size
            total += max(required - max(skipped, len(found)), 0)
            total += sum(block.users == 0 and not block.is_null for block in found[skipped:])
        return total

    def _drop_skipped(self, request: Request, computed: int) -> None:
        for spec, table in zip(self.groups, request.tables, strict=True):
            end = min(spec.skipped(computed) // self.block_size, len(table))
            left = []
            for place in range(end - 1, -1, -1):
                if table[place].is_null:
                    break
                left.append(table[place])
                table[place] = self.pool.null
            self.pool.release(left)

    def _adopt(self, request: Request, hit: Hit) -> None:
        request.junction = hit.junction
        request.tables = []
        request.registered = []
        for spec, found in zip(self.groups, hit.tables, strict=True):
            skipped = spec.skipped(hit.tokens) // self.block_size
            visible = found[skipped:]
            self.pool.touch(visible)
            request.tables.append([self.pool.null] * skipped + visible)
            request.registered.append(skipped + len(visible))

    def _register(self, request: Request, tokens: int) -> None:
        """Offer the blocks that ``tokens`` tokens fill to the cache."""
        request.extend_hashes(self.hasher, self.block_size)
        end = tokens // self.block_size
        boundaries = [len(request.prompt) - 1]
        if request.junction:
            boundaries.append(request.junction)
        for group, spec in enumerate(self.groups):
            start = request.registered[group]
            if start >= end:
                continue
            mask = spec.kept(start, end, boundaries, self.block_size)
            table = request.tables[group]
            stored = [
                place
                for place in range(start, end)
                if not table[place].is_null and (mask is None or mask[place - start])
            ]
            for place in stored:
                self.pool.register(table[place], (request.hashes[place], group))
            request.registered[group] = end
            self._store_event(request, group, start, end, stored)

    def _store_event(self, request: Request, group: int, start: int, end: int, places: Sequence[int]) -> None:
        adapter = request.adapter
        self._events.append(
            Stored(
                hashes=tuple(request.hashes[place] for place in places),
                parent=request.hashes[start - 1] if start else None,
                tokens=tuple(request.tokens[start * self.block_size : end * self.block_size]),
                block_size=self.block_size,
                lora_id=adapter.number if adapter else None,
                lora_name=adapter.name if adapter else None,
                extra_keys=tuple(request.extra_keys(place) for place in places),
                group=group,
                kind=self.groups[group].kind,
                window=self.groups[group].window,
                session_id=request.session_id,
            )
        )

    def _evicted(self, key: BlockKey) -> None:
        self._events.append(Removed(key[0], key[1]))
