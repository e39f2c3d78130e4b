"""What no single setting can show: names given twice, ports that overlap, folders that are not there.

These checks look at whatever parts are sound in themselves, so that they run even when other parts are not: a faulty
file gets all of its faults at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from kvsync.config.addresses import Address, http_address, loopback, tcp_address
from kvsync.config.curve import BadKey, secret_key
from kvsync.config.extproc import ExtProcSettings
from kvsync.config.model import AdminSettings, CurveSettings, EngineSettings, GatewaySettings
from kvsync.config.yamlfile import Path_, dotted

_MODELS = "/v1/models"


class Problem(NamedTuple):
    path: Path_
    message: str
    mend: str


class SoundEngine(NamedTuple):
    path: Path_
    settings: EngineSettings


class SoundModel(NamedTuple):
    path: Path_
    name: str | None
    tokenizer: Path | None
    engines: Sequence[SoundEngine]


def check_models(models: Sequence[SoundModel]) -> Iterator[Problem]:
    yield from _names(models)
    yield from _adapters(models)
    yield from _ports([engine for model in models for engine in model.engines])
    for model in models:
        if model.tokenizer is not None and not (model.tokenizer / "tokenizer.json").is_file():
            message = f"{model.tokenizer} is not a folder with a tokenizer.json"
            yield Problem((*model.path, "tokenizer"), message, "give the model's folder, or remove the line")


def check_listeners(
    gateway: GatewaySettings | None, extproc: ExtProcSettings | None, admin: AdminSettings | None
) -> Iterator[Problem]:
    """One port at least takes requests, and no two ports are one."""
    if gateway is not None and extproc is not None and not (gateway.enabled or extproc.enabled):
        message = "is false, and extproc.enabled too: no port takes requests"
        yield Problem(("gateway", "enabled"), message, "set one of the two to true")
    listeners: list[tuple[str, str, GatewaySettings | ExtProcSettings | AdminSettings]] = []
    if gateway is not None and gateway.enabled:
        listeners.append(("gateway", "the gateway's", gateway))
    if extproc is not None and extproc.enabled:
        listeners.append(("extproc", "the external processor's", extproc))
    if admin is not None:
        listeners.append(("admin", "the admin", admin))
    for number, (place, _, one) in enumerate(listeners):
        for _, whose, other in listeners[:number]:
            if one.port == other.port and one.port and (one.host == other.host or _any(one.host) or _any(other.host)):
                yield Problem((place, "port"), f"{one.port} is {whose} port too", "give the two different ports")


def check_paths(gateway: GatewaySettings | None) -> Iterator[Problem]:
    """The model list is the gateway's own."""
    for place, path in enumerate(gateway.extra_paths if gateway is not None else ()):
        if path == _MODELS or path.startswith(_MODELS + "/"):
            yield Problem(("gateway", "extra_paths", place), f"{path} is answered by the gateway itself", "remove it")


def check_loops(gateway: GatewaySettings | None, models: Sequence[SoundModel]) -> Iterator[Problem]:
    """No engine is this gateway, as far as its own settings tell: a request there would go round until no connection is
    left."""
    if gateway is None or not gateway.enabled or not gateway.port:
        return
    for path, engine in (engine for model in models for engine in model.engines):
        address = http_address(engine.url)
        here = address.host == gateway.host
        here = here or (loopback(address.host) and (_any(gateway.host) or loopback(gateway.host)))
        if here and address.port == gateway.port:
            message = f"{engine.url} is this gateway's own data port"
            yield Problem((*path, "url"), message, "give the engine's address, or another gateway.port")


def check_curve(curve: CurveSettings | None) -> Iterator[Problem]:
    """All of the keys or none, and a file that holds one."""
    if curve is None:
        return
    place = ("events", "curve")
    given = [name for name in type(curve).model_fields if getattr(curve, name) is not None]
    for name in type(curve).model_fields:
        if given and name not in given:
            message = f"is missing beside {' and '.join(given)}"
            yield Problem((*place, name), message, "CURVE needs all three: add it, or remove the others")
    if curve.secret_key_file is not None:
        try:
            secret_key(curve.secret_key_file)
        except BadKey as bad:
            yield Problem((*place, "secret_key_file"), str(bad), bad.mend)


def _any(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _names(models: Sequence[SoundModel]) -> Iterator[Problem]:
    seen_models: dict[str, Path_] = {}
    seen_engines: dict[str, Path_] = {}
    for model in models:
        if model.name is not None and (first := seen_models.setdefault(model.name, model.path)) != model.path:
            message = f"the model {model.name!r} is listed already ({dotted(first)})"
            yield Problem((*model.path, "name"), message, "list a model once, with all of its engines")
        for engine in model.engines:
            name = engine.settings.name
            if (first := seen_engines.setdefault(name, engine.path)) != engine.path:
                message = f"the engine name {name!r} is taken ({dotted(first)})"
                yield Problem((*engine.path, "name"), message, "give every engine a name of its own")


def _adapters(models: Sequence[SoundModel]) -> Iterator[Problem]:
    names = {model.name for model in models}
    owner: dict[str, tuple[Path_, str | None]] = {}
    for model in models:
        for engine in model.engines:
            mine: set[str] = set()
            for position, adapter in enumerate(engine.settings.adapters):
                path = (*engine.path, "adapters", position)
                if adapter in names:
                    yield Problem(path, f"the adapter {adapter!r} has the name of a model", "rename one of them")
                elif adapter in mine:
                    yield Problem(path, f"the adapter {adapter!r} is listed twice", "remove one")
                elif (first := owner.setdefault(adapter, (model.path, model.name)))[0] != model.path:
                    message = f"the adapter {adapter!r} belongs to the model {first[1]!r} already"
                    yield Problem(path, message, "an adapter's name has to say which model it is of: rename one")
                mine.add(adapter)


def _ports(engines: Sequence[SoundEngine]) -> Iterator[Problem]:
    """No two sockets of the fleet at one host and port; rank r of an engine is at its event and replay port + r."""
    taken: dict[tuple[str, int], tuple[Path_, str]] = {}
    for path, engine in engines:
        if engine.replay is not None and engine.events is None:
            mend = "give `events` as well, or neither: then the engine is asked"
            yield Problem((*path, "replay"), "is given without `events`", mend)
        for field, address, count in _sockets(engine):
            last = address.port + count - 1
            if last > 65_535:
                message = f"rank {count - 1} would be at port {last}"
                yield Problem((*path, field), message, "choose a lower port")
                continue
            for port in range(address.port, last + 1):
                what = f"{field} of {engine.name!r}" + (f", rank {port - address.port}" if count > 1 else "")
                mine = ((*path, field), what)
                first = taken.setdefault((address.host, port), mine)
                if first is not mine:
                    message = f"port {port} of {address.host} is taken: {first[1]}"
                    mend = "an engine's ranks need as many ports from each of `events` and `replay`: keep them apart"
                    if field == "url":
                        mend = "list every engine once, at its own address"
                    yield Problem((*path, field), message, mend)
                    break


def _sockets(engine: EngineSettings) -> Iterator[tuple[str, Address, int]]:
    yield "url", http_address(engine.url), 1
    if engine.events is not None:
        yield "events", tcp_address(engine.events), engine.data_parallel_size
    if engine.replay is not None:
        yield "replay", tcp_address(engine.replay), engine.data_parallel_size


__all__ = [
    "Problem",
    "SoundEngine",
    "SoundModel",
    "check_curve",
    "check_listeners",
    "check_loops",
    "check_models",
    "check_paths",
]
