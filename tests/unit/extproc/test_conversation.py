"""One of Envoy's streams without Envoy: however its messages come, there is one decision, by the whole body, and one
end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict

from kvsync.config import GatewaySettings
from kvsync.discovery.model import Engine
from kvsync.extproc.carried import Desk
from kvsync.extproc.conversation import Conversation
from kvsync.extproc.heads import read_flags, read_subset
from kvsync.extproc.protocol import messages as pb
from kvsync.extproc.targets import FRESH, Targets
from kvsync.gateway.counters import Counters
from kvsync.requests.admission import Admission
from kvsync.requests.ports import JsonObject, Tokenizing
from kvsync.requests.rooms import Rooms
from kvsync.routing.decision import Decision
from kvsync.tokenize.types import TokenizedRequest
from tests.integration.gateway.harness import AtOnce, InOrder, Models, Slow, eventually

Mode = pb.ProcessingMode
URL, OTHER = "http://10.0.0.5:8000", "http://[2001:db8::1]:8001"
BODY = b'{"model": "m", "prompt": "hello"}'


class Seen:
    """What the tokenizer was asked for."""

    def __init__(self) -> None:
        self.bodies: list[JsonObject] = []

    def begin(self, path: str, body: JsonObject, model: str, adapter: str | None) -> TokenizedRequest:
        self.bodies.append(body)
        return TokenizedRequest((), "none", "unsupported_api")


class Timed:
    def __init__(self) -> None:
        self.decided = 0

    def extproc_decided(self, seconds: float) -> None:
        self.decided += 1


class Town:
    def __init__(self, tokenizing: Tokenizing, engines: Sequence[Engine], **settings: object) -> None:
        self.routing = InOrder(list(engines))
        self.counters = Counters()
        self.answers: list[tuple[Decision, int, Mapping[str, object] | None]] = []
        self.rooms = Rooms.furnish(
            GatewaySettings.model_validate(settings),
            fleet=Models(),
            tokenizing=tokenizing,
            routing=self.routing,
            telemetry=self.counters,
            on_answer=lambda decision, _, status, usage: self.answers.append((decision, status, usage)),
            inject_usage=True,
        )
        self.targets = Targets(self.rooms.loop, 1.0, self.rooms.loop.time)
        self.timed = Timed()
        self.read_answers = False

    def talk(self) -> Conversation:
        desk = Desk(self.rooms, self.targets, lambda _: self.routing.engines)
        return Conversation(desk, Admission(self.rooms), self.timed, read_answers=self.read_answers)


def engines(*urls: str) -> list[Engine]:
    return [Engine(uid=url, name=url, url=url, model="m") for url in urls]


@pytest_asyncio.fixture
async def town() -> AsyncIterator[Town]:
    made = Town(AtOnce(), engines(URL, OTHER))
    yield made
    made.rooms.close()


def fields(**named: str) -> pb.HeaderMap:
    return pb.HeaderMap(
        headers=[pb.HeaderValue(key=key.replace("_", "-"), raw_value=value.encode()) for key, value in named.items()]
    )


def head(mode: int = Mode.BUFFERED, answers: int = Mode.NONE, *, last: bool = False, **named: str) -> Any:
    told = [(":method", "POST"), (":path", "/v1/completions"), *((k.replace("_", "-"), v) for k, v in named.items())]
    message = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(
            headers=pb.HeaderMap(headers=[pb.HeaderValue(key=k, raw_value=v.encode()) for k, v in told]),
            end_of_stream=last,
        )
    )
    message.protocol_config.request_body_mode = mode  # type: ignore[assignment]
    message.protocol_config.response_body_mode = answers  # type: ignore[assignment]
    return message


def body(piece: bytes, *, last: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=piece, end_of_stream=last))


def answer_head(status: int = 200, flags: int = 0, *, last: bool = False, **named: str) -> pb.ProcessingRequest:
    headers = fields(**named)
    headers.headers.insert(0, pb.HeaderValue(key=":status", raw_value=b"%d" % status))
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=headers, end_of_stream=last))
    if flags:
        message.attributes["envoy.filters.http.ext_proc"].update({"response.flags": flags})
    return message


def answer_piece(piece: bytes, *, last: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=piece, end_of_stream=last))


def set_fields(mutation: pb.HeaderMutation) -> dict[str, bytes]:
    return {option.header.key: option.header.raw_value for option in mutation.set_headers}


def refusal(replies: Sequence[pb.ProcessingResponse] | None) -> tuple[int, str]:
    assert replies is not None
    (reply,) = replies
    assert reply.WhichOneof("response") == "immediate_response"
    immediate = reply.immediate_response
    return immediate.status.code, json.loads(immediate.body)["error"]["message"]


async def test_pieces_in_any_splits_with_the_end_told_twice() -> None:
    """(P9) The engine gets the exact body, in pieces that Envoy takes; one decision is made."""
    rng = Random(5)
    seen = Seen()
    town = Town(seen, engines(URL))
    for size in (0, 1, 62 << 10, (62 << 10) + 1, 300_000):
        raw = b'{"model": "m", "prompt": "%b"}' % (b"x" * size)
        talk = town.talk()
        assert talk.hear(head(Mode.FULL_DUPLEX_STREAMED)) == []
        cuts = sorted({0, len(raw), *(rng.randrange(len(raw)) for _ in range(rng.randrange(6)))})
        pieces = [raw[start:stop] for start, stop in pairwise(cuts)]
        for piece in pieces[:-1]:
            assert talk.hear(body(piece, last=False)) == []
        before = len(town.routing.queries)
        replies = talk.hear(body(pieces[-1]))
        if len(raw) > 256 << 10:  # its turn comes
            assert replies is None
            await talk.settlement()
            replies = talk.decided()
        assert talk.hear(body(b"")) == talk.hear(body(pieces[-1])) == []
        assert replies is not None
        first, *rest = replies
        assert set_fields(first.request_headers.response.header_mutation)["target-pod"] == b"10.0.0.5:8000"
        assert first.request_headers.response.clear_route_cache
        sent = [reply.request_body.response.body_mutation.streamed_response for reply in rest]
        assert b"".join(piece.body for piece in sent) == raw
        assert max(len(piece.body) for piece in sent) <= 64 << 10
        assert [piece.end_of_stream for piece in sent] == [False] * (len(sent) - 1) + [True]
        assert len(town.routing.queries) == before + 1
        talk.end("client_gone")
    assert [len(str(asked["prompt"])) for asked in seen.bodies] == [0, 1, 62 << 10, (62 << 10) + 1, 300_000]
    assert all(ticket.ends == ["client_gone"] for ticket in town.routing.tickets)
    town.rooms.close()


async def test_trailers_end_a_body(town: Town) -> None:
    talk = town.talk()
    talk.hear(head(Mode.FULL_DUPLEX_STREAMED))
    talk.hear(body(BODY, last=False))
    replies = talk.hear(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    assert replies is not None
    kinds = [reply.WhichOneof("response") for reply in replies]
    assert kinds == ["request_headers", "request_body", "request_trailers"]
    assert not replies[1].request_body.response.body_mutation.streamed_response.end_of_stream


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.STREAMED, Mode.BUFFERED_PARTIAL, Mode.GRPC])
async def test_no_decision_by_half_a_body(town: Town, mode: int) -> None:
    assert refusal(town.talk().hear(head(mode)))[0] == 500
    assert town.routing.queries == []


async def test_an_envoy_that_does_not_tell_its_modes(town: Town) -> None:
    message = head()
    message.ClearField("protocol_config")
    talk = town.talk()
    assert talk.hear(message) == [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
    (reply,) = talk.hear(body(BODY)) or ()
    told = set_fields(reply.request_body.response.header_mutation)
    assert told["target-pod"] == told["x-gateway-destination-endpoint"] == b"10.0.0.5:8000"
    metadata = MessageToDict(reply.dynamic_metadata)
    assert metadata == {"envoy.lb": {"x-gateway-destination-endpoint": "10.0.0.5:8000"}}
    assert not reply.request_body.response.HasField("body_mutation")


async def test_every_end_releases_once(town: Town) -> None:
    """The answer whole, none, an error, cut short, and the stream's end told again and again."""
    for after, ends in (
        ([], ["client_gone"]),
        ([answer_head()], ["ok"]),
        ([answer_head(404)], ["request_error"]),
        ([answer_head(500)], ["engine_error"]),
        ([answer_head(503, 0x20)], ["connect_failed"]),
        ([answer_head(503, 0x40)], ["reset"]),
        ([answer_head(504, 0x4)], ["first_byte_timeout"]),
        ([answer_head(503, 0x80)], ["no_resources"]),
        ([answer_head(502, 0x800000)], ["bad_answer"]),
        ([answer_head(503, 0x100)], ["engine_error"]),
        ([answer_head(), answer_piece(b"x"), answer_piece(b"", last=True)], ["ok"]),
        ([answer_head(), answer_piece(b"x")], ["shutdown"]),
    ):
        talk = town.talk()
        talk.hear(head())
        talk.hear(body(BODY))
        for message in after:
            talk.hear(message)
        for _ in range(2):
            talk.end("shutdown" if ends == ["shutdown"] else "client_gone")
        assert town.routing.tickets[-1].ends == ends
    assert len(town.answers) == 5
    assert town.timed.decided == 12


