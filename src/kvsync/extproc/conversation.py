"""One of Envoy's streams: what it says about one request, and what it is told. No I/O.

The request comes as Envoy is configured to send it (``request_body_mode``): its head, then its body whole
(``BUFFERED``) or in pieces that are kept here (``FULL_DUPLEX_STREAMED``, as gateways do that speak the endpoint-picker
protocol). The answer's head and body follow as far as Envoy shows them.

What must always hold:

- Every message of Envoy's that wants an answer gets one, and a request is decided once, however often its end is told.
- Where a part of a body would go unseen, the request is refused: no decision by half a prompt.
- However the stream ends, so does the request (:meth:`Conversation.end`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from kvsync.extproc import replies
from kvsync.extproc.carried import Carried, Desk
from kvsync.extproc.heads import Head, check_framing, read_flags, read_head, read_subset
from kvsync.extproc.protocol import messages as pb
from kvsync.requests import errors
from kvsync.requests.admission import Admission, Admitted
from kvsync.requests.errors import Problem
from kvsync.requests.headers import Wishes
from kvsync.requests.ports import Outcome

_Mode = pb.ProcessingMode
_OURS: Final = ("x-kvsync-match", "x-gateway-destination-endpoint", "x-data-parallel-rank")
"""Fields of an answer that an engine has no say in, and that are not set in its place anyway."""


class Telemetry(Protocol):
    def extproc_decided(self, seconds: float) -> None:
        """From a request's last byte to what Envoy is told."""


