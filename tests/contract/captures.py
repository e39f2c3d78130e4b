"""Reads the event streams captured from real vLLM (tests/data/vllm, its README says how they were made)."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsync.index.match import Index

DATA = Path(__file__).parent.parent / "data" / "vllm"
MODEL = "tiny"


def records(name: str) -> Iterator[dict[str, Any]]:
    """The records of one capture, in the order in which things happened."""
    path = DATA / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else gzip.decompress(_gz(name)).decode().splitlines()
    for line in lines:
        yield json.loads(line)


def _gz(name: str) -> bytes:
    return (DATA / f"{name}.jsonl.gz").read_bytes()


def payload(record: dict[str, Any]) -> bytes | None:
    """The msgpack payload of a ``sub`` or ``replay`` record; ``None`` for an end marker or a record without frames."""
    frames = record.get("frames")
    return base64.b64decode(frames[-1]) or None if frames else None


@dataclass
class Judgement:
    """How an index's answers compare with vLLM's own."""

    answers: int = 0
    above_zero: int = 0
    equal_above_zero: int = 0
    equal_zero: int = 0
    over: list[str] = field(default_factory=list)
    under: list[str] = field(default_factory=list)

    @property
    def equal(self) -> int:
        return self.equal_above_zero + self.equal_zero

    @property
    def wrong(self) -> list[str]:
        return sorted([*self.over, *self.under])

    def add(self, name: str, credits: set[int], actual: int) -> None:
        self.answers += 1
        self.above_zero += actual > 0
        if actual in credits:
            self.equal_above_zero += actual > 0
            self.equal_zero += actual == 0
        elif min(credits) > actual:
            self.over.append(name)
        else:
            self.under.append(name)


def judge(index: Index, *names: str, workers: int = 1, **facts: Any) -> Judgement:
    """Feed captures to a fresh index and compare its credit with each answer's ``cached_tokens``.

    Before each request the index is whatever the ``sub`` lines above it make it. A request whose data-parallel rank
    nobody knows counts as equal when one of the ranks gives the figure.
    """
    result = Judgement()
    for src in range(workers):
        index.add_worker(f"w{src}", MODEL, **facts)
    for name in names:
        _judge_one(index, result, name, list(records(name)), workers)
    return result


def _judge_one(index: Index, result: Judgement, name: str, lines: list[dict[str, Any]], workers: int) -> None:
    answers = {r["id"]: r for r in lines if r["kind"] == "resp"}
    for at, record in enumerate(lines):
        kind, data = record["kind"], payload(record)
        if kind in ("sub", "noevent") and "hit" in record:  # scheduler-side: the record's own frames come after the hit
            label = f"{name.removeprefix('gen_')} {at + 1}"
            if "report_mode full" in record["note"]:
                index.mark_reannouncing("w0")
            if record["token_ids"] is not None and record["hit"] is not None:
                salt = "alpha" if record["note"] == "salt" else None
                found = index.match(record["token_ids"], MODEL, cache_salt=salt)["w0"].credit
                result.add(label, {found}, record["hit"])
        if kind == "sub" and data is not None:
            index.apply(f"w{record['src']}", data)
        if kind == "req":
            _judge_request(index, result, f"{name.removeprefix('v0.32_')} {record['id']}", record, answers, lines[at:])


def _judge_request(
    index: Index,
    result: Judgement,
    label: str,
    request: dict[str, Any],
    answers: dict[int, dict[str, Any]],
    after: list[dict[str, Any]],
) -> None:
    body = request["body"]
    answer = answers.get(request["id"])
    rank = _rank(request, after)
    if (body.get("vllm_xargs") or {}).get("kv_cache_report_mode") == "full":
        index.mark_reannouncing(f"w{rank or 0}")
    if answer is None or answer.get("cached_tokens") is None or "prompt_logprobs" in body:
        return
    matches = index.match(
        answer["prompt_token_ids"],
        MODEL,
        adapter=body["model"] if body["model"] != MODEL else None,
        cache_salt=body.get("cache_salt"),
    )
    credits = {match.credit for worker, match in matches.items() if rank is None or worker == f"w{rank}"}
    result.add(label, credits, answer["cached_tokens"])


def _rank(request: dict[str, Any], after: list[dict[str, Any]]) -> int | None:
    """The data-parallel rank that served a request: its header, else the source of the event that follows it."""
    headers = request.get("headers") or {}
    if "X-data-parallel-rank" in headers:
        return int(headers["X-data-parallel-rank"])
    for record in after[1:]:
        if record["kind"] == "sub":
            return int(record["src"])
        if record["kind"] == "req":
            return None
    return None
