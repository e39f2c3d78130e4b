"""Tenants, secrets and certificates in the configuration: faults at once, each with its mend; no secret is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from pydantic import BaseModel, SecretStr

from kvsync.cli import main
from kvsync.config import ConfigError, Settings, TenantSettings, read
from kvsync.config.access import SECRETS
from kvsync.config.live import Live
from tests.certificates import Authority
from tests.unit.config.conftest import Faults

KEY = "a-key-that-nobody-may-see"
OTHER = "another-key-nobody-may-see"
SALT = "a-salt-that-nobody-may-see"


def yaml(**sections: object) -> str:
    """JSON is YAML; one section a line, so that origins have lines."""
    return "\n".join(f"{name}: {json.dumps(section)}" for name, section in sections.items()) + "\n"


@pytest.mark.parametrize(
    ("sections", "path", "says"),
    [
        ({"tenants": [{"name": "a"}]}, "tenants[0]", "has no key"),
        ({"tenants": [{"name": "a b", "api_keys": [KEY]}]}, "tenants[0].name", "pattern"),
        (
            {"tenants": [{"name": "a", "api_keys": [key]} for key in (KEY, OTHER)]},
            "tenants[1].name",
            "listed already (tenants[0])",
        ),
        (
            {"tenants": [{"name": n, "api_keys": [KEY]} for n in "ab"]},
            "tenants[1]",
            "a key of 'b' is also one of tenants[0]",
        ),
        ({"tenants": [{"name": "a", "api_keys": ["short"]}]}, "tenants[0].api_keys[0]", "openssl rand"),
        ({"tenants": [{"name": "a", "api_keys": ["not a key, it has blanks"]}]}, "tenants[0].api_keys[0]", "visible"),
        ({"tenants": [{"name": "a", "api_keys": [12345678901234567]}]}, "tenants[0].api_keys[0]", "not shown"),
        ({"tenants": [{"name": "a", "api_keys": KEY}]}, "tenants[0].api_keys", "write a list"),
        ({"tenants": [{"name": "a", "api_key_hashes": ["12"]}]}, "tenants[0].api_key_hashes[0]", "sha256sum"),
        ({"tenants": [{"name": "a", "api_keys_file": "nowhere"}]}, "tenants[0].api_keys_file", "can't be read"),
        ({"tenants": [{"name": "a", "api_key": [KEY]}]}, "tenants[0].api_key", "was 'api_keys' meant?"),
        ({"gateway": {"cache_salt": "enforce"}}, "gateway.cache_salt", "add `tenants`"),
        (
            {"gateway": {"cache_salt": "enforce"}, "tenants": [{"name": "a", "api_keys": [KEY]}]},
            "gateway.cache_salt",
            "gateway.salt_secret",
        ),
        (
            {"tenants": [{"name": "a", "api_keys": [KEY], "cache_salt": "enforce"}]},
            "tenants[0].cache_salt",
            "gateway.salt_secret",
        ),
        ({"gateway": {"cache_salt": "hash"}}, "gateway.cache_salt", "'pass', 'enforce' or 'strip'"),
        ({"gateway": {"salt_secret": "short"}}, "gateway.salt_secret", "openssl rand"),
        ({"gateway": {"salt_secret": SALT, "salt_secret_file": "f"}}, "gateway.salt_secret_file", "one of the two"),
        ({"gateway": {"salt_secret_file": "f"}}, "gateway.salt_secret_file", "can't be read"),
        ({"gateway": {"engine_api_key": KEY, "engine_api_key_file": "f"}}, "gateway.engine_api_key_file", "one of"),
        ({"gateway": {"engine_api_key": [KEY]}}, "gateway.engine_api_key", "not shown"),
        ({"gateway": {"salted_paths": ["chat"]}}, "gateway.salted_paths[0]", "pattern"),
        ({"gateway": {"tls": {"cert": "c"}}}, "gateway.tls.cert", "without key"),
        ({"gateway": {"tls": {"client_ca": "c"}}}, "gateway.tls.client_ca", "without cert and key"),
        ({"admin": {"tls": {"key": "k"}}}, "admin.tls.key", "without cert"),
        ({"admin": {"tls": {"cert": "c", "key": "k"}}}, "admin.tls.cert", "can't be read"),
        ({"gateway": {"engine_tls": {"ca": "c"}}}, "gateway.engine_tls.ca", "can't be read"),
        ({"gateway": {"engine_tls": {"cert": "c"}}}, "gateway.engine_tls.cert", "without key"),
        ({"gateway": {"engine_tls": {"server_name": "a/b"}}}, "gateway.engine_tls.server_name", "pattern"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_mend(
    faults: Faults, sections: dict[str, object], path: str, says: str
) -> None:
    (fault,) = faults(yaml(**sections))
    assert fault.path == path
    assert says in str(fault)
    assert fault.origin.rpartition(":")[2].isdigit()
    assert not any(secret in str(fault) for secret in (KEY, SALT, "short", "12345678901234567"))


def test_all_of_it_is_said_at_once(faults: Faults) -> None:
    found = faults(
        yaml(
            gateway={"cache_salt": "enforce", "tls": {"cert": "c"}, "engine_tls": {"ca": "c"}},
            admin={"tls": {"key": "k"}},
            tenants=[{"name": "a"}, {"name": "b", "api_keys": ["short"]}, {"name": "c", "api_keys_file": "f"}],
        )
    )
    assert sorted(fault.path for fault in found) == [
        "admin.tls.key",
        "gateway.cache_salt",
        "gateway.engine_tls.ca",
        "gateway.tls.cert",
        "tenants[0]",
        "tenants[1].api_keys[0]",
        "tenants[2].api_keys_file",
    ]


def test_files_are_looked_for_beside_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    authority = Authority(folder)
    authority.issue("gateway.test")
    (folder / "keys").write_text(KEY)
    (folder / "salt").write_text(SALT)
    sections = {
        "gateway": {
            "tls": {"cert": "port.crt", "key": "port.key"},
            "engine_tls": {"ca": "ca.pem"},
            "salt_secret_file": "salt",
            "cache_salt": "enforce",
        },
        "tenants": [{"name": "a", "api_keys_file": "keys"}],
    }
    (folder / "kvsync.yaml").write_text(yaml(**sections))
    monkeypatch.chdir(tmp_path)
    settings = read(Path("etc/kvsync.yaml"), {}, {}).settings
    assert settings.gateway.tls.cert == Path("etc/port.crt")
    assert settings.tenants[0].api_keys_file == Path("etc/keys")
    # What the environment names is looked for where the process runs.
    (tmp_path / "elsewhere").write_text(SALT)
    loaded = read(Path("etc/kvsync.yaml"), {"KVSYNC_GATEWAY_SALT_SECRET_FILE": "elsewhere"}, {})
    assert loaded.settings.gateway.salt_secret_file == Path("elsewhere")


def test_secrets_from_the_environment_and_no_secret_in_what_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "kvsync.yaml"
    file.write_text(yaml(tenants=[{"name": "a", "api_keys": [KEY, OTHER], "api_key_hashes": ["ab" * 32]}]))
    environ = {"KVSYNC_GATEWAY_ENGINE_API_KEY": OTHER, "KVSYNC_GATEWAY_SALT_SECRET": SALT}
    loaded = read(file, environ, {})
    assert loaded.settings.gateway.engine_api_key == SecretStr(OTHER)
    result = CliRunner().invoke(main, ["config", "check", str(file)], env=environ)
    assert result.exit_code == 0
    assert "tenants[0].name = a" in result.output
    assert "gateway.engine_api_key = ****" in result.output
    shown = result.output + repr(loaded) + str(loaded.settings) + loaded.settings.model_dump_json()
    assert not any(secret in shown for secret in (KEY, OTHER, SALT, "abab"))


def test_tls_towards_engines_that_have_none_is_doubted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for scheme, doubted in (("http", True), ("https", False)):
        engines = [{"name": "e", "url": f"{scheme}://h:1"}]
        file = tmp_path / "kvsync.yaml"
        file.write_text(
            yaml(gateway={"engine_tls": {"ca": authority.file.name}}, models=[{"name": "m", "engines": engines}])
        )
        result = CliRunner().invoke(main, ["config", "check", str(file)])
        assert ("gateway.engine_tls is not used" in result.output) == doubted


@pytest.mark.parametrize("name", ["KVSYNC_GATEWAY_ENGINE_API_KEY", "KVSYNC_GATEWAY_SALT_SECRET"])
def test_a_secret_that_the_environment_gives_wrongly_is_not_repeated(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(None, {name: "hush hush"}, {})
    assert "hush" not in str(refused.value)
    assert name in str(refused.value)


def _secret_fields(model: type[BaseModel]) -> set[str]:
    found: set[str] = set()
    for name, field in model.model_fields.items():
        kinds: list[Any] = [field.annotation]
        while kinds:
            kind = kinds.pop()
            if kind is SecretStr:
                found.add(name)
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _secret_fields(kind)
            kinds += get_args(kind)
    return found


def test_every_secret_is_known_as_one() -> None:
    assert _secret_fields(Settings) | _secret_fields(TenantSettings) == SECRETS


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("1")
    changes = ["22"]

    def make() -> str:
        text = file.read_text()
        if changes:
            file.write_text(changes.pop())
        return text

    live = Live("it", make, [file, None])
    assert live.value == "1"
    assert live.check() == "applied"
    assert live.value == "22"
    assert live.check() == "unchanged"
