"""Configuration of every shape: it is taken, or refused with every fault named. Nothing else can happen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kvsync.config import ConfigError, Settings, read
from kvsync.config.faults import Fault
from kvsync.config.loading import Loaded
from tests.fuzz.values import ANYTHING, mostly

FILE = Path("kvsync.yaml")


def _tree(model: type[BaseModel]) -> dict[str, Any]:
    """Every setting by name: a section's dictionary, or the strategy for a value."""
    return {
        name: _tree(field.annotation)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        else st.just(field.default)
        for name, field in model.model_fields.items()
    }


def _documents(tree: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={k: _documents(v) if isinstance(v, dict) else mostly(v) for k, v in tree.items()}
    )


def _names(tree: dict[str, Any], above: str = "KVSYNC") -> list[str]:
    found = []
    for name, inner in tree.items():
        path = f"{above}_{name.upper()}"
        found += _names(inner, path) if isinstance(inner, dict) else [path]
    return found


TREE = _tree(Settings)
AIBRIX = [
    "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED",
    "AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER",
    "AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT",
    "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE",
    "AIBRIX_PREFIX_CACHE_BLOCK_SIZE",
    "ROUTING_ALGORITHM",
]
ENGINES = st.fixed_dictionaries(
    {
        "name": mostly(st.sampled_from(["a", "b"])),
        "url": mostly(st.sampled_from(["http://127.0.0.1:1", "http://[::1]:2"])),
    },
    optional={
        "events": mostly(st.sampled_from(["tcp://127.0.0.1:5557", "tcp://[::1]:65535"])),
        "replay": mostly(st.just("tcp://127.0.0.1:5558")),
        "data_parallel_size": mostly(st.integers(1, 4)),
        "adapters": mostly(st.lists(st.text(max_size=3), max_size=2)),
        "labels": ANYTHING,
    },
)
MODELS = st.lists(
    mostly(st.fixed_dictionaries({"name": mostly(st.just("m"))}, optional={"engines": st.lists(ENGINES, max_size=3)})),
    max_size=3,
)
FILES = st.one_of(
    st.builds(
        lambda document, models: yaml.safe_dump({**document, "models": models}).encode(),
        _documents(TREE),
        mostly(MODELS),
    ),
    ANYTHING.map(lambda value: yaml.safe_dump(value).encode()),
    ANYTHING.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=80),
    st.text("abm:-[]{}#&*!|>'\"\\ \n\t?,%@`<=0x.", max_size=60).map(str.encode),
)
TEXTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", "0", "-1", "1e999", "nan", "true", "yes", "1h30m", "9" * 400, "[", '{"a":', "null", "engines", "random"]
)
ENVIRONMENTS = st.dictionaries(st.sampled_from([*_names(TREE), *AIBRIX, "KVSYNC_NOBODY_KNOWS"]), TEXTS, max_size=6)


def _faults(environ: dict[str, str], content: bytes | None) -> list[Fault] | Loaded:
    try:
        return read(None if content is None else FILE, environ, {}, content=content)
    except ConfigError as error:
        return list(error.faults)


@given(content=FILES, environ=ENVIRONMENTS)
def test_any_configuration_is_taken_or_refused(content: bytes, environ: dict[str, str]) -> None:
    found = _faults(environ, content)
    if isinstance(found, list):
        assert found
        assert all(fault.message and fault.origin for fault in found)
    else:
        assert Settings.model_validate(found.settings.model_dump()) == found.settings


@given(environ=ENVIRONMENTS)
def test_what_the_environment_says_is_taken_or_named(environ: dict[str, str]) -> None:
    found = _faults(environ, None)
    said = found if isinstance(found, list) else [*found.origins.values(), *found.warnings]
    named = "\n".join(map(str, said))
    if isinstance(found, list):
        assert any(name in named for name in environ)
    else:
        assert all(name in named for name, text in environ.items() if name.startswith("KVSYNC_") and text.strip())
