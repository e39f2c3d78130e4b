"""All that is known of one worker: which blocks are resident where, how they are read, and how far that can be trusted.

The rules stand in the text of :mod:`kvsync.index.reference`.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from typing_extensions import Buffer

from kvsync.events.decode import decode_batch
from kvsync.events.types import (
    AllBlocksClearedEvent,
    BlockRemovedEvent,
    BlockStoredEvent,
    EngineHash,
    EventBatch,
    KVEvent,
    SkippedEvent,
    UndecodableBatch,
)
from kvsync.index.hits import Rule, hit_blocks, kind_of
from kvsync.index.keys import KeyChain
from kvsync.index.match import Match, Tier, Trust
from kvsync.index.placement import Placement

_TIERS: Final[dict[str, Tier]] = {
    "gpu": "gpu",
    "cpu": "cpu",
    "storage": "storage",
    "fs": "storage",
    "obj": "storage",
    "disk": "storage",
}


def _tier(medium: str | None) -> Tier | None:
    return "gpu" if medium is None else _TIERS.get(medium.casefold())


MOST_DOUBTFUL: Final = 65_536
"""Where the number of usable blocks is unknown."""


class _Group:
    """What the events tell of one KV-cache group."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.window = 0
        self.block_size = 0
        """0 until the first store that has one."""
        self.sparse = False
        """A store named fewer or more hashes than its tokens hold."""


