"""The whole gateway in one process: every room, put together.

Data moves one way. Discovery tells of engines; the fleet routes to them and KV sync follows their events into the
index; a request is tokenized, matched, routed and relayed; its answer feeds the audit. Once a second what has run out
ends, and what knowledge serves is told. This module knows all rooms and none of them knows it; there is no decision in
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvsync.config import EventsSettings, Settings
from kvsync.config.live import Looked
from kvsync.discovery.access import live_access
from kvsync.discovery.adapters import Adapters
from kvsync.discovery.kubernetes.source import KubernetesSource
from kvsync.discovery.model import Change
from kvsync.discovery.static import StaticSource
from kvsync.events.manager import EventManager
from kvsync.events.sync import KVSync
from kvsync.gateway.admin import Admin, AdminPorts
from kvsync.gateway.server import Gateway
from kvsync.gateway.tls import port_tls
from kvsync.index import NATIVE, PrefixIndex
from kvsync.report import Report
from kvsync.requests.auth import Tenants
from kvsync.requests.ports import JsonObject
from kvsync.requests.rooms import Rooms
from kvsync.routing.audit import Audit
from kvsync.routing.decision import Decision
from kvsync.routing.fleet import Fleet
from kvsync.routing.load import LoadTable
from kvsync.routing.modes import Modes
from kvsync.routing.records import as_json
from kvsync.routing.router import Router
from kvsync.store.connection import Store
from kvsync.store.leases import ReplayTurns
from kvsync.store.limits import Limits, requests_per_second
from kvsync.store.loads import SharedLoads
from kvsync.store.snapshots import Snapshots
from kvsync.telemetry.logs import Throttle
from kvsync.telemetry.metrics import Metrics
from kvsync.tokenize.service import TokenizerService
from kvsync.tokenize.types import TokenizedRequest
from kvsync.warmup import WarmUp

if TYPE_CHECKING:
    from kvsync.extproc.server import ExtProc

log = logging.getLogger("kvsync")


class Renewed(Protocol):
    """What is made from files that may be renewed."""

    def check(self) -> Looked: ...


class Door(Protocol):
    """A port by which requests come in."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def hurry(self) -> None: ...


TICK = 1.0
"""Seconds between two looks at what time alone changes."""
FIRST_LIST = 2.0
"""Seconds that a start waits for the first list of pods."""


class CountedTokenizing:
    """The tokenizer as the gateway sees it, with every request counted."""

    def __init__(self, tokenizer: TokenizerService, metrics: Metrics) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics

    def begin(
        self, path: str, body: JsonObject, model: str, adapter: str | None
    ) -> TokenizedRequest | Awaitable[TokenizedRequest]:
        begun = self._tokenizer.begin(path, body, model, adapter)
        if isinstance(begun, TokenizedRequest):
            self._metrics.tokenized(model, begun.source, begun.reason, 0.0)
            return begun
        return self._timed(begun, model)

    async def _timed(self, begun: Awaitable[TokenizedRequest], model: str) -> TokenizedRequest:
        started = time.perf_counter()
        tokenized = await begun
        self._metrics.tokenized(model, tokenized.source, tokenized.reason, time.perf_counter() - started)
        return tokenized


