"""Adapters that engines name themselves: of which pages, and what a source's own word does to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest
from aiohttp import web

from kvsync.config import DiscoverySettings
from kvsync.discovery.access import EngineAccess
from kvsync.discovery.adapters import MAX_ADAPTERS, Adapters, adapters
from kvsync.discovery.model import Change, Engine
from tests.faults.client import until


def page(*cards: object) -> bytes:
    return json.dumps({"object": "list", "data": list(cards)}).encode()


def card(name: object, parent: object = None) -> dict[str, object]:
    return {"id": name, "object": "model", "root": "/models/x", "parent": parent, "permission": [{"id": "p"}]}


def test_those_with_a_parent() -> None:
    assert adapters(page(card("m"), card("alias"), card("y", "m"), card("x", "m"), card("x", "m")), "m") == ("x", "y")
    assert adapters(page(), "m") == ()
    assert adapters(page(card("m", "m"), card("two words", "m"), card("", "m"), card("n" * 254, "m")), "m") == ()
    assert adapters(page({"id": "old"}), "m") == ()
    assert len(adapters(page(*(card(f"a{n}", "m") for n in range(2 * MAX_ADAPTERS))), "m")) == MAX_ADAPTERS


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"{}", b'{"data":{}}', b'{"data":[7]}', b'{"data":[{"id":7}]}', b'{"data":[{}]}', b"\xff"],
)
def test_what_is_no_list_of_models(body: bytes) -> None:
    with pytest.raises(ValueError, match="no list of models"):
        adapters(body, "m")


class Place:
    """An engine's port, and everything that was told."""

    def __init__(self, url: str) -> None:
        self.engine = Engine(uid="e", name="e", url=url, model="m", adapters=("own",))
        self.body = page(card("m"))
        self.status = 200
        self.asked = 0
        self.told: list[Change] = []
        self.adapters = Adapters(DiscoverySettings(adapters_interval=0.02), self.told.append, EngineAccess())

    async def has(self, *names: str) -> None:
        async def look() -> bool:
            return bool(self.told) and self.told[-1].engine.adapters == names

        await until(look, f"adapters {names}")

    async def asked_again(self) -> None:
        before = self.asked

        async def look() -> bool:
            return self.asked >= before + 2

        await until(look, "asked again")


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async def models(_: web.Request) -> web.Response:
        found.asked += 1
        return web.Response(body=found.body, status=found.status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found = Place(f"http://127.0.0.1:{runner.addresses[0][1]}")
    task = asyncio.create_task(found.adapters.run())
    yield found
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await runner.cleanup()


async def test_they_come_and_go_as_the_engine_says(place: Place) -> None:
    place.adapters.apply(Change("added", place.engine))
    assert place.told == [Change("added", place.engine)]
    place.body = page(card("m"), card("b", "m"), card("own", "m"))
    await place.has("own", "b")
    place.body = page(card("m"), card("c", "m"))
    await place.has("own", "c")
    place.body = page(card("m"))
    await place.has("own")
    assert [change.kind for change in place.told] == ["added", "changed", "changed", "changed"]
    count = len(place.told)
    await place.asked_again()
    assert len(place.told) == count


async def test_an_engine_that_does_not_serve_its_model_is_named_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers each request for it with 404, and nothing else would say why."""
    place.body = page(card("/models/m"), card("b", "/models/m"))
    place.adapters.apply(Change("added", place.engine))
    await place.has("own", "b")
    await place.asked_again()
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line.startswith("engine e is said to serve 'm', and serves /models/m, b: it may refuse")
    for body in (page(), page(card("x"), card("m")), page(card("lora"), card("m", "base"))):
        place.body = body
        await place.asked_again()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_a_thousand_of_them_are_no_line_of_a_quarter_megabyte(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsync.discovery.adapters")
    names = tuple(sorted(f"{n}-".ljust(250, "x") for n in range(MAX_ADAPTERS)))
    place.body = page(card("m"), *(card(name, "m") for name in names))
    place.adapters.apply(Change("added", place.engine))
    await place.has("own", *names)
    (line,) = caplog.messages
    assert line.endswith(" and 991 more")
    assert len(line) < 4000


@pytest.mark.parametrize(("status", "body"), [(500, b""), (404, b""), (200, b"<html>"), (302, b""), (401, b"")])
async def test_an_engine_that_answers_nonsense_keeps_those_it_had(place: Place, status: int, body: bytes) -> None:
    place.body = page(card("b", "m"))
    place.adapters.apply(Change("added", place.engine))
    await place.has("own", "b")
    place.status, place.body = status, body
    await place.asked_again()
    assert len(place.told) == 2
    place.status, place.body = 200, page(card("c", "m"))
    await place.has("own", "c")


async def test_a_sources_word_keeps_what_the_engine_said(place: Place) -> None:
    place.body = page(card("b", "m"))
    place.adapters.apply(Change("added", place.engine))
    await place.has("own", "b")
    changed = replace(place.engine, ready=False, adapters=("other",))
    place.adapters.apply(Change("changed", changed))
    assert place.told[-1] == Change("changed", replace(changed, adapters=("other", "b")))
    place.adapters.apply(Change("gone", place.engine))
    assert place.told[-1].kind == "gone"
    place.adapters.apply(Change("added", replace(place.engine, ready=False)))
    assert place.told[-1].engine.adapters == ("own",)  # another life has said nothing yet


async def test_only_ready_engines_are_asked(place: Place) -> None:
    place.body = page(card("b", "m"))
    place.adapters.apply(Change("added", replace(place.engine, ready=False)))
    other = replace(place.engine, uid="f", name="f")
    place.adapters.apply(Change("added", other))
    await place.asked_again()
    assert {change.engine.uid for change in place.told if change.kind == "changed"} == {"f"}
    place.adapters.apply(Change("changed", place.engine))

    async def both() -> bool:
        return {change.engine.uid for change in place.told if change.engine.adapters == ("own", "b")} == {"e", "f"}

    await until(both, "asked as soon as it is ready")
