"""Limits by way of Envoy: refusals as at the gateway's own port, and tokens counted from the bodies of answers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.faults.client import until
from tests.faults.http import FakeEngine, Talk, reply
from tests.integration.extproc.harness import Street, note, street
from tests.integration.gateway.harness import BODY, Answer, eventually, post
from tests.valkey import Valkey

NOW = 1_700_000_000.0
ALICE = post(BODY, b"/v1/completions", b"user: alice")


async def counting(engine: FakeEngine, talk: Talk) -> None:
    while (request := await talk.request()) is not None:
        note(engine, request)
        await talk.send(reply(b'{"usage":{"total_tokens":7}}', b"200 OK", b"content-type: application/json"))


async def both(made: Street) -> tuple[Answer, Answer]:
    """The answers of the gateway's own port and of Envoy, one after the other."""
    return await made.say(ALICE, made.app.gateway.port), await made.say(ALICE)


async def test_both_doors_count_together_and_refuse_alike(tmp_path: Path) -> None:
    (tmp_path / "valkey").mkdir()
    async with (
        Valkey(tmp_path / "valkey") as valkey,
        street(tmp_path, counting, redis={"url": valkey.url}, limits={"users": True}) as made,
        valkey.client() as client,
    ):
        made.app.limits._wall = lambda: NOW
        await eventually(lambda: made.app.store.up)
        await client.set("aibrix-users/alice", json.dumps({"name": "alice", "rpm": 4}))
        for n in (1, 3):
            one, two = await both(made)
            assert (one.status, two.status) == (200, 200)
            assert [each.get(b"x-update-rpm") for each in (one, two)] == [[b"%d" % n], [b"%d" % (n + 1)]]
        for answer in await both(made):
            assert answer.status == 429
            assert answer.get(b"x-error-rpm-exceeded") == [b"true"]
            assert answer.get(b"retry-after") == [b"40"]
            assert json.loads(answer.body)["error"]["code"] == "rate_limit_exceeded"
        assert len(made.engines[0].requests) == 4

        async def told() -> bool:
            return bool(await client.get(f"aibrix:alice_TPM_CURRENT:{int(NOW) // 60 % 64}") == b"28")

        await until(told, "the tokens of four answers are counted")
