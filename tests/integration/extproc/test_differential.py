"""Requests of random paths, fields and bodies: whatever they are, both doors give the same answer, and an engine gets
the same request."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.integration.extproc.harness import post, street
from tests.integration.extproc.test_requests import KEY, OTHER_KEY, both, comparable, shown, telling
from tests.integration.gateway.harness import eventually

REQUESTS = 150
KEYS = [b"Authorization: Bearer " + key.encode() for key in (KEY, OTHER_KEY)]
METHODS = [*[b"POST"] * 12, b"GET", b"PUT", b"OPTIONS", b"DELETE"]
LISTED = [
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/v1/embeddings",
    b"/v1/completions/",
    b"//v1/./%63ompletions?x=1&y=%20",
]
PATHS = [
    *LISTED * 3,
    b"/sleep",
    b"/tokenize",
    b"/v1/models/m",
    b"/v1/models/a%2fb",
    b"/v1/completions/../models",
    b"/v1/completions%2f..%2f..%2fsleep",
    b"/v1/completions;x",
    b"/V1/completions",
    b"/v1/comp%00letions",
    b"/v1/completions%",
    b"/" + b"x" * 9000,
]
FIELDS = [
    *(b"X-Api-Key: k", b"x_api_key: k", b"authorization: Basic k", b"User: u", b"user: v", b"Cookie: a=b", b"x-empty:"),
    *(b"target-pod: 127.0.0.1:9", b"Target_Pod: 127.0.0.1:9", b"x-data-parallel-rank: 1", b"host_: h"),
    *(b"request-id: mine", b"Request-Id: not well formed", b"request_id: mine", b"X-Request-Id: theirs"),
    *(
        b"routing-strategy: random",
        b"routing-strategy: nonsense",
        b"external-filter: zone=east",
        b"external-filter: ((",
    ),
    *(b"Keep-Alive: 5", b"Proxy-Authorization: p", b"TE: trailers", b"Trailer: x", b"http2-settings: h", b"expect: x"),
    *(b"Connection: x-a", b"x-a: 1", b"content_length: 3", b"transfer_encoding: chunked", b"x-b: \xc3\xa9\xff"),
    *(b"Content-Encoding: identity", b"Content-Encoding: br", b"Accept-Encoding: gzip"),
]
NAMES = [b"model", b"mod\\u0065l", b"prompt", b"messages", b"cache_salt", b"cache\\u005fsalt", b"stream", b"input"]
NAMES += [b"stream_options", b"use_beam_search", b"kv_transfer_params", b"vllm_xargs"]
VALUES = [b'"m"', b'"adapter"', b'"nobody"', b'""', b"null", b"5", b"true", b"1e400", b"12345678901234567890123"]
VALUES += [b"[1, 2]", b'{"a": [[[[[[[1]]]]]]]}', b'"x\\"},{"', b'"\\ud83d\\ude00"']


def content(rng: Random) -> bytes:
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(40))
    members = [b'"model": ' + rng.choice(VALUES[:2])] if rng.random() < 0.9 else []
    members += [b'"%b":%b' % (rng.choice(NAMES), rng.choice(VALUES)) for _ in range(rng.randrange(4))]
    rng.shuffle(members)
    return b"{%b}" % b", ".join(members)


@pytest.mark.parametrize("closed", [False, True], ids=["anybody", "tenants"])
async def test_both_doors_do_the_same(tmp_path: Path, closed: bool) -> None:
    rng = Random(6)
    sections: dict[str, Any] = {"gateway": {"reveal_match": True, "salt_secret": "a-secret-of-some-length"}}
    if closed:
        policies = {"alice": (KEY, "enforce"), "bob": (OTHER_KEY, "strip")}
        sections["tenants"] = [
            {"name": name, "api_keys": [key], "cache_salt": policy} for name, (key, policy) in policies.items()
        ]
    entry = {"labels": {"zone": "east"}, "adapters": ["adapter"]}
    async with street(tmp_path, telling, entry=entry, **sections) as made:
        (engine,) = made.engines
        for _ in range(REQUESTS):
            fields = [rng.choice(KEYS)] if closed and rng.random() < 0.8 else []
            for field in rng.sample(FIELDS, rng.randrange(6)):
                # Envoy makes one field of some that come twice.
                if field.partition(b":")[0].lower() not in {each.partition(b":")[0].lower() for each in fields}:
                    fields.append(field)
            raw = post(content(rng), rng.choice(PATHS), *fields).replace(b"POST", rng.choice(METHODS), 1)
            before = len(engine.requests)
            own, by_envoy = await both(made, raw)
            assert shown(own) == shown(by_envoy), raw
            received = [comparable(request) for request in engine.requests[before:]]
            assert not received or (len(received) == 2 and received[0] == received[1]), raw
        assert len(engine.requests) > REQUESTS // 4
        await eventually(lambda: made.running() == 0)
