"""Failure memory: when to leave an engine, or one of its ranks, alone.

What is remembered is of two kinds, and a worker may be chosen when both permit it:

* *Reaching* the engine (connections that fail, requests that it does not read, resets before an answer): one failure is
  enough. All ranks of an engine share it, for behind them is one process with one HTTP server.
* *Answering* (5xx, no first byte in time, an answer that is no HTTP, breaks off or stalls): several in a row without a
  success between. Each rank has its own, for a rank is an engine core of its own: were it shared, the answers of
  healthy ranks would clear the memory of a broken one each time.

A 4xx is the request's fault: it says that the engine can be reached, and nothing of how it answers. A client that
leaves, our own shutdown and our own want of files or ports say nothing at all.

A breaker that opened lets nobody through for :data:`FIRST_REST` seconds, doubling with each opening to
:data:`LONGEST_REST`; then one request at a time tries (*half-open*): the next is let through when the answer of the one
before begins, and :data:`TRIALS` successes close it. What must always hold: a try counts for the state in which it
began. Of twenty requests that fail together one opens the breaker; the others, like all that began before, neither
lengthen the rest nor end it. Where nobody is let through anybody is tried; who succeeds then ends the rest, who fails
does not lengthen it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

from kvsync.discovery.model import Engine

BreakerState: TypeAlias = Literal["closed", "half-open", "open"]
Verdict: TypeAlias = Literal["success", "failure"]

FIRST_REST: Final = 1.0
LONGEST_REST: Final = 30.0
TRIALS: Final = 2

REACHING: Final[Mapping[str, Verdict]] = {
    **dict.fromkeys(
        ("connect_refused", "connect_timeout", "connect_failed", "tls_failed", "send_timeout", "reset"), "failure"
    ),
    **dict.fromkeys(("ok", "request_error", "engine_error", "bad_answer", "upstream_died", "idle_timeout"), "success"),
}
ANSWERING: Final[Mapping[str, Verdict]] = {
    **dict.fromkeys(("engine_error", "first_byte_timeout", "bad_answer", "upstream_died", "idle_timeout"), "failure"),
    "ok": "success",
}
"""By outcome. An outcome that is absent says nothing of it."""

_log = logging.getLogger(__name__)


class Breaker:
    """One memory.

    Args:
        what: it is about, for the log.
        failures: in a row, that open it.
        resting: the breakers that are not closed; this one is in it as long as that is true of it.
        clock: monotonic seconds.
    """

    __slots__ = (
        "_clock",
        "_failures",
        "_life",
        "_rest",
        "_resting",
        "_rests_until",
        "_row",
        "_successes",
        "_trying",
        "_what",
    )

    def __init__(self, what: str, failures: int, resting: set[Breaker], clock: Callable[[], float]) -> None:
        self._what = what
        self._failures = failures
        self._resting = resting
        self._clock = clock
        self._row = 0
        """Failures without a success between."""
        self._rest = 0.0
        """Seconds of the last opening; 0 while closed."""
        self._rests_until = 0.0
        self._successes = 0
        """Since it opened."""
        self._trying = 0
        """Requests sent there since it opened whose answer has not begun."""
        self._life = 0
        """Grows with each opening and closing."""

    @property
    def state(self) -> BreakerState:
        if not self._rest:
            return "closed"
        return "open" if self._clock() < self._rests_until else "half-open"

    @property
    def permits(self) -> bool:
        """Whether a request may be sent there now."""
        state = self.state
        return state == "closed" or (state == "half-open" and not self._trying)

    def begin(self) -> int:
        """A request is sent there, permitted or not: where nobody is permitted, anybody may be tried.

        Returns:
            the life that :meth:`began` and :meth:`end` want back.
        """
        if self._rest:
            self._trying += 1
        return self._life

    def began(self, life: int) -> None:
        """Its answer began: it keeps others away no longer."""
        if self._rest and life == self._life:
            self._trying -= 1

    def end(self, life: int, outcome: str, verdict: Verdict | None) -> None:
        """How it ended, after :meth:`began`. ``verdict`` is ``None`` when the outcome says nothing."""
        if life != self._life or verdict is None:
            return
        if verdict == "failure":
            self._row += 1
            state = self.state
            # While it is open, who fails was sent there for want of anybody else: that is no news.
            if state == "half-open" or (state == "closed" and self._row >= self._failures):
                self._open(outcome)
            return
        self._row = 0
        if self._rest:
            self._rests_until = 0.0
            self._successes += 1
            if self._successes >= TRIALS:
                self._enter(0.0)
                self._resting.discard(self)
                _log.info("%s serves again", self._what)

    def retire(self) -> None:
        """What it is about is gone; attempts that are still out concern nobody."""
        self._resting.discard(self)
        self._resting = set()

    def _open(self, outcome: str) -> None:
        self._enter(min(LONGEST_REST, 2 * self._rest) if self._rest else FIRST_REST)
        self._rests_until = self._clock() + self._rest
        self._resting.add(self)
        _log.warning("%s rests for %g s: %s", self._what, self._rest, outcome)

    def _enter(self, rest: float) -> None:
        self._rest = rest
        self._row = self._successes = self._trying = 0
        self._life += 1


class Guard:
    """Both memories of one worker. Made by :meth:`Breakers.guard`."""

    __slots__ = ("answering", "reaching")

    def __init__(self, reaching: Breaker, answering: Breaker) -> None:
        self.reaching = reaching
        self.answering = answering

    @property
    def permits(self) -> bool:
        return self.reaching.permits and self.answering.permits

    @property
    def state(self) -> BreakerState:
        """The worse of the two."""
        states = {self.reaching.state, self.answering.state}
        return "open" if "open" in states else "half-open" if "half-open" in states else "closed"


class Attempt:
    """One request at one worker. It holds the memories themselves, not their worker's name: a worker that is gone and
    comes back under its name starts from nothing."""

    __slots__ = ("_answering", "_began", "_guard", "_over", "_reaching")

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._reaching = guard.reaching.begin()
        self._answering = guard.answering.begin()
        self._began = False
        self._over = False

    def first_byte(self) -> None:
        """The answer began, whatever its status: the engine is reached."""
        if self._over or self._began:
            return
        self._began = True
        guard = self._guard
        guard.reaching.began(self._reaching)
        guard.answering.began(self._answering)
        guard.reaching.end(self._reaching, "ok", "success")

    def end(self, outcome: str) -> None:
        """How it ended, in the gateway's words. Later calls change nothing."""
        if self._over:
            return
        guard, began = self._guard, self._began
        if not began:
            guard.reaching.began(self._reaching)
            guard.answering.began(self._answering)
            guard.reaching.end(self._reaching, outcome, REACHING.get(outcome))
        self._over = True
        guard.answering.end(self._answering, outcome, ANSWERING.get(outcome))


