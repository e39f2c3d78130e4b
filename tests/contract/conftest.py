"""Every test of this folder runs over every implementation of the index that is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest

from kvsync.index.match import Index
from kvsync.index.reference import ReferenceIndex

IMPLEMENTATIONS: dict[str, Callable[[], Index]] = {"reference": ReferenceIndex}
if find_spec("kvsync_core"):
    IMPLEMENTATIONS["core"] = import_module("kvsync_core").PrefixIndex


@pytest.fixture(params=list(IMPLEMENTATIONS))
def make_index(request: pytest.FixtureRequest) -> Callable[[], Index]:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture
def index(make_index: Callable[[], Index]) -> Index:
    return make_index()
