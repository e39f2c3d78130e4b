"""The values with which docs/migrate.md has the chart installed beside AIBrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.deploy.render import template

from kvsync.config import read
from tests.deploy.objects import only, parsed
from tests.e2e.migrate.page import block


@pytest.mark.usefixtures("helm")
def test_the_chart_takes_the_values_beside_aibrix(tmp_path: Path) -> None:
    """Envoy finds the Service that the page names; pods are seen everywhere; KV sync is on by AIBrix's own names."""
    values = tmp_path / "values.yaml"
    values.write_text(block("### 1. Beside AIBrix", "yaml"))
    objects = parsed(template("kvsync", "aibrix-system", values))
    services = [each for each in objects if each["kind"] == "Service"]
    (service,) = [each for each in services if each["metadata"]["name"] == "kvsync-extproc"]
    assert [port["port"] for port in service["spec"]["ports"]] == [50052]
    assert "kvsync" not in {each["metadata"]["name"] for each in services}, "a data port"
    assert only(objects, "ClusterRole")
    (container,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    loaded = read(None, {name: value for name, value in environ.items() if not name.startswith("KVSYNC_")}, {})
    settings = loaded.settings
    assert (settings.events.enabled, settings.tokenizer.remote.endpoint) == (True, "engines")
    assert settings.routing.policy == "prefix-cache"
    assert (settings.routing.imbalance_abs_count, settings.routing.standard_deviation_factor) == (16, 2.0)
    assert [warning.partition(" ")[0] for warning in loaded.warnings] == ["AIBRIX_PREFIX_CACHE_BLOCK_SIZE"]
