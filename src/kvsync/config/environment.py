"""Environment variables and flags as settings.

Every setting outside ``models`` has one name of its own, ``KVSYNC_<SECTION>_<FIELD>``, such as
``KVSYNC_TOKENIZER_REMOTE_TIMEOUT``. The names of AIBrix mean here what they mean there; those without a counterpart are
named in a warning with the reason, never passed over in silence. An empty value counts as unset. Values never appear in
a warning: some are secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError

from kvsync.config.access import SECRETS
from kvsync.config.faults import Fault, nearest
from kvsync.config.model import Settings

Place = tuple[str, ...]


class Given(NamedTuple):
    """One setting as a layer gives it."""

    place: Place
    value: object
    origin: str


class Layer(NamedTuple):
    given: list[Given]
    faults: list[Fault]
    warnings: list[str]


class _Bad(ValueError):
    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


def _leaves(model: type[BaseModel], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    for name, field in model.model_fields.items():
        place = (*above, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, place)
        elif place not in (("models",), ("tenants",)):
            yield place, field.annotation


_TYPES: dict[Place, Any] = dict(_leaves(Settings))
OWN_NAMES: dict[str, Place] = {"KVSYNC_" + "_".join(place).upper(): place for place in _TYPES}
"""Every ``KVSYNC_*`` name that says one setting."""
FILES: tuple[Place, ...] = tuple(place for place, kind in _TYPES.items() if Path in get_args(kind))
"""Settings that are paths."""

_AIBRIX: dict[str, Place] = {
    "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED": ("events", "enabled"),
    "AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER": ("tokenizer", "remote", "enabled"),
    "AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT": ("tokenizer", "remote", "endpoint"),
    "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE": ("tokenizer", "type"),
    "AIBRIX_TOKENIZER_REQUEST_TIMEOUT": ("tokenizer", "remote", "timeout"),
    "AIBRIX_PREFIX_CACHE_LOCAL_ROUTER_METRICS_ENABLED": ("telemetry", "prefix_cache_metrics"),
    "AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT": ("routing", "imbalance_abs_count"),
    "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR": ("routing", "standard_deviation_factor"),
    "AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES": ("extproc", "max_message_bytes"),
}
_SHORT: dict[str, Place] = {"KVSYNC_STRICT": ("events", "strict")}
TEMPLATE = "AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE"
"""AIBrix asks the pods themselves by it: here it turns the endpoint ``engines`` on where no endpoint is set."""
ALGORITHM = "ROUTING_ALGORITHM"

REDIS: dict[str, Place] = {
    "REDIS_HOST": ("redis", "url"),
    "REDIS_PORT": ("redis", "url"),
    "REDIS_PASSWORD": ("redis", "password"),
}
"""AIBrix's too. Nothing but ``REDIS_HOST`` turns Redis on: a Service named ``redis`` makes Kubernetes put a
``REDIS_PORT`` (a URL) into every pod beside it."""

_BY_EVENTS = "the index follows the engines' own removals: nothing is evicted by age or count"
_UNUSED: dict[str, str] = {
    "AIBRIX_PREFIX_CACHE_BLOCK_SIZE": "the block size is learned from each engine's events",
    "AIBRIX_PREFIX_CACHE_KV_EVENT_PUBLISH_ADDR": "event endpoints come with the engines",
    "AIBRIX_PREFIX_CACHE_KV_EVENT_SUBSCRIBE_ADDRS": "event endpoints come with the engines",
    "AIBRIX_SYNC_MAX_CONTEXTS": _BY_EVENTS,
    "AIBRIX_SYNC_MAX_PREFIXES_PER_CONTEXT": _BY_EVENTS,
    "AIBRIX_SYNC_EVICTION_INTERVAL_SECONDS": _BY_EVENTS,
    "AIBRIX_SYNC_EVICTION_DURATION_MINUTES": _BY_EVENTS,
    "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER": _BY_EVENTS,
    "AIBRIX_PREFIX_CACHE_EVICTION_INTERVAL_SECONDS": _BY_EVENTS,
    "AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS": _BY_EVENTS,
    "AIBRIX_PREFIX_CACHE_HASH_SEED": "block keys need no seed: they are compared with themselves only",
    "AIBRIX_PREFIX_CACHE_LOAD_IMBALANCE_FACTOR": "the gate is set by ..._IMBALANCE_ABS_COUNT alone",
    "AIBRIX_PREFIX_CACHE_LOAD_IMBALANCE_MIN_GAP": "the gate is set by ..._IMBALANCE_ABS_COUNT alone",
    "AIBRIX_TOKENIZER_HEALTH_CHECK_PERIOD": "a tokenizer's health is judged by its answers",
    "AIBRIX_TOKENIZER_TTL": "tokenizer connections are pooled, not kept for a time",
    "AIBRIX_MAX_TOKENIZERS_PER_POOL": "one pool serves every model; KVSYNC_TOKENIZER_REMOTE_CONNECTIONS bounds it",
    "AIBRIX_STATESYNC_ENABLED": "every gateway follows all engines itself",
    "AIBRIX_STATESYNC_SYNC_PERIOD": "every gateway follows all engines itself",
    "AIBRIX_AUTH_BEARER_TOKEN": "keys are those of `tenants` in the file: requests are NOT authenticated by this one",
    "AIBRIX_HTTPROUTE_CACHE_TTL": "there are no HTTPRoutes",
    "AIBRIX_TTFT_THRESHOLD_S": "time to first byte is a histogram in the metrics",
}

# A Service named "kvsync" or "kvsync-gateway" makes Kubernetes put such names into every pod beside it.
_SERVICE_LINK = re.compile(r"KVSYNC_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")

_UNIT = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PIECE = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def duration(text: str) -> float:
    """Seconds from a Go duration (``500ms``, ``1m30s``) or a plain number of seconds.

    Raises:
        ValueError: it is neither.
    """
    if re.fullmatch(r"\d+\.?\d*|\.\d+", text):
        return float(text)
    pieces = list(_PIECE.finditer(text))
    if not pieces or "".join(piece[0] for piece in pieces) != text:
        raise _Bad(f"{text!r} is not a duration", "write 5s, 500ms, 1m30s or a number of seconds")
    return sum(float(piece[1]) * _UNIT[piece[2]] for piece in pieces)


def convert(place: Place, text: str) -> object:
    """A setting's value from its text.

    Raises:
        ValueError: the text can't be one.
    """
    kind = _TYPES[place]
    if get_origin(kind) is tuple:
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        value: object = TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ValueError):
            raise _Bad(str(cause), getattr(cause, "mend", "correct it")) from None
        shown = "a value that is not shown" if place[-1] in SECRETS else repr(text)
        raise _Bad(f"{shown}: {first['msg'][:1].lower()}{first['msg'][1:]}", mend_of(first["type"])) from None
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if isinstance(value, Path) else value


def mend_of(kind: str) -> str:
    """What to write instead, by pydantic's name of the fault."""
    for begins, mend in (
        ("bool", "write true or false"),
        ("int", "write a whole number"),
        ("float", "write a number"),
        ("finite", "write a finite number"),
        ("string_type", "write text; put it in quotes if it looks like a number, a date or yes/no"),
        ("string", "write text that fits the rule"),
        ("literal", "write one of those"),
        ("missing", "add it"),
        ("tuple", "write a list"),
        ("dict", "write a mapping, `name: value`"),
        ("model", "write a mapping of settings"),
        ("path", "write a path"),
    ):
        if kind.startswith(begins):
            return mend
    return "write a value within the bounds"


