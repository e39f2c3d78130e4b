"""Whether what is said about Redis fits together, and whether the files that are named can be used."""

from __future__ import annotations

from collections.abc import Iterator

from kvsync.config.access import EngineTlsSettings
from kvsync.config.addresses import redis_address
from kvsync.config.checks import Problem
from kvsync.config.credentials import BadFile, client_context, password
from kvsync.config.redis import RedisSettings


def check_redis(redis: RedisSettings | None) -> Iterator[Problem]:
    if redis is None:
        return
    place = ("redis",)
    if redis.password is not None and redis.password_file is not None:
        yield Problem((*place, "password_file"), "is given beside password", "give one of the two")
    else:
        try:
            password(redis.password, redis.password_file, "password_file")
        except BadFile as bad:
            yield Problem((*place, bad.field), str(bad), bad.mend)
    if redis.tls != EngineTlsSettings():
        try:
            client_context(redis.tls)
        except BadFile as bad:
            yield Problem((*place, "tls", bad.field), str(bad), bad.mend)
    if redis.load.lifetime < 2 * redis.load.interval:
        message = f"{redis.load.lifetime:g} s is too short for news every {redis.load.interval:g} s"
        yield Problem((*place, "load", "lifetime"), message, "give at least twice redis.load.interval")
    if redis.snapshots.lifetime < 2 * redis.snapshots.interval:
        message = f"{redis.snapshots.lifetime:g} s is too short for snapshots every {redis.snapshots.interval:g} s"
        yield Problem((*place, "snapshots", "lifetime"), message, "give at least twice redis.snapshots.interval")
    if redis.url is not None:
        yield from _url(redis, redis.url)


def _url(redis: RedisSettings, url: str) -> Iterator[Problem]:
    address = redis_address(url)
    if redis.tls != EngineTlsSettings() and not address.tls:
        yield Problem(("redis", "tls"), "is given, and redis.url is not encrypted", "write rediss:// in redis.url")
    if redis.mode == "single" and len(address.nodes) > 1:
        mend = "give one, or set redis.mode to cluster or sentinel"
        yield Problem(("redis", "url"), f"names {len(address.nodes)} servers", mend)
    if redis.mode == "cluster" and address.db:
        yield Problem(("redis", "url"), f"names database {address.db}, and a cluster has only 0", "remove it")
    if (redis.mode == "sentinel") != (redis.sentinel_service is not None):
        mend = "sentinels need redis.sentinel_service, and nothing else does"
        yield Problem(("redis", "sentinel_service"), f"does not fit redis.mode {redis.mode}", mend)


__all__ = ["check_redis"]