ANY = [
    head(),
    head(Mode.FULL_DUPLEX_STREAMED),
    head(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED),
    head(answers=Mode.STREAMED),
    head(last=True),
    head(content_length="99999999999999999999999", content_encoding="gzip"),
    body(BODY),
    body(BODY, last=False),
    body(b'{"model": "m", "stream": true}'),
    body(b"\xff", last=False),
    answer_head(),
    answer_head(503, 0x20),
    answer_head(0, last=True, content_type="text/event-stream"),
    answer_piece(b"data: 1\n\n"),
    answer_piece(b"", last=True),
    pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
    pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
    pb.ProcessingRequest(request_headers=pb.HttpHeaders()),
    pb.ProcessingRequest(),
]


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_comes_in_whatever_order_ends(town: Town, seed: int) -> None:
    """No Envoy does most of this. One decision at most, every load released once, every request counted once."""
    rng = Random(seed)
    for _ in range(50):
        before, counted = len(town.routing.tickets), sum(town.counters.answers.values())
        cut = sum(town.counters.cuts.values())
        talk = town.talk()
        for message in rng.choices(ANY, k=rng.randrange(1, 9)):
            replies = talk.hear(message)
            assert replies is not None  # tokens are known at once here
        for _ in range(rng.randrange(1, 3)):
            talk.end("client_gone")
        tickets = town.routing.tickets[before:]
        assert len(tickets) <= 1
        assert all(len(ticket.ends) == 1 for ticket in tickets)
        ended = sum(town.counters.answers.values()) - counted + sum(town.counters.cuts.values()) - cut
        assert ended <= 1
        assert ended == 1 or not tickets


