"""What one worker can do for a prompt, and how far that can be trusted.

Pure questions to a :class:`~kvsync.index.worker.Worker`. The rules stand in the text of :mod:`kvsync.index.reference`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvsync.index.hits import Rule, hit_blocks, kind_of
from kvsync.index.keys import KeyChain
from kvsync.index.match import Match, Tier, Trust
from kvsync.index.worker import Worker


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in blocks of one worker's size."""

    chain: KeyChain
    tokens: int
    size: int

    @property
    def limit(self) -> int:
        """The most blocks that a hit can have: the engine always computes the last token itself."""
        return max(0, self.tokens - 1) // self.size


def block_size(worker: Worker) -> int:
    """The block size of the groups that place blocks; 0 before the first store."""
    sizes = [g.block_size for g in worker.groups.values() if kind_of(g.kind) == "full"]
    return max(sizes or [g.block_size for g in worker.groups.values()], default=0)


def rules(worker: Worker) -> list[Rule] | None:
    """How hits are counted here; ``None`` when no rule is proven for what the events show."""
    groups = worker.groups
    full_sizes = {g.block_size for g in groups.values() if kind_of(g.kind) == "full"}
    size = max(full_sizes, default=0) or max((g.block_size for g in groups.values()), default=0)
    found = []
    for index, group in groups.items():
        kind = kind_of(group.kind)
        if kind == "unproven" or group.block_size > size or (kind == "window" and group.window <= 0):
            return None
        if group.kind is None and (len(groups) > 1 or group.sparse):
            return None
        if kind == "chunked" and worker.facts.attention_chunk_size is None:
            return None
        found.append(Rule(index, kind, group.window))
    kinds = {rule.kind for rule in found}
    if len(full_sizes) > 1 or ("chunked" in kinds and kinds & {"window", "state"}):
        return None
    if worker.reannouncing and kinds & {"window", "state"}:
        return None
    return found


def trust(worker: Worker) -> Trust:
    hidden = worker.hides_keys and "hidden_keys" in worker.marks
    if worker.suspended or rules(worker) is None or hidden:
        return "none"
    return "partial" if worker.lost or worker.placement.incomplete else "exact"


def is_plain(worker: Worker, some: Sequence[Rule]) -> bool:
    """Whether a hit of n blocks says that each of the first n is held, and a shorter one that the next is not."""
    return all(rule.kind == "full" for rule in some) and worker.facts.hit_alignment is None


def match(worker: Worker, prompt: Prompt | None) -> Match:
    how_far = trust(worker)
    some = rules(worker)
    position = 2 * worker.positions.now
    if prompt is None or not some:
        return Match(0, trust=how_far, as_of=position)
    by_tier: dict[Tier, int] = {}
    credit = own = 0
    if how_far != "none":
        credit = own = hit(worker, some, prompt, by_tier=by_tier)
        if worker.observed:
            by_tier.clear()
            credit = hit(worker, some, prompt, observed=True, by_tier=by_tier)
    likely = credit
    if how_far == "none" or worker.observed or worker.residence.doubtful or worker.placement.guesses:
        likely = max(credit, hit(worker, some, prompt, observed=True, even_doubtful=True))
    return Match(credit, likely - credit, by_tier, how_far, position + (credit > own))


def hit(
    worker: Worker,
    some: Sequence[Rule],
    prompt: Prompt,
    *,
    observed: bool = False,
    even_doubtful: bool = False,
    by_tier: dict[Tier, int] | None = None,
) -> int:
    """Tokens of the prompt that its cache can serve: by its events alone, with what was ``observed``, and with what is
    in doubt or guessed."""
    placement, chain, size = worker.placement, prompt.chain, prompt.size
    plain = is_plain(worker, some)
    trusted = prompt.limit
    """Events count up to this block."""
    if placement.twins:
        trusted = next((i for i in range(prompt.limit) if chain[i] in placement.twins), trusted)

    def held(tier: Tier, group: int, i: int) -> bool:
        if observed and plain and tier == "gpu" and worker.observed.held(chain[i], even_doubtful=even_doubtful):
            return True
        engine_hash = placement.hash_of(chain[i]) if i <= trusted else None
        if engine_hash is None or (placement.is_guess(engine_hash) and not even_doubtful):
            return False
        return worker.residence.held(tier, group, engine_hash, even_doubtful=even_doubtful)

    chunk = worker.facts.attention_chunk_size or 1
    run = hit_blocks(some, lambda group, i: held("gpu", group, i), prompt.tokens, size, chunk, worker.facts.eagle)
    alignment = worker.facts.hit_alignment
    if alignment:
        run = run * size // alignment * alignment // size
    counts: Counter[Tier] = Counter({"gpu": run})
    if all(rule.kind == "full" for rule in some):
        while run < prompt.limit:
            offloaded: tuple[Tier, ...] = ("cpu", "storage")
            tier = next((t for t in offloaded if all(held(t, rule.group, run) for rule in some)), None)
            if tier is None:
                break
            counts[tier] += 1
            run += 1
    if by_tier is not None:
        by_tier.update({tier: blocks * size for tier, blocks in counts.items() if blocks})
    return run * size


def describe(worker: Worker) -> dict[str, object]:
    """The worker's state, for people and metrics."""
    return {
        "model": worker.facts.model,
        "trust": trust(worker),
        "block_size": block_size(worker),
        "blocks": worker.residence.blocks,
        "copies": worker.residence.copies,
        "doubtful": worker.residence.doubtful,
        "placed": worker.placement.placed,
        "guessed": worker.placement.guesses,
        "parked": worker.placement.parked,
        "observed": worker.observed.live_keys,
        "reannouncing": worker.reannouncing,
        "suspended": worker.suspended,
        "counts": dict(worker.counts),
    }


__all__ = ["Prompt", "block_size", "describe", "hit", "is_plain", "match", "rules", "trust"]
