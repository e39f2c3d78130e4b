"""Prints the figures of the scenarios that ran, at the end, whether they passed or not."""

from __future__ import annotations

import pytest

from .run import Figures, table

_RUNS = pytest.StashKey[list[Figures]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> list[Figures]:
    """Runs added here are shown in the table."""
    return request.config.stash.setdefault(_RUNS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    runs = config.stash.get(_RUNS, [])
    if runs:
        terminalreporter.section("real vLLM")
        for line in table(runs):
            terminalreporter.write_line(line)
