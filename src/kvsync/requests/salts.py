"""What becomes of a request's ``cache_salt`` on its way to an engine.

Requests with different salts share nothing of an engine's prefix cache. A client that chooses its salt itself may
choose another's, and learn by the time to the first token what that other one asked. An *enforced* salt is made from
who the client is:

    base64url(HMAC-SHA256(salt_secret, tenant NUL the client's own salt, or nothing))

What must always hold, where a salt is enforced:

- Requests of two tenants never carry the same salt, whatever they send; equal requests of one tenant always do.
- A request that an engine may answer without looking at its salt is refused.
- The tokenizer and the index see the salt that the engine sees.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from typing import Final

from kvsync.config import GatewaySettings
from kvsync.config.credentials import secret
from kvsync.requests import errors
from kvsync.requests.auth import Tenant
from kvsync.requests.edit import edit_object
from kvsync.requests.paths import TOKENIZE_PATHS
from kvsync.requests.ports import JsonObject

FIELD: Final = "cache_salt"


class Salts:
    """The gateway's salts.

    Raises:
        BadFile: the secret's file can't be used.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._secret = secret(settings.salt_secret, settings.salt_secret_file, "salt_secret_file")
        self._paths = frozenset(settings.salted_paths)

    def apply(self, tenant: Tenant, path: str, asked: JsonObject, text: bytes) -> bytes:
        """Do to a request what its tenant's policy says.

        Args:
            asked: the request, whose ``cache_salt`` is changed too.
            text: the same as it came in.

        Returns:
            The text for the engine; the same where nothing had to be changed.

        Raises:
            Problem: a salt is enforced, and can't be.
        """
        if tenant.cache_salt == "pass" or (tenant.cache_salt == "strip" and FIELD not in asked):
            return text
        if tenant.cache_salt == "strip":
            del asked[FIELD]
            return edit_object(text, {FIELD: None})
        if path in TOKENIZE_PATHS:  # no cache has a part in these
            return text
        if path not in self._paths:
            raise errors.salt_not_enforceable(path)
        # Until early 2026 vLLM built a beam's prompts anew for every token, without the salt. What is neither absent
        # nor false may be true to an engine ("yes", 1).
        if asked.get("use_beam_search") not in (None, False):
            raise errors.salt_lost_in_beam_search()
        own = asked.get(FIELD)
        if own is not None and not isinstance(own, str):
            raise errors.salt_not_string()
        salt = self.enforced(tenant.name, own)
        asked[FIELD] = salt
        return edit_object(text, {FIELD: b'"%b"' % salt.encode()})

    def enforced(self, tenant: str, own: str | None) -> str:
        """The salt of a tenant's requests that carry this salt of its own. 43 characters: vLLM takes up to 128."""
        assert self._secret is not None, "checked with the configuration"
        message = tenant.encode() + b"\0" + (own or "").encode()
        return urlsafe_b64encode(hmac.digest(self._secret.encode(), message, "sha256")).rstrip(b"=").decode()


__all__ = ["FIELD", "Salts"]
