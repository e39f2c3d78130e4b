"""These tests run on uvloop, as the product does."""

from __future__ import annotations

from tests.integration.gateway.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
