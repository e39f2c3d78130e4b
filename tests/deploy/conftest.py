"""What these tests need beside Python: helm, fetched once for the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.tools import HELM, fetched


@pytest.fixture(scope="session")
def helm() -> Path:
    """Where helm lies."""
    if trouble := fetched():
        pytest.skip(trouble)
    return HELM
