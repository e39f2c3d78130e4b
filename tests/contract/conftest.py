"""Every test of this folder runs over every implementation of the index that is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from kvsync.index.match import Index
from kvsync.index.reference import ReferenceIndex
from tests.contract.face import ELSEWHERE, M, W
from tests.wire import batch

IMPLEMENTATIONS: dict[str, Callable[..., Index]] = {"reference": ReferenceIndex}
if find_spec("kvsync_core"):
    IMPLEMENTATIONS["core"] = import_module("kvsync_core").PrefixIndex


@pytest.fixture(params=list(IMPLEMENTATIONS))
def make_index(request: pytest.FixtureRequest) -> Callable[[], Index]:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture
def index(make_index: Callable[[], Index]) -> Index:
    return make_index()


@pytest.fixture
def fed(index: Index) -> Callable[..., Index]:
    """An index with one worker that has applied one batch of the given events."""

    def feed(*events: Any, **facts: Any) -> Index:
        index.add_worker(W, M, **facts)
        index.apply(W, batch(*events))
        return index

    return feed


@pytest.fixture
def lost(index: Index) -> Callable[..., Index]:
    """As ``fed``, of a worker that lost something before: its trust is ``partial``."""

    def feed(*events: Any, **facts: Any) -> Index:
        index.add_worker(W, M, **facts)
        index.apply(W, batch(ELSEWHERE))
        index.forget(W)
        index.apply(W, batch(*events))
        return index

    return feed
