"""The Helm chart refuses what kvsync would refuse: its schema holds every setting as it is now."""

from __future__ import annotations

from scripts.deploy import render


def test_the_charts_schema_has_the_settings_of_today() -> None:
    """After a change of the settings: make manifests (or python -m scripts.deploy.render)."""
    assert render.SCHEMA.read_text(encoding="utf-8") == render.schema()
