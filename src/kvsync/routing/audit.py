"""Was the credit true? What was predicted for an answer beside what its engine reported.

Only answers that can be compared are: one prompt, one sample, an engine that reads its cache and reports
``cached_tokens``. All others are counted by reason. Nothing here changes a decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from kvsync.routing.decision import Decision

Observer = Callable[[str, str, int, int], None]
"""(worker, verdict, predicted tokens, actual tokens)."""


class Audit:
    """Totals over all answers so far.

    Args:
        observer: told of every answer; verdict is ``right``, ``over``, ``under``, or why it was not compared.
    """

    def __init__(self, observer: Observer = lambda *_: None) -> None:
        self._observer = observer
        self.verdicts: Counter[str] = Counter()
        self.credited_tokens = 0
        self.right_tokens = 0
        """Of ``credited_tokens``, those that the engine said it had."""
        self.reported_tokens = 0

    @property
    def share_right(self) -> float | None:
        """The share of audited credit that proved right; ``None`` before any credit was audited."""
        return self.right_tokens / self.credited_tokens if self.credited_tokens else None

    def observe(self, decision: Decision, status: int, usage: Mapping[str, object] | None) -> None:
        """Take one whole answer."""
        worker, credit = decision.chosen.worker, decision.chosen.match.credit
        why_not, cached = _reported(decision, status, usage)
        if why_not is not None:
            self.verdicts[why_not] += 1
            self._observer(worker, why_not, 0, 0)
            return
        verdict = "right" if credit == cached else "over" if credit > cached else "under"
        self.verdicts[verdict] += 1
        self.credited_tokens += credit
        self.right_tokens += min(credit, cached)
        self.reported_tokens += cached
        self._observer(worker, verdict, credit, cached)


def _reported(decision: Decision, status: int, usage: Mapping[str, object] | None) -> tuple[str | None, int]:
    """Why an answer can't be compared (or ``None``), and the engine's ``cached_tokens``."""
    if status != 200:
        return "not_ok", 0
    if not decision.tokenized.comparable or not decision.prompt_tokens:
        return "not_comparable", 0
    if usage is None:
        return "no_usage", 0
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    # More cached than asked is no figure to count with.
    if not isinstance(cached, int) or isinstance(cached, bool) or not 0 <= cached <= decision.prompt_tokens:
        return "no_cached_tokens", 0
    return None, cached


__all__ = ["Audit"]
