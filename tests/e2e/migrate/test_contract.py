"""Headers and errors as docs/migrate.md says of them, by way of the real Envoy: as engines and clients get them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from kvsync.requests import errors
from kvsync.requests.errors import Problem
from tests.integration.extproc.harness import good, street
from tests.integration.gateway.harness import Answer

from .page import Row, rows

UNKNOWN: Final = "Incorrect API key provided"
BODY: Final = b'{"model": "m", "prompt": "p"}'
CHAT: Final = b"/v1/completions"


def told(row: Row) -> set[str]:
    return set(re.findall(r"`([^`]+)`", row.text))


async def test_headers(tmp_path: Path) -> None:
    sent = {
        "routing-strategy": "random",
        "external-filter": "zone=east",
        "user": "somebody",
        "authorization": "Bearer of-the-engine",
        "content-type": "application/json",
        "config-profile": "pd",
        "x-session-id": "s1",
        "x-aibrix-session-key": "s2",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    assert set(rows("Headers of requests")) == set(sent)
    labels = {"labels": {"zone": "east"}}
    async with street(tmp_path, good, good, entry=labels, limits={"users": True}) as made:
        fields = [f"{name}: {value}".encode() for name, value in sent.items()]
        answer = await made.ask(BODY, CHAT, *fields, b"target-pod: 127.0.0.1:1", b"request-id: mine")
        assert answer.status == 200
        (request,) = (request for engine in made.engines for request in engine.requests)

        passing = [name for name, row in rows("Headers of requests").items() if "to the engine" in row.text]
        assert sorted(passing) == [
            "authorization",
            "config-profile",
            "traceparent",
            "x-aibrix-session-key",
            "x-session-id",
        ]
        for name in passing:
            assert request.get(name.encode()) == [sent[name].encode()], name

        for name, row in rows("Headers to the engine").items():
            assert row.verdict == "same"
            assert len(request.get(name.encode())) == 1, name
        assert request.get(b"routing-strategy") == [b"random"]
        chosen = next(engine for engine in made.engines if engine.requests)
        assert request.get(b"target-pod") == [b"127.0.0.1:%d" % chosen.port]
        assert request.get(b"request-id") == request.get(b"x-request-id") == [b"mine"]

        for name, row in rows("Headers of answers").items():
            assert len(answer.get(name.encode())) == (row.verdict != "not"), name
        assert answer.one(b"target-pod") == chosen.name.encode()
        assert answer.one(b"target-pod-ip") == request.get(b"target-pod")[0]
        assert answer.one(b"x-update-rpm") == b"1"

        form = await made.ask(b"--b\r\n\r\n\r\n--b--", CHAT, b"content-type: multipart/form-data; boundary=b")
        assert form.status == 400


def holds(name: str, subject: str, status: int, message: str, code: object, headers: set[str]) -> None:
    """An answer is the error of this row."""
    row = rows("Errors")[name]
    said = told(row)
    assert status == int(row.first.partition(" ")[0]), name
    if name.startswith("x-error"):
        assert name in headers
    elif row.verdict == "same":
        assert message == name.replace("X", subject)
    else:
        assert any(message.startswith(part) for part in said), message
    assert {part for part in said if part.startswith("x-error")} <= headers
    if expected := re.search(r"code `(\w+)`", row.text):
        assert code == expected[1]


async def test_errors(tmp_path: Path) -> None:
    limits = {"users": True, "requests_per_minute": 1}
    asked = set()

    def seen(name: str, answer: Answer, subject: str = "") -> None:
        error: Any = answer.json["error"]
        headers = {key.decode().lower() for key, _ in answer.fields}
        holds(name, subject, answer.status, error["message"], error["code"], headers)
        asked.add(name)

    def made_of(name: str, problem: Problem, subject: str = "") -> None:
        headers = {key.decode() for key, _ in problem.headers}
        holds(name, subject, problem.status, problem.message, problem.code, headers)
        asked.add(name)

    async with street(tmp_path, good, limits=limits) as made:
        seen("model X does not exist", await made.ask(b'{"model": "nobody"}', CHAT), "nobody")
        for foreign in ("throughput", "pd", "least-kv-cache", "prefix-cache:2,least-request:1"):
            answer = await made.ask(BODY, CHAT, f"routing-strategy: {foreign}".encode())
            seen("incorrect routing strategy X", answer, foreign)
        seen("error on selecting target pod", await made.ask(BODY, CHAT, b"external-filter: zone=nowhere"))
        for path in (b"/v1/images/generations", b"/v1/audio/transcriptions", b"/v1/files", b"/v1/batches"):
            seen("unknown request path", await made.ask(BODY, path))
        assert (await made.ask(BODY, CHAT, b"user: often")).status == 200
        answer = await made.ask(BODY, CHAT, b"user: often")
        seen("x-error-rpm-exceeded", answer)
        assert int(answer.one(b"retry-after")) > 0
    made_of("error on getting pods for model X", errors.no_ready_engine("m"), "m")
    made_of("x-error-tpm-exceeded", errors.limit_exceeded("tpm", "often", 1, 1))
    made_of("include usage for stream options not set", errors.usage_not_asked_for())
    for problem in (errors.wrong_api_key(), errors.no_api_key()):
        assert (problem.status, problem.message.partition(":")[0] in told(rows("Errors")[UNKNOWN])) == (401, True)
    made_of(UNKNOWN, errors.wrong_api_key())
    assert asked == set(rows("Errors"))
