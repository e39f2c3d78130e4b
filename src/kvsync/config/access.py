"""What can be set about who may come in, and how engines are spoken to: tenants, keys, salts and TLS.

What must always hold: a secret is a :class:`~pydantic.SecretStr` (or the path of a file that holds it) and its field is
one of :data:`SECRETS`, so that neither a printed setting nor a fault shows it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

SaltPolicy = Literal["pass", "enforce", "strip"]
"""What becomes of a client's ``cache_salt``: it goes to the engine as it is, it is replaced by one that only this
tenant's requests can have, or it is removed."""

SECRETS: Final = frozenset({"api_keys", "api_key_hashes", "engine_api_key", "password", "salt_secret"})
"""Fields whose values are never shown."""

SHORTEST_SECRET: Final = 16
_KEY = re.compile(r"[!-~]{16,512}")


Seconds = Annotated[float, Field(gt=0, le=86_400)]


class BadSecret(ValueError):
    """A secret that can't be used; ``mend`` says what to do. The text never holds the secret."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


def check_secret(text: str) -> None:
    """Raises BadSecret for what can't be sent in a header, and for what could be guessed."""
    if not _KEY.fullmatch(text):
        raise BadSecret(
            f"a secret here has {SHORTEST_SECRET} to 512 characters, each of them visible ASCII",
            "make one with `openssl rand -hex 32`",
        )


def _secret(value: SecretStr) -> SecretStr:
    check_secret(value.get_secret_value())
    return value


def _hash(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", value.get_secret_value()):
        mend = 'write the 64 hex digits of `printf %s "$KEY" | sha256sum`'
        raise BadSecret("this is no SHA-256 in hex", mend)
    return value


Secret = Annotated[SecretStr, AfterValidator(_secret)]
KeyHash = Annotated[SecretStr, AfterValidator(_hash)]


class Section(BaseModel):
    """Part of the settings: frozen, and nothing unknown in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True, allow_inf_nan=False)


class TlsSettings(Section):
    """TLS of a port. Without ``cert`` the port speaks plain HTTP. The files are read again when they change."""

    cert: Path | None = None
    """PEM: the certificate, followed by those of the authorities between it and the root."""
    key: Path | None = None
    """PEM: its private key, not encrypted."""
    client_ca: Path | None = None
    """PEM: the authorities whose certificates clients must show. With it TLS 1.3 is required."""


class EngineTlsSettings(Section):
    """TLS towards engines with ``https`` URLs, and towards Redis. The files are read again when they change."""

    ca: Path | None = None
    """PEM: the authorities that their certificates must come from; the system's when not set."""
    cert: Path | None = None
    """PEM: the gateway's own certificate, for servers that ask for one."""
    key: Path | None = None
    server_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,253}$")] | None = None
    """The name that their certificates carry, where it is not the host of their URL."""


class TenantSettings(Section):
    """One tenant: whoever sends one of these keys as ``Authorization: Bearer``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """With ``enforce``, salts are made from it: a tenant that is renamed begins with an empty cache."""
    api_keys: tuple[Secret, ...] = ()
    api_key_hashes: tuple[KeyHash, ...] = ()
    """SHA-256 of keys, in hex."""
    api_keys_file: Path | None = None
    """One key a line; blank lines and those that begin with ``#`` don't count. Read again when it changes."""
    cache_salt: SaltPolicy | None = None
    """``gateway.cache_salt`` where it is not given."""


__all__ = [
    "SECRETS",
    "SHORTEST_SECRET",
    "BadSecret",
    "EngineTlsSettings",
    "KeyHash",
    "SaltPolicy",
    "Seconds",
    "Secret",
    "Section",
    "TenantSettings",
    "TlsSettings",
    "check_secret",
]
