"""docs/dependencies.md names every dependency that the package declares, with the bound that it declares."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsync.extras import how_to_install

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
MANIFESTS = sorted((ROOT / "core").glob("*/Cargo.toml"))


def declared(project: dict[str, Any]) -> Iterator[str]:
    yield from project["build-system"]["requires"]
    yield from project["project"]["dependencies"]
    for group in (*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()):
        yield from (item for item in group if isinstance(item, str) and not item.startswith("kvsync["))


REQUIREMENTS = sorted(set(declared(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))))


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_python(requirement: str) -> None:
    found = re.fullmatch(r"([a-z0-9-]+)(?:\[[a-z]+\])?(?:([>=]=)([0-9.]+))?(?:,<\d+)?", requirement)
    assert found, requirement
    name, compared, bound = found.groups()
    if bound is None or name == "kvsync-core":
        wanted = f"`{name}`"
    else:
        wanted = f"`{name}` {bound}" if compared == "==" else f"`{name}` ≥ {bound}"
    assert wanted in PAGE


@pytest.mark.skipif(not MANIFESTS, reason="the native core's sources are not here")
def test_rust() -> None:
    for manifest in MANIFESTS:
        crates = tomllib.loads(manifest.read_text(encoding="utf-8"))
        for name, wanted in {**crates["dependencies"], **crates.get("dev-dependencies", {})}.items():
            version = wanted if isinstance(wanted, str) else wanted.get("version")
            assert version is None or re.search(rf"`{name}` {version}\b", PAGE), name


def test_extras_that_messages_name_can_be_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"how_to_install\('(\w+)'\)", sources))
    assert {"zmq", "redis"} <= named <= set(extras)
    assert "pip install 'kvsync[" not in sources.replace(inspect.getsource(how_to_install), "")
    assert how_to_install("zmq") == "pip install 'kvsync[zmq]', or '.[zmq]' in its checkout"