class Conversation:
    """
    Args:
        read_answers: ``extproc.read_answers``.
    """

    def __init__(self, desk: Desk, admission: Admission, telemetry: Telemetry, *, read_answers: bool) -> None:
        self._desk = desk
        self._admission = admission
        self._telemetry = telemetry
        self._read_answers = read_answers
        self._head: Head
        self._admitted: Admitted | None = None
        self._subset: frozenset[str] | None = None
        self._duplex = False
        self._modes_told = False
        self._answer_mode: int = _Mode.NONE
        self._pieces = bytearray()
        self._trailers = False
        self._course: Carried | None = None
        self._began = 0.0
        self._told = False
        """What becomes of the request was said."""

    def hear(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse] | None:
        """What Envoy is to be told, or ``None`` when it will be known later."""
        match message.WhichOneof("request"):
            case "request_headers":
                return self._on_head(message)
            case "request_body":
                return self._on_body(message)
            case "request_trailers":
                return self._on_trailers(message)
            case "response_headers":
                return self._on_answer_head(message)
            case "response_body":
                return self._on_answer_body(message)
            case "response_trailers":
                return self._on_answer_trailers()
            case _:
                return []

    def settlement(self) -> asyncio.Future[None]:
        """Done once :meth:`decided` may be called, where :meth:`hear` had no answer."""
        assert self._course is not None
        return self._course.settlement()

    def decided(self) -> Sequence[pb.ProcessingResponse]:
        """What Envoy is told of the request, once that is settled."""
        course = self._course
        assert course is not None
        self._told = True
        self._telemetry.extproc_decided(self._desk.rooms.loop.time() - self._began)
        if course.problem is not None:
            return [replies.refuse(course.problem, course.request_id)]
        told = self._forwarded(course)
        course.sent()
        self._head = self._head._replace(fields=[])
        return told

    def _forwarded(self, course: Carried) -> Sequence[pb.ProcessingResponse]:
        fields, remove = course.changes(self._head.target)
        if not self._duplex:
            # One that came in chunks has none of its own. (What came in pieces goes out in chunks, come what may.)
            fields.append(("content-length", b"%d" % len(course.body)))
        changes = replies.mutation(fields, remove)
        if not self._duplex:
            return [replies.forward(changes, course.address, course.body if course.changed else None)]
        told = list(replies.forward_in_pieces(changes, course.address, course.body, ends=not self._trailers))
        if self._trailers:
            told.append(replies.go_on("request_trailers"))
        return told

    @property
    def unfinished(self) -> bool:
        """The request did not come whole, so far."""
        return self._course is None and not self._told

    def end(self, outcome: Outcome) -> None:
        """The stream is over. May be called again."""
        self._pieces.clear()
        if self._course is not None:
            self._course.ended(outcome)

    # ---- the request

    def _on_head(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse] | None:
        if self._admitted is not None or self._told:  # one request a stream
            return [replies.go_on("request_headers")]
        self._head = head = read_head(message.request_headers)
        self._subset = read_subset(message)
        rooms = self._desk.rooms
        mode: int = _Mode.BUFFERED
        if message.HasField("protocol_config"):  # older Envoys don't tell
            self._modes_told = True
            mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        self._duplex = mode == _Mode.FULL_DUPLEX_STREAMED
        path = "other"
        try:
            check_framing(head, rooms.settings.max_body_bytes, has_body=not message.request_headers.end_of_stream)
            self._admitted = self._admission.admit(head.method, head.target, head.fields)
            path = self._admitted.route.path
            own = self._admission.answer(head.method, self._admitted.route)
            if own is not None:
                self._told = True
                rooms.telemetry.answered(path, own.status, 0.0, "gateway")
                fields = [(own.field[0].decode(), own.field[1]), ("request-id", Wishes(head.fields).request_id)]
                return [replies.answer_now(own.status, fields, own.body, "gateway")]
            if mode not in (_Mode.BUFFERED, _Mode.FULL_DUPLEX_STREAMED):
                raise errors.body_not_buffered()
        except Problem as problem:
            return self._refuse(path, problem)
        if message.request_headers.end_of_stream:
            return self._begin(b"")
        if self._duplex:
            return []
        return [self._go_on()]

    def _go_on(self) -> pb.ProcessingResponse:
        """The head is in order."""
        bodies = self._answer_mode
        if self._read_answers and bodies == _Mode.NONE:
            return replies.send_the_rest(_Mode.STREAMED)
        if self._modes_told and bodies != _Mode.FULL_DUPLEX_STREAMED:  # of which Envoy lets nobody change anything
            return replies.send_the_rest(bodies)
        return replies.go_on("request_headers")

    def _on_body(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse] | None:
        body = message.request_body
        if self._told or self._course is not None or self._admitted is None:
            return [] if self._duplex else [replies.go_on("request_body")]
        if not self._duplex:
            return self._limited(body.body)
        self._pieces += body.body
        if len(self._pieces) <= self._desk.rooms.settings.max_body_bytes and not body.end_of_stream:
            return []
        return self._limited(self._take_pieces())

    def _on_trailers(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse] | None:
        if self._course is not None or self._told or self._admitted is None:
            return [replies.go_on("request_trailers")]
        self._trailers = True  # without a body before them, where those are buffered
        return self._limited(self._take_pieces())

    def _take_pieces(self) -> bytes:
        raw = bytes(self._pieces)
        self._pieces.clear()
        return raw

    def _limited(self, raw: bytes) -> Sequence[pb.ProcessingResponse] | None:
        limit = self._desk.rooms.settings.max_body_bytes
        assert self._admitted is not None
        if len(raw) > limit:
            return self._refuse(self._admitted.route.path, errors.body_too_large(limit))
        return self._begin(raw)

    def _begin(self, raw: bytes) -> Sequence[pb.ProcessingResponse] | None:
        assert self._admitted is not None
        self._began = self._desk.rooms.loop.time()
        self._course = Carried(
            self._desk,
            self._admitted,
            self._head,
            raw,
            subset=self._subset,
            may_inject=self._answer_mode in (_Mode.STREAMED, _Mode.FULL_DUPLEX_STREAMED),
        )
        self._course.begin()
        return self.decided() if self._course.settled else None

    def _refuse(self, path: str, problem: Problem) -> Sequence[pb.ProcessingResponse]:
        self._told = True
        self._desk.rooms.telemetry.answered(path, problem.status, 0.0, problem.reason)
        return [replies.refuse(problem, Wishes(self._head.fields).request_id)]

    # ---- the answer

    def _on_answer_head(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse]:
        course = self._course
        if course is None or course.problem is not None or not self._told:
            return [replies.go_on("response_headers")]
        told = message.response_headers
        fields = course.answer_begins(read_head(told), read_flags(message), last=told.end_of_stream)
        if fields is None:
            assert course.problem is not None
            return [replies.refuse(course.problem, course.request_id)]
        names = {name for name, _ in fields}
        return [replies.answer_head(replies.mutation(fields, [name for name in _OURS if name not in names]))]

    def _on_answer_body(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse]:
        course, body = self._course, message.response_body
        last = body.end_of_stream
        passing = None
        if course is not None and course.problem is None:
            passing = course.answer_piece(body.body, last=last)
        if self._answer_mode == _Mode.FULL_DUPLEX_STREAMED:
            return replies.answer_in_pieces(body.body if passing is None else passing, ends=last)
        return [replies.go_on("response_body") if passing is None else replies.answer_piece(passing)]

    def _on_answer_trailers(self) -> Sequence[pb.ProcessingResponse]:
        course = self._course
        rest = b"" if course is None or course.problem is not None else course.answer_trailers()
        told: list[pb.ProcessingResponse] = []
        if rest and self._answer_mode == _Mode.FULL_DUPLEX_STREAMED:  # in no other mode is there a place for it
            told += replies.answer_in_pieces(rest, ends=False)
        return [*told, replies.go_on("response_trailers")]


__all__ = ["Conversation", "Telemetry"]
