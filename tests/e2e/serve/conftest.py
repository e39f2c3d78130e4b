"""What the tests of the running gateway share. Engines and gateways live as long as the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.fleet import Batches


@pytest.fixture(scope="module")
def batches() -> Iterator[Batches]:
    """Counts the batches of every simulated engine that is made after it."""
    with pytest.MonkeyPatch.context() as patch:
        yield Batches(patch)
