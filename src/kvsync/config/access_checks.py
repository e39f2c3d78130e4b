"""Whether tenants, keys, salts and certificates fit together, and whether the files that are named can be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvsync.config.access import TenantSettings, TlsSettings
from kvsync.config.checks import Problem
from kvsync.config.credentials import BadFile, client_context, key_hashes, secret, server_context
from kvsync.config.extproc import ExtProcSettings
from kvsync.config.model import AdminSettings, GatewaySettings
from kvsync.config.yamlfile import Path_, dotted


class SoundTenant(NamedTuple):
    path: Path_
    settings: TenantSettings


def check_access(
    gateway: GatewaySettings | None,
    extproc: ExtProcSettings | None,
    admin: AdminSettings | None,
    tenants: Sequence[SoundTenant],
    tenants_given: bool,
) -> Iterator[Problem]:
    """``tenants`` are those that are sound in themselves; ``tenants_given`` says whether there are any at all."""
    yield from _tenants(tenants)
    if gateway is not None:
        yield from _tls(("gateway", "tls"), gateway.tls)
        yield from _engine_tls(gateway)
        yield from _secrets(gateway)
        yield from _salts(gateway, tenants, tenants_given)
    if extproc is not None:
        yield from _tls(("extproc", "tls"), extproc.tls)
    if admin is not None:
        yield from _tls(("admin", "tls"), admin.tls)


def _tenants(tenants: Sequence[SoundTenant]) -> Iterator[Problem]:
    names: dict[str, Path_] = {}
    owners: dict[bytes, Path_] = {}
    for path, tenant in tenants:
        if (first := names.setdefault(tenant.name, path)) != path:
            message = f"the tenant {tenant.name!r} is listed already ({dotted(first)})"
            yield Problem((*path, "name"), message, "list a tenant once, with all of its keys")
        try:
            hashes = key_hashes(tenant)
        except BadFile as bad:
            yield Problem((*path, bad.field), str(bad), bad.mend)
            continue
        if not hashes:
            yield Problem(
                path, f"the tenant {tenant.name!r} has no key", "add api_keys, api_key_hashes or api_keys_file"
            )
        for digest in hashes:
            if (first := owners.setdefault(digest, path)) != path:
                message = f"a key of {tenant.name!r} is also one of {dotted(first)}"
                yield Problem(path, message, "a key has to say whose it is: give each tenant keys of its own")
                break


def _tls(path: Path_, tls: TlsSettings) -> Iterator[Problem]:
    if tls == TlsSettings():
        return
    try:
        server_context(tls)
    except BadFile as bad:
        yield Problem((*path, bad.field), str(bad), bad.mend)


def _engine_tls(gateway: GatewaySettings) -> Iterator[Problem]:
    try:
        client_context(gateway.engine_tls)
    except BadFile as bad:
        yield Problem(("gateway", "engine_tls", bad.field), str(bad), bad.mend)


def _secrets(gateway: GatewaySettings) -> Iterator[Problem]:
    for name in ("engine_api_key", "salt_secret"):
        given, file = getattr(gateway, name), getattr(gateway, f"{name}_file")
        if given is not None and file is not None:
            yield Problem(("gateway", f"{name}_file"), f"is given beside {name}", "give one of the two")
            continue
        try:
            secret(given, file, f"{name}_file")
        except BadFile as bad:
            yield Problem(("gateway", bad.field), str(bad), bad.mend)


def _salts(gateway: GatewaySettings, tenants: Sequence[SoundTenant], tenants_given: bool) -> Iterator[Problem]:
    if gateway.cache_salt == "enforce" and not tenants_given:
        message = "without tenants there is nobody to tell apart"
        yield Problem(("gateway", "cache_salt"), message, "add `tenants`, or choose pass or strip")
        return
    enforced = [(*path, "cache_salt") for path, tenant in tenants if tenant.cache_salt == "enforce"]
    if gateway.cache_salt == "enforce":
        enforced.append(("gateway", "cache_salt"))
    if enforced and gateway.salt_secret is None and gateway.salt_secret_file is None:
        mend = "add gateway.salt_secret or gateway.salt_secret_file, the same in every replica"
        yield Problem(enforced[-1], "enforced salts need a secret to be made with", mend)


__all__ = ["SoundTenant", "check_access"]
