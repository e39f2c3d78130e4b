"""Which adapters engines have loaded, asked of the engines: ``GET /v1/models`` names each, with its base model as
``parent``.

It stands between the sources of discovery and whoever follows them, and adds to each engine's description what the
engine said last. What must always hold: what a source says is passed on at once; an engine that does not answer, or
answers nonsense, keeps the adapters that it had; questions are few at a time, bounded in time and size, and are put to
ready engines only.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import aiohttp
import msgspec

from kvsync.config.discovery import DiscoverySettings
from kvsync.discovery.access import EngineAccess, NoPage, fetch, in_a_line
from kvsync.discovery.model import Change, Engine
from kvsync.telemetry.logs import Throttle

_log = logging.getLogger(__name__)

AT_ONCE: Final = 8
TIMEOUT: Final = 5.0
MAX_BYTES: Final = 4 << 20
MAX_ADAPTERS: Final = 1000
"""Of one engine."""
SHOWN: Final = 10
"""In a line of the log: it would have a quarter of a megabyte."""
LONGEST_PAUSE: Final = 300.0
"""Seconds between two questions to an engine that doesn't answer, unless the interval is longer."""
_NAME: Final = re.compile(r"[^\x00-\x20\x7f]{1,253}")


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_cards = msgspec.json.Decoder(_Cards).decode


class _Asked:
    """An engine as its source has it, and what it said."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.learned: tuple[str, ...] = ()
        self.due = float("-inf")
        self.busy = False
        self.failed_in_a_row = 0
        self.strange = False
        """It does not name its model."""

    def whole(self) -> Engine:
        known = self.engine.adapters
        more = tuple(name for name in self.learned if name not in known)
        return replace(self.engine, adapters=known + more) if more else self.engine


class Adapters:
    """See the module. Everything is called on one event loop.

    Args:
        deliver: gets every change.
        access: how engines are spoken to.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: DiscoverySettings,
        deliver: Callable[[Change], None],
        access: EngineAccess,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._deliver = deliver
        self._access = access
        self._clock = clock
        self._engines: dict[str, _Asked] = {}
        self._news = asyncio.Event()
        self._throttle = Throttle(_log, interval=60.0, clock=clock)

    def apply(self, change: Change) -> None:
        """A source's change; it is passed on before this returns."""
        engine = change.engine
        if change.kind == "gone":
            self._engines.pop(engine.uid, None)
            self._deliver(change)
            return
        asked = self._engines.get(engine.uid) if change.kind == "changed" else None
        if asked is None:
            asked = self._engines[engine.uid] = _Asked(engine)
        elif engine.ready and not asked.engine.ready:
            asked.due = float("-inf")
        asked.engine = engine
        self._deliver(replace(change, engine=asked.whole()))
        self._news.set()

    async def run(self) -> None:
        """Ask, until cancelled."""
        if not self._settings.adapters:
            await asyncio.Event().wait()
        async with (
            aiohttp.ClientSession(
                # Half a minute lies between two questions: longer than most servers keep a connection.
                connector=aiohttp.TCPConnector(force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            room = asyncio.Semaphore(AT_ONCE)
            while True:
                self._news.clear()
                now = self._clock()
                idle = sorted(
                    (each for each in self._engines.values() if each.engine.ready and not each.busy),
                    key=lambda each: each.due,
                )
                for asked in idle:
                    if asked.due > now:
                        break
                    asked.busy = True
                    tasks.create_task(self._ask(session, room, asked), name=f"adapters of {asked.engine.name}")
                pause = next((each.due - now for each in idle if not each.busy), None)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._news.wait()

    async def _ask(self, session: aiohttp.ClientSession, room: asyncio.Semaphore, asked: _Asked) -> None:
        engine = asked.engine
        try:
            async with room:
                page = await fetch(session, self._access, engine.url, "/v1/models", MAX_BYTES, TIMEOUT)
            learned = asked.learned
            if page is not None:
                learned = adapters(page, engine.model)
                self._compare(asked, page)
        except (NoPage, _NoList) as why:
            asked.failed_in_a_row += 1
            self._throttle.log(logging.DEBUG, engine.uid, "%s does not say its adapters: %s", engine.name, why)
        else:
            asked.failed_in_a_row = 0
            if learned != asked.learned and self._engines.get(engine.uid) is asked:
                before = asked.whole()
                asked.learned = learned
                now = asked.whole()
                if now != before:
                    _log.info("engine %s has the adapters %s", engine.name, _shown(now.adapters))
                    self._deliver(Change("changed", now))
        finally:
            asked.busy = False
            asked.due = self._clock() + self._pause(asked) * random.uniform(0.9, 1.1)
            self._news.set()

    def _compare(self, asked: _Asked, page: bytes) -> None:
        """Say so, once, when an engine doesn't serve the model that it is said to: most refuse its requests with 404
        then, which is no sign of trouble otherwise."""
        engine, names = asked.engine, served(page)
        strange = bool(names) and engine.model not in names
        if strange and not asked.strange:
            _log.warning(
                "engine %s is said to serve %r, and serves %s: it may refuse all requests for it (mend the label or "
                "the entry in the file, or the engine's --served-model-name)",
                engine.name,
                engine.model,
                _shown(names),
            )
        asked.strange = strange

    def _pause(self, asked: _Asked) -> float:
        interval = self._settings.adapters_interval
        return min(interval * 2.0 ** min(asked.failed_in_a_row, 16), max(LONGEST_PAUSE, interval))


def _shown(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "(none)") + more


class _NoList(ValueError):
    """A page that is no list of models."""


def adapters(body: bytes, model: str) -> tuple[str, ...]:
    """The adapters that a page of ``/v1/models`` names: entries with a base model. Sorted, at most
    :data:`MAX_ADAPTERS`.

    Raises:
        ValueError: it is no such page.
    """
    try:
        cards = _cards(body).data
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _NoList(f"it is no list of models: {error}") from None
    named = {card.id for card in cards if card.parent and card.id != model and _NAME.fullmatch(card.id)}
    return tuple(sorted(named))[:MAX_ADAPTERS]


def served(body: bytes) -> tuple[str, ...]:
    """Whatever a page that :func:`adapters` can read names, adapters too: each can be asked for."""
    return tuple(in_a_line(card.id) for card in _cards(body).data)


__all__ = ["Adapters", "adapters"]
