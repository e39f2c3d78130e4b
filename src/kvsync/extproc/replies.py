"""What Envoy is told, as messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from google.protobuf.struct_pb2 import Struct

from kvsync.extproc.protocol import messages as pb
from kvsync.requests.errors import Problem

PIECE: Final = 62 << 10
"""Bytes of a body in one message of a stream of them. Envoy takes no more than 64 KiB."""
_OVERWRITE: Final = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_DESTINATION: Final = "x-gateway-destination-endpoint"

Pairs = Iterable[tuple[str, bytes]]


def mutation(fields: Pairs, remove: Iterable[str] = ()) -> pb.HeaderMutation:
    """Fields that are set, each in place of all of its name, and names that go. Only ``raw_value`` reaches Envoy's
    original-destination cluster."""
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(header=pb.HeaderValue(key=name, raw_value=value), append_action=_OVERWRITE)
            for name, value in fields
        ],
        remove_headers=remove,
    )


def destination(address: str) -> Struct:
    """The chosen endpoint as dynamic metadata: the Gateway API's endpoint-picker protocol."""
    told = Struct()
    told.update({"envoy.lb": {_DESTINATION: address}})
    return told


def go_on(kind: str) -> pb.ProcessingResponse:
    """Nothing to change. ``kind`` is the message's that is answered."""
    response = pb.ProcessingResponse()
    getattr(response, kind).SetInParent()
    return response


@lru_cache(16)
def send_the_rest(bodies: int) -> pb.ProcessingResponse:
    """A request's head is in order: send its body whole, trailers even where there is none, the head of its answer, and
    the body of that as ``bodies`` says (a ``BodySendMode``). It takes the place of what Envoy is configured to send."""
    mode = pb.ProcessingMode
    rest = mode(
        request_body_mode=mode.BUFFERED,
        request_trailer_mode=mode.SEND,
        response_header_mode=mode.SEND,
        response_body_mode=bodies,  # type: ignore[arg-type]
        response_trailer_mode=mode.SKIP if bodies == mode.NONE else mode.SEND,
    )
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse(), mode_override=rest)


def forward(changes: pb.HeaderMutation, address: str, body: bytes | None) -> pb.ProcessingResponse:
    """The buffered request goes to this address; ``body`` is given where it changed."""
    common = pb.CommonResponse(header_mutation=changes, clear_route_cache=True)
    if body is not None:
        common.body_mutation.body = body
    return pb.ProcessingResponse(request_body=pb.BodyResponse(response=common), dynamic_metadata=destination(address))


def forward_in_pieces(
    changes: pb.HeaderMutation, address: str, body: bytes, *, ends: bool
) -> Iterator[pb.ProcessingResponse]:
    """The same for a request that came in pieces: it goes out as pieces, whatever became of it. ``ends``: no trailers
    follow."""
    common = pb.CommonResponse(header_mutation=changes, clear_route_cache=True)
    yield pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=common), dynamic_metadata=destination(address)
    )
    for start in range(0, len(body), PIECE) or (0,):
        piece = _piece(body[start : start + PIECE], ends=ends and start + PIECE >= len(body))
        yield pb.ProcessingResponse(request_body=piece)


def answer_head(changes: pb.HeaderMutation) -> pb.ProcessingResponse:
    return pb.ProcessingResponse(
        response_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=changes))
    )


def answer_piece(body: bytes) -> pb.ProcessingResponse:
    """In place of a piece of the answer."""
    common = pb.CommonResponse()
    if body:
        common.body_mutation.body = body
    else:
        common.body_mutation.clear_body = True
    return pb.ProcessingResponse(response_body=pb.BodyResponse(response=common))


def answer_in_pieces(body: bytes, *, ends: bool) -> Sequence[pb.ProcessingResponse]:
    """The same where pieces go out one by one, whatever came in."""
    return [
        pb.ProcessingResponse(
            response_body=_piece(body[start : start + PIECE], ends=ends and start + PIECE >= len(body))
        )
        for start in range(0, len(body), PIECE) or (0,)
    ]


def _piece(body: bytes, *, ends: bool) -> pb.BodyResponse:
    streamed = pb.StreamedBodyResponse(body=body, end_of_stream=ends)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))


def answer_now(status: int, fields: Pairs, body: bytes, reason: str) -> pb.ProcessingResponse:
    """Envoy answers this itself. ``reason`` stands in its access log (``%RESPONSE_CODE_DETAILS%``)."""
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=status), headers=mutation(fields), body=body, details=f"kvsync_{reason}"
        )
    )


def refuse(problem: Problem, request_id: bytes) -> pb.ProcessingResponse:
    fields = [("content-type", b"application/json"), ("request-id", request_id)]
    fields += [(name.decode(), value) for name, value in problem.headers]
    return answer_now(problem.status, fields, problem.body(), problem.reason)


__all__ = [
    "PIECE",
    "answer_head",
    "answer_in_pieces",
    "answer_now",
    "answer_piece",
    "forward",
    "forward_in_pieces",
    "go_on",
    "mutation",
    "refuse",
    "send_the_rest",
]
