"""Kubernetes objects as an API server in strict mode sees them, without one.

``faults`` judges by the API's own schemas (tests/data/kubernetes), in which an unknown field is a fault.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

DATA = Path(__file__).parents[1] / "data" / "kubernetes"
CRD = DATA / "servicemonitors-crd.json"
Object = dict[str, Any]


def parsed(text: str) -> list[Object]:
    return [item for item in yaml.load_all(text, Loader=yaml.CSafeLoader) if item is not None]


def only(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The one object of that kind (and name)."""
    (found,) = (o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"]))
    return found


def faults(item: Object) -> list[str]:
    """Everything in the object that the API would refuse, or would not keep."""
    where = f"{item.get('kind')} {item.get('metadata', {}).get('name')}"
    judge = _judge(item["apiVersion"], item["kind"])
    schema = [f"{where}: {'.'.join(map(str, e.instance_path))}: {e.message}" for e in judge.iter_errors(item)]
    return schema + [f"{where}: {path} is null" for path in _nulls(item, "")]


@functools.cache
def _judge(api: str, kind: str) -> jsonschema_rs.Draft202012Validator:
    if api == "monitoring.coreos.com/v1" and kind == "ServiceMonitor":
        (version,) = json.loads(CRD.read_text(encoding="utf-8"))["spec"]["versions"]
        return jsonschema_rs.Draft202012Validator(_closed(version["schema"]["openAPIV3Schema"]))
    group, _, version = api.rpartition("/")
    name = f"io.k8s.api.{group.split('.')[0] or 'core'}.{version}.{kind}"
    whole = json.loads((DATA / "schemas.json").read_text(encoding="utf-8"))
    if name not in whole["$defs"]:
        raise ValueError(f"no schema of {api} {kind}: scripts/deploy/schemas.py has the list")
    return jsonschema_rs.Draft202012Validator({**whole, "$ref": f"#/$defs/{name}"})


def _closed(schema: Any) -> Any:
    """A structural schema whose unknown fields are faults; metadata is the API server's own matter."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


def _nulls(value: Any, path: str) -> Iterator[str]:
    """A key without a value: the API takes it for absent, so whoever wrote it meant something else."""
    if value is None:
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _nulls(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _nulls(inner, f"{path}[{number}]")


def selects(selector: Object, labels: Object) -> bool:
    """A selector by labels alone; those of this repository have no expressions."""
    wanted = selector.get("matchLabels", selector) if "matchExpressions" not in selector else None
    assert isinstance(wanted, dict), selector
    return bool(wanted) and wanted.items() <= labels.items()
