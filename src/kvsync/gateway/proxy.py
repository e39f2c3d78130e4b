"""What a request is for, and who answers it: an engine through an :class:`~kvsync.gateway.exchange.Exchange`, or the
gateway itself (the model list, OPTIONS, refusals).
"""

from __future__ import annotations

from kvsync.gateway import errors, openai
from kvsync.gateway.auth import STRANGER
from kvsync.gateway.errors import Problem
from kvsync.gateway.exchange import Exchange, Rooms
from kvsync.gateway.headers import Field, Wishes
from kvsync.gateway.http1 import ClientConnection, Running
from kvsync.gateway.paths import MODELS, Paths, Route
from kvsync.gateway.reader import Admitted, Request

_JSON = b"content-type: application/json\r\n"
_ANY = Route("*", ())


class Proxy:
    """The data port's application. Satisfies :class:`kvsync.gateway.http1.Application`."""

    def __init__(self, rooms: Rooms) -> None:
        self.draining = False
        self._rooms = rooms
        self._paths = Paths(rooms.settings.extra_paths, expose_tokenize=rooms.settings.expose_tokenize)

    def admit(self, method: bytes, target: bytes, fields: list[Field]) -> Admitted:
        tenants = self._rooms.tenants
        # A browser that asks whether it may send a key can't send it yet; the answer tells methods only.
        tenant = STRANGER if method == b"OPTIONS" else tenants.identify(fields)
        if method == b"OPTIONS" and target == b"*":
            return Admitted(_ANY, b"", tenant)
        route, query = self._paths.find(target)
        if method not in route.methods and method != b"OPTIONS":
            raise errors.method_not_allowed(route.allow)
        return Admitted(route, query, tenant)

    def begin(self, request: Request, connection: ClientConnection) -> Running | None:
        admitted = request.admitted
        route = None if admitted is None else admitted.route
        try:
            if request.problem is not None:
                raise request.problem
            assert admitted is not None
            assert route is not None
            if request.method == b"OPTIONS":
                self._answer(connection, request, route, 204, b"No Content", b"allow: %b\r\n" % route.allow)
                return None
            if route.path == MODELS:
                models = self._rooms.fleet.models()
                body = openai.model_list(models) if route.model is None else openai.one_model(models, route.model)
                self._answer(connection, request, route, 200, b"OK", _JSON, body)
                return None
        except Problem as problem:
            self._rooms.telemetry.answered(route.path if route else "other", problem.status, 0.0, problem.reason)
            connection.refuse(problem)
            return None
        return Exchange(self._rooms, request, admitted, connection).run()

    def _answer(
        self,
        connection: ClientConnection,
        request: Request,
        route: Route,
        status: int,
        phrase: bytes,
        field: bytes,
        body: bytes = b"",
    ) -> None:
        self._rooms.telemetry.answered(route.path, status, 0.0, "gateway")
        name = b"request-id: %b\r\n" % Wishes(request.fields).request_id
        connection.answer(status, phrase, [name, field], body)


__all__ = ["Proxy"]
