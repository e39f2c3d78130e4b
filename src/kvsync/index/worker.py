"""All that is known of one worker, and how its events change it.

What it can do for a prompt is said in ``lookup``, what answers add to it in ``learning``. The rules stand in the text
of :mod:`kvsync.index.reference`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from typing_extensions import Buffer

from kvsync.events.decode import decode_batch
from kvsync.events.types import (
    AllBlocksClearedEvent,
    BlockRemovedEvent,
    BlockStoredEvent,
    EngineHash,
    EventBatch,
    KVEvent,
    Opaque,
    SkippedEvent,
    UndecodableBatch,
)
from kvsync.index.cap import Reads
from kvsync.index.hits import kind_of
from kvsync.index.observed import Observed
from kvsync.index.placement import Placement
from kvsync.index.positions import Positions
from kvsync.index.residence import Residence, tier_of

MOST_DOUBTFUL: Final = 65_536
"""Where the number of usable blocks is unknown."""

Mark: TypeAlias = Literal["reannouncing", "hidden_keys"]


@dataclass(slots=True)
class Facts:
    """What is known of an engine apart from its events."""

    model: str
    usable_blocks: int | None = None
    attention_chunk_size: int | None = None
    eagle: bool = False
    hit_alignment: int | None = None
    rank: int | None = None


class Group:
    """What the events tell of one KV-cache group."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.window = 0
        self.block_size = 0
        """0 until the first store that has one."""
        self.sparse = False
        """A store named fewer or more hashes than its tokens hold."""


