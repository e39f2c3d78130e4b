"""TLS of a port: what is accepted, and that renewed files count for the next handshake without a new start."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from kvsync.config import TlsSettings
from kvsync.config.credentials import BadFile
from kvsync.gateway.tls import PortTls, port_tls
from tests.certificates import Authority


class Shaken:
    """One handshake in memory, both sides in turn."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = "gateway.test") -> None:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(to_client, to_server, server_hostname=name)
        self.server = server.wrap_bio(to_server, to_client, server_side=True)
        waiting: list[ssl.SSLObject] = [self.client, self.server]
        for _ in range(10):
            for side in list(waiting):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                waiting.remove(side)
        assert not waiting, "the handshake never ended"
        self.server.write(b"x")
        assert self.client.read(1) == b"x"

    def serial(self) -> object:
        found = self.client.getpeercert()
        assert found is not None
        return found["serialNumber"]


def unnamed(context: ssl.SSLContext) -> ssl.SSLContext:
    """A client that names no host (no SNI) and therefore checks none."""
    context.check_hostname = False
    return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def port(authority: Authority, clients: Authority | None = None) -> PortTls:
    cert, key = authority.issue("gateway.test")
    return PortTls("the port", TlsSettings(cert=cert, key=key, client_ca=clients.file if clients else None))


def test_without_a_certificate_there_is_no_tls() -> None:
    assert port_tls("the port", TlsSettings()) is None


@pytest.mark.parametrize("name", ["gateway.test", None])
def test_a_renewed_certificate_serves_the_next_handshake(authority: Authority, name: str | None) -> None:
    tls = port(authority)
    client = authority.client() if name else unnamed(authority.client())
    first = Shaken(tls.context, client, name)
    assert tls.live.check() == "unchanged"
    authority.issue("gateway.test")
    assert Shaken(tls.context, client, name).serial() == first.serial()
    assert tls.live.check() == "applied"
    assert Shaken(tls.context, client, name).serial() != first.serial()
    first.server.write(b"y")  # what was connected goes on
    assert first.client.read(1) == b"y"


def test_a_half_renewed_certificate_changes_nothing_and_is_told_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = port(authority)
    cert, key = authority.issue("gateway.test")
    old = Shaken(tls.context, authority.client()).serial()
    whole = key.read_bytes()
    key.write_bytes(authority.issue("gateway.test", name="other")[1].read_bytes())
    assert tls.live.check() == "broken"
    assert tls.live.check() == "unchanged"
    assert len(caplog.records) == 1
    assert "no certificate and the key to it" in caplog.text
    assert Shaken(tls.context, authority.client()).serial() == old
    key.write_bytes(whole)
    assert tls.live.check() == "applied"
    cert.unlink()
    assert tls.live.check() == "broken"
    assert Shaken(tls.context, authority.client()).serial() != old


@pytest.mark.parametrize("name", ["gateway.test", None])
def test_clients_show_a_certificate_of_the_authority_in_force(tmp_path: Path, name: str | None) -> None:
    """A client whose authority was exchanged has no way back in, not with an old session either."""
    authority = Authority(tmp_path)
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    tls = port(authority, old)
    context = authority.client(old) if name else unnamed(authority.client(old))
    first = Shaken(tls.context, context, name)
    with pytest.raises(ssl.SSLError):
        Shaken(tls.context, authority.client(), "gateway.test")
    with pytest.raises(ssl.SSLError):
        Shaken(tls.context, authority.client(new), "gateway.test")
    assert first.client.session is None or not first.client.session.has_ticket
    old.file.write_bytes(new.file.read_bytes())
    assert tls.live.check() == "applied"
    with pytest.raises(ssl.SSLError):
        Shaken(tls.context, context, name)
    Shaken(tls.context, authority.client(new), "gateway.test")


def test_no_protocol_before_1_2_is_spoken_and_1_3_where_clients_are_known(authority: Authority) -> None:
    context = authority.client()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert Shaken(port(authority).context, context).client.version() == "TLSv1.2"
    with pytest.raises(ssl.SSLError):
        Shaken(port(authority, authority).context, context)
    assert port(authority).context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("spoil", "field", "says"),
    [
        ("no key", "cert", "is given without key"),
        ("no cert", "key", "is given without cert"),
        ("neither", "client_ca", "is given without cert and key"),
        ("gone", "cert", "can't be read"),
        ("noise", "cert", "no certificate and the key"),
        ("encrypted", "cert", "must not be encrypted"),
        ("empty ca", "client_ca", "holds no certificates"),
        ("folder", "key", "can't be read"),
    ],
)
def test_files_that_can_not_be_used(authority: Authority, tmp_path: Path, spoil: str, field: str, says: str) -> None:
    cert, key = authority.issue("gateway.test")
    settings: dict[str, Path] = {"cert": cert, "key": key}
    if spoil == "no key":
        del settings["key"]
    elif spoil == "no cert":
        del settings["cert"]
    elif spoil == "neither":
        settings = {"client_ca": authority.file}
    elif spoil == "gone":
        cert.unlink()
    elif spoil == "noise":
        cert.write_bytes(bytes(range(256)))
    elif spoil == "encrypted":
        key.write_bytes(encrypted(key.read_bytes()))
    elif spoil == "empty ca":
        settings["client_ca"] = tmp_path / "empty.pem"
        settings["client_ca"].touch()
    else:
        settings["key"] = tmp_path
    with pytest.raises(BadFile) as refused:
        PortTls("the port", TlsSettings(**settings))
    assert refused.value.field == field
    assert says in f"{refused.value} ({refused.value.mend})"


def encrypted(key: bytes) -> bytes:
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    return load_pem_private_key(key, None).private_bytes(*form, serialization.BestAvailableEncryption(b"word"))
