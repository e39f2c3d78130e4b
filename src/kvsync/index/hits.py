"""How many blocks of a prompt an engine's cache can serve: the rule of each kind of KV-cache group.

Pure functions over a question "is block i held in group g?". The rules reproduce vLLM's own answers on its captured
event streams (tests/data/vllm); a kind without a proven rule is ``UNPROVEN`` and gets no credit.

* ``full_attention``, ``mla_attention``, ``sink_full_attention``: the longest unbroken run from the first block.
* ``sliding_window``, ``sliding_window_mla``: the longest prefix whose last ceil((window − 1) / block_size) blocks are
  held, fewer only where they reach the prompt's start.
* ``mamba``: the longest prefix whose one last block is held.
* ``chunked_local_attention``: blocks before the chunk in which the next token lies are not needed; from there on the
  unbroken run counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["full", "window", "state", "chunked", "unproven"]

_KINDS: Final[dict[str, Kind]] = {
    "full_attention": "full",
    "mla_attention": "full",
    "sink_full_attention": "full",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "mamba": "state",
    "chunked_local_attention": "chunked",
}


def kind_of(spec_kind: str | None) -> Kind:
    """The rule for a ``kv_cache_spec_kind``; ``None`` (vLLM < 0.22): one dense group is full attention."""
    return "full" if spec_kind is None else _KINDS.get(spec_kind, "unproven")


@dataclass(frozen=True, slots=True)
class Rule:
    """One group's part in a hit."""

    group: int
    kind: Kind
    window: int = 0
    """``window``: the attention window in tokens."""


Held: TypeAlias = Callable[[int, int], bool]
"""(group, block index) → held."""


def hit_blocks(rules: Collection[Rule], held: Held, tokens: int, block_size: int, chunk: int, eagle: bool) -> int:
    """Blocks of a prompt of ``tokens`` tokens that every group can serve together.

    At most floor((tokens − 1) / block_size): the engine always computes the last token itself. With ``eagle`` (EAGLE or
    MTP speculative decoding) the engine drops the last block of the hit, and a window needs one block more.
    ``chunk`` is the model's ``attention_chunk_size``.
    """
    limit = max(0, tokens - 1) // block_size
    run = limit
    for rule in rules:
        if rule.kind == "full":
            run = _run(held, rule.group, 0, run)
    if any(rule.kind == "chunked" for rule in rules):
        reach = max(0, tokens - 1) if run == limit else run * block_size
        start = min(run, reach // chunk * chunk // block_size)
        for rule in rules:
            if rule.kind == "chunked":
                run = _run(held, rule.group, start, run)
    lowered = True
    while lowered and run:
        before = run
        for rule in rules:
            if rule.kind == "window":
                run = _windowed(held, rule.group, run, -(-(rule.window - 1) // block_size) + eagle)
            elif rule.kind == "state":
                while run and not held(rule.group, run - 1):
                    run -= 1
        lowered = run < before
    return max(0, run - 1) if eagle else run


def _run(held: Held, group: int, start: int, limit: int) -> int:
    at = start
    while at < limit and held(group, at):
        at += 1
    return at


def _windowed(held: Held, group: int, run: int, need: int) -> int:
    """The longest prefix ≤ ``run`` whose last ``need`` blocks are held."""
    at = run - 1
    while at >= max(0, run - need):
        if not held(group, at):
            run = at  # every longer prefix down to here has this block in its window
        at -= 1
    return run


__all__ = ["Held", "Kind", "Rule", "hit_blocks", "kind_of"]
