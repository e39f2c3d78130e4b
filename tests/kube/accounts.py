"""A gateway's own account: what deploy/manifests/rbac*.yaml give, and how it is withdrawn.

On the fake and on a real API server, where the rights are those of the manifest and the server made the token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from .fake import Account, FakeApiServer
from .pods import Kube, Refused
from .real import RealApiServer

MANIFESTS: Final = Path(__file__).parents[2] / "deploy" / "manifests"
_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"


class GatewayAccount:
    """The service account of a namespace, with the rights of a manifest.

    Args:
        wide: those of the one for all namespaces.
    """

    def __init__(self, server: FakeApiServer | RealApiServer, kube: Kube, *, wide: bool = False) -> None:
        self._server = server
        self._kube = kube
        self._wide = wide
        self._manifest = MANIFESTS / ("rbac-all-namespaces.yaml" if wide else "rbac.yaml")
        self.token = ""

    async def grant(self) -> str:
        """Make it, and bind its role; returns a token of it."""
        namespace = self._kube.namespace
        if isinstance(self._server, FakeApiServer):
            self.token = self.token or f"token-of-{namespace}"
            self._server.accounts[self.token] = Account(frozenset({"*"} if self._wide else {namespace}))
            return self.token
        account = ""
        for document in self._documents():
            await self._make(document)
            if document["kind"] == "ServiceAccount":
                account = document["metadata"]["name"]
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        made = await self._kube.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        self.token = made["status"]["token"]
        return self.token

    async def withdraw(self) -> None:
        """The binding goes; account and token stay."""
        if isinstance(self._server, FakeApiServer):
            self._server.accounts[self.token] = Account()
            return
        (binding,) = (each for each in self._documents() if each["kind"].endswith("RoleBinding"))
        await self._kube.ask("DELETE", f"{self._path(binding['kind'])}/{binding['metadata']['name']}")

    async def _make(self, document: dict[str, Any]) -> None:
        try:
            await self._kube.ask("POST", self._path(document["kind"]), document)
        except Refused as refused:
            if refused.status != 409:  # it is there: a role without its binding
                raise

    def _documents(self) -> Iterator[dict[str, Any]]:
        """The manifest's, for this test's namespace."""
        for document in yaml.safe_load_all(self._manifest.read_text()):
            meta = document["metadata"]
            if "namespace" in meta:
                meta["namespace"] = self._kube.namespace
            else:
                meta["name"] += f"-{self._kube.namespace}"
            for subject in document.get("subjects", ()):
                subject["namespace"] = self._kube.namespace
            if "Cluster" in document.get("roleRef", {}).get("kind", ""):
                document["roleRef"]["name"] += f"-{self._kube.namespace}"
            yield document

    def _path(self, kind: str) -> str:
        namespaced = f"/namespaces/{self._kube.namespace}"
        return {
            "ServiceAccount": f"/api/v1{namespaced}/serviceaccounts",
            "Role": f"{_RBAC}{namespaced}/roles",
            "RoleBinding": f"{_RBAC}{namespaced}/rolebindings",
            "ClusterRole": f"{_RBAC}/clusterroles",
            "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
        }[kind]


__all__ = ["GatewayAccount"]
