"""Settings of Kubernetes discovery that don't go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsync.config import ConfigError, load


def kubernetes(tmp_path: Path, **settings: Any) -> str:
    """What is said of these settings; nothing when they are sound."""
    environ = {f"KVSYNC_KUBERNETES_{name.upper()}": str(value) for name, value in settings.items()}
    try:
        load(None, environ, {})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"namespaces": "a,*"}, "names others beside *"),
        ({"namespaces": "a,b,a"}, "names one twice"),
        ({"namespaces": "No_Such"}, "namespaces"),
        ({"api_server": "https://h:6443"}, "name the namespaces"),
        ({"api_server": "http://h:80", "namespaces": "a", "token_file": "t"}, "sent in the clear"),
        ({"api_server": "ftp://h", "namespaces": "a"}, "http"),
        ({"api_server": "https://user:pw@h", "namespaces": "a"}, "user name or password"),
        ({"selector": "a=b;c"}, "selector"),
        ({"watch_timeout": "0"}, "watch_timeout"),
    ],
)
def test_faults(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    said = kubernetes(tmp_path, enabled="true", **settings)
    assert words in said
    assert "kubernetes." in said


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"namespaces": "*"},
        {"namespaces": "a,b", "selector": "model.aibrix.ai/name,tier in (a, b)"},
        {"api_server": "https://h:6443/k8s", "namespaces": "*", "token_file": "t", "ca_file": "c"},
        {"api_server": "http://127.0.0.1:8001", "namespaces": "a", "token_file": "t"},
        {"api_server": "http://h:8001", "namespaces": "a"},
    ],
)
def test_sound_ones(tmp_path: Path, settings: dict[str, str]) -> None:
    assert kubernetes(tmp_path, enabled="true", **settings) == ""


def test_what_is_off_may_be_unfinished(tmp_path: Path) -> None:
    assert kubernetes(tmp_path, api_server="https://h:6443") == ""
