"""Credit equals what real vLLM reported, on every captured answer but those that no index could know.

The expected figures are those of the table in tests/data/vllm/README.md: answers, answers above 0, inherently different
ones. Answers above 0 and equal to 0 are judged apart: an index that always says 0 would pass many of the latter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kvsync.events.decode import decode_batch
from kvsync.index.match import Index
from tests.contract.captures import DATA, MODEL, judge, payload, records


class Row(NamedTuple):
    files: tuple[str, ...]
    answers: int
    above_zero: int
    different: frozenset[str] = frozenset()
    facts: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    workers: int = 1


ROWS = {
    "basic+evict+lora+reset": Row(
        ("v0.32_basic", "v0.32_evict", "v0.32_lora", "v0.32_reset"),
        60,
        14,
        # n=2 hits its own first sample; two that ran at the same moment; a clear that the idle engine had not flushed
        frozenset({"basic 25", "evict 10", "evict 12", "reset 3"}),
    ),
    "long": Row(("v0.32_long",), 414, 391),
    "dp2": Row(("v0.32_dp2",), 12, 0, workers=2),
    "dp2_long": Row(("v0.32_dp2_long",), 235, 216, workers=2),
    "hybrid_swa": Row(("v0.32_hybrid_swa",), 11, 1, frozenset({"hybrid_swa 11"})),
    "hybrid_long": Row(("v0.32_hybrid_long",), 230, 196),
    "mamba": Row(("v0.32_mamba",), 130, 98),
    "chunked": Row(("v0.32_chunked",), 150, 140, facts={"attention_chunk_size": 128}),
    "dup": Row(("v0.32_dup",), 156, 80),
    "chunked_full": Row(("v0.32_chunked_full",), 90, 84, facts={"attention_chunk_size": 128}),
    "gen 0.9.2": Row(("gen_0.9.2",), 9, 2),
    "gen 0.11.2": Row(("gen_0.11.2",), 9, 2),
    "gen 0.23.0": Row(("gen_0.23.0",), 9, 2),
    "gen 0.24.0": Row(("gen_0.24.0",), 9, 2),
    "gen mla": Row(("gen_0.32_mla",), 80, 72, frozenset({"0.32_mla 62"})),
    "gen mamba_align": Row(("gen_0.32_mamba_align",), 120, 97, frozenset({"0.32_mamba_align 62"})),
    "gen mamba_all": Row(("gen_0.32_mamba_all",), 120, 97, frozenset({"0.32_mamba_all 62"})),
    "gen chunked": Row(
        ("gen_0.32_chunked",), 120, 109, frozenset({"0.32_chunked 62"}), {"attention_chunk_size": 80}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_credit_equals_cached_tokens(index: Index, name: str) -> None:
    row = ROWS[name]
    result = judge(index, *row.files, workers=row.workers, **row.facts)
    print(name, result)
    assert (result.answers, result.above_zero) == (row.answers, row.above_zero)
    assert set(result.wrong) <= row.different
    assert result.equal_above_zero >= row.above_zero - len(row.different)


@pytest.mark.parametrize("name", ["v0.32_hybrid_full", "gen_0.32_swa_full"])
def test_reannouncing_hybrid_is_never_credited_with_more_than_it_has(index: Index, name: str) -> None:
    result = judge(index, name)
    assert result.answers == {"v0.32_hybrid_full": 110, "gen_0.32_swa_full": 140}[name]
    assert result.over == []


def test_what_was_evicted_is_not_credited(index: Index) -> None:
    """Counting the re-announced hits of basic as copies would credit its request 23 long after it was evicted."""
    judge(index, "v0.32_basic", "v0.32_evict", "v0.32_lora")
    (prompt,) = (r["prompt_token_ids"] for r in records("v0.32_basic") if r["kind"] == "resp" and r["id"] == 23)
    assert index.match(prompt, MODEL)["w0"].credit == 0


@pytest.mark.parametrize("name", sorted(path.name.split(".jsonl")[0] for path in DATA.glob("*.jsonl*")))
def test_every_captured_batch_decodes(name: str) -> None:
    skipped = []
    for record in records(name):
        if record["kind"] in ("sub", "replay") and (data := payload(record)):
            skipped += [(event.tag, event.reason) for event in decode_batch(data).skipped]
    expected = [("TierBlocksCleared", "unknown_tag")] if name == "synthetic_shapes_v0.32" else []
    assert skipped == expected
