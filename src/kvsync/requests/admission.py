"""What a request's head asks for, on whose behalf, and what is answered without any engine."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvsync.requests import errors, openai
from kvsync.requests.auth import STRANGER, Tenant
from kvsync.requests.headers import Field
from kvsync.requests.paths import MODELS, Paths, Route
from kvsync.requests.rooms import Rooms

_JSON: Final = (b"content-type", b"application/json")
_ANY: Final = Route("*", ())


class Admitted(NamedTuple):
    """What a head asks for, once it may."""

    route: Route
    query: bytes
    """``b""``, or with its question mark."""
    tenant: Tenant


class OwnAnswer(NamedTuple):
    """An answer that no engine has a part in."""

    status: int
    field: tuple[bytes, bytes]
    body: bytes


class Admission:
    """The allow-list and the keys of one process."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._paths = Paths(rooms.settings.extra_paths, expose_tokenize=rooms.settings.expose_tokenize)

    def admit(self, method: bytes, target: bytes, fields: list[Field]) -> Admitted:
        """
        Raises:
            Problem: it is not served, or not to this client.
        """
        # A browser that asks whether it may send a key can't send it yet; the answer tells methods only.
        tenant = STRANGER if method == b"OPTIONS" else self._rooms.tenants.identify(fields)
        if method == b"OPTIONS" and target == b"*":
            return Admitted(_ANY, b"", tenant)
        route, query = self._paths.find(target)
        if method not in route.methods and method != b"OPTIONS":
            raise errors.method_not_allowed(route.allow)
        return Admitted(route, query, tenant)

    def answer(self, method: bytes, route: Route) -> OwnAnswer | None:
        """The answer to an admitted request, or ``None`` where an engine has to give it.

        Raises:
            Problem: 404; there is no such model.
        """
        if method == b"OPTIONS":
            return OwnAnswer(204, (b"allow", route.allow), b"")
        if route.path == MODELS:
            models = self._rooms.fleet.models()
            body = openai.model_list(models) if route.model is None else openai.one_model(models, route.model)
            return OwnAnswer(200, _JSON, body)
        return None


__all__ = ["Admission", "Admitted", "OwnAnswer"]
