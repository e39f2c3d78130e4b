"""What the index answers, and the face that every implementation of it shows.

Two implementations stand behind :class:`Index`: the pure-Python reference (``kvsync.index.reference``), which is the
specification, and the native core (package ``kvsync-core``). One contract suite (``tests/contract``) judges both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from typing_extensions import Buffer

from kvsync.events.types import EventBatch, ExtraKey

Tier: TypeAlias = Literal["gpu", "cpu", "storage"]
Trust: TypeAlias = Literal["exact", "partial", "none"]
Tokens: TypeAlias = Buffer | Sequence[int]
"""A prompt: any contiguous buffer of native-endian uint32 (``array('I')``, numpy ``uint32``, or plain bytes whose
length is a multiple of 4), or a sequence of ints."""


@dataclass(frozen=True, slots=True)
class Match:
    """What one worker can do for one prompt. All figures are tokens."""

    credit: int
    """The worker can serve the first ``credit`` tokens from its cache. Always 0 under trust ``none``."""
    expected: int = 0
    """Tokens beyond ``credit`` that it may well have (doubtful blocks): a hint, never credit."""
    by_tier: Mapping[Tier, int] = field(default_factory=dict)
    """How ``credit`` divides over the tiers; tiers without tokens are absent."""
    trust: Trust = "exact"


class Index(Protocol):
    """The global prefix index.

    Not thread-safe by itself beyond this: one writer may call the mutating methods while other threads call ``match``;
    a match sees each worker's batch wholly or not at all. Mutating calls for an unregistered worker are ignored.
    """

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
    ) -> None: ...

    def remove_worker(self, worker: str) -> None: ...

    def apply(self, worker: str, payload: Buffer | EventBatch) -> None: ...

    def apply_many(self, batches: Iterable[tuple[str, Buffer | EventBatch]]) -> None: ...

    def forget(self, worker: str) -> None: ...

    def new_epoch(self, worker: str) -> None: ...

    def suspend(self, worker: str) -> None: ...

    def resume(self, worker: str) -> None: ...

    def mark_reannouncing(self, worker: str) -> None: ...

    def mark_hidden_keys(self, worker: str) -> None: ...

    def match(
        self,
        tokens: Tokens,
        model: str,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    ) -> dict[str, Match]: ...

    def block_sizes(self, model: str) -> dict[str, int]: ...

    def stats(self) -> dict[str, object]: ...


__all__ = ["Index", "Match", "Tier", "Tokens", "Trust"]
