"""The prefix index in pure Python: short, readable, and the specification of every implementation.

**Must always hold: no worker is credited with a block that it does not hold.** Where the events leave that open, the
block is not credited, and trust says so.

Residence
    Per (tier, group) and engine hash: the number of physical copies. Engines store and remove one copy at a time, and
    second copies are common. ``remaining_copy_counts`` of a removal, where sent, replaces the count.

Re-announcing workers
    ``kv_cache_report_mode=full`` announces hits as if they were stores, with no matching removals, so counts run too
    high. From :meth:`mark_reannouncing`, or from the moment that a worker's GPU copies exceed its usable blocks, until
    a clear or a new epoch: the first removal of a block ends its credit. While copies remain it is *doubtful*
    (expected, not credit) until a store holds it again. With window or state groups trust is ``none``: there such a
    worker announces blocks that it does not hold.

Placement
    An engine hash gets a block key when its tokens are known (tokens = hashes × block size) and its parent's key is; a
    known hash keeps its key. Events of window and state groups often name only some blocks of their range: those count
    as resident, and the full-attention event of the same hash places them, whichever comes first. A placement lives
    while any tier or group of the worker holds the hash.

    A store whose parent has no key is *parked* until it gets one, and never attached to the root: at most
    ``PARKED_EVENTS`` and ``PARKED_BYTES`` per worker, oldest out first, counted. An offload store (cpu, storage) of an
    unknown hash without extra keys is not placed: it might be salted.

    Two live hashes for one key mean that the engine hides what tells them apart (a salt, an image, an adapter's
    weights): the key matches nothing until all of its hashes are gone.

Forgetting
    What can't be read may have been a removal: an undecodable batch, or a skipped event that may remove, forgets the
    whole worker and leaves it ``partial`` until a clear or a new epoch. ``AllBlocksCleared`` clears every tier: it does
    not say which, and that is the sound reading.

Trust
    ``none`` when soundness is unknown: a group kind without a proven rule, several groups without kinds or of differing
    block sizes, sparse stores without a kind, chunked attention of unknown chunk size, a re-announcing worker with
    window or state groups, a suspended worker (its stream does not tell at present), a worker whose dialect hides salts
    and images after a request that carried one. Otherwise ``partial`` after a loss, else ``exact``.

Threads: any number may call :meth:`match` while one applies; a match sees each worker's batch wholly or not at all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from time import perf_counter, sleep
from typing import Final

from typing_extensions import Buffer

from kvsync.events.decode import decode_batch
from kvsync.events.types import (
    AllBlocksClearedEvent,
    BlockRemovedEvent,
    BlockStoredEvent,
    EngineHash,
    EventBatch,
    ExtraKey,
    KVEvent,
    Salt,
    SkippedEvent,
    UndecodableBatch,
)
from kvsync.index.hits import Rule, hit_blocks, kind_of
from kvsync.index.keys import HiddenAdapter, Key, KeyChain, block_key, packed, root_key
from kvsync.index.match import Match, Tier, Tokens, Trust

PARKED_EVENTS: Final = 4096
PARKED_BYTES: Final = 16 << 20
LONGEST_TURN: Final = 0.001
BREATH: Final = 50e-6
"""Seconds. A thread that is busy in Python keeps the others out for up to 5 ms, the event loop among them: so a long
run of batches lets go of the interpreter for a moment each millisecond. (The native core runs without it.)"""

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


class _Worker:
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
        self.groups: dict[int, _Group] = {}
        self.hides_keys = False
        self._empty()
        self._settle()

    def _empty(self) -> None:
        self.residence: dict[tuple[Tier, int], _Residence] = {}
        self.places: Counter[EngineHash] = Counter()
        """In how many tiers and groups a hash is resident."""
        self.gpu_copies = 0
        self.key_of: dict[EngineHash, Key] = {}
        self.hash_of: dict[Key, EngineHash] = {}
        self.twins: dict[Key, set[EngineHash]] = {}
        self.parked: OrderedDict[int, BlockStoredEvent] = OrderedDict()
        self.parked_under: dict[EngineHash, list[int]] = {}
        self.parked_bytes = 0
        self.parked_next = 0

    def _settle(self) -> None:
        """What a clear and a new epoch make good."""
        self.lost = False
        self.reannouncing = False
        self.hidden_request = False

    # -- the worker's life

    def forget(self) -> None:
        self._empty()
        self.lost = True
        self.counts["forgotten"] += 1

    def clear(self) -> None:
        self._empty()
        self._settle()
        self.counts["cleared"] += 1

    def new_epoch(self) -> None:
        self._start_epoch()
        self.counts["epochs"] += 1

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
                self.reannouncing = True
        if not event.block_hashes:
            return
        if not dense or event.block_size != self._block_size(index):
            self.counts["unplaced"] += 1
        elif tier != "gpu" and event.extra_keys is None:
            if any(h not in self.key_of for h in event.block_hashes):
                self.counts["waiting_offload"] += 1
        else:
            self._place(event)

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
        self.places[engine_hash] -= 1
        if not self.places[engine_hash]:
            del self.places[engine_hash]
            self._unplace(engine_hash)
        return True

    # -- placement

    def _place(self, event: BlockStoredEvent) -> None:
        """Give the event's hashes their keys, and then those whose parked events waited for them."""
        waiting = [event]
        while waiting:
            event = waiting.pop()
            for engine_hash in self._place_one(event):
                for number in self.parked_under.pop(engine_hash, ()):
                    waiting.append(self._unpark(number))

    def _place_one(self, event: BlockStoredEvent) -> list[EngineHash]:
        """Returns the hashes that have a key now and may be parents of parked events."""
        adapter = event.lora_name if event.lora_name is not None or event.lora_id < 0 else HiddenAdapter(event.lora_id)
        step = event.block_size * 4
        tokens = memoryview(event.raw_token_ids)
        parent: Key | None
        if event.parent_block_hash is None:
            parent = root_key(self.model, adapter, event.block_size)
        else:
            parent = self.key_of.get(event.parent_block_hash)
        missing = False
        for i, engine_hash in enumerate(event.block_hashes):
            key = self.key_of.get(engine_hash)
            if key is None:
                if parent is None:
                    missing = True
                    continue
                extra = event.extra_keys[i] if event.extra_keys else ()
                key = block_key(parent, tokens[i * step : (i + 1) * step], extra)
                if engine_hash in self.places:
                    self.key_of[engine_hash] = key
                    if key in self.twins:  # hash_of may still name one that is gone, even this one
                        self.twins[key].add(engine_hash)
                    elif self.hash_of.setdefault(key, engine_hash) != engine_hash:
                        self.twins[key] = {self.hash_of[key], engine_hash}
            parent = key
        if missing:
            self._park(event)
        return [h for h in event.block_hashes if h in self.parked_under and h in self.key_of]

    def _unplace(self, engine_hash: EngineHash) -> None:
        key = self.key_of.pop(engine_hash, None)
        if key is None:
            return
        twins = self.twins.get(key)
        if twins is not None:
            twins.discard(engine_hash)
            if twins:
                return
            del self.twins[key]
        del self.hash_of[key]

    def _park(self, event: BlockStoredEvent) -> None:
        assert event.parent_block_hash is not None
        number = self.parked_next
        self.parked_next += 1
        self.parked[number] = event
        self.parked_under.setdefault(event.parent_block_hash, []).append(number)
        self.parked_bytes += _parked_size(event)
        self.counts["parked"] += 1
        while len(self.parked) > PARKED_EVENTS or self.parked_bytes > PARKED_BYTES:
            oldest = next(iter(self.parked))
            parent = self._unpark(oldest).parent_block_hash
            assert parent is not None
            siblings = self.parked_under[parent]
            siblings.remove(oldest)
            if not siblings:
                del self.parked_under[parent]
            self.counts["parked_dropped"] += 1

    def _unpark(self, number: int) -> BlockStoredEvent:
        event = self.parked.pop(number)
        self.parked_bytes -= _parked_size(event)
        return event

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
            key = chain[i]
            engine_hash = self.hash_of.get(key)
            if engine_hash is None or key in self.twins:
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
            "placed": len(self.key_of),
            "parked": len(self.parked),
            "reannouncing": self.reannouncing,
            "suspended": self.suspended,
            "counts": dict(self.counts),
        }


