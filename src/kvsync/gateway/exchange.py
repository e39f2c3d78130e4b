"""One request's course by way of the gateway's own connections: send → relay → release.

What must always hold, besides what :mod:`kvsync.requests.course` says:

- What comes back is :mod:`.relay`'s business.
- Every wait has a deadline of its own: tokens, connection, sending, first byte, next byte. There is none on the total.
"""

from __future__ import annotations

import asyncio
import logging

from kvsync.gateway.http1 import ClientConnection, Running
from kvsync.gateway.reader import Request
from kvsync.gateway.relay import Relay
from kvsync.gateway.upstream import JOIN_BELOW, ConnectFailed, UpstreamConnection, Upstreams
from kvsync.requests import errors
from kvsync.requests.admission import Admitted
from kvsync.requests.course import Course
from kvsync.requests.errors import Problem
from kvsync.requests.headers import Field
from kvsync.requests.ports import Outcome
from kvsync.requests.rooms import Rooms

_log = logging.getLogger(__name__)

STALE_WITHIN = 1.0
"""Seconds from a request's sending in which a reset says that an idle connection was closed in the same moment. Later,
the engine may have worked on the request: it may have died of it."""


class Exchange(Course):
    """One request, carried by the gateway's own connections.

    With token ids at hand and an idle connection to the engine, it passes through without a task or a turn of the event
    loop.
    """

    __slots__ = (
        "_answer",
        "_client",
        "_connection",
        "_deadline",
        "_heard",
        "_paused",
        "_reset_elsewhere",
        "_taken_at",
        "_unsent",
        "_upstreams",
    )

    def __init__(
        self, rooms: Rooms, upstreams: Upstreams, request: Request, admitted: Admitted, client: ClientConnection
    ) -> None:
        super().__init__(rooms, admitted, request.fields, request.body)
        if self._authorization is not None:
            self._wishes.forwarded.append(b"authorization: %b\r\n" % self._authorization.encode())
        self._upstreams = upstreams
        self._client = client
        self._reset_elsewhere = rooms.settings.retry_fresh_reset
        self._connection: UpstreamConnection | None = None
        self._answer = Relay(client)
        self._paused = False
        self._deadline = 0.0
        self._heard = False
        """The answer got on since deadlines were last looked at."""
        self._unsent = 0
        self._taken_at = 0.0
        """When the engine last took some of the request."""

    def run(self) -> Running | None:
        """Start. ``None`` when the answer was given at once."""
        self.begin()
        return None if self._over else self

    # ---- send

    def _carry(self) -> None:
        connection = self._upstreams.take(self._decision.chosen.engine.url)
        if connection is not None:
            self._send(connection)
        else:
            self._connect()

    def _connect(self) -> None:
        task = self._rooms.loop.create_task(self._upstreams.connect(self._decision.chosen.engine.url))
        task.add_done_callback(self._on_connected)
        self._task = task

    def _on_connected(self, task: asyncio.Future[UpstreamConnection]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if self._over:
            if error is None:  # made just as the client left: good for somebody else
                self._upstreams.keep(task.result())
            return
        if error is None:
            self._send(task.result())
            return
        outcome: Outcome = "connect_failed"
        if isinstance(error, ConnectFailed):
            outcome = error.outcome
        else:
            _log.error("connecting failed with an unforeseen exception", exc_info=error)
        self._elsewhere(outcome)

    def _send(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        chosen = self._decision.chosen
        body = self._raw
        rank = b"x-data-parallel-rank: %d\r\n" % chosen.rank if chosen.engine.data_parallel_size > 1 else b""
        head = b"POST %b%b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            self._route.path.encode(),
            self._query,
            connection.target.host_field,
            b"".join(self._wishes.forwarded),
            self._wishes.request_id,
            rank,
            len(body),
        )
        now = self._rooms.loop.time()
        self._deadline = now + self._rooms.settings.first_byte_timeout
        self._taken_at = now
        connection.send(head, body, self)
        self._unsent = connection.unsent if len(body) > JOIN_BELOW else 0  # the kernel takes less
        if self._client.paused:
            self.pause()

    # ---- relay

    def on_head(
        self, status: int, phrase: bytes, fields: list[Field], length: int | None, *, until_close: bool
    ) -> None:
        assert self._connection is not None
        self._answer.start(
            self._route.path, status, phrase, fields, self._told(self._connection.peer), length, until_close
        )

    def on_body(self, piece: bytes) -> None:
        if not self._answer.begun:
            if self._ticket is not None:
                self._ticket.first_byte()
            self._rooms.telemetry.first_byte(self._route.path, self._rooms.loop.time() - self._since)
        self._answer.body(piece)

    def on_pause(self) -> None:
        self._heard = True
        self._client.flush()

    def on_chunks(self, chunks: bytes, body: bytes) -> None:
        self._heard = True
        self._answer.chunks(chunks, body)

    def on_end(self) -> None:
        self._connection = None
        if not self._answer.whole():
            self._cut("upstream_died")
            return
        status = self._answer.status
        self._release_answered(status)
        self._over = True
        self._answer.end()
        self._answered(status, self._answer.usage())

    def on_lost(self, outcome: Outcome) -> None:
        connection, self._connection = self._connection, None
        if self._answer.status:
            self._cut(outcome)
        elif outcome == "reset" and connection is not None and connection.reused and self._just_sent():
            # The engine closed its idle connection just as the request went out: the same engine, once more. It never
            # read the request, so this is no load on a fleet in trouble and takes nothing of the retries.
            self._rooms.telemetry.retried("reset")
            self._connect()
        elif outcome == "reset" and self._reset_elsewhere:
            self._reset_elsewhere = False
            self._elsewhere(outcome)
        else:
            self._fail(outcome, errors.engine_unreachable(outcome))

    def _just_sent(self) -> bool:
        return self._rooms.loop.time() - self._taken_at <= STALE_WITHIN

    # ---- ends

    def _cut(self, outcome: Outcome) -> None:
        """After the status line nothing can be mended: the client must see that the answer is not whole."""
        self._spend(None)
        self._release(outcome)
        self._over = True
        self._rooms.telemetry.cut(self._route.path, outcome)
        self._answer.cut()

    def _turn_down(self, problem: Problem) -> None:
        self._client.refuse(problem, self._wishes.request_id)

    def _expect_usage(self) -> None:
        self._answer.expect_usage()

    # ---- kvsync.gateway.http1.Running

    def stop(self, outcome: Outcome) -> None:
        if not self._over and self._connection is not None:
            self._connection.abort()
        super().stop(outcome)

    def pause(self) -> None:
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._heard = True
            self._connection.resume()

    def check(self, now: float) -> None:
        connection = self._connection
        if connection is None:
            return
        if self._heard:
            self._heard = False
            deadline = now + self._rooms.settings.idle_timeout
            # Some engines send the head of a stream before they begin with the prompt: the wait for it is still on.
            self._deadline = deadline if self._answer.begun else max(self._deadline, deadline)
        if self._unsent and not self._answer.status and not self._still_sending(connection, now):
            return
        if self._paused or now < self._deadline:
            return
        self._connection = None
        connection.abort()
        if self._answer.status:
            self._cut("idle_timeout")
        else:
            self._fail("first_byte_timeout", errors.first_byte_timeout(self._rooms.settings.first_byte_timeout))

    def _still_sending(self, connection: UpstreamConnection, now: float) -> bool:
        """Look after a request that the engine has not read whole; ``False`` when that took too long."""
        unsent = connection.unsent
        if unsent < self._unsent:
            self._unsent = unsent
            self._taken_at = now
            self._deadline = now + self._rooms.settings.first_byte_timeout
        elif now - self._taken_at > self._rooms.settings.send_timeout:
            self._connection = None
            connection.abort()
            self._elsewhere("send_timeout")
            return False
        return True


__all__ = ["Exchange"]
