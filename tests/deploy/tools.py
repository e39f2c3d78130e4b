"""helm and kubectl: `make test` and `make test-kube` have put them there; who runs pytest alone gets them now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.deploy.render import HELM, ROOT

KUBECTL = HELM.with_name("kubectl")


def fetched() -> str | None:
    """Have both there; what is said where there are none for this machine."""
    script: Path = ROOT / "scripts" / "deploy" / "helm.py"
    got = subprocess.run([sys.executable, script, HELM.parent], stderr=subprocess.PIPE, text=True, check=True)
    return None if HELM.exists() and KUBECTL.exists() else got.stderr.strip()


__all__ = ["HELM", "KUBECTL", "fetched"]