class App:
    """One gateway. Create, start and stop it on one event loop.

    Args:
        settings: all layers together.
        config_file, environ, flags: the layers, to read the file again when it changes; without a file the fleet is
            that of ``settings`` for good.

    Raises:
        BadFile: a secret or a certificate can't be read.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        config_file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, object] | None = None,
    ) -> None:
        self.settings = settings
        self._access, credentials = live_access(settings.gateway)
        self._tenants = Tenants(settings)
        data_tls = port_tls("certificates of the data port", settings.gateway.tls)
        admin_tls = port_tls("certificates of the admin port", settings.admin.tls)
        ports = [tls.live for tls in (data_tls, admin_tls) if tls is not None]
        self._adapters = Adapters(settings.discovery, self._changed, self._access)
        self.kubernetes: KubernetesSource | None = None
        if settings.kubernetes.enabled:
            self.kubernetes = KubernetesSource(settings.kubernetes, environ or {}, self._discovered)
        self.index = PrefixIndex(settings.index.max_blocks, settings.index.max_bytes)
        self.metrics = Metrics(prefix_cache=settings.telemetry.prefix_cache_metrics)
        self.store = Store(settings.redis, self.metrics)
        self._renewed: Sequence[Renewed] = (
            *credentials,
            *ports,
            self._tenants,
            *self.store.renewed,
            *(self.kubernetes.renewed if self.kubernetes is not None else ()),
        )
        self.fleet = Fleet(model.name for model in settings.models)
        loads = LoadTable(settings.routing.decode_cost)
        self.router = Router(
            self.index, self.fleet, loads, settings.routing, self.metrics, asleep=lambda: self.kv_sync.asleep()
        )
        self.shared_loads = SharedLoads(self.store, settings.redis.load, loads, self.fleet, self.metrics)
        self.modes = Modes(time.monotonic)
        self.tokenizer = TokenizerService(
            settings.tokenizer,
            settings.models,
            self._engine_urls,
            served=self._served_models,
            access=self._access,
            held=self.router.held,
        )
        self.kv_sync = KVSync(settings, self._make_manager, lambda _: self.tokenizer.probe())
        self.audit = Audit(self.index, self.kv_sync.resync, settings.routing.observed_lifetime, self.metrics)
        tokenizing = CountedTokenizing(self.tokenizer, self.metrics)
        self.limits = Limits(settings.limits, requests_per_second(settings.models), self.store, self.metrics)
        self._rooms = Rooms.furnish(
            settings.gateway,
            fleet=self.fleet,
            tokenizing=tokenizing,
            routing=self.router,
            telemetry=self.metrics,
            on_answer=self._answered,
            inject_usage=settings.audit.inject_usage,
            engines=self._access,
            tenants=self._tenants,
            gate=self.limits,
        )
        self.gateway = Gateway(self._rooms, data_tls)
        self._draining = False
        self._hurry = asyncio.Event()
        self.report = Report(
            fleet=self.fleet,
            index=self.index,
            loads=loads,
            router=self.router,
            audit=self.audit,
            modes=self.modes,
            kv_sync=self.kv_sync,
            metrics=self.metrics,
            tokenizing=self.tokenizer.stats,
            draining=lambda: self._draining,
            redis=lambda: {**self.store.describe(), "replicas": self.shared_loads.replicas},
            warmup=WarmUp(settings.ready),
            kubernetes=self.kubernetes.status if self.kubernetes is not None else None,
        )
        self.extproc = self._make_extproc() if settings.extproc.enabled else None
        self._doors: list[Door] = [self.gateway] if settings.gateway.enabled else []
        if self.extproc is not None:
            self._doors.append(self.extproc)
            if self.extproc.tls is not None:
                self._renewed = (*self._renewed, self.extproc.tls.live)
        self.admin = Admin(
            settings.admin,
            AdminPorts(
                metrics=self.metrics.look,
                ready=self.report.ready,
                workers=self.report.workers,
                decision=self._decision,
                forget=self._forget,
                fleet=self.fleet,
                tokenizing=self.tokenizer,
                index=self.index,
            ),
            tls=admin_tls,
        )
        self._source = StaticSource(
            config_file, environ or {}, flags or {}, settings, self._discovered, reloaded=self._reloaded
        )
        self._changes: asyncio.Queue[Change] = asyncio.Queue()
        self._newer_settings = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._turns: ReplayTurns | None = None
        self._snapshots: Snapshots | None = None
        if self.store.configured and settings.redis.snapshots.enabled:
            self._snapshots = Snapshots(
                self.store, settings.redis.snapshots, self.kv_sync.snapshot, self._followed, self.metrics
            )

    async def start(self) -> None:
        """Start everything; requests are taken once this returns.

        Raises:
            KVSyncRefused: KV sync is asked for, ``events.strict`` is set and conditions are unmet.
            OSError: an address is taken.
        """
        log.info("prefix index: %s", "native core" if NATIVE else "pure Python (kvsync-core is not installed)")
        self._source.start()
        try:
            if self.kubernetes is not None:
                self._tasks.append(asyncio.create_task(_keep("pods", self.kubernetes.run), name="pods"))
                # The engines may be those that KV sync needs to start: to tokenize, and to be followed.
                await self.kubernetes.listed(FIRST_LIST)
            await self.store.start()
            spread = self.settings.events.replay_spread
            if self.store.configured or spread:
                self._turns = ReplayTurns(self.store, self.settings.redis.replays, spread, self.metrics)
            await self.tokenizer.start()
            await self.kv_sync.start()
            while not self._changes.empty():
                await self.kv_sync.apply(self._changes.get_nowait())
            await self.admin.start()
            for door in self._doors:
                await door.start()
        except BaseException:
            await self.stop()
            raise
        steps: Mapping[str, Callable[[], Awaitable[None]]] = {
            "changes of the fleet": self._follow_change,
            "the configuration file": self._source.run,
            "changed settings": self._follow_settings,
            "what runs out with time": self._tick,
            "secrets and certificates": self._follow_files,
            "adapters of engines": self._adapters.run,
        }
        if self.limits.users and self.store.configured:
            steps = {**steps, "tokens of users": self.limits.step}
        if self._shares_load:
            steps = {**steps, "the load of other replicas": self.shared_loads.step}
        if self._snapshots is not None:
            steps = {**steps, "snapshots for other replicas": self._snapshots.step}
        self._tasks += [asyncio.create_task(_keep(what, step), name=what) for what, step in steps.items()]
        if self.extproc is not None:
            log.info("Envoy's questions on port %d", self.extproc.port)
        if self.settings.gateway.enabled:
            log.info("requests on port %d, admin on port %d", self.gateway.port, self.admin.port)
        else:
            log.info("admin on port %d", self.admin.port)

    def reload(self) -> None:
        """Read the configuration file now (SIGHUP)."""
        self._source.trigger()

    async def leave(self) -> None:
        """Say that no more requests should come, and for ``gateway.drain_delay`` serve those that do. :meth:`stop`
        comes next."""
        self._draining = True
        if self.settings.gateway.enabled:
            self.gateway.leave()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.gateway.drain_delay):
                    await self._hurry.wait()

    async def stop(self) -> None:
        """Take no more requests, let open answers end within ``gateway.drain_timeout``, then stop everything."""
        self._draining = True
        await asyncio.gather(*(door.stop() for door in self._doors))
        self._rooms.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.kv_sync.stop()
        await self.tokenizer.close()
        await self.limits.tell()
        if self._shares_load:
            await self.shared_loads.stop()
        if self._turns is not None:
            await self._turns.close()
        await self.store.stop()
        await self.admin.stop()

    @property
    def _shares_load(self) -> bool:
        return self.store.configured and self.settings.redis.load.enabled

    def hurry(self) -> None:
        """Have :meth:`leave` wait no longer for whoever sends requests, and :meth:`stop` not for open answers."""
        self._hurry.set()
        for door in self._doors:
            door.hurry()

    def _make_extproc(self) -> ExtProc:
        from kvsync.extproc.server import ExtProc  # the extra `envoy` is needed where this port is, and only there

        def show() -> None:
            self.metrics.extproc_streams(extproc.streams)

        extproc = ExtProc(
            self.settings.extproc,
            self._rooms,
            engines=self.fleet.engines,
            telemetry=self.metrics,
            ready=lambda: self.report.ready()[0],
        )
        self.metrics.at_scrape(show)
        return extproc

    def _make_manager(self, settings: EventsSettings) -> EventManager:
        shared = self.settings.redis
        return EventManager(
            self.index,
            settings,
            timer=self.metrics,
            on_hits=self.audit.on_hits,
            introduced=self._introduced,
            warm=None if self._snapshots is None else self._snapshots.read,
            warm_timeout=shared.snapshots.patience,
            turns=self._turns,
            access=self._access,
        )

    def _followed(self) -> list[tuple[str, str]]:
        """Workers whose events are followed, and their models."""
        engines = [engine for engine in self.fleet if engine.kv_events]
        return [(engine.worker(rank), engine.model) for engine in engines for rank in engine.ranks]

    def _introduced(self, worker: str) -> None:
        self.router.introduced(worker)
        self.audit.introduced(worker)

    def _decision(self, request_id: str) -> Mapping[str, object] | None:
        decision = self.router.get(request_id)
        return None if decision is None else as_json(decision)

    def _forget(self, worker: str) -> bool:
        if not any(worker == engine.worker(rank) for engine in self.fleet for rank in engine.ranks):
            return False
        self.index.forget(worker)
        self.router.forget(worker)
        log.info("worker %s: what was known of its cache is forgotten, by order of the admin API", worker)
        return True

    def _engine_urls(self, model: str) -> list[str]:
        return [engine.url for engine in self.fleet.engines(model) if engine.tokenizes]

    def _served_models(self) -> set[str]:
        return {engine.model for engine in self.fleet if engine.ready}

    def _discovered(self, change: Change) -> None:
        """What a source of discovery says."""
        self._adapters.apply(change)

    def _changed(self, change: Change) -> None:
        self.router.apply(change)
        self.audit.apply(change)
        self.modes.apply(change)
        self._changes.put_nowait(change)

    async def _tick(self) -> None:
        await asyncio.sleep(TICK)
        for mode_change in self.modes.look(self.report.moments()):
            log.log(logging.WARNING if mode_change.worse else logging.INFO, "%s", mode_change)
        self.audit.settle()
        self.report.start()
        # a look at all that the index holds, where a worker lost what it had: no request may wait for it
        await asyncio.to_thread(self.index.expire, time.monotonic())

    async def _follow_files(self) -> None:
        """Read secrets and certificates again when their files change."""
        await asyncio.sleep(TICK)
        for renewed in self._renewed:
            looked = await asyncio.to_thread(renewed.check)
            if looked != "unchanged":
                self.metrics.reloaded(looked)

    async def _follow_change(self) -> None:
        await self.kv_sync.apply(await self._changes.get())

    def _reloaded(self, result: str) -> None:
        self.metrics.reloaded(result)
        if result != "broken":
            self._newer_settings.set()

    async def _follow_settings(self) -> None:
        """Take over what is newest. However many files came while that lasted, the last of them is enough."""
        await self._newer_settings.wait()
        self._newer_settings.clear()
        settings = self._source.settings
        await asyncio.to_thread(self._tenants.update, settings)
        self.limits.update(requests_per_second(settings.models))
        await self.tokenizer.update_models(settings.models)
        await self.kv_sync.update(self.settings.model_copy(update={"events": settings.events}))

    def _answered(
        self, decision: Decision, tokenized: TokenizedRequest, status: int, usage: Mapping[str, object] | None
    ) -> None:
        cached = self.audit.observe(decision, tokenized, status, usage)
        self.metrics.model_answered(decision.model, status)
        if status == 200:
            self.router.answered(decision, tokenized, cached)
            self.tokenizer.answered(decision.tokenized, decision.chosen.worker)
        if self.audit.may_publish(decision, status, usage):
            self.kv_sync.served(decision.chosen.worker)


async def _keep(what: str, step: Callable[[], Awaitable[None]]) -> None:
    """Take one step after the other, for ever: a fault in one must not end what the next ones are for."""
    throttle = Throttle(log, interval=60.0)
    while True:
        try:
            await step()
        except Exception as error:
            throttle.warning("fault", "seeing to %s failed, and goes on: %r", what, error, exc_info=error)
            await asyncio.sleep(TICK)


__all__ = ["App"]
