"""Who sends a request: tenants, known by their API keys.

What must always hold:

- With tenants, nobody without one of their keys gets beyond the head of a request (but for OPTIONS: browsers ask that
  without a key).
- How long a refusal takes tells nothing about the keys: what is looked up is a keyed hash that no client can predict.
- A reload never opens a port that was closed to strangers, and a keys file that is broken changes nothing.
- Keys are kept as hashes; no log, error or metric holds one.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final

from kvsync.config import SaltPolicy, Settings
from kvsync.config.credentials import BadFile, key_hashes
from kvsync.config.live import Live, Looked
from kvsync.requests import errors
from kvsync.requests.headers import Field

_log = logging.getLogger(__name__)

_BEARER: Final = re.compile(rb"bearer +([!-~]+)\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    """Empty for everybody, where there are no tenants."""
    cache_salt: SaltPolicy


STRANGER: Final = Tenant("", "pass")
"""Whoever asks for the methods only."""


class _Keys:
    """The keys of all tenants, to be looked up without telling anything by the time it takes."""

    def __init__(self, owners: dict[bytes, Tenant]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._entries = {self._hidden(digest): (digest, tenant) for digest, tenant in owners.items()}

    def _hidden(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._pepper, digest_size=32).digest()

    def owner(self, key: bytes) -> Tenant | None:
        digest = hashlib.sha256(key).digest()
        entry = self._entries.get(self._hidden(digest))
        return entry[1] if entry is not None and compare_digest(entry[0], digest) else None


class Tenants:
    """All tenants. :meth:`identify` belongs to the event loop; the others may be called from any one thread.

    Raises:
        BadFile: a keys file can't be used.
    """

    def __init__(self, settings: Settings) -> None:
        gateway = settings.gateway
        self._salts = gateway.salt_secret is not None or gateway.salt_secret_file is not None
        self._default = gateway.cache_salt
        self._anybody = Tenant("", gateway.cache_salt)
        self._live = _live(settings, self._default)

    @property
    def closed(self) -> bool:
        """A key is needed."""
        return self._live.value is not None

    def update(self, settings: Settings) -> None:
        """Take over a changed list of tenants. What can't be taken over is logged and changes nothing; all other
        settings are those of the start."""
        if self.closed and not settings.tenants:
            _log.error("tenants stay as they are: only a new start opens the data port to everybody")
            return
        if not self._salts and any(tenant.cache_salt == "enforce" for tenant in settings.tenants):
            _log.error("tenants stay as they are: gateway.salt_secret, which they need, takes a new start")
            return
        try:
            self._live = _live(settings, self._default)
        except BadFile as bad:
            _log.error("tenants stay as they are: %s (%s)", bad, bad.mend)

    def check(self) -> Looked:
        """Read the keys files again if they changed."""
        return self._live.check()

    def identify(self, fields: Sequence[Field]) -> Tenant:
        """Whose request this is.

        Raises:
            Problem: 401; the key is missing, or nobody's.
        """
        keys = self._live.value
        if keys is None:
            return self._anybody
        given = [value for lower, _, value in fields if lower == b"authorization"]
        found = _BEARER.match(given[0].strip(b" \t")) if len(given) == 1 else None
        if found is None:
            raise errors.no_api_key()
        tenant = keys.owner(found[1])
        if tenant is None:
            raise errors.wrong_api_key()
        return tenant


def _live(settings: Settings, default: SaltPolicy) -> Live[_Keys | None]:
    """``None`` without tenants. ``default`` is the policy of those that have none of their own."""

    def make() -> _Keys | None:
        if not settings.tenants:
            return None
        owners: dict[bytes, Tenant] = {}
        for listed in settings.tenants:
            tenant = Tenant(listed.name, listed.cache_salt or default)
            for digest in key_hashes(listed):
                if (other := owners.setdefault(digest, tenant)) != tenant:
                    mend = "give each tenant keys of its own"
                    message = f"a key of {tenant.name!r} is also one of {other.name!r}"
                    raise BadFile("api_keys_file", message, mend)
        return _Keys(owners)

    return Live("API keys", make, [tenant.api_keys_file for tenant in settings.tenants])


__all__ = ["STRANGER", "Tenant", "Tenants"]
