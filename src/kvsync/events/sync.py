"""Whether KV event sync runs: its conditions, its start by itself, its refusal.

Sync is started when it is asked for and every condition holds, and never pretends: :func:`unmet_conditions` names each
one that does not, with the mend, and :class:`KVSync` checks again every ``events.condition_interval`` seconds. Once
running it ends only when it is no longer asked for (or its settings no longer allow it); a tokenizer that fails later
costs routing quality, not the events. Importing this module needs no pyzmq.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from kvsync.config.model import EventsSettings, Settings
from kvsync.discovery.model import Change, Engine
from kvsync.events.contracts import Snapshot, WorkerStatus
from kvsync.extras import how_to_install

log = logging.getLogger("kvsync.events")

Probe: TypeAlias = Callable[[Settings], Awaitable[str | None]]
"""Tries the remote tokenizer: ``None`` when it answers, else what is wrong with it."""
SyncState: TypeAlias = Literal["off", "waiting", "running"]

_PREFIX = "AIBRIX_PREFIX_CACHE_"


class Manager(Protocol):
    """What is started and stopped: ``kvsync.events.manager.EventManager``."""

    @property
    def asleep(self) -> Collection[str]: ...

    @property
    def failed(self) -> bool: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def add(self, engine: Engine) -> None: ...

    async def change(self, engine: Engine) -> None: ...

    async def remove(self, uid: str) -> None: ...

    def served(self, worker: str) -> None: ...

    def resync(self, worker: str) -> None: ...

    def workers(self) -> list[WorkerStatus]: ...

    async def snapshot(self, worker: str) -> Snapshot | None: ...


@dataclass(frozen=True, slots=True)
class SyncStatus:
    state: SyncState
    """``off``: not asked for · ``waiting``: asked for, conditions unmet · ``running``."""
    unmet: tuple[str, ...]
    """Each unmet condition as a sentence, with its mend."""


class KVSyncRefused(RuntimeError):
    """KV event sync is asked for and strict, and conditions are unmet."""

    def __init__(self, unmet: tuple[str, ...]) -> None:
        super().__init__("KV event sync can't start:\n" + "\n".join(f"  - {sentence}" for sentence in unmet))
        self.unmet = unmet


def zmq_installed() -> bool:
    try:
        importlib.import_module("zmq")
    except ImportError:
        return False
    return True


def unmet_conditions(settings: Settings, *, zmq_installed: Callable[[], bool] = zmq_installed) -> tuple[str, ...]:
    """Every condition that the settings and this installation don't meet. (Whether the tokenizer can be reached is for
    a probe to tell.)"""
    tokenizer = settings.tokenizer
    unmet = []
    if not settings.events.enabled:
        unmet.append(
            f"KV event sync is off (set {_PREFIX}KV_EVENT_SYNC_ENABLED=true, or events.enabled: true in the YAML file)"
        )
    if not tokenizer.remote.enabled:
        unmet.append(
            f"KV event sync requires the remote tokenizer (set {_PREFIX}USE_REMOTE_TOKENIZER=true, "
            "or tokenizer.remote.enabled: true in the YAML file)"
        )
    if tokenizer.type not in (None, "remote"):
        unmet.append(
            f"KV event sync requires the tokenizer type to be remote, and it is {tokenizer.type!r} "
            f"(unset {_PREFIX}TOKENIZER_TYPE or set it to remote; tokenizer.type in the YAML file)"
        )
    if not tokenizer.remote.endpoint:
        unmet.append(
            f"KV event sync requires the address of the remote tokenizer (set {_PREFIX}REMOTE_TOKENIZER_ENDPOINT, or "
            "tokenizer.remote.endpoint in the YAML file, to a vLLM server's base URL, or to engines for the engines "
            "themselves)"
        )
    if not zmq_installed():
        unmet.append(f"KV event sync requires ZMQ support ({how_to_install('zmq')})")
    return tuple(unmet)


class KVSync:
    """Runs an event manager whenever that is asked for and possible, for the engines that discovery tells of.

    Args:
        make_manager: a fresh manager, not started.
    """

    def __init__(
        self,
        settings: Settings,
        make_manager: Callable[[EventsSettings], Manager],
        probe: Probe,
        *,
        zmq_installed: Callable[[], bool] = zmq_installed,
    ) -> None:
        self._settings = settings
        self._make_manager = make_manager
        self._probe = probe
        self._zmq_installed = zmq_installed
        self._engines: dict[str, Engine] = {}
        self._manager: Manager | None = None
        self._runs_with: EventsSettings | None = None
        """The settings of the manager that runs."""
        self._status = SyncStatus("off", ())
        self._lock = asyncio.Lock()
        """Held while the manager is started, stopped or told of an engine."""
        self._task: asyncio.Task[None] | None = None

    def status(self) -> SyncStatus:
        return self._status

    def workers(self) -> list[WorkerStatus]:
        """How each worker's stream is doing; empty while sync does not run."""
        return [] if self._manager is None else self._manager.workers()

    def asleep(self) -> Collection[str]:
        """The workers whose engines sleep, as far as that is known: only those that are followed are asked."""
        return () if self._manager is None else self._manager.asleep

    def served(self, worker: str) -> None:
        """Tell that a worker answered a request just now. Any thread may."""
        manager = self._manager
        if manager is not None:
            manager.served(worker)

    def resync(self, worker: str) -> None:
        """What is known of a worker is doubted: have it forgotten and its stream followed anew from the beginning. At
        most once a minute and worker, which is for the caller to keep. Any thread may."""
        manager = self._manager
        if manager is not None:
            manager.resync(worker)

    async def snapshot(self, worker: str) -> Snapshot | None:
        """What is known of a worker, for another replica; ``None`` while that can't be told."""
        manager = self._manager
        return None if manager is None else await manager.snapshot(worker)

    async def start(self) -> None:
        """Check the conditions, start what can be started, and keep checking.

        Raises:
            KVSyncRefused: sync is asked for, ``events.strict`` is set and conditions are unmet.
        """
        await self._check()
        if self._status.state == "waiting" and self._settings.events.strict:
            raise KVSyncRefused(self._status.unmet)
        self._task = asyncio.create_task(self._keep_checking(), name="kv sync conditions")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        async with self._lock:
            await self._stop_manager()
        self._status = SyncStatus("off", ())

    async def update(self, settings: Settings) -> None:
        """Take new settings. Those of a running manager (timeouts, limits) hold from its next start on: a stream that
        is opened anew may have lost what its engine no longer replays."""
        before, self._settings = self._settings.events, settings
        await self._check()
        later = _held_back(self._runs_with, settings.events)
        if later and later != _held_back(self._runs_with, before):
            log.warning(
                "these settings hold from the next start of KV sync on (events.enabled off and on): %s",
                ", ".join(later),
            )

    async def apply(self, change: Change) -> None:
        """Take a step in the fleet's life."""
        engine = change.engine
        async with self._lock:
            if change.kind == "gone":
                self._engines.pop(engine.uid, None)
            else:
                self._engines[engine.uid] = engine
            if self._manager is None:
                return
            if change.kind == "gone":
                await self._manager.remove(engine.uid)
            elif change.kind == "changed":
                await self._manager.change(engine)
            else:
                await self._manager.add(engine)

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(self._settings.events.condition_interval)
            await self._check()

    async def _check(self) -> None:
        settings = self._settings
        unmet = unmet_conditions(settings, zmq_installed=self._zmq_installed)
        if not unmet and (self._manager is None or self._manager.failed):
            problem = await self._tokenizer_problem(settings)
            if problem is not None:
                unmet = (
                    "KV event sync requires the remote tokenizer to be reachable, and "
                    f"{settings.tokenizer.remote.endpoint} is not: {problem} (mend the service, or "
                    f"{_PREFIX}REMOTE_TOKENIZER_ENDPOINT; tokenizer.remote.endpoint in the YAML file)",
                )
        async with self._lock:
            if settings is not self._settings:  # changed meanwhile: whoever changed them checks
                return
            if self._manager is not None and (unmet or self._manager.failed):
                await self._stop_manager()
            if not unmet and self._manager is None:
                unmet = await self._start_manager(settings)
            self._tell(SyncStatus("running" if not unmet else "waiting" if settings.events.enabled else "off", unmet))

    async def _tokenizer_problem(self, settings: Settings) -> str | None:
        remote = settings.tokenizer.remote
        limit = remote.connect_timeout + remote.timeout
        try:
            async with asyncio.timeout(limit):
                return await self._probe(settings)
        except TimeoutError:
            return f"no answer in {limit:g} s"

    async def _start_manager(self, settings: Settings) -> tuple[str, ...]:
        manager = self._make_manager(settings.events)
        try:
            await manager.start()
        except OSError as error:
            return (f"KV event sync could not open what it needs: {error} (it is tried again by itself)",)
        self._manager, self._runs_with = manager, settings.events
        for engine in self._engines.values():
            await manager.add(engine)
        return ()

    async def _stop_manager(self) -> None:
        manager, self._manager, self._runs_with = self._manager, None, None
        if manager is not None:
            await manager.stop()

    def _tell(self, status: SyncStatus) -> None:
        before, self._status = self._status, status
        if status == before:
            return
        if status.state == "running":
            log.info("KV event sync runs")
        elif status.state == "waiting":
            if self._settings.events.strict and self._task is None:
                return  # nothing is routed: start() refuses, and says why
            log.error(
                "KV event sync does not run; requests are routed without it. Unmet conditions:\n%s",
                "\n".join(f"  - {sentence}" for sentence in status.unmet),
            )
        else:
            log.info("KV event sync is off")


def _held_back(runs_with: EventsSettings | None, settings: EventsSettings) -> list[str]:
    """What a running manager has otherwise. The first three are not the manager's."""
    if runs_with is None:
        return []
    names = [name for name in type(settings).model_fields if name not in ("enabled", "strict", "condition_interval")]
    return [f"events.{name}" for name in names if getattr(runs_with, name) != getattr(settings, name)]


__all__ = ["KVSync", "KVSyncRefused", "Manager", "Probe", "SyncStatus", "unmet_conditions", "zmq_installed"]
