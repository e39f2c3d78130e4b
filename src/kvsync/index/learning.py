"""What an answer teaches of its worker: the engine said how much of a prompt it had in its cache.

What must always hold: what it had once counts only as long as nothing may have taken it since. The rules stand in the
text of :mod:`kvsync.index.reference`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvsync.index.adoption import content
from kvsync.index.hits import Rule
from kvsync.index.keys import Key
from kvsync.index.lookup import Prompt, hit, is_plain, rules, trust
from kvsync.index.match import Observation
from kvsync.index.observed import Run
from kvsync.index.worker import Worker


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer's claim, and the match that its worker was chosen by."""

    prompt: Prompt
    cached: int
    """Tokens that the engine said it had."""
    credit: int
    as_of: int
    until: float
    root: Key
    """The prompt's context."""
    tokens: memoryview
    """Packed."""
    with_keys: Collection[int]
    """Numbers of the blocks that have extra keys, the salt apart."""
    names_keys: bool
    """The request has an adapter or a salt."""

    @property
    def had(self) -> int:
        """Blocks."""
        return min(self.cached // self.prompt.size, self.prompt.limit)


def observe(worker: Worker, answer: Answer) -> Observation:
    position, leaned = divmod(answer.as_of, 2)
    some = rules(worker)
    steady = _is_steady(worker, answer, position, bool(leaned))
    if steady and some:
        _confirm(worker, answer, position, some)
    if some and is_plain(worker, some):
        _miss(worker, answer, position, some)
    if steady and some:
        _record(worker, answer, position, some)
    return "steady" if steady else "evicted"


def _is_steady(worker: Worker, answer: Answer, position: int, leaned: bool) -> bool:
    positions, prompt = worker.positions, answer.prompt
    if not positions.known_since(position) or (leaned and positions.keyless_at > position):
        return False
    credited = min(answer.credit, prompt.tokens) // prompt.size
    if credited and worker.facts.eagle:
        credited = min(credited + 1, prompt.limit)  # the hit was found by the block that was dropped from it, too
    return not any(positions.removed_since(prompt.chain[i], position) for i in range(credited))


def _confirm(worker: Worker, answer: Answer, position: int, some: Collection[Rule]) -> None:
    """A hit ends doubt."""
    if not worker.residence.doubtful or trust(worker) != "exact":
        return
    for key in (answer.prompt.chain[i] for i in range(answer.had)):
        engine_hash = worker.placement.hash_of(key)
        if engine_hash is not None and not worker.positions.removed_since(key, position):
            for rule in some:
                if rule.kind == "full":
                    worker.residence.confirm(rule.group, engine_hash)


def _miss(worker: Worker, answer: Answer, position: int, some: list[Rule]) -> None:
    """The first block that it did not have is no doubtful one, and no run goes on there."""
    prompt = answer.prompt
    if not worker.observed and not worker.residence.doubtful and not worker.placement.guesses:
        return
    if hit(worker, some, prompt, observed=True, even_doubtful=True) <= answer.had * prompt.size:
        return
    first = answer.had + worker.facts.eagle  # there it had one more than it said, and dropped it
    for i in range(first, prompt.limit):
        engine_hash = worker.placement.hash_of(prompt.chain[i])
        if engine_hash is None:
            continue
        guessed = worker.placement.is_guess(engine_hash)
        dropped = worker.residence.drop(engine_hash) if guessed else worker.residence.drop_doubtful(engine_hash)
        if dropped:
            worker.counts["doubtful_missed"] += dropped
    if first < prompt.limit:
        # A run of a later request may rightly go further: this one's blocks are there now.
        worker.observed.end_with(prompt.chain[first], recorded_by=position)


def _record(worker: Worker, answer: Answer, position: int, some: list[Rule]) -> None:
    """What is more than events tell counts until it may have gone, or its time is over."""
    positions, prompt = worker.positions, answer.prompt
    if trust(worker) != "partial" or positions.keyless_at > position:
        return
    had = min([answer.had, *answer.with_keys])
    had = next((i for i in range(had) if positions.removed_since(prompt.chain[i], position)), had)
    if had * prompt.size <= hit(worker, some, prompt):
        return
    hidden = worker.shows_unknown_keys or (worker.hides_keys and answer.names_keys)
    if hidden or not is_plain(worker, some):
        worker.counts["observed_unusable"] += 1
        return
    keys = tuple(prompt.chain[i] for i in range(had))
    follows = _follows(answer) if had == answer.had else None
    run = Run(keys, answer.until, positions.move(), follows)
    if worker.observed.record(run):
        worker.placement.adopt_parked(run, worker.residence)


def _follows(answer: Answer) -> Key | None:
    """The content of the block behind the hit: this very request computed and stored it."""
    had, step = answer.had, answer.prompt.size * 4
    if (had + 1) * step > len(answer.tokens) or had in answer.with_keys:
        return None
    return content(answer.root, answer.tokens[had * step : (had + 1) * step])


__all__ = ["Answer", "observe"]