async def test_a_request_that_went_out_is_not_kept(town: Town) -> None:
    """An answer may stream for minutes, and bodies are large."""
    raw = b'{"model": "m", "prompt": "%b"}' % (b"x" * 100_000)
    talk = town.talk()
    talk.hear(head(user_agent="x" * 1000))
    talk.hear(body(raw))
    assert talk._course is not None
    assert (talk._course.body, talk._course._fields, talk._head.fields) == (b"", [], [])
    talk.hear(answer_head())
    talk.end("client_gone")
    assert town.routing.tickets[-1].ends == ["ok"]


async def test_a_refused_request_is_not_answered_for_again(town: Town) -> None:
    talk = town.talk()
    talk.hear(head())
    assert refusal(talk.hear(body(b'{"model": "nobody"}')))[0] == 400
    assert talk.hear(body(b"")) == [pb.ProcessingResponse(request_body=pb.BodyResponse())]
    assert talk.hear(answer_head(400)) == [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]
    talk.end("client_gone")
    assert sum(town.counters.answers.values()) == 1


async def test_who_leaves_while_tokens_are_awaited() -> None:
    """(P4) Neither the tokens nor a choice are waited for."""
    slow = Slow()
    town = Town(slow, engines(URL))
    talk = town.talk()
    talk.hear(head())
    assert talk.hear(body(BODY)) is None
    await slow.started.wait()
    talk.end("client_gone")
    await eventually(lambda: slow.cancelled == 1)
    assert (slow.cancelled, town.routing.queries, town.counters.cuts["/v1/completions", "client_gone"]) == (1, [], 1)
    town.rooms.close()


