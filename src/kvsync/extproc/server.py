"""The port that Envoy asks: gRPC streams, one for each request, from its head to the end of its answer.

What must always hold: streams and messages are bounded, however a stream ends its request ends with it, and shutdown
ends within ``extproc.drain_delay`` and ``gateway.drain_timeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvsync.config import ExtProcSettings
from kvsync.discovery.model import Engine
from kvsync.extproc import conversation
from kvsync.extproc.carried import Desk
from kvsync.extproc.conversation import Conversation
from kvsync.extproc.health import SERVICE, Health
from kvsync.extproc.protocol import messages as pb
from kvsync.extproc.targets import Targets
from kvsync.extproc.tls import GrpcTls
from kvsync.requests.admission import Admission
from kvsync.requests.ports import Outcome
from kvsync.requests.rooms import Rooms

_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[bytes, bytes]


class Telemetry(conversation.Telemetry, Protocol):
    def extproc_stream(self, event: str) -> None:
        """``opened``, ``turned_away`` (there are too many), ``malformed`` (no message of Envoy's),
        ``incomplete_request`` (it ended before the request's last byte)."""


class ExtProc:
    """The external processor. Create and use it on one event loop.

    Args:
        rooms: what serves; closed by whoever made it.
        engines: those of a model.
        ready: whether requests should come here at all; asked by :mod:`.health` until shutdown begins.

    Raises:
        BadFile: a certificate can't be used.
    """

    def __init__(
        self,
        settings: ExtProcSettings,
        rooms: Rooms,
        *,
        engines: Callable[[str], Sequence[Engine]],
        telemetry: Telemetry,
        ready: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._rooms = rooms
        self._telemetry = telemetry
        self.tls = None if settings.tls.cert is None else GrpcTls(settings.tls)
        self._targets = Targets(rooms.loop, rooms.settings.connect_timeout, time.monotonic)
        self._desk = Desk(rooms, self._targets, engines)
        self._admission = Admission(rooms)
        self._health = Health(lambda: not self.draining and ready())
        self._server: grpc.aio.Server | None = None
        self._hurry = asyncio.Event()
        self._ending: Outcome = "client_gone"
        """Why streams end that nobody ended."""
        self.draining = False
        """Shutdown has begun."""
        self.streams = 0
        """Open now."""
        self.port = 0
        """The port that is listened on, once it is."""

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken.
        """
        longest = self._settings.longest_message(self._rooms.settings.max_body_bytes)
        most = self._settings.max_streams
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", longest),
                ("grpc.max_send_message_length", longest),
                ("grpc.so_reuseport", 0),  # two processes on one port would share it without a word
                # By default gRPC turns away, uncounted, what comes in a burst: from 1000 that wait for this process on.
                ("grpc.server.max_pending_requests", most),
                ("grpc.server.max_pending_requests_hard_limit", most),
                # Envoy's idle connections are pinged as often as it likes.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ]
        )
        handlers: dict[str, Any] = {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers), self._health.handler())
        )
        host = self._settings.host
        address = f"[{host}]:{self._settings.port}" if ":" in host else f"{host}:{self._settings.port}"
        try:
            if self.tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self.tls.credentials)
        except RuntimeError as error:
            raise OSError(f"{address} can't be listened on: {error}") from None
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Say no to health checks, take requests for ``drain_delay`` all the same, then no more; let open ones end for
        up to ``gateway.drain_timeout``, then end what is left."""
        self.draining = True
        server = self._server
        if server is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_delay):
                await self._hurry.wait()
        self._health.close()
        ended = asyncio.ensure_future(server.stop(self._rooms.settings.drain_timeout))
        hurried = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({ended, hurried}, return_when=asyncio.FIRST_COMPLETED)
        self._ending = "shutdown"
        if not ended.done():
            await server.stop(0)
        hurried.cancel()
        await ended
        self._targets.close()

    def hurry(self) -> None:
        """Have :meth:`stop` wait no longer."""
        self._hurry.set()

    async def _process(self, _: object, context: _Context) -> None:
        if self.streams >= self._settings.max_streams:
            self._telemetry.extproc_stream("turned_away")
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many open requests (extproc.max_streams)")
        self._telemetry.extproc_stream("opened")
        self.streams += 1
        gate = self._rooms.gate  # users' tokens are counted by their answers
        read_answers = self._settings.read_answers or (gate is not None and gate.users)
        talk = Conversation(self._desk, self._admission, self._telemetry, read_answers=read_answers)
        malformed = False
        try:
            await self._converse(talk, context)
        except DecodeError:
            malformed = True
            self._telemetry.extproc_stream("malformed")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a message of Envoy's external processing")
        except grpc.aio.InternalError:
            return  # what is written to a stream that just ended
        finally:
            self.streams -= 1
            if talk.unfinished and not malformed:
                self._telemetry.extproc_stream("incomplete_request")
            talk.end(self._ending)

    async def _converse(self, talk: Conversation, context: _Context) -> None:
        settled: asyncio.Future[None] | None = None
        reading: asyncio.Future[Any] | None = None
        try:
            while True:
                if settled is None:
                    said = await (context.read() if reading is None else reading)
                else:
                    # Who waits for a decision listens: the client may leave meanwhile.
                    reading = reading or asyncio.ensure_future(context.read())
                    await asyncio.wait({settled, reading}, return_when=asyncio.FIRST_COMPLETED)
                    if settled.done():
                        settled = None
                        await _say(talk.decided(), context)
                        continue
                    said = await reading
                reading = None
                if said is grpc.aio.EOF:
                    return
                replies = talk.hear(pb.ProcessingRequest.FromString(said))
                if replies is None:
                    settled = talk.settlement()
                else:
                    await _say(replies, context)
        finally:
            if reading is not None:
                reading.cancel()


async def _say(replies: Sequence[pb.ProcessingResponse], context: _Context) -> None:
    for reply in replies:
        await context.write(reply.SerializeToString())


__all__ = ["ExtProc", "Telemetry"]
