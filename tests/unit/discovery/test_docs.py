"""docs/kubernetes.md names every label, port and kind of pod that the code knows, and no other."""

from __future__ import annotations

import re
from inspect import getsource
from pathlib import Path

from kvsync.discovery.kubernetes import pods

PAGE = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> set[str]:
    """The code words in the first column of the table with this heading."""
    table = PAGE.partition(f"\n| {heading}")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert rows
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


def test_labels() -> None:
    read = set(re.findall(r'said\.(?:get|number)\(\s*"([a-z-]+)"', getsource(pods))) | {"kv-events-enabled"}
    assert len(read) > 8
    without_effect = {"lora-id"}
    assert first_cells("label, else annotation") == {pods.PREFIX + name for name in read | without_effect}


def test_ports() -> None:
    assert first_cells("container port named") == {pods.EVENTS_PORT_NAME, pods.REPLAY_PORT_NAME}
    assert f"| {pods.EVENTS_PORT} |" in PAGE
    assert f"| {pods.REPLAY_PORT} |" in PAGE
    assert pods.GROUP_INDEX in PAGE
    assert f"{pods.RAY_NODE_TYPE}: worker" in PAGE


def test_kinds_of_pods() -> None:
    assert first_cells("`kvsync_discovery_pods`") == {"ready", "followed", *pods.REASONS}