async def test_usage_that_was_asked_for_is_taken_out_where_answers_are_shown(town: Town) -> None:
    """Where they are not, none is asked for: nobody could take it out."""
    stream = b'{"model": "m", "prompt": "p", "stream": true}'
    for answers, injected in ((Mode.NONE, False), (Mode.STREAMED, True), (Mode.FULL_DUPLEX_STREAMED, True)):
        talk = town.talk()
        talk.hear(head(answers=answers, accept_encoding="gzip"))
        (reply,) = talk.hear(body(stream)) or ()
        common = reply.request_body.response
        assert (b"include_usage" in common.body_mutation.body) is injected
        assert ("accept-encoding" in common.header_mutation.remove_headers) is injected
        if not injected:
            continue
        assert set_fields(common.header_mutation)["content-length"] == b"%d" % len(common.body_mutation.body)
        talk.hear(answer_head(content_type="text/event-stream"))
        chunks = [
            b'data: {"x": 1}\n\n',
            b'data: {"choices": [], "usage": {"prompt_tokens": 7}}\n\n',
            b"data: [DONE]\n\n",
        ]
        passed = b""
        for number, piece in enumerate(chunks):
            (told,) = talk.hear(answer_piece(piece, last=number == 2)) or ()
            mutation = told.response_body.response.body_mutation
            kind = mutation.WhichOneof("mutation")
            passed += {"streamed_response": mutation.streamed_response.body, "body": mutation.body, None: piece}.get(
                kind, b""
            )
        assert passed == chunks[0] + chunks[2]
        talk.end("client_gone")
        assert town.answers[-1][1:] == (200, {"prompt_tokens": 7})


async def test_trailers_end_an_answer_that_is_shown(town: Town) -> None:
    """It is whole, and what was held back of it comes before them."""
    for answers in (Mode.STREAMED, Mode.FULL_DUPLEX_STREAMED):
        talk = town.talk()
        talk.hear(head(answers=answers))
        talk.hear(body(b'{"model": "m", "prompt": "p", "stream": true}'))
        talk.hear(answer_head(content_type="text/event-stream"))
        talk.hear(answer_piece(b'data: {"usage": {"prompt_tokens": 7}}'))
        *before, last = talk.hear(pb.ProcessingRequest(response_trailers=pb.HttpTrailers())) or ()
        assert last.HasField("response_trailers")
        assert len(before) == (answers == Mode.FULL_DUPLEX_STREAMED)
        for reply in before:
            piece = reply.response_body.response.body_mutation.streamed_response
            assert (piece.body, piece.end_of_stream) == (b'data: {"usage": {"prompt_tokens": 7}}', False)
        talk.end("client_gone")
        assert town.routing.tickets[-1].ends == ["ok"]
        assert town.answers[-1][1:] == (200, {"prompt_tokens": 7})


