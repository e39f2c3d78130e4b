"""Where Redis is, in every way to say it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsync.config import read
from kvsync.config.addresses import BadAddress, redis_address
from tests.unit.config.conftest import Faults


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("redis://redis", "redis://redis:6379"),
        ("redis://Redis.Example:7000/", "redis://redis.example:7000"),
        ("rediss://10.0.0.5:6380/3", "rediss://10.0.0.5:6380/3"),
        ("redis://[2001:db8::1]", "redis://[2001:db8::1]:6379"),
        ("redis://[2001:db8::1]:7000/0", "redis://[2001:db8::1]:7000"),
        ("redis://a,b:7000,[::1]:7001", "redis://a:6379,b:7000,[::1]:7001"),
    ],
)
def test_addresses(text: str, meant: str) -> None:
    assert str(redis_address(text)) == meant
    assert redis_address(meant) == redis_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "redis",
        "redis:6379",
        "http://redis:6379",
        "redis://",
        "redis://:6379",
        "redis://a,,b",
        "redis://a:0",
        "redis://a:65536",
        "redis://a:b",
        "redis://a/x",
        "redis://a/-1",
        "redis://a/1/2",
        "redis://a/٣",
        "redis://a?ssl_cert_reqs=none",
        "redis://a b",
        "redis://a\n",
        "redis://0.0.0.0",
        "redis://::1",
        "unix:///redis.sock",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BadAddress):
        redis_address(text)


def test_secrets_do_not_stand_in_a_url(faults: Faults) -> None:
    (fault,) = faults(environ={"KVSYNC_REDIS_URL": "redis://:geheim@redis:6379"})
    assert "redis.password_file" in str(fault)
    assert "geheim" not in str(fault)


@pytest.mark.parametrize(
    ("section", "path", "says"),
    [
        ({"url": "redis://a,b"}, "redis.url", "names 2 servers"),
        ({"url": "redis://a/1", "mode": "cluster"}, "redis.url", "a cluster has only 0"),
        ({"url": "redis://a", "mode": "sentinel"}, "redis.sentinel_service", "sentinels need"),
        ({"url": "redis://a", "sentinel_service": "main"}, "redis.sentinel_service", "nothing else does"),
        ({"url": "redis://a", "tls": {"ca": "nowhere"}}, "redis.tls.ca", "can't be read"),
        ({"url": "redis://a", "tls": {"server_name": "b"}}, "redis.tls", "rediss://"),
        ({"password": "a", "password_file": "b"}, "redis.password_file", "beside password"),
        ({"password_file": "nowhere"}, "redis.password_file", "can't be read"),
        ({"password": 7}, "redis.password", "not shown"),
        ({"prefix": "a:b"}, "redis.prefix", "pattern"),
        ({"budget": 0}, "redis.budget", "greater than 0"),
        ({"load": {"interval": 1.5}}, "redis.load.lifetime", "too short"),
        ({"snapshots": {"interval": 301}}, "redis.snapshots.lifetime", "too short"),
        ({"load": {"interval": 0.001}}, "redis.load.interval", "greater than or equal"),
        ({"address": "a"}, "redis.address", "is not a setting"),
    ],
)
def test_faults(faults: Faults, section: object, path: str, says: str) -> None:
    found = {fault.path: str(fault) for fault in faults(f"redis: {json.dumps(section)}\n")}
    assert says in found[path]


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines\n", b"\xff\xfe", b"x" * (2 << 20)])
def test_a_file_that_holds_no_password(tmp_path: Path, faults: Faults, content: bytes) -> None:
    (tmp_path / "password").write_bytes(content)
    (fault,) = faults('redis: {url: "redis://a", password_file: password}\n')
    assert fault.path == "redis.password_file"


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({"REDIS_HOST": "redis"}, "redis://redis:6379"),
        ({"REDIS_HOST": "redis", "REDIS_PORT": "7000"}, "redis://redis:7000"),
        ({"REDIS_HOST": "2001:db8::1", "REDIS_PORT": "7000"}, "redis://[2001:db8::1]:7000"),
        ({"REDIS_HOST": "redis", "KVSYNC_REDIS_URL": "redis://mine"}, "redis://mine:6379"),
    ],
)
def test_aibrix_s_variables(environ: dict[str, str], url: str) -> None:
    loaded = read(None, {**environ, "REDIS_PASSWORD": "p w"}, {})
    assert loaded.settings.redis.url == url
    assert loaded.settings.redis.password is not None
    assert loaded.settings.redis.password.get_secret_value() == "p w"
    assert not loaded.warnings


def test_service_links_of_kubernetes_turn_nothing_on() -> None:
    links = {
        "REDIS_SERVICE_HOST": "10.0.0.1",
        "REDIS_SERVICE_PORT": "6379",
        "REDIS_PORT": "tcp://10.0.0.1:6379",
        "REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
    }
    loaded = read(None, links, {})
    assert loaded.settings.redis.url is None
    assert loaded.warnings == ("REDIS_PORT is not used: REDIS_HOST is not set",)
    loaded = read(None, {**links, "REDIS_HOST": "redis"}, {})
    assert loaded.settings.redis.url == "redis://redis:6379"
    assert "Kubernetes set it" in loaded.warnings[0]
    links = {"KVSYNC_REDIS_SERVICE_HOST": "10.0.0.1", "KVSYNC_REDIS_PORT": "tcp://10.0.0.1:6379"}
    assert read(None, links, {}).settings.redis.url is None


def test_a_bad_host_is_a_fault(faults: Faults) -> None:
    (fault,) = faults(environ={"REDIS_HOST": "red is"})
    assert str(fault).startswith("REDIS_HOST: redis.url")


def test_limits_without_redis_are_warned_of() -> None:
    (warning,) = read(None, {"KVSYNC_LIMITS_USERS": "true"}, {}).warnings
    assert "each replica counts by itself" in warning
    assert not read(None, {"KVSYNC_LIMITS_USERS": "true", "REDIS_HOST": "redis"}, {}).warnings
