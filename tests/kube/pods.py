"""Pods as tests write them, and a client that writes them: to the fake or to a real API server, by equal requests."""

from __future__ import annotations

import random
import ssl
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

NAME: Final = "model.aibrix.ai/name"
EVENTS: Final = "model.aibrix.ai/kv-events-enabled"
PORT: Final = "model.aibrix.ai/port"
NODE: Final = "node-1"
MERGE: Final = "application/merge-patch+json"
Json = dict[str, Any]


def pod(
    name: str,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    ports: Mapping[str, int] | None = None,
    node: str | None = NODE,
) -> Json:
    """A manifest. Without labels: one that serves ``m`` and publishes events."""
    given = {NAME: "m", EVENTS: "true"} if labels is None else dict(labels)
    container: Json = {"name": "vllm", "image": "vllm"}
    if ports:
        container["ports"] = [{"name": key, "containerPort": port} for key, port in ports.items()]
    spec: Json = {"containers": [container]}
    if node is not None:
        spec["nodeName"] = node
    meta: Json = {"name": name, "labels": given, "annotations": dict(annotations or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def running(ip: str | None, *, ready: bool = True, phase: str = "Running", restarts: int = 0) -> Json:
    """A status as a kubelet writes it."""
    status: Json = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "podIP": ip,
        "podIPs": [{"ip": ip}] if ip else None,
        "startTime": "2026-01-01T00:00:00Z",
    }
    state: Json = {"running": {}}
    status["containerStatuses"] = [
        {"name": "vllm", "image": "vllm", "imageID": "", "ready": ready, "restartCount": restarts, "state": state}
    ]
    return status


def own_address() -> str:
    """One that no other test's pods have: for tests that look into all namespaces of a server that all tests share."""
    return ".".join(["10", *(str(random.randint(1, 254)) for _ in range(3))])


class Refused(AssertionError):
    """The API server refused what a test asked for."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:500]}")
        self.status = status


class Kube:
    """An administrator, in one namespace."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, token: str, tls: ssl.SSLContext | None, ns: str
    ) -> None:
        self._session = session
        self._url = url
        self._token = token
        self._tls = tls
        self.namespace = ns

    def inside(self, namespace: str) -> Kube:
        return Kube(self._session, self._url, self._token, self._tls, namespace)

    def holding(self, token: str) -> Kube:
        """The same place, as somebody else."""
        return Kube(self._session, self._url, token, self._tls, self.namespace)

    async def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Json:
        """One request to the API; its answer's document.

        Raises:
            Refused: it is no success.
        """
        async with self._session.request(
            method,
            self._url + path,
            json=body,
            headers={"Authorization": f"Bearer {self._token}", **({"Content-Type": kind} if body is not None else {})},
            ssl=self._tls if self._tls is not None else True,
        ) as response:
            if response.status >= 300:
                raise Refused(response.status, await response.text())
            found: Json = await response.json(content_type=None)
            return found

    def _pods(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{name}" if name else "")

    async def namespaced(self) -> None:
        """Make the namespace."""
        await self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})

    async def create(self, manifest: Json, status: Json | None = None) -> str:
        """A pod, and its status; returns its uid."""
        made = await self.ask("POST", self._pods(), manifest)
        if status is not None:
            await self.status(manifest["metadata"]["name"], status)
        return str(made["metadata"]["uid"])

    async def status(self, name: str, status: Json) -> None:
        await self.ask("PATCH", self._pods(name) + "/status", {"status": status}, MERGE)

    async def label(self, pod_name: str, /, **labels: str | None) -> None:
        """Set labels by their names behind ``model.aibrix.ai/`` (``_`` for ``-``); ``None`` removes one."""
        full = {f"model.aibrix.ai/{key.replace('_', '-')}": value for key, value in labels.items()}
        await self.ask("PATCH", self._pods(pod_name), {"metadata": {"labels": full}}, MERGE)

    async def delete(self, name: str, *, now: bool = True) -> None:
        """``now``: without grace, so that it is gone; else it stays and terminates, since there is no kubelet."""
        await self.ask("DELETE", self._pods(name), {"gracePeriodSeconds": 0 if now else 30})

    async def get(self, name: str) -> Json:
        return await self.ask("GET", self._pods(name))


__all__ = ["EVENTS", "NAME", "PORT", "Json", "Kube", "Refused", "own_address", "pod", "running"]