class Breakers:
    """All of them.

    Args:
        failures: ``routing.breaker_failures``.
        clock: monotonic seconds.
    """

    def __init__(self, failures: int, clock: Callable[[], float]) -> None:
        self._failures = failures
        self._clock = clock
        self._engines: dict[str, Breaker] = {}
        self._guards: dict[str, Guard] = {}
        self.resting: set[Breaker] = set()
        """Those that are not closed. Empty most of the time: then nobody need be asked."""

    def guard(self, engine: Engine, worker: str) -> Guard:
        """The memories of one of the engine's workers."""
        found = self._guards.get(worker)
        if found is None:
            reaching = self._engines.get(engine.uid)
            if reaching is None:
                what = (
                    f"engine {engine.name} (every rank)" if engine.data_parallel_size > 1 else f"engine {engine.name}"
                )
                reaching = self._engines[engine.uid] = Breaker(what, 1, self.resting, self._clock)
            answering = Breaker(f"worker {worker}", self._failures, self.resting, self._clock)
            found = self._guards[worker] = Guard(reaching, answering)
        return found

    def states(self) -> dict[str, BreakerState]:
        """By worker, of those that were ever chosen among."""
        return {worker: guard.state for worker, guard in self._guards.items()}

    def drop(self, engine: Engine) -> None:
        """The engine is gone. Attempts that are out end as they would have."""
        if reaching := self._engines.pop(engine.uid, None):
            reaching.retire()
        for rank in engine.ranks:
            if guard := self._guards.pop(engine.worker(rank), None):
                guard.answering.retire()


__all__ = [
    "ANSWERING",
    "FIRST_REST",
    "LONGEST_REST",
    "REACHING",
    "TRIALS",
    "Attempt",
    "Breaker",
    "BreakerState",
    "Breakers",
    "Guard",
]
