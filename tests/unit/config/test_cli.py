"""`kvsync config check`, run as a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvsync.cli.config import config


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:

    for name in os.environ:
        if name.startswith(("KVSYNC_", "AIBRIX_", "REDIS_", "ROUTING_")):
            monkeypatch.delenv(name)


def test_effective_settings_with_their_origins(tmp_path: Path) -> None:
    file = tmp_path / "kvsync.yaml"
    file.write_text(
        "models:\n  - name: m\n    engines:\n      - name: e\n        url: http://h\n        adapters: [x, y]\n"
    )
    environ = {"KVSYNC_GATEWAY_PORT": "99", "AIBRIX_PREFIX_CACHE_BLOCK_SIZE": "128"}
    result = CliRunner().invoke(config, ["check", str(file)], env=environ)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "gateway.port = 99  # KVSYNC_GATEWAY_PORT" in lines
    assert "admin.port = 8081" in lines
    assert "events.enabled = false" in lines
    assert "tokenizer.remote.endpoint = -" in lines
    assert f"models[0].engines[0].url = http://h:80  # {file}:5" in lines
    assert f"models[0].engines[0].adapters = [x, y]  # {file}:6" in lines
    assert result.stderr.startswith("Warning: AIBRIX_PREFIX_CACHE_BLOCK_SIZE is not used")


def test_every_fault_and_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "kvsync.yaml"
    file.write_text("gateway:\n  hots: h\n")
    result = CliRunner().invoke(config, ["check", str(file)], env={"KVSYNC_ADMIN_PORT": "x"})
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "2 faults in the configuration" in result.stderr
    assert f"{file}:2: gateway.hots: is not a setting (was 'host' meant?)" in result.stderr
    assert "KVSYNC_ADMIN_PORT: admin.port: 'x'" in result.stderr


def test_the_environment_alone() -> None:
    result = CliRunner().invoke(config, ["check"], env={"ROUTING_ALGORITHM": "random"})
    assert result.exit_code == 0
    assert "routing.policy = random  # ROUTING_ALGORITHM" in result.stdout


def test_help_names_the_layers() -> None:
    result = CliRunner().invoke(config, ["check", "--help"])
    assert result.exit_code == 0
    assert "KVSYNC_<SECTION>_<FIELD>" in result.stdout


def test_what_serve_would_start_with_and_not_do(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("events: {enabled: true}\n")
    result = CliRunner().invoke(config, ["check", str(file)])
    assert result.exit_code == 0
    assert "Warning: no model is configured" in result.stderr
    assert "Warning: KV event sync requires the remote tokenizer" in result.stderr
