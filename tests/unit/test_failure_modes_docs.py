"""docs/failure-modes.md names only what exists: metrics, words in the log, settings, routes, outcomes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvsync.config import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failure-modes.md").read_text()
SPANS = re.findall(r"`([^`]+)`", PAGE)
CODE = "\n".join(file.read_text() for file in sorted((ROOT / "src" / "kvsync").rglob("*.py")))
METRICS = (ROOT / "docs" / "metrics.md").read_text()


def settings(model: type[BaseModel], before: str = "") -> set[str]:
    """Every setting's whole name."""
    found = set()
    for name, field in model.model_fields.items():
        found.add(before + name)
        kinds: list[Any] = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= settings(kind, f"{before}{name}.")
    return found


def test_metrics_are_documented() -> None:
    """(And docs/metrics.md is held against the code by a test of its own.)"""
    named = {name for span in SPANS for name in re.findall(r"\b(?:kvsync|aibrix)_[a-z_]+", span)}
    assert len(named) > 25
    assert {name for name in named if f"`{name}`" not in METRICS} == set()


def test_label_values_are_documented() -> None:
    values = set()
    for span in SPANS:
        for group in re.findall(r'=~?"([^"]+)"', span):
            values |= {value.removesuffix(".*").removesuffix("_") for value in group.split("\\|")}
    words = {value for value in values if value.replace("_", "").isalpha()}
    assert len(words) > 25
    assert {word for word in words if word not in METRICS and f'"{word}' not in CODE} == set()


def test_words_of_the_log_are_in_the_code() -> None:
    quoted = re.findall(r"log `([^`]+)`", PAGE)
    assert len(quoted) > 12
    together = re.sub(r'"\s*f?"', "", CODE)  # texts over several lines
    assert [words for words in quoted if words not in together] == []


def test_settings_exist() -> None:
    known = settings(Settings)
    sections = "|".join(Settings.model_fields)
    named = {span for span in SPANS if re.fullmatch(rf"(?:{sections})\.[a-z_.]+", span)}
    assert len(named) > 15
    # What /v1/workers and /readyz call so is theirs.
    assert named - known == {"audit.proposal"}


def test_routes_exist() -> None:
    api = (ROOT / "docs" / "http-api.md").read_text()
    named = {span.removeprefix("POST ") for span in SPANS if re.fullmatch(r"(?:POST )?/(?:v1/\S+|readyz)", span)}
    assert len(named) >= 4
    assert {route for route in named if route not in api} == set()
