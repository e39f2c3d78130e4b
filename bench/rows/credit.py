"""Truth beside the speed: credit against what real vLLM said it had cached, on the captured event streams.

The judging is the contract suite's own (``tests/contract``); here its sums are shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.model import OURS, Figures, Row, Run, Sides, Target, Unavailable, simple
from kvsync.index import NATIVE, PrefixIndex


def _judge() -> Figures:
    from tests.contract.captures import judge
    from tests.contract.test_captures import ROWS as CAPTURES

    if not NATIVE:
        raise Unavailable("kvsync-core is not installed")
    found = {"answers": 0, "above_zero": 0, "equal": 0, "inherent": 0, "wrong": 0, "over": 0}
    for row in CAPTURES.values():
        result = judge(PrefixIndex(), *row.files, workers=row.workers, **row.facts)
        found["answers"] += result.answers
        found["above_zero"] += result.above_zero
        found["equal"] += result.equal
        found["inherent"] += len(row.different)
        found["wrong"] += len(set(result.wrong) - row.different)
        found["over"] += len(set(result.over) - row.different)
    return found


def _sides(run: Run) -> Sides:
    return {OURS: _judge}


ROWS: Sequence[Row] = (
    Row(
        name="credit",
        title="credit equal to vLLM's own cached_tokens",
        method=(
            "The captures of real vLLM in tests/data/vllm, every event in its order, every request looked up when it "
            "came. Inherently different are the answers that no index could know (tests/contract/test_captures.py "
            "names each with its reason)."
        ),
        targets=(
            Target("credit unlike vLLM's cached_tokens, the inherent ones apart", "wrong", "answers", at_most=0.0),
            Target("answers compared", "answers", "", "higher", aside=True),
            Target("of these above zero", "above_zero", "", "higher", aside=True),
            Target("equal", "equal", "", "higher", aside=True),
            Target("inherently different at most", "inherent", "", aside=True),
            Target("credited with more than was there", "over", "", aside=True),
        ),
        open=simple(_sides),
        repeats=1,
    ),
)
