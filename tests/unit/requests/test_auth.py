"""Tenants by their keys, and the salts that become of who they are."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.config import Settings
from kvsync.config.credentials import BadFile
from kvsync.requests.auth import STRANGER, Tenant, Tenants
from kvsync.requests.errors import Problem
from kvsync.requests.headers import Field
from kvsync.requests.salts import Salts

A, B = "key-of-tenant-a-0123456789", "key-of-tenant-b-0123456789"
SECRET = "a secret never shown".replace(" ", "-")


def settings(**more: object) -> Settings:
    given = {"gateway": {"cache_salt": "enforce", "salt_secret": SECRET}, "tenants": tenants()}
    return Settings.model_validate({**given, **more})


def tenants(**more: object) -> list[dict[str, object]]:
    b = hashlib.sha256(B.encode()).hexdigest()
    return [{"name": "a", "api_keys": [A], **more}, {"name": "b", "api_key_hashes": [b.upper()], "cache_salt": "strip"}]


def authorization(*values: str | bytes) -> list[Field]:
    raw = [value if isinstance(value, bytes) else value.encode() for value in values]
    return [(b"host", b"Host", b"g"), *((b"authorization", b"Authorization", value) for value in raw)]


# ---- who it is


def test_keys_and_hashes_of_keys_name_their_tenant_and_its_policy() -> None:
    found = Tenants(settings())
    assert found.closed
    assert found.identify(authorization(f"Bearer {A}")) == Tenant("a", "enforce")
    assert found.identify(authorization(f"bEARER   {B} \t")) == Tenant("b", "strip")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((), "no_api_key"),
        (("",), "no_api_key"),
        (("Bearer",), "no_api_key"),
        (("Bearer ",), "no_api_key"),
        ((A,), "no_api_key"),
        ((f"Basic {A}",), "no_api_key"),
        ((f"Bearer{A}",), "no_api_key"),
        ((f"Bearer\t{A}",), "no_api_key"),
        ((f"Bearer {A} {A}",), "no_api_key"),
        ((f"Bearer {A},Bearer {A}",), "no_api_key"),
        ((f"Bearer {A}", f"Bearer {A}"), "no_api_key"),
        ((f"Bearer {A}", "Bearer"), "no_api_key"),
        ((b"Bearer \xff\xfe" + A.encode(),), "no_api_key"),
        ((f"Bearer {A}x",), "wrong_api_key"),
        ((f"Bearer {A[:-1]}",), "wrong_api_key"),
        ((f"Bearer {A.upper()}",), "wrong_api_key"),
        ((f"Bearer {hashlib.sha256(A.encode()).hexdigest()}",), "wrong_api_key"),
        ((f"Bearer {hashlib.sha256(B.encode()).hexdigest()}",), "wrong_api_key"),
        ((f"Bearer {A},",), "wrong_api_key"),
        (("Bearer " + "x" * 60_000,), "wrong_api_key"),
    ],
)
def test_whatever_is_no_key_alone_is_refused(values: tuple[str | bytes, ...], reason: str) -> None:
    with pytest.raises(Problem) as refused:
        Tenants(settings()).identify(authorization(*values))
    assert (refused.value.status, refused.value.reason) == (401, reason)
    assert dict(refused.value.headers)[b"www-authenticate"].startswith(b"Bearer")
    assert A.encode() not in refused.value.body()


@given(st.binary(max_size=80))
def test_no_bytes_but_a_key_let_anybody_in(value: bytes) -> None:
    with pytest.raises(Problem):
        Tenants(settings()).identify(authorization(value))


def test_without_tenants_everybody_comes_in_with_the_gateway_s_policy() -> None:
    found = Tenants(Settings.model_validate({"gateway": {"cache_salt": "strip"}}))
    assert not found.closed
    assert found.identify([]) == Tenant("", "strip")


# ---- changes


def test_a_keys_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of tenant a\n\n{A}\r\n")
    found = Tenants(settings(tenants=[{"name": "a", "api_keys_file": file}]))
    assert found.identify(authorization(f"Bearer {A}")).name == "a"
    (tmp_path / "new").write_text(f"{B}\n")
    (tmp_path / "new").rename(file)
    assert found.check() == "applied"
    with pytest.raises(Problem):
        found.identify(authorization(f"Bearer {A}"))
    assert found.identify(authorization(f"Bearer {B}")).name == "a"
    for broken in (b"short\n", b"\xff" * 20, B.encode() + b" \x00 a blank in it\n"):
        file.write_bytes(broken)
        assert found.check() == "broken"
    file.unlink()
    assert found.check() == "broken"
    assert found.identify(authorization(f"Bearer {B}")).name == "a"
    assert B not in caplog.text
    assert "short" not in caplog.text


def test_a_reload_takes_new_tenants_over_and_never_opens_the_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Tenants(Settings())
    assert not found.closed
    found.update(settings(tenants=tenants()[:1]))
    assert found.closed
    assert found.identify(authorization(f"Bearer {A}")) == Tenant("a", "pass")  # the gateway's policy takes a new start
    found.update(settings())
    assert found.identify(authorization(f"Bearer {B}")).name == "b"
    found.update(Settings())
    found.update(settings(tenants=[{"name": "c", "api_keys_file": tmp_path / "nowhere"}]))
    assert found.identify(authorization(f"Bearer {A}")).name == "a"
    found.update(settings(tenants=tenants(cache_salt="enforce")))  # there was no secret at the start
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3
    assert "only a new start opens" in caplog.messages[0]
    assert "gateway.salt_secret" in caplog.messages[2]
    assert found.identify(authorization(f"Bearer {A}")) == Tenant("a", "pass")
    found.update(settings(tenants=tenants()[:1]))
    with pytest.raises(Problem):
        found.identify(authorization(f"Bearer {B}"))


def test_a_key_that_two_files_hold_is_nobody_s(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(A)
    both = [{"name": name, "api_keys_file": tmp_path / name} for name in ("one", "two")]
    with pytest.raises(BadFile, match="also one of 'one'"):
        Tenants(settings(tenants=both))


# ---- salts

SALTS = Salts(settings().gateway)
CHAT = "/v1/chat/completions"


def salted(tenant: Tenant, text: bytes, path: str = CHAT) -> tuple[bytes, dict[str, object]]:
    asked = json.loads(text)
    return SALTS.apply(tenant, path, asked, text), asked


def test_nothing_is_edited_unless_it_has_to_be() -> None:
    text = b'{"model":"m", "cache_salt":"s"}'
    plain = b'{"model":"m"}'
    assert SALTS.apply(STRANGER, CHAT, json.loads(text), text) is text
    assert SALTS.apply(Tenant("b", "strip"), CHAT, json.loads(plain), plain) is plain
    assert SALTS.apply(Tenant("a", "enforce"), "/tokenize", json.loads(text), text) is text


def test_a_salt_is_stripped_in_every_spelling() -> None:
    text = b'{"cache_salt":"s","model":"m","cache\\u005fsalt":"t","x":1e400}'
    assert salted(Tenant("b", "strip"), text) == (b'{"model":"m","x":1e400}', {"model": "m", "x": float("inf")})


@given(st.text(max_size=8), st.text(max_size=8), st.sampled_from(["a", "b", "ab"]), st.sampled_from(["a", "b", "ab"]))
def test_tenants_never_meet_and_equal_requests_of_one_always_do(one: str, other: str, mine: str, yours: str) -> None:
    """(X3) Whatever salts two tenants send, theirs differ; one tenant's are equal exactly if it sent equal ones."""
    equal = SALTS.enforced(mine, one) == SALTS.enforced(yours, other)
    assert equal == ((mine, one) == (yours, other))


