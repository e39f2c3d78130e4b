"""What in deploy/ is made from other files of this repository; a test compares.

``make manifests`` writes it.

- the definitions of kvsync's own settings in the chart's values.schema.json, so that `helm install` refuses what the
  process would refuse
- the chart's files/, the configurations of Envoy as deploy/envoy has them
- deploy/manifests, rendered from the chart
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
ENVOY = ROOT / "deploy" / "envoy"
OWN = "Settings"
NAMESPACE = "kvsync"
RENDERED = {
    "gateway.yaml": ("gateway.values.yaml", None),
    "rbac.yaml": ("gateway.values.yaml", "templates/access.yaml"),
    "rbac-all-namespaces.yaml": ("all-namespaces.values.yaml", "templates/access.yaml"),
}
"""Each file of deploy/manifests, its values, and the one template that it shows, if not all."""


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


def template(name: str, namespace: str, values: Path, shown: str | None = None) -> str:
    """The chart's objects.

    Args:
        values: a file of values.
        shown: the one template whose objects are wanted.

    Raises:
        ValueError: the chart refuses the values; the text says why.
    """
    options = ["--namespace", namespace, "--values", str(values), *(["--show-only", shown] if shown else [])]
    done = helm("template", name, str(CHART), *options)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def manifests() -> dict[Path, str]:
    """Every file of deploy/manifests but the values that it is rendered with."""
    made = {}
    for name, (values, shown) in RENDERED.items():
        head = f"# Rendered from deploy/helm/kvsync with {values} by `make manifests`: change those.\n"
        text = template("kvsync", NAMESPACE, MANIFESTS / values, shown=shown)
        made[MANIFESTS / name] = head + ("" if shown else _NAMESPACE) + text
    return made


_NAMESPACE = """\
---
apiVersion: v1
kind: Namespace
metadata:
  name: kvsync
  labels:
    # The gateway fits the restricted profile; engines, which are root in vLLM's image, this one.
    pod-security.kubernetes.io/enforce: baseline
"""


def copies() -> dict[Path, str]:
    """What the chart has of deploy/envoy: helm reads nothing outside of a chart's folder."""
    return {CHART / "files" / file.name: file.read_text(encoding="utf-8") for file in sorted(ENVOY.glob("*.yaml"))}


def write(made: dict[Path, str]) -> None:
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    # one after the other: manifests are rendered with what the others have written
    write({SCHEMA: schema()})
    write(copies())
    write(manifests())