class _Residence:
    """The blocks of one tier and group."""

    def __init__(self) -> None:
        self.copies: dict[EngineHash, int] = {}
        self.doubtful: set[EngineHash] = set()

    def held(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self.copies and engine_hash not in self.doubtful


class Worker:
    """All that is known of one worker."""

    def __init__(
        self,
        model: str,
        usable_blocks: int | None,
        attention_chunk_size: int | None,
        spec_decode: str | None,
        hit_alignment: int | None,
        rank: int | None,
    ) -> None:
        self.model = model
        self.usable_blocks = usable_blocks
        self.attention_chunk_size = attention_chunk_size
        self.eagle = spec_decode is not None
        self.hit_alignment = hit_alignment
        self.rank = rank
        self.counts: Counter[str] = Counter()
        """What happened, by word: for metrics, never for decisions."""
        self.lost = False
        self.suspended = False
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._unmark()
        self._begin()

    def _begin(self) -> None:
        self.groups: dict[int, _Group] = {}
        self.hides_keys = False
        self._empty()
        self._settle()

    def _empty(self) -> None:
        self.residence: dict[tuple[Tier, int], _Residence] = {}
        self.places: Counter[EngineHash] = Counter()
        """In how many tiers and groups a hash is resident."""
        self.gpu_copies = 0
        self.placement = Placement(self.model, self.counts)

    def _settle(self) -> None:
        """What a clear and a new epoch make good."""
        self.lost = False
        self.overfull = False
        """More copies were announced than there are blocks."""

    def _unmark(self) -> None:
        self.marked_reannouncing = False
        self.hidden_request = False
        self.fresh_mark = False
        """No batch was applied since a request was marked."""

    def mark(self, *, reannouncing: bool = False, hides_keys: bool = False) -> None:
        """A request that makes events say less goes to this worker."""
        self.marked_reannouncing |= reannouncing
        self.hidden_request |= hides_keys
        self.fresh_mark = True

    @property
    def reannouncing(self) -> bool:
        return self.overfull or self.marked_reannouncing

    # -- the worker's life

    def forget(self) -> None:
        self._empty()
        self.lost = True
        self.counts["forgotten"] += 1

    def clear(self) -> None:
        self._empty()
        self._settle()
        if not self.fresh_mark:
            self._unmark()
        self.counts["cleared"] += 1

    def new_epoch(self) -> None:
        self._start_epoch()
        self.counts["epochs"] += 1

    def relearn(self) -> None:
        self._begin()
        self.counts["relearned"] += 1

    # -- events

    def apply(self, payload: Buffer | EventBatch) -> None:
        if isinstance(payload, EventBatch):
            batch = payload
        else:
            try:
                batch = decode_batch(payload)
            except UndecodableBatch as error:
                self.counts[f"undecodable_{error.reason}"] += 1
                self.forget()
                return
        if self.rank is not None and batch.data_parallel_rank is not None and batch.data_parallel_rank != self.rank:
            self.counts["wrong_rank"] += 1
            return
        self.counts["batches"] += 1
        for event in batch.events:
            self._event(event)
        self.fresh_mark = False

    def _event(self, event: KVEvent | SkippedEvent) -> None:
        match event:
            case BlockStoredEvent():
                self._stored(event)
            case BlockRemovedEvent():
                self._removed(event)
            case AllBlocksClearedEvent():
                self.clear()
            case SkippedEvent():
                self.counts[f"skipped_{event.reason}"] += 1
                if event.may_remove:
                    self.forget()

    def _stored(self, event: BlockStoredEvent) -> None:
        tier = _tier(event.medium)
        if tier is None:
            self.counts["unknown_medium"] += 1
            return
        self.counts["stored"] += 1
        index = event.group_idx or 0
        dense = event.block_size > 0 and len(event.raw_token_ids) == 4 * event.block_size * len(event.block_hashes)
        if tier == "gpu":
            self._learn(index, event, dense)
        residence = self.residence.setdefault((tier, index), _Residence())
        for engine_hash in event.block_hashes:
            if engine_hash in residence.copies:
                residence.copies[engine_hash] += 1
            else:
                residence.copies[engine_hash] = 1
                self.places[engine_hash] += 1
            residence.doubtful.discard(engine_hash)
        if tier == "gpu":
            self.gpu_copies += len(event.block_hashes)
            if self.usable_blocks is not None and self.gpu_copies > self.usable_blocks:
                self.overfull = True
        if not event.block_hashes:
            return
        if not dense or event.block_size != self._block_size(index):
            self.counts["unplaced"] += 1
        elif tier != "gpu" and event.extra_keys is None:
            if any(not self.placement.knows(h) for h in event.block_hashes):
                self.counts["waiting_offload"] += 1
        else:
            self.placement.place(event, self.places)

    def _learn(self, index: int, event: BlockStoredEvent, dense: bool) -> None:
        group = self.groups.setdefault(index, _Group())
        if event.kv_cache_spec_kind is not None:
            group.kind = event.kv_cache_spec_kind
        if event.kv_cache_spec_sliding_window is not None:
            group.window = event.kv_cache_spec_sliding_window
        if event.block_size and not group.block_size:
            group.block_size = event.block_size
        if dense and event.block_hashes and event.extra_keys is None:
            self.hides_keys = True
        if not dense and event.block_size:
            group.sparse = True

    def _block_size(self, index: int) -> int:
        group = self.groups.get(index)
        return group.block_size if group else 0

    def _removed(self, event: BlockRemovedEvent) -> None:
        tier = _tier(event.medium)
        if tier is None:
            self.counts["unknown_medium"] += 1
            return
        self.counts["removed"] += 1
        groups = [event.group_idx] if event.group_idx is not None else [g for t, g in self.residence if t == tier]
        for i, engine_hash in enumerate(event.block_hashes):
            left = event.remaining_copy_counts[i] if event.remaining_copy_counts is not None else None
            gone = [self._remove(tier, group, engine_hash, left) for group in groups]
            if not any(gone):
                self.counts["removed_unknown"] += 1
        if sum(len(r.doubtful) for r in self.residence.values()) > (self.usable_blocks or MOST_DOUBTFUL):
            self._drop_doubtful()

    def _drop_doubtful(self) -> None:
        for (tier, _), residence in self.residence.items():
            for engine_hash in residence.doubtful:
                copies = residence.copies.pop(engine_hash)
                if tier == "gpu":
                    self.gpu_copies -= copies
                self._left(engine_hash)
                self.counts["doubtful_dropped"] += 1
            residence.doubtful.clear()

    def _remove(self, tier: Tier, group: int, engine_hash: EngineHash, left: int | None) -> bool:
        """One copy less (or ``left`` copies left); False when the block was not known to be there."""
        residence = self.residence.get((tier, group))
        if residence is None or engine_hash not in residence.copies:
            return False
        had = residence.copies[engine_hash]
        now = had - 1 if left is None else left
        if tier == "gpu":
            self.gpu_copies += now - had
        if now > 0:
            residence.copies[engine_hash] = now
            if self.reannouncing and left is None:
                residence.doubtful.add(engine_hash)
            return True
        del residence.copies[engine_hash]
        residence.doubtful.discard(engine_hash)
        self._left(engine_hash)
        return True

    def _left(self, engine_hash: EngineHash) -> None:
        """One tier and group holds no copy of it any more."""
        self.places[engine_hash] -= 1
        if not self.places[engine_hash]:
            del self.places[engine_hash]
            self.placement.unplace(engine_hash)

    # -- lookups

    def rules(self) -> list[Rule] | None:
        """How hits are counted here; ``None`` when no rule is proven for what the events show."""
        full_sizes = {g.block_size for g in self.groups.values() if kind_of(g.kind) == "full"}
        size = max(full_sizes, default=0) or max((g.block_size for g in self.groups.values()), default=0)
        rules = []
        for index, group in self.groups.items():
            kind = kind_of(group.kind)
            if kind == "unproven" or group.block_size > size or (kind == "window" and group.window <= 0):
                return None
            if group.kind is None and (len(self.groups) > 1 or group.sparse):
                return None
            if kind == "chunked" and self.attention_chunk_size is None:
                return None
            rules.append(Rule(index, kind, group.window))
        kinds = {rule.kind for rule in rules}
        if len(full_sizes) > 1 or ("chunked" in kinds and kinds & {"window", "state"}):
            return None
        if self.reannouncing and kinds & {"window", "state"}:
            return None
        return rules

    @property
    def block_size(self) -> int:
        """The block size of the groups that place blocks; 0 before the first store."""
        sizes = [g.block_size for g in self.groups.values() if kind_of(g.kind) == "full"]
        return max(sizes or [g.block_size for g in self.groups.values()], default=0)

    def trust(self) -> Trust:
        if self.suspended or self.rules() is None or (self.hides_keys and self.hidden_request):
            return "none"
        return "partial" if self.lost else "exact"

    def match(self, chain: KeyChain | None, tokens: int) -> Match:
        trust = self.trust()
        rules = self.rules()
        if chain is None or not rules:
            return Match(0, trust=trust)
        by_tier: dict[Tier, int] = {}
        credit = 0
        if trust != "none":
            credit = self._hit(rules, chain, tokens, doubtful=False, by_tier=by_tier)
        likely = credit
        if trust == "none" or any(r.doubtful for r in self.residence.values()):
            likely = self._hit(rules, chain, tokens, doubtful=True, by_tier={})
        return Match(credit, max(0, likely - credit), by_tier, trust)

    def _hit(self, rules: list[Rule], chain: KeyChain, tokens: int, *, doubtful: bool, by_tier: dict[Tier, int]) -> int:
        def held(tier: Tier, group: int, i: int) -> bool:
            engine_hash = self.placement.hash_of(chain[i])
            if engine_hash is None:
                return False
            residence = self.residence.get((tier, group))
            if residence is None:
                return False
            return residence.held(engine_hash) or (doubtful and engine_hash in residence.copies)

        size = self.block_size
        chunk = self.attention_chunk_size or 1
        run = hit_blocks(rules, lambda group, i: held("gpu", group, i), tokens, size, chunk, self.eagle)
        if self.hit_alignment:
            run = run * size // self.hit_alignment * self.hit_alignment // size
        counts: Counter[Tier] = Counter({"gpu": run})
        if all(rule.kind == "full" for rule in rules):
            limit = max(0, tokens - 1) // size
            while run < limit:
                tier: Tier | None = next(
                    (t for t in ("cpu", "storage") if all(held(t, rule.group, run) for rule in rules)), None
                )
                if tier is None:
                    break
                counts[tier] += 1
                run += 1
        by_tier.update({tier: blocks * size for tier, blocks in counts.items() if blocks})
        return run * size

    def describe(self) -> dict[str, object]:
        return {
            "model": self.model,
            "trust": self.trust(),
            "block_size": self.block_size,
            "blocks": len(self.places),
            "copies": sum(sum(r.copies.values()) for r in self.residence.values()),
            "doubtful": sum(len(r.doubtful) for r in self.residence.values()),
            "placed": self.placement.placed,
            "parked": self.placement.parked,
            "reannouncing": self.reannouncing,
            "suspended": self.suspended,
            "counts": dict(self.counts),
        }


__all__ = ["Worker"]
