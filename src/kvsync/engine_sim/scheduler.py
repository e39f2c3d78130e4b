"""Which sequences run in the next step: vLLM's continuous batching with chunked prefill, without a clock.

A step has two halves. :meth:`Scheduler.plan` gives every running sequence its next tokens, then admits waiting ones
while tokens, places and blocks last; :meth:`Scheduler.finish` appends one output token to each sequence that is
through its prompt, frees those that are done, and hands out the step's cache events. Whoever drives it lets time pass
between the two. What must always hold:

- First come, first served; the first waiting sequence that does not fit ends the admission.
- When a running sequence needs a block and none is free, the *last* admitted one gives up its blocks, goes back to the
  head of the queue and starts over (finding its own blocks in the cache if they survive). No one is admitted in a step
  that preempted.
- A sequence is admitted only if all its tokens would fit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvsync.engine_sim.cache import KVCache
from kvsync.engine_sim.events import CacheEvent
from kvsync.engine_sim.request import FinishReason, Request


@dataclass(slots=True)
class Counters:
    """What ``/metrics`` counts, over one rank's life."""

    queries: int = 0
    """Tokens of admitted prompts that looked into the cache."""
    hits: int = 0
    cached_prompt_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work."""

    work: tuple[tuple[Request, int], ...]
    """Each scheduled sequence with its number of tokens, in scheduling order."""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.work)


@dataclass(frozen=True, slots=True)
class Token:
    """One output token."""

    request: Request
    token: int
    finish: FinishReason | None


class Scheduler:
    """See the module.

    Args:
        cache: the rank's cache.
        max_running: ``max_num_seqs``.
        max_tokens: ``max_num_batched_tokens``, the most tokens of one step.
    """

    def __init__(self, cache: KVCache, *, max_running: int, max_tokens: int) -> None:
        self.cache = cache
        self.counters = Counters()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._max_running = max_running
        self._max_tokens = max_tokens

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Take a sequence out, wherever it is, and free its blocks. Of one that is gone already: nothing."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        self.cache.release(request)
        self.counters.finished["abort"] += 1

    def plan(self) -> Plan:
        """Schedule the next step. An empty plan means that nothing could run."""
        budget = self._max_tokens
        work: list[tuple[Request, int]] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            new = min(len(request.tokens) - request.computed, budget)
            fits = self.cache.allocate(request, new)
            while not fits:
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
                fits = self.cache.allocate(request, new)
            if not fits:
                break
            work.append((request, new))
            budget -= new
            index += 1
        if not preempted:
            self._admit(work, budget)
        for request, new in work:
            request.computed += new
        return Plan(tuple(work))

    def finish(self, plan: Plan) -> tuple[list[Token], list[CacheEvent]]:
        """End a step: its output tokens, and the cache events since the last step's end."""
        produced: list[Token] = []
        alive = set(map(id, self.running))
        for request, _ in plan.work:
            # Aborted or preempted (by a reset) while the step ran, or still in the middle of its prompt.
            if id(request) not in alive or request.computed < len(request.tokens):
                continue
            token = request.outputs[request.produced]
            request.tokens.append(token)
            self.counters.generation_tokens += 1
            done = request.produced == len(request.outputs)
            if done:
                self.running.remove(request)
                self.cache.release(request)
                self.counters.finished[request.finish] += 1
            produced.append(Token(request, token, request.finish if done else None))
        return produced, self.cache.take_events()

    def reset_cache(self, *, preempt: bool) -> bool:
        """Empty the cache. With ``preempt``, running sequences give up their blocks first and start over."""
        if preempt:
            while self.running:
                self._preempt(self.running.pop())
        return self.cache.reset()

    def _admit(self, work: list[tuple[Request, int]], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            request = self.waiting[0]
            hit = self.cache.lookup(request)
            new = min(len(request.tokens) - hit.tokens, budget)
            if not self.cache.allocate(request, new, hit, whole=True):
                break
            self.waiting.popleft()
            self.running.append(request)
            request.computed = hit.tokens
            if request.preemptions == 0:
                request.cached = hit.tokens
                self.counters.prompt_tokens += len(request.prompt)
                self.counters.cached_prompt_tokens += hit.tokens
                if not request.skip_cache:
                    self.counters.queries += len(request.tokens)
                    self.counters.hits += hit.tokens
            work.append((request, new))
            budget -= new

    def _preempt(self, request: Request) -> None:
        self.cache.release(request)
        request.computed = 0
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)
