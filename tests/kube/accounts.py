"""A gateway's own account: what deploy/manifests/rbac.yaml gives, and how it is withdrawn.

On the fake and on a real API server, where the rights are those of the manifest and the server made the token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from .fake import Account, FakeApiServer
from .pods import Kube, Refused
from .real import RealApiServer

MANIFEST: Final = Path(__file__).parents[2] / "deploy" / "manifests" / "rbac.yaml"
_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"


class GatewayAccount:
    """The service account ``kvsync`` of a namespace, with the Role of the manifest.

    Args:
        wide: with the ClusterRole instead.
    """

    def __init__(self, server: FakeApiServer | RealApiServer, kube: Kube, *, wide: bool = False) -> None:
        self._server = server
        self._kube = kube
        self._wide = wide
        self._binding = f"kvsync-pods-{kube.namespace}" if wide else "kvsync-pods"
        self.token = ""

    async def grant(self) -> str:
        """Make it, and bind its role; returns a token of it."""
        namespace = self._kube.namespace
        if isinstance(self._server, FakeApiServer):
            self.token = self.token or f"token-of-{namespace}"
            self._server.accounts[self.token] = Account(frozenset({"*"} if self._wide else {namespace}))
            return self.token
        for document in yaml.safe_load_all(MANIFEST.read_text()):
            kind = document["kind"]
            if (kind in ("Role", "RoleBinding") and self._wide) or (kind.startswith("Cluster") and not self._wide):
                continue
            await self._make(kind, self._here(document))
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/kvsync/token"
        made = await self._kube.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        self.token = made["status"]["token"]
        return self.token

    async def withdraw(self) -> None:
        """The binding goes; account and token stay."""
        if isinstance(self._server, FakeApiServer):
            self._server.accounts[self.token] = Account()
            return
        kind = "ClusterRoleBinding" if self._wide else "RoleBinding"
        await self._kube.ask("DELETE", f"{self._path(kind)}/{self._binding}")

    async def _make(self, kind: str, document: dict[str, Any]) -> None:
        try:
            await self._kube.ask("POST", self._path(kind), document)
        except Refused as refused:
            if refused.status != 409:  # it is there: a role without its binding
                raise

    def _here(self, document: dict[str, Any]) -> dict[str, Any]:
        """The manifest's document, for this test's namespace."""
        meta = document["metadata"]
        if "namespace" in meta:
            meta["namespace"] = self._kube.namespace
        for subject in document.get("subjects", ()):
            subject["namespace"] = self._kube.namespace
        if document["kind"] == "ClusterRoleBinding":
            meta["name"] = self._binding
        return dict(document)

    def _path(self, kind: str) -> str:
        namespaced = f"/namespaces/{self._kube.namespace}"
        return {
            "ServiceAccount": f"/api/v1{namespaced}/serviceaccounts",
            "Role": f"{_RBAC}{namespaced}/roles",
            "RoleBinding": f"{_RBAC}{namespaced}/rolebindings",
            "ClusterRole": f"{_RBAC}/clusterroles",
            "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
        }[kind]


__all__ = ["MANIFEST", "GatewayAccount"]
