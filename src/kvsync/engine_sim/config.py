"""What a simulated engine is: its model, cache, wire form, ports and speed, checked as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvsync.engine_sim.dialect import Dialect, HashForm
from kvsync.engine_sim.groups import FullAttention, GroupSpec, SlidingWindow
from kvsync.engine_sim.timing import TimeModel

TINY_LLAMA = Path(__file__).parent / "data" / "tiny-llama"
"""A small tokenizer with a chat template, part of the package."""
MOST_BLOCKS = 1 << 22
"""Each is an object of this process; the largest real caches have some hundred thousand."""
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """One simulated engine.

    Raises:
        ValueError: a value is out of its range, or values contradict each other.
    """

    model: str = "tiny"
    tokenizer: Path = TINY_LLAMA
    """Folder with ``tokenizer.json`` and ``chat_template.jinja``."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters, served as models of their own."""
    host: str = "127.0.0.1"
    port: int = 0
    """HTTP; 0 lets the system choose."""
    events_port: int = 0
    """Rank r publishes on this port + r."""
    replay_port: int = 0
    """Rank r answers replays on this port + r."""
    kv_events: bool = True
    topic: str = ""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    version: str = "0.32.0"
    """The vLLM version whose wire form is spoken. The cache's behaviour is 0.32's in any case."""
    hash_form: HashForm | None = None
    """How block hashes look on the wire; without it, as that version does by default."""
    event_sources: bool = True
    """Whether ``GET /kv_event_sources`` is there, in versions that have it."""
    seed: int = 0
    """Of the block hashes: engines share hashes only if they share it."""
    blocks: int = 512
    """Of the cache of one rank, the null block included (``num_gpu_blocks``)."""
    block_size: int = 16
    sliding_window: int | None = None
    """Makes the model a hybrid: a sliding-window group of this window before the full-attention group."""
    data_parallel_size: int = 1
    max_model_len: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    answer_tokens: int = 64
    """About how long an answer is when nothing in the request limits it."""
    time: TimeModel = field(default_factory=TimeModel)
    test_hooks: bool = False
    """Obey ``forced_output_token_ids`` in request bodies."""

    def __post_init__(self) -> None:
        for name in ("blocks", "block_size", "data_parallel_size", "max_model_len", "max_num_seqs", "answer_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name, most in (("blocks", MOST_BLOCKS), ("data_parallel_size", MOST_RANKS)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, not {getattr(self, name)}")
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        _at_least("buffer_steps", self.buffer_steps, 1)
        for name in ("port", "events_port", "replay_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise ValueError(f"{name} must be a port number, not {getattr(self, name)}")
        if not self.model or len({self.model, *self.adapters}) != 1 + len(self.adapters):
            raise ValueError("the model and its adapters need names that differ")
        apart = abs(self.events_port - self.replay_port)
        if self.events_port and self.replay_port and apart < self.data_parallel_size:
            raise ValueError(
                f"rank r uses events port {self.events_port} + r and replay port {self.replay_port} + r: with "
                f"{self.data_parallel_size} ranks they must be at least that far apart"
            )
        if self.blocks - 1 < self.most_blocks:
            raise ValueError(
                f"a request of {self.max_model_len} tokens needs {self.most_blocks} blocks of {self.block_size}, "
                f"but only {self.blocks - 1} of {self.blocks} are usable: lower max_model_len or raise blocks"
            )
        _ = self.dialect, self.groups

    @property
    def dialect(self) -> Dialect:
        return Dialect.of(self.version, self.hash_form)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The model's cache groups in ``group_idx`` order."""
        if self.sliding_window is None:
            return (FullAttention(),)
        return (SlidingWindow(self.sliding_window), FullAttention())

    @property
    def most_blocks(self) -> int:
        """What the longest possible request holds at most."""
        total = 0
        for spec in self.groups:
            all_of_it = -(-self.max_model_len // self.block_size)
            bound = spec.most_blocks(self.max_num_batched_tokens, self.max_model_len, self.block_size)
            total += all_of_it if bound is None else min(all_of_it, bound)
        return total


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")
