"""The tools of these tests: helm and kubectl, fetched once for the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts.deploy import render


@pytest.fixture(scope="session")
def helm() -> Path:
    """Where helm lies. `make test` has put it there; who runs pytest alone gets it now."""
    script = Path(render.__file__).with_name("helm.py")
    got = subprocess.run([sys.executable, script, render.HELM.parent], stderr=subprocess.PIPE, text=True, check=True)
    if not render.HELM.exists():
        pytest.skip(got.stderr.strip())
    return render.HELM