def default_policy(environ: Mapping[str, str]) -> Layer:
    """``ROUTING_ALGORITHM``, which replaces a default and yields to everything else."""
    layer = Layer([], [], [])
    if text := environ.get(ALGORITHM, "").strip():
        _take(layer, ALGORITHM, ("routing", "policy"), text)
    return layer


def environment(environ: Mapping[str, str]) -> Layer:
    """Everything else that the environment says; a setting's own name, ``KVSYNC_*``, comes after AIBrix's."""
    layer = Layer([], [], [])
    for name in sorted(environ):
        text = environ[name].strip()
        if not text:
            continue
        if place := _AIBRIX.get(name):
            _take(layer, name, place, text, duration if name == "AIBRIX_TOKENIZER_REQUEST_TIMEOUT" else None)
        elif reason := _UNUSED.get(name):
            layer.warnings.append(f"{name} is not used: {reason}")
        elif name.startswith("AIBRIX_") and name != TEMPLATE:
            meant = nearest(name, _AIBRIX, "AIBRIX_")
            layer.warnings.append(f"{name} is not known here" + (f"; was {meant} meant?" if meant else ""))
    _redis(environ, layer)
    for name in sorted(environ, key=lambda name: (name not in _SHORT, name)):
        text = environ[name].strip()
        if not text or not name.startswith("KVSYNC_"):
            continue
        if _SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_URL.fullmatch(text)):
            layer.warnings.append(
                f"{name} is not used: Kubernetes set it for a Service (enableServiceLinks: false stops it)"
            )
        elif place := OWN_NAMES.get(name) or _SHORT.get(name):
            _take(layer, name, place, text)
        else:
            meant = nearest(name, [*OWN_NAMES, *_SHORT], "KVSYNC_")
            mend = f"was {meant} meant?" if meant else "remove it; `kvsync config check` lists every setting"
            layer.faults.append(Fault(name, "", "is not a setting", mend))
    return layer


def _redis(environ: Mapping[str, str], layer: Layer) -> None:
    host, port, password = (environ.get(name, "").strip() for name in REDIS)
    if not host:
        layer.warnings.extend(
            f"{name} is not used: REDIS_HOST is not set" for name in REDIS if environ.get(name, "").strip()
        )
        return
    if _SERVICE_URL.fullmatch(port):
        layer.warnings.append("REDIS_PORT is not used: Kubernetes set it for a Service; 6379 is taken")
        port = ""
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    _take(layer, "REDIS_HOST", REDIS["REDIS_HOST"], f"redis://{host}" + (f":{port}" if port else ""))
    if password:
        _take(layer, "REDIS_PASSWORD", REDIS["REDIS_PASSWORD"], password)


def flags(values: Mapping[str, object]) -> Layer:
    """Settings by their dotted names; ``None`` is a flag that was not given."""
    layer = Layer([], [], [])
    for name, value in values.items():
        place = tuple(name.split("."))
        if value is None:
            continue
        if place not in _TYPES:
            meant = nearest(name, map(".".join, _TYPES))
            layer.faults.append(
                Fault(f"flag {name}", "", "is not a setting", f"was {meant} meant?" if meant else "remove it")
            )
        elif isinstance(value, str):
            _take(layer, f"flag {name}", place, value)
        else:
            layer.given.append(Given(place, value, f"flag {name}"))
    return layer


def _take(layer: Layer, name: str, place: Place, text: str, parse: Callable[[str], object] | None = None) -> None:
    try:
        value = parse(text) if parse else convert(place, text)
    except _Bad as bad:
        layer.faults.append(Fault(name, ".".join(place), str(bad), bad.mend))
    else:
        layer.given.append(Given(place, value, name))


__all__ = [
    "ALGORITHM",
    "FILES",
    "OWN_NAMES",
    "REDIS",
    "TEMPLATE",
    "Given",
    "Layer",
    "convert",
    "default_policy",
    "duration",
    "environment",
    "flags",
    "mend_of",
]
