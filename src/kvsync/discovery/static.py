"""The fleet that a YAML file lists, followed while the file changes.

What must always hold: the fleet delivered so far is the one of the last file that was sound. A broken file changes
nothing; it is logged with all of its faults and counted, once per content. All changes of one reload are delivered in
one go, so nobody sees a half-changed fleet.

A file that is being written may look sound: without its end it lists fewer engines, and empty it lists none. So a new
content counts once two looks show it, and what is no regular file is not read again (a pipe gives its content once).
One that stays without any models, where the last one had engines, is one whose writing failed; ``models: []`` says that
none are meant.

An engine whose address, ranks or model changed is another engine: the old one is gone and a new one is added under a
new ``uid``, so nothing known of the old one can be credited to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvsync.config import ConfigError, Settings, read
from kvsync.config.yamlfile import MAX_BYTES
from kvsync.discovery.model import Change, Engine

_log = logging.getLogger(__name__)
_NAMES = 1_000
"""Whose lives are remembered after they are gone."""


def engines(settings: Settings) -> tuple[Engine, ...]:
    """The engines that the settings list, each in its first life (``uid`` = name)."""
    return tuple(
        Engine(
            uid=engine.name,
            name=engine.name,
            url=engine.url,
            model=model.name,
            adapters=engine.adapters,
            data_parallel_size=engine.data_parallel_size,
            kv_events=engine.kv_events,
            events=engine.events,
            replay=engine.replay,
            spec_decode=engine.spec_decode,
            attention_chunk_size=engine.attention_chunk_size,
            usable_blocks=engine.usable_blocks,
            labels=engine.labels,
        )
        for model in settings.models
        for engine in model.engines
    )


class StaticFleet:
    """The engines as last listed, and the changes that lead from one list to the next."""

    def __init__(self) -> None:
        self._now: dict[str, Engine] = {}
        self._lives: dict[str, int] = {}
        """Of each name, those begun last at the end. Names that are not listed are remembered up to a bound: one that
        comes back after a thousand others begins anew, when nothing of its earlier lives is left anywhere."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._now.values())

    def update(self, listed: Iterable[Engine]) -> list[Change]:
        """Take over a new list; names in it are unique. Engines that are gone come first, new ones last."""
        gone: list[Change] = []
        changed: list[Change] = []
        added: list[Change] = []
        after: dict[str, Engine] = {}
        before = self._now
        for engine in listed:
            old = before.get(engine.name)
            if old is not None and _same_process(old, engine):
                engine = replace(engine, uid=old.uid)
                if engine != old:
                    changed.append(Change("changed", engine))
            else:
                engine = replace(engine, uid=self._new_uid(engine.name))
                added.append(Change("added", engine))
            after[engine.name] = engine
        for old in before.values():
            new = after.get(old.name)
            if new is None or new.uid != old.uid:
                gone.append(Change("gone", old))
        self._now = after
        if (excess := len(self._lives) - _NAMES) > 0:
            for name in [name for name in self._lives if name not in after][:excess]:
                del self._lives[name]
        return gone + changed + added

    def _new_uid(self, name: str) -> str:
        """No name holds a ``#``, so the uid of a later life never meets another engine's name."""
        life = self._lives.pop(name, 0) + 1
        self._lives[name] = life
        return name if life == 1 else f"{name}#life{life}"


def _same_process(old: Engine, new: Engine) -> bool:
    """Whether all that differs is what a running engine can change: its adapters, and what people say of it."""
    return replace(new, uid=old.uid, adapters=old.adapters, labels=old.labels) == old


class StaticSource:
    """The engines of a configuration file, as changes.

    Args:
        file: looked at again and again; ``None`` means that the fleet never changes.
        environ, flags: the other layers, as they were at the start.
        settings: what all layers said at the start.
        deliver: gets every change, from :meth:`start` and :meth:`check`, on the caller's task.
        reloaded: told of every new content with ``applied``, ``unchanged`` (no engine differs) or ``broken``.
        interval: seconds between two looks.
        settle: seconds between the look that finds a new content and the one that confirms it.
    """

    def __init__(
        self,
        file: Path | None,
        environ: Mapping[str, str],
        flags: Mapping[str, object],
        settings: Settings,
        deliver: Callable[[Change], None],
        *,
        reloaded: Callable[[str], None] = lambda _: None,
        interval: float = 1.0,
        settle: float = 0.1,
    ) -> None:
        self._file = file
        self._environ = dict(environ)
        self._flags = dict(flags)
        self._settings = self._started_with = settings
        self._deliver = deliver
        self._reloaded = reloaded
        self._interval = interval
        self._settle = settle
        self._fleet = StaticFleet()
        self._seen: bytes | str | None = None
        self._wake = asyncio.Event()

    @property
    def settings(self) -> Settings:
        """Those of the last sound file. The fleet, its tokenizers and ``events`` follow it; all else is read at the
        start."""
        return self._settings

    def start(self) -> None:
        """Deliver the fleet of the settings given at the start."""
        for change in self._fleet.update(engines(self._settings)):
            self._deliver(change)

    def trigger(self) -> None:
        """Have :meth:`run` look at the file now, and judge it even if it is the same (SIGHUP)."""
        self._seen = None
        self._wake.set()

    async def run(self) -> None:
        """Look at the file at every interval, until cancelled."""
        while True:
            await self.check()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._wake.wait()
            self._wake.clear()

    async def check(self) -> None:
        """Look at the file once. The content decides, not its time: a mounted file is often replaced within a second
        and by an older one."""
        if self._file is None:
            return
        content = await asyncio.to_thread(_content, self._file)
        if content == self._seen:
            return
        await asyncio.sleep(self._settle)
        if content != await asyncio.to_thread(_content, self._file):
            return  # it is being written: the next look decides
        self._seen = content
        if isinstance(content, str):
            self._broken(content)
            return
        try:
            loaded = await asyncio.to_thread(read, self._file, self._environ, self._flags, content=content)
        except ConfigError as error:
            self._broken(str(error))
            return
        if self._fleet.engines and "models" not in loaded.settings.model_fields_set:
            self._broken(
                f"{self._file}: has no models any more, as when its writing failed (a full disk leaves it empty); "
                "`models: []` takes all engines out"
            )
            return
        for warning in loaded.warnings:
            _log.warning("%s", warning)
        self._apply(loaded.settings)

    def _broken(self, why: str) -> None:
        _log.error("the fleet stays as it is, the configuration can't be used: %s", why)
        self._reloaded("broken")

    def _apply(self, settings: Settings) -> None:
        if later := _needs_restart(self._started_with, settings):
            _log.warning("these settings change with the next start only: %s", ", ".join(later))
        self._settings = settings
        changes = self._fleet.update(engines(settings))
        for change in changes:
            self._deliver(change)
            _log.info("engine %s (%s) %s", change.engine.name, change.engine.url, change.kind)
        self._reloaded("applied" if changes else "unchanged")


def _content(file: Path) -> bytes | str:
    """The file's bytes (of one that is too large, enough to see that), or why there are none. Never waits."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return f"{file}: is no regular file, and only such are read again"
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        return f"{file}: can't be read: {error.strerror or error}"


def _needs_restart(old: Settings, new: Settings) -> list[str]:
    sections = (name for name in type(old).model_fields if name not in ("models", "tenants", "events"))
    return [
        f"{section}.{field}"
        for section in sections
        for field in type(getattr(old, section)).model_fields
        if getattr(getattr(old, section), field) != getattr(getattr(new, section), field)
    ]


__all__ = ["StaticFleet", "StaticSource", "engines"]