def test_an_enforced_salt_is_what_engine_tokenizer_and_index_see() -> None:
    """(X3) B sends the salt that A's requests carry at the engine: B gets another one."""
    text, asked = salted(Tenant("a", "enforce"), b'{"model":"m"}')
    a = asked["cache_salt"]
    assert isinstance(a, str)
    assert json.loads(text) == asked == {"model": "m", "cache_salt": a}
    assert len(a) == 43
    assert set(a) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert salted(Tenant("a", "enforce"), b'{"model":"m","cache_salt":null}')[1]["cache_salt"] == a
    text, asked = salted(Tenant("b", "enforce"), b'{"model":"m","cache_salt":"%b"}' % a.encode())
    assert asked["cache_salt"] != a
    assert a.encode() not in text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/embeddings", "/v1/score"])
def test_where_an_engine_may_ignore_a_salt_none_is_enforced(path: str) -> None:
    """(X3) vLLM before 0.32 takes no salt at /v1/messages: all tenants would share a cache there."""
    with pytest.raises(Problem) as refused:
        salted(Tenant("a", "enforce"), b'{"model":"m"}', path)
    assert (refused.value.status, refused.value.reason) == (403, "salt_not_enforceable")
    assert "gateway.salted_paths" in refused.value.message
    opened = Salts(settings(gateway={"salted_paths": [path], "salt_secret": SECRET}).gateway)
    assert b"cache_salt" in opened.apply(Tenant("a", "enforce"), path, {}, b'{"model":"m"}')


@pytest.mark.parametrize("asked", [b"true", b"1", b'"yes"', b'"true"', b"{}"])
def test_a_beam_search_which_may_drop_the_salt_is_refused(asked: bytes) -> None:
    """(X3) Older engines make each beam's prompts anew, without it: their blocks would be in the cache of all."""
    text = b'{"model":"m","use_beam_search":%b}' % asked
    with pytest.raises(Problem) as refused:
        salted(Tenant("a", "enforce"), text)
    assert (refused.value.status, refused.value.reason) == (403, "salt_not_enforceable")
    assert refused.value.param == "use_beam_search"
    assert salted(Tenant("b", "pass"), text)[0] == text


@pytest.mark.parametrize("asked", [b"false", b"null", b"0"])
def test_who_asks_for_no_beam_search_is_not_refused_for_saying_so(asked: bytes) -> None:
    assert b"cache_salt" in salted(Tenant("a", "enforce"), b'{"model":"m","use_beam_search":%b}' % asked)[0]


@pytest.mark.parametrize("salt", [b"1", b"true", b'["s"]', b'{"s":1}', b"0"])
def test_a_salt_that_is_no_text_is_refused_and_not_hidden(salt: bytes) -> None:
    with pytest.raises(Problem) as refused:
        salted(Tenant("a", "enforce"), b'{"cache_salt":%b}' % salt)
    assert refused.value.reason == "salt_not_string"


def test_another_secret_makes_other_salts(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("another-secret-of-length\n")
    other = Salts(settings(gateway={"salt_secret_file": file}).gateway)
    assert other.enforced("a", None) != SALTS.enforced("a", None)
    assert other.enforced("a", None) == other.enforced("a", "")
    file.write_text("too short")
    with pytest.raises(BadFile):
        Salts(settings(gateway={"salt_secret_file": file}).gateway)
