"""The files that settings name, read: secrets, and TLS contexts from certificates and keys.

Used when a configuration is checked, so that a missing file is a fault like any other, and again while the gateway
runs, since mounted secrets and certificates are renewed.

What must always hold: no error's text holds a secret.
"""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from kvsync.config.access import BadSecret, EngineTlsSettings, TenantSettings, TlsSettings, check_secret

MAX_SECRETS_BYTES: Final = 1 << 20


class BadFile(ValueError):
    """A file that can't be used. ``field`` is the setting that names it, and ``mend`` says what to do."""

    def __init__(self, field: str, message: str, mend: str) -> None:
        super().__init__(message)
        self.field = field
        self.mend = mend


def secret(given: SecretStr | None, file: Path | None, field: str) -> str | None:
    """A secret that is given as such, or as the content of a file (named by the setting ``field``).

    Raises:
        BadFile: the file is none that holds one secret.
    """
    if given is not None:
        return given.get_secret_value()
    if file is None:
        return None
    text = _read(file, field).strip()
    _checked(text, file, field)
    return text


def password(given: SecretStr | None, file: Path | None, field: str) -> str | None:
    """As :func:`secret`, for what others chose: any one line of text.

    Raises:
        BadFile: the file is none that holds one line.
    """
    if given is not None:
        return given.get_secret_value()
    if file is None:
        return None
    text = _read(file, field).strip("\r\n")
    if not text or "\n" in text:
        raise BadFile(field, f"{file} does not hold one line of text", "give a file with the password and nothing else")
    return text


def key_hashes(tenant: TenantSettings) -> frozenset[bytes]:
    """SHA-256 of every key of a tenant.

    Raises:
        BadFile: of ``api_keys_file``.
    """
    found = {bytes.fromhex(given.get_secret_value()) for given in tenant.api_key_hashes}
    keys = [given.get_secret_value() for given in tenant.api_keys]
    file = tenant.api_keys_file
    if file is not None:
        lines = [line.strip() for line in _read(file, "api_keys_file").splitlines()]
        listed = [line for line in lines if line and not line.startswith("#")]
        for key in listed:
            _checked(key, file, "api_keys_file")
        keys += listed
    return frozenset(found | {hashlib.sha256(key.encode()).digest() for key in keys})


def _checked(text: str, file: Path, field: str) -> None:
    try:
        check_secret(text)
    except BadSecret as error:
        raise BadFile(field, f"{file}: {error}", error.mend) from None


def _read(file: Path, field: str) -> str:
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_SECRETS_BYTES + 1)
        if len(raw) > MAX_SECRETS_BYTES:
            raise BadFile(field, f"{file} is larger than {MAX_SECRETS_BYTES} bytes", "give the file of the secret")
        return raw.decode()
    except OSError as error:
        raise BadFile(field, f"{file} can't be read: {error.strerror or error}", "give a readable file") from None
    except UnicodeDecodeError:
        raise BadFile(field, f"{file} is not text", "give a file with the secret as text") from None


def server_context(settings: TlsSettings) -> ssl.SSLContext:
    """The context of a listening port: TLS 1.2 and later; 1.3 and no resumption where clients show certificates, so
    that a client whose authority is no longer trusted has no way around being asked again.

    Raises:
        BadFile: certificate, key and authorities can't be used together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if settings.cert is None and settings.key is None:
        raise BadFile("client_ca", "is given without cert and key", "add them, or remove it")
    _load_pair(context, settings.cert, settings.key)
    if settings.client_ca is not None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0
        _load_authorities(context, settings.client_ca, "client_ca")
    return context


def client_context(settings: EngineTlsSettings) -> ssl.SSLContext:
    """The context for connections to engines and Redis: their certificates and names are always checked.

    Raises:
        BadFile: certificate, key and authorities can't be used together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.ca is None:
        context.load_default_certs()
    else:
        _load_authorities(context, settings.ca, "ca")
    if settings.cert is not None or settings.key is not None:
        _load_pair(context, settings.cert, settings.key)
    return context


def _load_pair(context: ssl.SSLContext, cert: Path | None, key: Path | None) -> None:
    if cert is None:
        raise BadFile("key", "is given without cert", "give the certificate's file as well")
    if key is None:
        raise BadFile("cert", "is given without key", "give the private key's file as well")
    for file, field in ((cert, "cert"), (key, "key")):
        _readable(file, field)
    try:
        # A password is asked for on the terminal unless there is one: an encrypted key fails instead.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError, OSError):
        message = f"{cert} and {key} are no certificate and the key to it"
        raise BadFile("cert", message, "give PEM files that belong together; the key must not be encrypted") from None


def _load_authorities(context: ssl.SSLContext, file: Path, field: str) -> None:
    _readable(file, field)
    try:
        context.load_verify_locations(file)
    except (ssl.SSLError, ValueError, OSError):
        raise BadFile(field, f"{file} holds no certificates", "give the authorities' certificates as PEM") from None


def _readable(file: Path, field: str) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise BadFile(field, f"{file} can't be read: {error.strerror or error}", "give a readable file") from None


__all__ = ["BadFile", "client_context", "key_hashes", "password", "secret", "server_context"]
