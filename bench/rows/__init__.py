"""All rows, in the order of the page. A module of this folder has the rows that are measured alike."""

from __future__ import annotations

from collections.abc import Sequence

from bench.model import Row
from bench.rows import credit, decision, envoy, events, gateway, growth, index, memory, steady, tokenizing

ROWS: Sequence[Row] = (
    *events.ROWS,
    *index.ROWS,
    *memory.ROWS,
    *growth.ROWS,
    *steady.ROWS,
    *credit.ROWS,
    *gateway.ROWS,
    *envoy.ROWS,
    *decision.ROWS,
    *tokenizing.ROWS,
)