def _parked_size(event: BlockStoredEvent) -> int:
    return len(event.raw_token_ids) + 16 * len(event.block_hashes)


class ReferenceIndex:
    """See :class:`kvsync.index.match.Index` for the face and the module for the rules."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._lock = Lock()

    def add_worker(
        self,
        worker: str,
        model: str,
        *,
        usable_blocks: int | None = None,
        attention_chunk_size: int | None = None,
        spec_decode: str | None = None,
        hit_alignment: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Register a worker, empty and trusted ``exact``: its events are expected from its epoch's first one on.

        Registering a known worker again makes it new. ``rank``: batches that name another are dropped and counted.

        Raises:
            ValueError: a fact that can't be: not positive, or an unknown ``spec_decode``.
        """
        for name, value in (
            ("usable_blocks", usable_blocks),
            ("attention_chunk_size", attention_chunk_size),
            ("hit_alignment", hit_alignment),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if spec_decode not in (None, "eagle"):
            raise ValueError(f"spec_decode must be None or 'eagle' (for EAGLE and MTP), not {spec_decode!r}")
        added = _Worker(model, usable_blocks, attention_chunk_size, spec_decode, hit_alignment, rank)
        with self._lock:
            self._workers[worker] = added

    def remove_worker(self, worker: str) -> None:
        with self._lock:
            self._workers.pop(worker, None)

    def apply(self, worker: str, payload: Buffer | EventBatch) -> None:
        """Apply one batch. Never raises because of what the payload holds."""
        self.apply_many([(worker, payload)])

    def apply_many(self, batches: Iterable[tuple[str, Buffer | EventBatch]]) -> None:
        """Apply batches in order; those of workers that are not registered are ignored."""
        since = perf_counter()
        for worker, payload in batches:
            with self._lock:
                known = self._workers.get(worker)
                if known is not None:
                    known.apply(payload)
            if perf_counter() - since > LONGEST_TURN:
                sleep(BREATH)
                since = perf_counter()

    def forget(self, worker: str) -> None:
        """A loss beyond repair: drop all that is known and go on as ``partial``."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].forget()

    def new_epoch(self, worker: str) -> None:
        """Another process answers for this worker: drop all that is known, begin again as ``exact``."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].new_epoch()

    def suspend(self, worker: str) -> None:
        """What is known of this worker may be out of date (its stream is down, or a gap in it is being repaired): until
        :meth:`resume` its trust is ``none``, and what would be credit is expected."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].suspended = True

    def resume(self, worker: str) -> None:
        """All that its stream said so far is applied."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].suspended = False

    def mark_reannouncing(self, worker: str) -> None:
        """A request with ``kv_cache_report_mode=full`` goes to this worker."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].reannouncing = True

    def mark_hidden_keys(self, worker: str) -> None:
        """A request with a salt or an image goes to this worker: if its dialect hides those, trust is ``none``."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].hidden_request = True

    def match(
        self,
        tokens: Tokens,
        model: str,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    ) -> dict[str, Match]:
        """What each worker of ``model`` can do for this prompt.

        ``block_keys`` gives a block's extra keys (images, embeddings) by its number; the salt is added to the first.

        Raises:
            TypeError, ValueError, OverflowError: the tokens can't be read (see ``kvsync.index.keys.packed``).
        """
        prompt = packed(tokens)
        count = len(prompt) // 4
        extra: list[Sequence[ExtraKey] | None] = list(block_keys or ())
        if cache_salt is not None:
            extra[:1] = [[*(extra[0] or ()), Salt(cache_salt)] if extra else [Salt(cache_salt)]]
        chains: dict[int, KeyChain] = {}
        matches = {}
        with self._lock:
            for name, worker in self._workers.items():
                if worker.model != model:
                    continue
                size = worker.block_size
                if size and size not in chains:
                    chains[size] = KeyChain(root_key(model, adapter, size), prompt, size, extra)
                matches[name] = worker.match(chains.get(size), count)
        return matches

    def block_sizes(self, model: str) -> dict[str, int]:
        """Tokens per block of each worker of ``model``; 0 before its first store."""
        with self._lock:
            return {name: worker.block_size for name, worker in self._workers.items() if worker.model == model}

    def stats(self) -> dict[str, object]:
        """State per worker, and what was counted since it was added."""
        with self._lock:
            return {
                "implementation": "reference",
                "workers": {name: worker.describe() for name, worker in self._workers.items()},
            }


__all__ = ["PARKED_BYTES", "PARKED_EVENTS", "ReferenceIndex"]