async def test_the_first_byte_of_an_answer_is_one(town: Town) -> None:
    """Of one that is no stream its head tells it, whether its body is shown or not."""
    for number, kind in enumerate(("application/json", "text/event-stream"), 1):
        talk = town.talk()
        talk.hear(head(answers=Mode.STREAMED))
        talk.hear(body(BODY))
        talk.hear(answer_head(content_type=kind))
        talk.hear(answer_piece(b"{}"))
        talk.hear(answer_piece(b"", last=True))
        talk.end("client_gone")
        assert town.counters.first_bytes == number


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("answers", [Mode.NONE, Mode.STREAMED, Mode.BUFFERED])
async def test_the_head_of_an_answer_is_asked_for_and_its_body_only_where_that_is_set(
    town: Town, answers: int, read: bool
) -> None:
    town.read_answers = read
    (reply,) = town.talk().hear(head(answers=answers)) or ()
    asked = reply.mode_override
    assert (asked.request_body_mode, asked.request_trailer_mode) == (Mode.BUFFERED, Mode.SEND)
    assert asked.response_header_mode == Mode.SEND
    assert asked.response_body_mode == (Mode.STREAMED if read and answers == Mode.NONE else answers)


async def test_an_envoy_whose_modes_are_not_known_keeps_them(town: Town) -> None:
    """Its answers' bodies may be shown already; and pieces both ways can't be changed."""
    message = head()
    message.ClearField("protocol_config")
    for told in (message, head(answers=Mode.FULL_DUPLEX_STREAMED)):
        (reply,) = town.talk().hear(told) or ()
        assert not reply.HasField("mode_override")
    town.read_answers = True
    (reply,) = town.talk().hear(message) or ()
    assert reply.mode_override.response_body_mode == Mode.STREAMED


async def test_trailers_where_no_body_came(town: Town) -> None:
    """Nothing but a refusal can come of it, and it is counted."""
    for mode in (Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED):
        talk = town.talk()
        talk.hear(head(mode))
        assert talk.unfinished
        status, message = refusal(talk.hear(pb.ProcessingRequest(request_trailers=pb.HttpTrailers())))
        assert (status, message.partition(":")[0]) == (400, "the request body is not valid JSON")
        assert not talk.unfinished
        talk.end("client_gone")
    assert town.counters.answers["/v1/completions", 400, "bad_json"] == 2


@pytest.mark.parametrize(
    ("subset", "chosen"),
    [
        (["[2001:db8::1]:8001"], b"[2001:db8::1]:8001"),
        (["10.0.0.9:1", " 10.0.0.5:8000 "], b"10.0.0.5:8000"),
        ("[2001:db8::1]:8001,10.0.0.9:1", b"[2001:db8::1]:8001"),
        ([], None),
        (["10.0.0.9:1"], None),
        (5, None),
    ],
)
async def test_endpoints_that_envoy_lets_choose_from(town: Town, subset: object, chosen: bytes | None) -> None:
    """The endpoint-picker protocol: none of them eligible, or an empty list, is 503."""
    message = head()
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
        {"x-gateway-destination-endpoint-subset": subset}
    )
    talk = town.talk()
    talk.hear(message)
    replies = talk.hear(body(BODY))
    if chosen is None:
        assert refusal(replies)[0] == 503
    else:
        (reply,) = replies or ()
        assert set_fields(reply.request_body.response.header_mutation)["target-pod"] == chosen


def test_metadata_and_attributes_of_others_say_nothing() -> None:
    message = head()
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"x": 1})
    message.attributes["another"].update({"response.flags": 4})
    assert read_subset(message) is None
    assert read_flags(message) == 0
    assert read_subset(pb.ProcessingRequest()) is None


async def test_names_are_looked_up_within_a_time_and_again_in_the_background() -> None:
    loop = asyncio.get_running_loop()
    now = [0.0]
    targets = Targets(loop, 5.0, lambda: now[0])
    assert targets.known(URL) == "10.0.0.5:8000"
    assert targets.known(OTHER) == "[2001:db8::1]:8001"
    assert targets.known("http://localhost:80") is None
    assert await targets.find("http://localhost:81") == "127.0.0.1:81"
    assert targets.known("http://localhost:81") == "127.0.0.1:81"
    now[0] = 2 * FRESH
    assert targets.known("http://localhost:81") == "127.0.0.1:81"
    assert len(targets._looking) == 1
    await asyncio.gather(*targets._looking.values())
    with pytest.raises(OSError):
        await targets.find("http://no-such-host.invalid:1")
    targets.close()
