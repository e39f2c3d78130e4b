"""One sequence on its way through the engine: what it asks, what it has produced, which blocks it holds.

An API call becomes one or more of these (one per prompt and sample). The output tokens are settled on arrival: the
simulated model has no weights, so when a token is produced is simulated, and which token it is is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvsync.engine_sim.hashing import BlockHash, BlockHasher
from kvsync.engine_sim.pool import Block

FinishReason = Literal["length", "stop", "abort"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: ``number`` is its load order in this engine and differs between engines; the name does not."""

    name: str
    number: int


@dataclass(eq=False, slots=True)
class Request:
    """See the module. Fields below ``tokens`` belong to the scheduler and the cache."""

    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    """The tokens it will produce, at least one."""
    finish: FinishReason = "length"
    """Why it will end."""
    salt: str | None = None
    adapter: Adapter | None = None
    session_id: str | None = None
    skip_cache: bool = False
    """Never reads the cache (``prompt_logprobs``, or ``echo`` with ``logprobs``), but still fills it."""
    report_full: bool = False
    """``kv_cache_report_mode=full``: announce the blocks of a hit again."""

    tokens: list[int] = field(init=False)
    hashes: list[BlockHash] = field(init=False, default_factory=list)
    """Of the full blocks of ``tokens``."""
    computed: int = field(init=False, default=0)
    cached: int = field(init=False, default=0)
    """Tokens found in the cache when it was first admitted: what usage reports."""
    preemptions: int = field(init=False, default=0)
    junction: int = field(init=False, default=0)
    """Where a longer shared prefix ends than this request could use; window groups keep their tail there (0: none)."""
    tables: list[list[Block]] = field(init=False, default_factory=list)
    """Per group, the block at each place; empty while it holds none."""
    registered: list[int] = field(init=False, default_factory=list)
    """Per group, how many places were already offered to the cache."""

    def __post_init__(self) -> None:
        if not self.prompt or not self.outputs:
            raise ValueError("a request needs at least one prompt token and one output token")
        self.tokens = list(self.prompt)

    @property
    def produced(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def admitted(self) -> bool:
        """Whether it holds blocks."""
        return bool(self.tables)

    def extra_keys(self, block: int) -> tuple[str, ...] | None:
        """What tells this block from one with the same parent and tokens, as events carry it."""
        keys = []
        if self.adapter is not None:
            keys.append(self.adapter.name)
        if self.salt is not None and block == 0:
            keys.append(self.salt)
        return tuple(keys) or None

    def extend_hashes(self, hasher: BlockHasher, block_size: int) -> None:
        """Hash the blocks that became full since the last call."""
        for block in range(len(self.hashes), len(self.tokens) // block_size):
            parent = self.hashes[-1] if self.hashes else None
            tokens: Sequence[int] = self.tokens[block * block_size : (block + 1) * block_size]
            self.hashes.append(hasher.block(parent, tokens, self._tagged_keys(block)))

    def _tagged_keys(self, block: int) -> tuple[str, ...] | None:
        # Tagged by kind, so that an adapter "x" and a salt "x" never make the same hash.
        keys = []
        if self.adapter is not None:
            keys.append(f"lora:{self.adapter.name}")
        if self.salt is not None and block == 0:
            keys.append(f"salt:{self.salt}")
        return tuple(keys) or None
