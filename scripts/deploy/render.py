"""What in deploy/ is made from other files of this repository; a test compares.

    make manifests                           writes
    from scripts.deploy.render import made   the same as values

- the definitions of kvsync's own settings in the chart's values.schema.json, so that `helm install` refuses what the
  process would refuse
- deploy/manifests, rendered from the chart: one file for each of ``MANIFESTS``
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvsync.config import Settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvsync"
HELM = ROOT / ".make" / "helm" / "helm"
SCHEMA = CHART / "values.schema.json"
MANIFESTS = ROOT / "deploy" / "manifests"
OWN = "Settings"


def schema() -> str:
    """values.schema.json, its settings as they are now."""
    whole = json.loads(SCHEMA.read_text(encoding="utf-8"))
    settings = Settings.model_json_schema()
    inner = settings.pop("$defs")
    kept = {name: value for name, value in whole["$defs"].items() if not name.endswith(OWN)}
    whole["$defs"] = kept | {name: _bare(value) for name, value in sorted({**inner, OWN: settings}.items())}
    return json.dumps(whole, indent=2) + "\n"


def _bare(value: Any) -> Any:
    """Without titles and texts: docs/configuration.md has them."""
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items() if not (k in ("title", "description") and isinstance(v, str))}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    """Run helm offline, with nothing of the caller's own setup."""
    return subprocess.run([HELM, *args], capture_output=True, text=True, check=False, env={"HOME": "/nonexistent"})


def template(name: str, namespace: str, *values: Path | str) -> str:
    """The chart's objects.

    Args:
        values: files of values, or ``key=value``.

    Raises:
        ValueError: the chart refuses them; the text says why.
    """
    options = [("--values" if isinstance(item, Path) else "--set", str(item)) for item in values]
    done = helm("template", name, str(CHART), "--namespace", namespace, *(part for pair in options for part in pair))
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def manifests() -> dict[Path, str]:
    """Every file of deploy/manifests but the values that it is rendered with."""
    made = {}
    for values in sorted(MANIFESTS.glob("*.values.yaml")):
        target = values.with_name(values.name.replace(".values.yaml", ".yaml"))
        head = f"# Rendered from deploy/helm/kvsync with {values.name} by `make manifests`: change those.\n"
        namespace = _NAMESPACE.format(name="kvsync")
        made[target] = head + namespace + template("kvsync", "kvsync", values)
    return made


_NAMESPACE = """\
---
apiVersion: v1
kind: Namespace
metadata:
  name: {name}
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""


def made() -> dict[Path, str]:
    return {SCHEMA: schema(), **manifests()}


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(made())} files\n")