class Worker:
    """All that is known of one worker."""

    def __init__(self, facts: Facts, reads: Reads) -> None:
        self.facts = facts
        self.reads = reads
        """Of its model."""
        self.counts: Counter[str] = Counter()
        """What happened, by word: for metrics, never for decisions."""
        self.positions = Positions()
        self.observed = Observed(self.counts)
        self.marks: dict[Mark, bool] = {}
        """What requests did to its events → no batch was applied since."""
        self.lost = False
        self.suspended = False
        self._hold_nothing()
        self._begin()

    def _begin(self) -> None:
        self.groups: dict[int, Group] = {}
        self.hides_keys = False
        """A store did not show extra keys: there may have been some."""
        self.shows_unknown_keys = False
        self._empty()
        self._settle()

    def _hold_nothing(self) -> None:
        self.residence = Residence(self._left)
        self.placement = Placement(self.facts.model, self.counts, self.positions, self.observed, self.reads)

    def _empty(self) -> None:
        self.observed.clear()
        self.placement.leave()
        self._hold_nothing()

    def _settle(self) -> None:
        """What a clear, a new epoch and learning anew make good."""
        self.lost = False
        self.overfull = False
        """More copies were announced than there are blocks."""

    def _left(self, engine_hash: EngineHash) -> None:
        self.placement.unplace(engine_hash)

    @property
    def reannouncing(self) -> bool:
        return self.overfull or "reannouncing" in self.marks

    @property
    def is_new(self) -> bool:
        """Nothing is known of it but what it was registered with, and marks."""
        known = self.groups or self.residence.blocks or self.hides_keys or self.shows_unknown_keys or self.lost
        return not known and not self.observed and self.placement.is_settled

    # -- the worker's life

    def mark(self, mark: Mark) -> None:
        """A request that makes events say less goes to this worker."""
        self.marks[mark] = True

    def forget(self) -> None:
        self.positions.lose()
        self._empty()
        self.lost = True
        self.counts["forgotten"] += 1

    def clear(self) -> None:
        self.positions.lose()
        self._empty()
        self._settle()
        self.counts["cleared"] += 1

    def new_epoch(self) -> None:
        self.marks = {mark: False for mark, fresh in self.marks.items() if fresh}
        self.positions.lose()
        self._begin()
        self.counts["epochs"] += 1

    def relearn(self) -> None:
        self.positions.lose()
        self._begin()
        self.counts["relearned"] += 1

    def cap(self, hashes: list[EngineHash]) -> None:
        """Drop these to make room; what they are is lost (``positions`` hears of it when all are dropped)."""
        for engine_hash in hashes:
            self.residence.drop(engine_hash)
        self.counts["capped"] += len(hashes)
        self.lost = True

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
        rank = self.facts.rank
        if rank is not None and batch.data_parallel_rank is not None and batch.data_parallel_rank != rank:
            self.counts["wrong_rank"] += 1
            self.lost = True
            return
        self.counts["batches"] += 1
        for event in batch.events:
            self._event(event)
        if not self.suspended:  # else it may be of the process before
            self.marks = dict.fromkeys(self.marks, False)

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
                elif event.reason != "unknown_tag":  # a store
                    self.lost = True

    def _stored(self, event: BlockStoredEvent) -> None:
        tier = tier_of(event.medium)
        if tier is None:
            self.counts["unknown_medium"] += 1
            return
        self.counts["stored"] += 1
        index = event.group_idx or 0
        dense = event.block_size > 0 and len(event.raw_token_ids) == 4 * event.block_size * len(event.block_hashes)
        if tier == "gpu":
            self._learn(index, event, dense)
        if any(isinstance(key, Opaque) for keys in event.extra_keys or () for key in keys):
            self.shows_unknown_keys = True
            self.observed.clear()
        for engine_hash in event.block_hashes:
            self.residence.add(tier, index, engine_hash)
        usable = self.facts.usable_blocks
        if tier == "gpu" and usable is not None and self.residence.gpu_copies > usable:
            self.overfull = True
        if not event.block_hashes:
            return
        if not dense or event.block_size != self._block_size(index):
            self.counts["unplaced"] += 1
        elif tier != "gpu" and event.extra_keys is None:
            if any(not self.placement.knows(h) for h in event.block_hashes):
                self.counts["waiting_offload"] += 1
        else:
            self.placement.place(event, self.residence)

    def _learn(self, index: int, event: BlockStoredEvent, dense: bool) -> None:
        group = self.groups.setdefault(index, Group())
        if event.kv_cache_spec_kind is not None:
            known = kind_of(event.kv_cache_spec_kind) != "unproven"
            group.kind = event.kv_cache_spec_kind if known else "unproven"  # it may be of any length
        if event.kv_cache_spec_sliding_window is not None:
            group.window = event.kv_cache_spec_sliding_window
        if event.block_size and not group.block_size:
            group.block_size = event.block_size
        if dense and event.block_hashes and event.extra_keys is None and not self.hides_keys:
            self.hides_keys = True
            self.observed.clear()
        if not dense and event.block_size:
            group.sparse = True

    def _block_size(self, index: int) -> int:
        group = self.groups.get(index)
        return group.block_size if group else 0

    def _removed(self, event: BlockRemovedEvent) -> None:
        tier = tier_of(event.medium)
        if tier is None:
            self.counts["unknown_medium"] += 1
            for engine_hash in event.block_hashes:
                self._note_removal(engine_hash)
            return
        self.counts["removed"] += 1
        groups = [event.group_idx] if event.group_idx is not None else self.residence.groups(tier)
        for i, engine_hash in enumerate(event.block_hashes):
            self._note_removal(engine_hash)
            left = event.remaining_copy_counts[i] if event.remaining_copy_counts is not None else None
            gone = [self.residence.remove(tier, group, engine_hash, left, doubt=self.reannouncing) for group in groups]
            if not any(gone):
                self.counts["removed_unknown"] += 1
        if self.residence.doubtful > (self.facts.usable_blocks or MOST_DOUBTFUL):
            self.counts["doubtful_dropped"] += self.residence.drop_doubtful()

    def _note_removal(self, engine_hash: EngineHash) -> None:
        """A copy of it leaves some cache, even one of a medium that is unknown here."""
        key = self.placement.key_of(engine_hash)
        self.positions.remove(key)
        if key is None:
            self.observed.doubt()
        else:
            self.observed.end_with(key)


__all__ = ["Facts", "Group", "Mark", "Worker"]
