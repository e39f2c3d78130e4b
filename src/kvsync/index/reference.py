"""The prefix index in pure Python: short, readable, and the specification of every implementation.

The rules stand here. ``worker`` carries out what events say, ``residence`` and ``placement`` are its parts; ``lookup``
says what a worker can do for a prompt; ``learning`` takes what answers teach, with ``positions``, ``observed`` and
``adoption``; ``cap`` makes room; ``snapshot`` tells a worker's state as an ``image`` and takes it from one; ``hits``
and ``keys`` are pure.

**Must always hold: no worker is credited with a block that it does not hold.** Where the events leave that open, the
block is not credited, and trust says so.

Residence
    Per (tier, group) and engine hash: the number of physical copies. Engines store and remove one copy at a time, and
    second copies are common. ``remaining_copy_counts`` of a removal, where sent, replaces the count.

Re-announcing workers
    ``kv_cache_report_mode=full`` announces hits as if they were stores, with no matching removals, so counts run too
    high. From :meth:`mark_reannouncing` until a new epoch, and from the moment that a worker's GPU copies exceed its
    usable blocks until a clear, a new epoch or learning anew: the first removal of a block ends its credit. While
    copies remain it is *doubtful* (expected, not credit) until a store holds it again, or an answer tells. With window
    or state groups trust is ``none``: there such a worker announces blocks that it does not hold. A block that was
    announced again and evicted leaves a copy behind that no event takes away, so doubtful blocks beyond the number of
    usable ones (``MOST_DOUBTFUL`` where that is unknown) are all dropped, counted.

Marks
    of requests that make events say less (:meth:`mark_reannouncing`, :meth:`mark_hidden_keys`) end with a new epoch
    only. Not with a clear: an engine tells of it with its next step, so it may be older than the request and stand
    before the blocks of the very request that was marked. A mark that no batch followed yet outlives one new epoch:
    the request may have gone to the new process. (A batch that comes while the worker is suspended does not count: it
    may be one of the old process that waited.) :meth:`relearn` and registering the worker again keep marks,
    :meth:`remove_worker` ends them.

Placement
    An engine hash gets a block key when its tokens are known (tokens = hashes × block size) and its parent's key is; a
    known hash keeps its key. Events of window and state groups often name only some blocks of their range: those count
    as resident, and the full-attention event of the same hash places them, whichever comes first. A placement lives
    while any tier or group of the worker holds the hash.

    A store whose parent has no key is *parked* until it gets one, and never attached to the root: at most
    ``PARKED_EVENTS`` and ``PARKED_BYTES`` per worker, oldest out first, counted, and ``partial`` from then on if the
    worker still has a block of it. An offload store (cpu, storage) of an unknown hash without extra keys is not placed:
    it might be salted.

    Two live hashes for one key mean that the engine hides what tells them apart (a salt, an image, an adapter's
    weights): the key matches nothing until all of its hashes are gone, and what events placed behind it doesn't count.

Forgetting
    What can't be read may have been a removal: an undecodable batch, or a skipped event that may remove, forgets the
    whole worker and leaves it ``partial`` until a clear, a new epoch or learning anew. A store that can't be read, and
    a batch that names another rank, cost themselves only, and leave it ``partial`` likewise. ``AllBlocksCleared``
    clears all tiers: it does not say which, and that is the sound reading.

Trust
    ``none`` when soundness is unknown: a group kind without a proven rule, several groups without kinds or of differing
    block sizes, sparse stores without a kind, chunked attention of unknown chunk size, a re-announcing worker with
    window or state groups, a suspended worker (its stream does not tell at present), a worker whose dialect hides salts
    and images after a request that carried one. Otherwise ``partial`` after a loss, else ``exact``.

Positions
    Each worker counts what may have taken a block: every hash that a removal names, whatever the medium; every clear,
    forgetting, new epoch, learning anew, and room made by the cap; and, for their order, parked stores and recorded
    runs. A match says where that stood (``as_of`` = 2 × position, + 1 where the credit leant on an observed run), and
    :meth:`observe` judges by it. *Evicted* when since then all was lost, or a removal named the key of one of the
    credited blocks (with EAGLE also of the next: the hit was found by it), or more removals came than ``REMOVALS``, or,
    where the credit leant on a run, a *keyless* block was removed: one that is not known, has no key, or a guessed one,
    so that it may be any. Else *steady*.

Answers
    An engine said that it had n blocks of a prompt when it began. *Plain* is a worker whose groups are all of full
    attention, without hit alignment: there each of the n was held, and the next one was not.

    A hit ends doubt: under ``exact``, and if steady, the doubtful GPU copies of the first n blocks are held again,
    where no removal named the block meanwhile and no other tier has it (the hit may have come from there).

    A miss forgets doubt, on plain workers: where more was expected than n blocks, the doubtful copies of the prompt's
    other blocks are dropped, and so are observed runs with the missing block that were recorded before the match. With
    EAGLE the engine says one block less than it had: the missing one is the next.

    *Observed runs:* what a ``partial`` worker had beyond its events is held until ``until``, if the answer is steady
    and no keyless block was removed since the match. The run ends before the first block that a removal named since,
    and before the first with extra keys besides the salt. A removal of one of its blocks ends a run. A keyless removal
    makes all of them doubtful; so does trust ``none`` while it lasts. Forgetting, clear, new epoch and learning anew
    end them. No run where a removal need not name the key that the request has: on a worker that showed extra keys of
    an unknown kind, on one that hides extra keys if the prompt has an adapter or a salt, on one that is not plain.
    Counted blocks of a run are GPU blocks. At most ``OBSERVED_KEYS`` per worker, oldest run out first, counted.

Adoption
    A store with an unknown parent whose first block is what followed an observed run in its prompt (the newest such)
    names that run's last block, in either order of store and answer; it and what is parked under it are placed. Another
    prompt may go on with the same tokens, so what hangs on a name is *guessed*: expected as doubtful blocks are, never
    credit by events, dropped by a miss like those, and its removal is keyless, as that of the named block is. A guess
    never takes a key that another hash has, and leaves it to one that is certain. A name is no copy and is a fact about
    content: it lives until the worker is emptied (``NAMES`` of them, oldest out).

Cap
    With ``max_blocks`` or ``max_bytes``: when all workers together have more resident hashes after a batch, whole
    classes go until an eighth is free: hashes without a key; then by depth in their chains, deepest first, over all
    workers, those whose key no match read since the last time before those that one did. A match reads what it finds,
    as far as some worker may have the prompt, and that counts for all workers of the model. The workers concerned are
    ``partial`` from then on.

Images
    :meth:`dump` tells all that is known of a worker: blocks with their keys and copies, groups, what was lost, marks,
    and EAGLE where answers showed it. After :meth:`restore` it answers and goes on as it did there; but lookups have
    read none of its blocks, and answers to earlier matches count as *evicted*. Facts are those of the registration.
    Not told is a worker that is suspended, on which stores wait for their parents, or of which answers taught something
    that events did not: that has its time, by another clock. Room is made for what was restored as for a batch.

Threads: any number may call :meth:`match` while one applies; a match sees each worker's batch wholly or not at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import isnan
from threading import Lock
from time import perf_counter, sleep
from typing import Final

from typing_extensions import Buffer

from kvsync.events.types import EventBatch, ExtraKey, Salt
from kvsync.index.cap import BLOCK_BYTES, Reads, make_room
from kvsync.index.image import decode, encode
from kvsync.index.keys import KeyChain, packed, root_key
from kvsync.index.learning import Answer, observe
from kvsync.index.lookup import Prompt, block_size, describe, match
from kvsync.index.match import MatchTable, Observation, Tokens
from kvsync.index.snapshot import take, tell
from kvsync.index.worker import Facts, Mark, Worker

LONGEST_TURN: Final = 0.001
BREATH: Final = 50e-6
"""Seconds. A thread that is busy in Python keeps the others out for up to 5 ms, the event loop among them: so a long
run of batches lets go of the interpreter for a moment each millisecond. (The native core runs without it.)"""


class ReferenceIndex:
    """See :class:`kvsync.index.match.Index` for the face and the module for the rules."""

    def __init__(self, max_blocks: int | None = None, max_bytes: int | None = None) -> None:
        """``max_blocks``: the most blocks that all workers together may have here. ``max_bytes``: the most memory that
        they may take, ``BLOCK_BYTES`` for each block. ``None``: no cap.

        Raises:
            ValueError: one of them is below 1.
        """
        for name, value in (("max_blocks", max_blocks), ("max_bytes", max_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        caps = [max_blocks, None if max_bytes is None else max_bytes // BLOCK_BYTES]
        self._max_blocks = min((cap for cap in caps if cap is not None), default=None)
        self._workers: dict[str, Worker] = {}
        self._reads: defaultdict[str, Reads] = defaultdict(Reads)
        """By model."""
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

        Registering a known worker again makes it new, but for its marks. ``rank``: batches that name another are
        dropped and counted.

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
        facts = Facts(model, usable_blocks, attention_chunk_size, spec_decode is not None, hit_alignment, rank)
        with self._lock:
            before = self._remove(worker)
            added = self._workers[worker] = Worker(facts, self._reads[model])
            if before is not None:
                added.marks = before.marks

    def remove_worker(self, worker: str) -> None:
        with self._lock:
            self._remove(worker)

    def _remove(self, worker: str) -> Worker | None:
        removed = self._workers.pop(worker, None)
        if removed is not None:
            removed.placement.leave()
            model = removed.facts.model
            if all(other.facts.model != model for other in self._workers.values()):
                del self._reads[model]
        return removed

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
                    if self._max_blocks is not None:
                        make_room(self._workers.values(), self._max_blocks)
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

    def relearn(self, worker: str) -> None:
        """Its batches come again from this epoch's number 0 on: drop what is known, begin again as ``exact``. The same
        process: marks stay."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].relearn()

    def drops_last_block(self, worker: str) -> None:
        """As if registered with ``spec_decode="eagle"``: its answers show that it decodes with EAGLE or MTP."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].facts.eagle = True

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
        self._mark(worker, "reannouncing")

    def mark_hidden_keys(self, worker: str) -> None:
        """A request with a salt or an image goes to this worker: if its dialect hides those, trust is ``none``."""
        self._mark(worker, "hidden_keys")

    def _mark(self, worker: str, mark: Mark) -> None:
        with self._lock:
            if worker in self._workers:
                self._workers[worker].mark(mark)

    def match(
        self,
        tokens: Tokens,
        model: str,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    ) -> MatchTable:
        """What each worker of ``model`` can do for this prompt.

        ``block_keys`` gives a block's extra keys (images, embeddings) by its number; the salt is added to the first.

        Raises:
            TypeError, ValueError, OverflowError: the tokens can't be read (see ``kvsync.index.keys.packed``).
        """
        packed_tokens = packed(tokens)
        extra = _extra_keys(cache_salt, block_keys)
        prompts: dict[int, Prompt] = {}
        longest: Counter[int] = Counter()
        """By block size: how many blocks some worker may have."""
        matches = MatchTable()
        with self._lock:
            for name, worker in self._workers.items():
                if worker.facts.model != model:
                    continue
                size = block_size(worker)
                if size and size not in prompts:
                    chain = KeyChain(root_key(model, adapter, size), packed_tokens, size, extra)
                    prompts[size] = Prompt(chain, len(packed_tokens) // 4, size)
                found = matches[name] = match(worker, prompts.get(size))
                if size:
                    longest[size] = max(longest[size], (found.credit + found.expected) // size)
            if self._max_blocks is not None:
                for size, prompt in prompts.items():
                    self._reads[model].note(prompt.chain[i] for i in range(longest[size]))
        return matches

    def observe(
        self,
        worker: str,
        tokens: Tokens,
        model: str,
        cached: int,
        credit: int,
        as_of: int,
        until: float,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    ) -> Observation:
        """Learn from an answer: its engine said that it had ``cached`` tokens of this prompt.

        ``credit`` and ``as_of`` are those of the match that the worker was chosen by, ``until`` is when what this
        teaches ends, in seconds of the clock that :meth:`expire` is told.

        Raises:
            TypeError, ValueError, OverflowError: as :meth:`match`; ``cached`` or ``credit`` is negative; ``until`` is
                not a number.
        """
        packed_tokens = packed(tokens)
        if cached < 0 or credit < 0:
            raise ValueError(f"cached and credit are tokens, at least 0, not {cached} and {credit}")
        if isnan(until):
            raise ValueError("until must be a time, not NaN")
        extra = _extra_keys(cache_salt, block_keys)
        with self._lock:
            known = self._workers.get(worker)
            size = block_size(known) if known is not None and known.facts.model == model else 0
            if known is None or not size:
                return "unknown"
            root = root_key(model, adapter, size)
            answer = Answer(
                Prompt(KeyChain(root, packed_tokens, size, extra), len(packed_tokens) // 4, size),
                cached,
                credit,
                as_of,
                until,
                root,
                memoryview(packed_tokens),
                [i for i, keys in enumerate(block_keys or ()) if keys],
                adapter is not None or cache_salt is not None,
            )
            return observe(known, answer)

    def expire(self, now: float) -> None:
        """Observed runs whose ``until`` is not after ``now`` end.

        Raises:
            ValueError: ``now`` is not a number.
        """
        if isnan(now):
            raise ValueError("now must be a time, not NaN")
        with self._lock:
            for worker in self._workers.values():
                worker.observed.expire(now)

    def block_sizes(self, model: str) -> dict[str, int]:
        """Tokens per block of each worker of ``model``; 0 before its first store."""
        with self._lock:
            return {name: block_size(worker) for name, worker in self._workers.items() if worker.facts.model == model}

    def dump(self, worker: str) -> bytes | None:
        """What is known of a worker, as an image; ``None`` where that can't be told now."""
        with self._lock:
            known = self._workers.get(worker)
            write = None if known is None else tell(known)
        return None if write is None else encode(write())

    def restore(self, worker: str, image: bytes) -> None:
        """Have a new worker know what an image tells.

        Raises:
            ValueError: it can't be taken; nothing is changed.
        """
        told = decode(image)
        with self._lock:
            known = self._workers.get(worker)
            if known is not None:
                take(known, told)
                if self._max_blocks is not None:
                    make_room(self._workers.values(), self._max_blocks)

    def stats(self) -> dict[str, object]:
        """State per worker, and what was counted since it was added."""
        with self._lock:
            return {
                "implementation": "reference",
                "bytes": BLOCK_BYTES * sum(worker.residence.blocks for worker in self._workers.values()),
                "workers": {name: describe(worker) for name, worker in self._workers.items()},
            }


def _extra_keys(
    cache_salt: str | None, block_keys: Sequence[Sequence[ExtraKey] | None] | None
) -> list[Sequence[ExtraKey] | None]:
    """Extra keys by block number, the salt with the first."""
    extra: list[Sequence[ExtraKey] | None] = list(block_keys or ())
    if cache_salt is not None:
        extra[:1] = [[*(extra[0] or ()), Salt(cache_salt)] if extra else [Salt(cache_salt)]]
    return extra


__all__ = ["ReferenceIndex"]
