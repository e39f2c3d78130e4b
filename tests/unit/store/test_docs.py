"""docs/redis.md and docs/metrics.md name every reason, call and state, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from kvsync.gateway.openapi import document
from kvsync.store import connection
from kvsync.store.replies import REASONS
from kvsync.telemetry.metrics import REDIS_STATES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "redis.md").read_text(encoding="utf-8")


def codes_of_first_cells(begin: str, end: str) -> list[str]:
    section = PAGE.partition(begin)[2].partition(end)[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return [code for cell in cells[1:] for code in re.findall(r"`([^`]+)`", cell)]  # the first is the table's head


def test_reasons() -> None:
    listed = codes_of_first_cells("## When it does not answer", "## ")
    assert sorted(listed) == sorted(REASONS)


def test_calls() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "src" / "kvsync" / "store").glob("*.py"))
    asked = set(re.findall(r'_?ask\(\s*"(\w+)"', sources)) | {"ping"}
    assert len(asked) >= 5
    assert set(codes_of_first_cells("## Calls", "| key |")) == asked


def test_states() -> None:
    assert set(get_args(connection.State)) == set(REDIS_STATES)
    row = next(line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if "| `kvsync_redis` |" in line)
    assert set(REDIS_STATES) <= set(re.findall(r"`([^`]+)`", row))
    assert str(sorted(REDIS_STATES)) in str(_enums(document()))


def _enums(node: object) -> list[list[str]]:
    if isinstance(node, dict):
        here = [sorted(map(str, node["enum"]))] if "enum" in node else []
        return here + [found for value in node.values() for found in _enums(value)]
    if isinstance(node, list):
        return [found for value in node for found in _enums(value)]
    return []
