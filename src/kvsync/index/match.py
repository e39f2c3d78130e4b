"""What the index answers, and the face that every implementation of it shows.

Two implementations stand behind :class:`Index`: the pure-Python reference (``kvsync.index.reference``), which is the
specification, and the native core (package ``kvsync-core``). One contract suite (``tests/contract``) judges both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, overload

from typing_extensions import Buffer

from kvsync.events.types import EventBatch, ExtraKey

Tier: TypeAlias = Literal["gpu", "cpu", "storage"]
Trust: TypeAlias = Literal["exact", "partial", "none"]
Observation: TypeAlias = Literal["steady", "evicted", "unknown"]
"""What :meth:`Index.observe` found of the credited blocks. ``steady``: held all the time since the match. ``evicted``:
one of them, or what is known of the worker, went meanwhile. ``unknown``: the index can't say (the worker is not
registered, serves another model, or has no block size yet)."""
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
    as_of: int = field(default=0, compare=False)
    """Where the worker's losses stood when this was answered; :meth:`Index.observe` wants it back. It says nothing of
    the prompt: two matches are equal whatever theirs is."""


class Matches(Protocol):
    """The answer to a lookup: a mapping of every registered worker of the model to its :class:`Match`.

    Of a thousand workers few hold anything of a prompt, so a chooser asks for :meth:`hits` and :meth:`doubts`, and for
    the others not at all.
    """

    def hits(self) -> list[tuple[str, Match]]:
        """The workers that hold something of the prompt, or may."""

    def doubts(self) -> dict[str, Trust]:
        """How far those workers can be trusted that can't be trusted to the full."""

    def __eq__(self, other: object, /) -> bool: ...
    def __getitem__(self, worker: str, /) -> Match: ...
    def __contains__(self, worker: object, /) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    @overload
    def get(self, worker: str, /) -> Match | None: ...
    @overload
    def get(self, worker: str, default: Match, /) -> Match: ...
    def keys(self) -> Iterable[str]: ...
    def values(self) -> Iterable[Match]: ...
    def items(self) -> Iterable[tuple[str, Match]]: ...


class MatchTable(dict[str, Match]):
    """:class:`Matches` that are all there."""

    def hits(self) -> list[tuple[str, Match]]:
        return [(worker, match) for worker, match in self.items() if match.credit or match.expected]

    def doubts(self) -> dict[str, Trust]:
        return {worker: match.trust for worker, match in self.items() if match.trust != "exact"}


class Index(Protocol):
    """The global prefix index.

    Not thread-safe by itself beyond this: one writer may call the mutating methods while other threads call ``match``;
    a match sees each worker's batch wholly or not at all. ``remove_worker`` may come from any thread at any time, and
    waits for at most the one batch that is being applied. Mutating calls for an unregistered worker are ignored.
    """

    def __init__(self, max_blocks: int | None = None, max_bytes: int | None = None) -> None:
        """``max_blocks``: the most blocks that all workers together may have here. ``max_bytes``: the most memory that
        they may take, kept to what a batch brings, as the implementation counts it. ``None``: no cap."""

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

    def relearn(self, worker: str) -> None: ...

    def drops_last_block(self, worker: str) -> None: ...

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
    ) -> Matches: ...

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
    ) -> Observation: ...

    def expire(self, now: float) -> None: ...

    def block_sizes(self, model: str) -> dict[str, int]: ...

    def dump(self, worker: str) -> bytes | None:
        """What is known of a worker, for :meth:`restore`: a :mod:`~kvsync.index.image`. Of one moment, whichever
        thread asks, while all others go on; to be called where no batches come for the worker meanwhile. ``None``: that
        can't be told now, or the worker is not registered."""

    def restore(self, worker: str, image: bytes) -> None:
        """Have a worker that is registered, and of which nothing is known yet, know what an image tells.

        Raises:
            ValueError: the image is damaged or of another version or model, or something is known of the worker; then
                nothing is changed.
        """

    def stats(self) -> dict[str, object]: ...


__all__ = ["Index", "Match", "MatchTable", "Matches", "Observation", "Tier", "Tokens", "Trust"]
