"""The engines among a cluster's pods, as changes of the fleet.

What must always hold: whatever happens to the API server, the fleet stays as it was last told, and :meth:`status` says
how old that is. A namespace that can't be seen hides nothing of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvsync.config.discovery import ALL, KubernetesSettings
from kvsync.discovery.kubernetes.api import ApiServer, place
from kvsync.discovery.kubernetes.fleet import PodFleet
from kvsync.discovery.kubernetes.pods import Verdict, judge
from kvsync.discovery.kubernetes.reflector import Key, Reflector, ReflectorStatus, State
from kvsync.discovery.model import Change
from kvsync.telemetry.logs import Throttle

_log = logging.getLogger(__name__)
_WORST: Sequence[State] = ("degraded", "failing", "starting", "synced")


@dataclass(frozen=True, slots=True)
class KubernetesStatus:
    state: State
    """The worst of the namespaces'."""
    scopes: tuple[ReflectorStatus, ...]
    pods: Mapping[str, int]
    """``ready``, ``followed`` (an engine that is not ready), or why pods with the labels are no engines."""


class KubernetesSource:
    """See the module. Everything is called on one event loop.

    Args:
        environ: says where the API server is, in a cluster.
        deliver: gets every change.

    Raises:
        BadFile: it can't be told where the API server is, or its authorities can't be read.
    """

    def __init__(
        self, settings: KubernetesSettings, environ: Mapping[str, str], deliver: Callable[[Change], None]
    ) -> None:
        where = place(settings, environ)
        self._deliver = deliver
        self._api = ApiServer(where, settings.connect_timeout, settings.list_timeout, 2 * len(where.namespaces))
        self.renewed = [self._api.authorities] if self._api.authorities is not None else []
        """What is made from files that may be renewed."""
        self._fleet = PodFleet()
        self._told: dict[Key, tuple[str, ...]] = {}
        """What the log said of a pod last."""
        self._throttle = Throttle(_log, interval=10.0)
        self._reflectors: list[Reflector[Verdict]] = [
            Reflector(
                self._api,
                scope,
                "/api/v1/pods" if scope == ALL else f"/api/v1/namespaces/{scope}/pods",
                "Pod",
                settings,
                judge,
                self._happened,
            )
            for scope in where.namespaces
        ]

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        scopes = ", ".join("all namespaces" if each.scope == ALL else each.scope for each in self._reflectors)
        _log.info("engines are looked for among the pods of %s (%s)", scopes, self._api.url)
        async with self._api, asyncio.TaskGroup() as tasks:
            for reflector in self._reflectors:
                tasks.create_task(reflector.run(), name=f"pods of {reflector.scope}")

    async def listed(self, patience: float) -> None:
        """Return once all pods were listed, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                for reflector in self._reflectors:
                    await reflector.listed.wait()

    def status(self) -> KubernetesStatus:
        scopes = tuple(reflector.status() for reflector in self._reflectors)
        return KubernetesStatus(min((each.state for each in scopes), key=_WORST.index), scopes, self._fleet.counts())

    def _happened(self, gone: Sequence[Verdict], seen: Sequence[Verdict]) -> None:
        concerned = dict.fromkeys(verdict.key for verdict in seen)
        for change in self._fleet.update(gone, seen):
            engine = change.engine
            how = "" if change.kind == "gone" else ", ready" if engine.ready else ", not ready"
            self._throttle.log(
                logging.INFO,
                f"{engine.name} {change.kind}{how}",
                "engine %s (%s, %s) %s%s",
                engine.name,
                engine.url,
                engine.model,
                change.kind,
                how,
            )
            self._deliver(change)
            namespace, _, name = engine.name.partition("/")
            concerned[namespace, name] = None
        for verdict in gone:
            self._told.pop(verdict.key, None)
        for verdict in self._fleet.among(concerned):
            self._tell(verdict)

    def _tell(self, verdict: Verdict) -> None:
        """What should be changed at a pod goes to the log once, and again when it differs."""
        notes = verdict.notes
        if verdict.reason in ("no_model", "bad_setting", "address_taken"):
            notes = (f"it is not served: {verdict.detail}",)
        if notes != self._told.get(verdict.key, ()):
            for note in notes:
                self._throttle.warning(f"{verdict.name} {note}", "pod %s: %s", verdict.name, note)
        if notes:
            self._told[verdict.key] = notes
        else:
            self._told.pop(verdict.key, None)


__all__ = ["KubernetesSource", "KubernetesStatus"]
