"""schemas.py KUBERNETES_VALIDATE_WHEEL SERVICEMONITORS_CRD_JSON: makes tests/data/kubernetes anew.

What an API server's strict mode checks, as one JSON schema: of each kind that this repository deploys, with everything
that it refers to, without descriptions. tests/data/kubernetes/README.md has the sources and the commands.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[2] / "tests" / "data" / "kubernetes"
DEFINITIONS = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
KINDS = (
    "apps.v1.Deployment",
    "autoscaling.v2.HorizontalPodAutoscaler",
    "core.v1.ConfigMap",
    "core.v1.Secret",
    "core.v1.Service",
    "core.v1.ServiceAccount",
    "networking.v1.NetworkPolicy",
    "policy.v1.PodDisruptionBudget",
    "rbac.v1.ClusterRole",
    "rbac.v1.ClusterRoleBinding",
    "rbac.v1.Role",
    "rbac.v1.RoleBinding",
)


def main(wheel: Path, crd: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        whole = json.loads(archive.read(DEFINITIONS))
    kept: dict[str, Any] = {}
    wanted = [f"io.k8s.api.{kind}" for kind in KINDS]
    while wanted:
        name = wanted.pop()
        if name not in kept:
            kept[name] = _bare(whole["$defs"][name])
            wanted += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(kept[name]))
    _write("schemas.json", {"$schema": whole["$schema"], "$defs": dict(sorted(kept.items()))})
    _write("servicemonitors-crd.json", _bare(json.loads(crd.read_text(encoding="utf-8"))))


def _bare(value: Any) -> Any:
    """Without what is there for readers: a description is text, a property of that name is a mapping."""
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items() if not (k == "description" and isinstance(v, str))}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def _write(name: str, value: Any) -> None:
    text = json.dumps(value, indent=1, sort_keys=True)
    (TARGET / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
