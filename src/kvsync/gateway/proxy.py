"""What a request is for, and who answers it: an engine through an :class:`~kvsync.gateway.exchange.Exchange`, or the
gateway itself (the model list, OPTIONS, refusals).
"""

from __future__ import annotations

from http import HTTPStatus

from kvsync.gateway.exchange import Exchange
from kvsync.gateway.http1 import ClientConnection, Running
from kvsync.gateway.reader import Request
from kvsync.gateway.upstream import Upstreams
from kvsync.requests.admission import Admission, OwnAnswer
from kvsync.requests.errors import Problem
from kvsync.requests.headers import Wishes
from kvsync.requests.rooms import Rooms


class Proxy:
    """The data port's application. Satisfies :class:`kvsync.gateway.http1.Application`."""

    def __init__(self, rooms: Rooms, upstreams: Upstreams) -> None:
        self.draining = False
        self._rooms = rooms
        self._upstreams = upstreams
        self._admission = Admission(rooms)
        self.admit = self._admission.admit

    def begin(self, request: Request, connection: ClientConnection) -> Running | None:
        admitted = request.admitted
        path = "other" if admitted is None else admitted.route.path
        try:
            if request.problem is not None:
                raise request.problem
            assert admitted is not None
            own = self._admission.answer(request.method, admitted.route)
        except Problem as problem:
            self._rooms.telemetry.answered(path, problem.status, 0.0, problem.reason)
            connection.refuse(problem)
            return None
        if own is None:
            return Exchange(self._rooms, self._upstreams, request, admitted, connection).run()
        self._rooms.telemetry.answered(path, own.status, 0.0, "gateway")
        _answer(connection, request, own)
        return None


def _answer(connection: ClientConnection, request: Request, own: OwnAnswer) -> None:
    name = b"request-id: %b\r\n" % Wishes(request.fields).request_id
    phrase = HTTPStatus(own.status).phrase.encode()
    connection.answer(own.status, phrase, [name, b"%b: %b\r\n" % own.field], own.body)


__all__ = ["Proxy"]
