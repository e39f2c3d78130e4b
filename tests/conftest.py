"""How hard Hypothesis tries: a hundred examples per test, or ten thousand with ``KVSYNC_FUZZ=1`` (``make fuzz``). And
which tests are fault tests: those that the table of README.md names, whatever their room, and those of ``faults/``."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

# The machine decides how long an example takes, so none has a deadline.
settings.register_profile("kvsync", deadline=None)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=10_000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("fuzz" if os.environ.get("KVSYNC_FUZZ") == "1" else "kvsync")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    named = set(re.findall(r"`([^`]+::[^`]+)`", (TESTS / "README.md").read_text()))
    for item in items:
        test = item.nodeid.partition("::")[2].partition("[")[0]
        if f"{os.path.relpath(item.path, TESTS)}::{test}" in named:
            item.add_marker(pytest.mark.faults)
