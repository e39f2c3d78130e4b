"""The prefix index in pure Python: short, readable, and the specification of every implementation.

The rules stand here; ``worker`` and ``placement`` carry them out, ``hits`` and ``keys`` are their pure parts.

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
    worker announces blocks that it does not hold. A block that was announced again and evicted leaves a copy behind
    that no event takes away, so doubtful blocks beyond the number of usable ones (``MOST_DOUBTFUL`` where that is
    unknown) are all dropped, counted.

Marks
    of requests that make events say less (:meth:`mark_reannouncing`, :meth:`mark_hidden_keys`) end with a clear, but
    not with one in the first batch after the mark: an engine tells of a clear with its next step only, so that one may
    be older than the request and stand before the blocks of the very request that was marked.

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

from collections.abc import Iterable, Sequence
from threading import Lock
from time import perf_counter, sleep
from typing import Final

from typing_extensions import Buffer

from kvsync.events.types import EventBatch, ExtraKey, Salt
from kvsync.index.keys import KeyChain, packed, root_key
from kvsync.index.match import Match, Observation, Tokens
from kvsync.index.worker import Worker

LONGEST_TURN: Final = 0.001
BREATH: Final = 50e-6
"""Seconds. A thread that is busy in Python keeps the others out for up to 5 ms, the event loop among them: so a long
run of batches lets go of the interpreter for a moment each millisecond. (The native core runs without it.)"""


class ReferenceIndex:
    """See :class:`kvsync.index.match.Index` for the face and the module for the rules."""

    def __init__(self, max_blocks: int | None = None) -> None:
        """``max_blocks``: the most blocks that all workers together may have here; ``None``: no cap.

        Raises:
            ValueError: ``max_blocks`` is below 1.
        """
        if max_blocks is not None and max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self._max_blocks = max_blocks
        self._workers: dict[str, Worker] = {}
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
        added = Worker(model, usable_blocks, attention_chunk_size, spec_decode, hit_alignment, rank)
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
                self._workers[worker].eagle = True

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
                self._workers[worker].mark(reannouncing=True)

    def mark_hidden_keys(self, worker: str) -> None:
        """A request with a salt or an image goes to this worker: if its dialect hides those, trust is ``none``."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker].mark(hides_keys=True)

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
        """Learn from an answer: its engine said that it had ``cached`` tokens of this prompt."""
        with self._lock:
            known = self._workers.get(worker)
            return "unknown" if known is None or known.model != model or not known.block_size else "evicted"

    def expire(self, now: float) -> None:
        """Observed runs whose ``until`` is not after ``now`` end."""

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


__all__ = ["ReferenceIndex"]
