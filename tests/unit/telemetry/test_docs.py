"""docs/metrics.md says every metric with its labels, and nothing else."""

from __future__ import annotations

import re
from inspect import getsource
from pathlib import Path
from typing import get_args

from kvsync import index
from kvsync.discovery.access import Reason
from kvsync.discovery.kubernetes import api, pods, reflector
from kvsync.events import decode
from kvsync.events.contracts import Alarm
from kvsync.events.stream import Counts
from kvsync.events.sync import SyncState
from kvsync.routing import breaker, modes
from kvsync.telemetry.metrics import (
    ALARMS,
    BREAKER_STATES,
    DISCOVERY_STATES,
    KV_SYNC_STATES,
    MODES,
    STREAM_STATES,
    TRUSTS,
    Metrics,
)
from tests.unit.telemetry.test_metrics import everything

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")


def codes(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def table(page: str) -> dict[str, tuple[set[str], str]]:
    """Labels and meaning by metric."""
    found = {}
    for line in page.splitlines():
        if line.startswith(("| `kvsync_", "| `aibrix_")):
            name, labels, meaning = line.strip("| ").split(" | ")
            assert name not in found, f"{name} stands twice"
            found[name.strip("`")] = (codes(labels), meaning)
    return found


def test_every_metric_is_listed_with_its_labels_and_nothing_else_is() -> None:
    metrics = Metrics(prefix_cache=True)
    everything(metrics)
    there = {}
    for family in metrics.registry.collect():
        labels = {label for sample in family.samples for label in sample.labels}
        there[family.name + ("_total" if family.type == "counter" else "")] = labels - {"le"}
    assert {name: labels for name, (labels, _) in table(PAGE).items()} == there


def test_states_are_all_named() -> None:
    listed = table(PAGE)
    assert set(KV_SYNC_STATES) == set(get_args(SyncState))
    assert set(KV_SYNC_STATES) <= codes(listed["kvsync_kv_sync"][1])
    assert set(TRUSTS) <= codes(listed["kvsync_worker_trust"][1])
    assert set(STREAM_STATES) <= codes(listed["kvsync_stream_state"][1])
    assert set(ALARMS) == set(get_args(Alarm))
    assert set(ALARMS) <= codes(listed["kvsync_stream_alarm"][1])
    assert set(get_args(Reason)) <= codes(listed["kvsync_engine_metrics_failures_total"][1])
    assert set(DISCOVERY_STATES) == set(get_args(reflector.State))
    assert set(DISCOVERY_STATES) <= codes(listed["kvsync_discovery_state"][1])
    assert set(get_args(api.Reason)) <= codes(listed["kvsync_discovery_failures_total"][1])
    assert set(pods.REASONS) == set(get_args(pods.Reason))
    assert set(pods.REASONS) <= codes(listed["kvsync_discovery_pods"][1])
    counted = set(re.findall(r'counts\["(\w+)"\]', getsource(reflector)))
    assert len(counted) > 5
    assert counted <= codes(listed["kvsync_discovery_events_total"][1])
    assert modes.MODES == MODES
    assert set(MODES) <= codes(listed["kvsync_worker_mode"][1])
    assert set(BREAKER_STATES) == set(get_args(breaker.BreakerState))
    assert set(BREAKER_STATES) <= codes(listed["kvsync_worker_breaker"][1])


def test_stream_events_are_all_named() -> None:
    section = PAGE.partition("### Stream events")[2].partition("###")[0]
    first_cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert set.union(*map(codes, first_cells)) == set(Counts.__dataclass_fields__)


def test_index_events_are_all_named() -> None:
    """Counts are words in the code that counts them, so they are read there."""
    section = PAGE.partition("### Index events")[2].partition("##")[0]
    sources = "".join(path.read_text() for path in Path(index.__path__[0]).glob("*.py"))
    counted = set(re.findall(r'counts\["(\w+)"\]', sources))
    skipped = {f"skipped_{reason}" for reason in re.findall(r'_Bad\("(\w+)"\)', getsource(decode))}
    undecodable = {f"undecodable_{reason}" for reason in re.findall(r'UndecodableBatch\("(\w+)"', getsource(decode))}
    assert len(counted) > 10
    assert skipped
    assert undecodable
    listed = set.union(*(codes(line.split(" | ")[0]) for line in section.splitlines() if line.startswith("| `")))
    assert listed == counted | skipped | undecodable | {"skipped_wrong_type"}
