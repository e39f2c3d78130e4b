"""The admin API is asked what its OpenAPI document allows and forbids; every answer must be one that it lists."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from schemathesis import Case
from schemathesis.checks import positive_data_acceptance

from kvsync.app import App
from kvsync.config import Settings
from kvsync.gateway.openapi import document
from tests.wire import batch, stored

MODELS = [{"name": "m", "engines": [{"name": "a", "url": "http://127.0.0.1:1", "kv_events": False}]}]
SETTINGS = {"gateway": {"host": "127.0.0.1", "port": 0}, "admin": {"port": 0}, "models": MODELS}


async def _serve() -> App:
    app = App(Settings.model_validate(SETTINGS))
    app.index.add_worker("a", "m")
    app.index.apply("a", batch(stored([1, 2], range(32), block_size=16)))
    await app.start()
    return app


@pytest.fixture(scope="module")
def admin() -> Iterator[str]:
    """The admin port of a whole gateway, which runs on a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        app = asyncio.run_coroutine_threadsafe(_serve(), loop).result(10)
        yield f"http://127.0.0.1:{app.admin.port}"
        asyncio.run_coroutine_threadsafe(app.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


schema = schemathesis.openapi.from_dict(document())


@schema.parametrize()
def test_every_answer_is_one_of_those_listed(admin: str, case: Case[Any]) -> None:
    # A question can be well-formed and wrong (two prompts at once, a model that nobody serves): 400 is in the document.
    case.call_and_validate(base_url=admin, timeout=10, excluded_checks=[positive_data_acceptance])
