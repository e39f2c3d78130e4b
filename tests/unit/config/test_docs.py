"""docs/configuration.md says every setting, its environment name, its default and its bounds, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from kvsync.config import ConfigError, EngineSettings, ModelSettings, Settings, TenantSettings, read
from kvsync.config import environment as names

PAGE = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
_SYMBOLS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def rows(page: str) -> dict[str, list[str]]:
    """The cells of every table row that begins with a code word, by that word. One row per setting."""
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            first, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            assert first not in found, f"{first} stands twice"
            found[first] = cells
    return found


ROWS = rows(PAGE)


def leaves(model: type[BaseModel], path: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, here)
        elif here not in ("models", "models[].engines", "tenants"):
            yield here, field


SETTINGS = [
    *leaves(Settings, ""),
    *leaves(ModelSettings, "models[]"),
    *leaves(EngineSettings, "models[].engines[]"),
    *leaves(TenantSettings, "tenants[]"),
]


def shown(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "–"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, tuple):
        return ", ".join(f"`{item}`" for item in field.default) or "`[]`"
    return f"`{field.default}`"


def allowed(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    for mark in field.metadata:
        annotation = Annotated[annotation, mark]
    schema = TypeAdapter(annotation).json_schema()
    part = next(part for part in schema.get("anyOf", [schema]) if part.get("type") != "null")
    choices = part.get("enum", [part["const"]] if "const" in part else [])
    bounds = [f"{symbol} {part[key]:.0f}" for key, symbol in _SYMBOLS.items() if key in part]
    return ", ".join([f"`{choice}`" for choice in choices] + bounds)


@pytest.mark.parametrize(("path", "field"), SETTINGS, ids=[path for path, _ in SETTINGS])
def test_a_setting_s_row(path: str, field: FieldInfo) -> None:
    cells = ROWS[f"`{path}`"]
    if not path.startswith(("models", "tenants")):
        variable, *cells = cells
        assert names.OWN_NAMES[variable.strip("`")] == tuple(path.split("."))
    default, _, bounds, meaning = cells
    assert default == shown(field)
    assert bounds == allowed(field)
    assert len(meaning) > 10


def test_no_row_is_of_a_setting_that_is_not_there() -> None:
    said = {row.strip("`") for row in ROWS if re.fullmatch(r"`[a-z_]+(\[\])?\..+`", row)}
    assert said == {path for path, _ in SETTINGS}


def test_names_of_aibrix_and_what_they_set() -> None:
    known = {**names._AIBRIX, **names._SHORT, **names.REDIS, names.ALGORITHM: ("routing", "policy")}
    known[names.TEMPLATE] = ("tokenizer", "remote", "endpoint")
    for name, place in known.items():
        assert ROWS[f"`{name}`"][0] == f"`{'.'.join(place)}`"


def test_every_unused_name_is_listed_and_warned_of() -> None:
    table = PAGE.partition("Accepted, without effect")[2].partition("\n\nPod labels")[0]
    listed = re.findall(r"`([A-Z][A-Z_]+)`", table)
    assert sorted(listed) == sorted(names._UNUSED)
    warnings = read(None, dict.fromkeys(listed, "1"), {}).warnings
    assert len(warnings) == len(listed)


def yaml_after(heading: str) -> str:
    found = re.search(r"```yaml\n(.*?)```", PAGE.partition(heading)[2], re.DOTALL)
    assert found
    return found[1]


def test_the_file_loads_as_printed(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml_after("## A file"))
    loaded = read(file, {}, {})
    assert [engine.name for engine in loaded.settings.models[0].engines] == ["a", "b"]
    assert not loaded.warnings


def test_the_broken_file_has_the_faults_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(yaml_after("With this `bad.yaml`"))
    with pytest.raises(ConfigError) as refused:
        read(Path("bad.yaml"), {}, {})
    printed = PAGE.partition("$ kvsync config check bad.yaml\nError: ")[2].partition("```")[0]
    assert str(refused.value) == printed.rstrip()
