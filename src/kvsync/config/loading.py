"""The layers, put on top of each other and judged as a whole.

Order, the later winning: defaults, ``ROUTING_ALGORITHM``, the YAML file, ``AIBRIX_*``, ``KVSYNC_*``, flags. Text from
the environment is converted by the kind of its setting; the YAML file has types of its own and is taken at its word
(``"8080"`` is not a number there). Nothing is applied when anything is wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvsync.config.access import SECRETS, TenantSettings
from kvsync.config.access_checks import SoundTenant, check_access
from kvsync.config.checks import (
    Problem,
    SoundEngine,
    SoundModel,
    check_curve,
    check_listeners,
    check_loops,
    check_models,
    check_paths,
)
from kvsync.config.discovery import KubernetesSettings, unfit
from kvsync.config.environment import FILES, TEMPLATE, Given, default_policy, environment, flags, mend_of
from kvsync.config.extproc import ExtProcSettings
from kvsync.config.faults import SHOWN, ConfigError, Fault, nearest
from kvsync.config.model import AdminSettings, CurveSettings, EngineSettings, GatewaySettings, ModelSettings, Settings
from kvsync.config.redis import RedisSettings
from kvsync.config.redis_checks import check_redis
from kvsync.config.yamlfile import Document, Path_, dotted, parse_yaml, read_yaml

_log = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Loaded:
    settings: Settings
    warnings: tuple[str, ...]
    """What was said and does nothing, with the reason."""
    origins: Mapping[str, str]
    """Where each setting that was given comes from, by its dotted path; others have their default."""


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Settings:
    """The settings of all layers; warnings go to the log.

    Args:
        file: the YAML file, if there is one.
        environ: the environment, normally ``os.environ``.
        flags: values by dotted path (``gateway.port``); ``None`` is a flag that was not given.

    Raises:
        ConfigError: with every fault of every layer.
    """
    loaded = read(file, environ, flags)
    for warning in loaded.warnings:
        _log.warning("%s", warning)
    return loaded.settings


def read(
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    content: bytes | None = None,
) -> Loaded:
    """As :func:`load`, with the warnings and origins as values.

    Args:
        content: the file's bytes where they are known already; else the file is read.
    """
    document = Document({}, {}, [])
    if file is not None:
        document = read_yaml(file) if content is None else parse_yaml(content, str(file))
    return _Stack(file, document).settle(environ, flags)


class _Stack:
    """The merged data, and of every part of it where it came from."""

    def __init__(self, file: Path | None, document: Document) -> None:
        self._file = file
        self._lines = document.lines
        # A section whose lines are all commented out is a section left at its defaults.
        self._data: dict[str, object] = {key: value for key, value in document.value.items() if value is not None}
        self._given: dict[Path_, str] = {}
        self._faults = document.faults

    def settle(self, environ: Mapping[str, str], flag_values: Mapping[str, object]) -> Loaded:
        # A broken environment variable is a fault of its own: a value for it from elsewhere does not hide it.
        base, above, top = default_policy(environ), environment(environ), flags(flag_values)
        for layer in (base, above, top):
            self._faults += layer.faults
        for given in base.given:
            if "policy" not in self._section("routing"):
                self._put(given)
        for given in (*above.given, *top.given):
            self._put(given)
        warnings = [*above.warnings, *self._template(environ)]
        self._root_files()
        settings = self._validate()
        self._faults += [self._fault(problem) for problem in self._problems()]
        if self._faults or settings is None:
            raise ConfigError(self._faults)
        warnings += [
            f"the model {model.name!r} has no engines: requests for it can't be served"
            for model in settings.models
            if not model.engines
        ]
        if settings.limits.users and settings.redis.url is None:
            warnings.append("limits.users is on without redis.url: each replica counts by itself")
        return Loaded(settings, tuple(warnings), self._origins())

    def _section(self, *place: str) -> dict[str, object]:
        """A section to read or write in; what is no mapping there is left as it is and judged later."""
        node: object = self._data
        for part in place:
            if not isinstance(node, dict):
                return {}
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        return node if isinstance(node, dict) else {}

    def _put(self, given: Given) -> None:
        if isinstance(given.value, str) and not _is_text(given.value):
            self._faults.append(Fault(given.origin, dotted(given.place), "is not UTF-8 text", "correct it"))
            return
        self._section(*given.place[:-1])[given.place[-1]] = given.value
        self._given[given.place] = given.origin

    def _template(self, environ: Mapping[str, str]) -> Iterator[str]:
        if not environ.get(TEMPLATE, "").strip():
            return
        place = ("tokenizer", "remote", "endpoint")
        if self._section(*place[:-1]).get("endpoint") is None:
            self._put(Given(place, "engines", TEMPLATE))
            yield f"{TEMPLATE}: the engines tokenize, each at its own url; the template's port is not used"
        else:
            yield f"{TEMPLATE} is not used: an endpoint is set ({self._origin(place)})"

    def _root_files(self) -> None:
        """A file or folder named in the file is looked for beside it."""
        if self._file is None:
            return
        for *above, name in (place for place in FILES if place not in self._given):
            self._root(self._peek(above), name)
        for model in self._listed("models"):
            self._root(model, "tokenizer")
        for tenant in self._listed("tenants"):
            self._root(tenant, "api_keys_file")

    def _root(self, section: object, name: str) -> None:
        assert self._file is not None
        if isinstance(section, dict) and isinstance(path := section.get(name), str):
            section[name] = str(self._file.parent / path)

    def _peek(self, place: Sequence[str]) -> object:
        node: object = self._data
        for part in place:
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def _listed(self, name: str) -> list[Any]:
        listed = self._data.get(name)
        return listed if isinstance(listed, list) else []

    def _validate(self) -> Settings | None:
        try:
            return _strict(Settings, self._data)
        except ValidationError as error:
            # To look for what was meant costs a while for each: only for those that are shown.
            self._faults += (self._explained(each, n < SHOWN) for n, each in enumerate(error.errors()))
            return None

    def _explained(self, error: ErrorDetails, shown: bool) -> Fault:
        path, kind = tuple(error["loc"]), error["type"]
        origin, name = self._origin(path), dotted(path)
        if kind == "extra_forbidden":
            meant = nearest(str(path[-1]), _fields(path[:-1])) if shown else None
            return Fault(origin, name, "is not a setting", f"was {meant!r} meant?" if meant else "remove it")
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, ValueError):
            return Fault(origin, name, str(cause), getattr(cause, "mend", "correct it"))
        if kind == "missing":
            return Fault(origin, name, "is missing", "add it")
        given = repr(error["input"])
        given = given if len(given) <= 80 else given[:77] + "..."
        if not SECRETS.isdisjoint(path):
            given = "a value that is not shown"
        message = error["msg"][:1].lower() + error["msg"][1:]
        return Fault(origin, name, f"{given}: {message}", mend_of(kind))

    def _problems(self) -> Iterator[Problem]:
        gateway, admin = self._sound(GatewaySettings, "gateway"), self._sound(AdminSettings, "admin")
        models = list(self._sound_models())
        extproc = self._sound(ExtProcSettings, "extproc")
        yield from check_listeners(gateway, extproc, admin)
        yield from check_paths(gateway)
        yield from check_loops(gateway, models)
        yield from check_curve(_sound(CurveSettings, self._section("events").get("curve") or {}))
        kubernetes = self._sound(KubernetesSettings, "kubernetes")
        yield from (Problem(("kubernetes", each.field), each.message, each.mend) for each in unfit(kubernetes))
        yield from check_models(models)
        yield from check_redis(self._sound(RedisSettings, "redis"))
        yield from check_access(
            gateway,
            extproc,
            admin,
            list(self._sound_tenants()),
            bool(self._data.get("tenants")),
        )

    def _sound(self, model: type[_Model], section: str) -> _Model | None:
        return _sound(model, self._data.get(section, {}))

    def _sound_models(self) -> Iterator[SoundModel]:
        for position, raw in enumerate(self._listed("models")):
            if not isinstance(raw, dict):
                continue
            path: Path_ = ("models", position)
            head = _sound(ModelSettings, {key: raw[key] for key in ("name", "tokenizer") if key in raw})
            listed = raw.get("engines")
            engines = [
                SoundEngine((*path, "engines", place), engine)
                for place, item in enumerate(listed if isinstance(listed, list) else ())
                if (engine := _sound(EngineSettings, item)) is not None
            ]
            yield SoundModel(path, head.name if head else None, head.tokenizer if head else None, engines)

    def _sound_tenants(self) -> Iterator[SoundTenant]:
        for position, raw in enumerate(self._listed("tenants")):
            tenant = _sound(TenantSettings, raw)
            if tenant is not None:
                yield SoundTenant(("tenants", position), tenant)

    def _fault(self, problem: Problem) -> Fault:
        return Fault(self._origin(problem.path), dotted(problem.path), problem.message, problem.mend)

    def _origin(self, path: Path_) -> str:
        """Where the nearest part that was given stands."""
        for end in range(len(path), 0, -1):
            if origin := self._given.get(path[:end]):
                return origin
            if line := self._lines.get(path[:end]):
                return f"{self._file}:{line}"
        return str(self._file) if self._file is not None else dotted(path)

    def _origins(self) -> dict[str, str]:
        places = {**{path: f"{self._file}:{line}" for path, line in self._lines.items()}, **self._given}
        return {dotted(path): origin for path, origin in places.items()}


def _strict(model: type[_Model], data: object) -> _Model:
    """Validated as JSON: there lists are tuples and text is a path, but text is no number."""
    return model.model_validate_json(json.dumps(data, default=_text), strict=True)


def _text(value: object) -> str:
    """A path, which the environment's layer has as one."""
    assert isinstance(value, Path), value
    return str(value)


def _is_text(value: str) -> bool:
    """Bytes that are not UTF-8 come from the environment and the command line as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sound(model: type[_Model], data: object) -> _Model | None:
    try:
        return _strict(model, data)
    except ValidationError:
        return None


def _fields(path: Path_) -> list[str]:
    """The settings of the section at ``path``."""
    model: type[BaseModel] = Settings
    for part in path:
        if part == "models":
            model = ModelSettings
        elif part == "tenants":
            model = TenantSettings
        elif part == "engines":
            model = EngineSettings
        elif isinstance(part, str) and part in model.model_fields:
            inner = model.model_fields[part].annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                model = inner
    return list(model.model_fields)


__all__ = ["Loaded", "load", "read"]
