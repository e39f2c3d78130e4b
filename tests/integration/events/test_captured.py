"""The bytes of a real vLLM 0.32, sent over real sockets: history by replay, the rest live, into the reference index."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import zmq

from kvsync.index.reference import ReferenceIndex
from tests.faults.publisher import END, Publisher
from tests.integration.events.conftest import Fleet

CAPTURE = Path(__file__).parents[2] / "data" / "vllm" / "v0.32_basic.jsonl"


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CAPTURE.read_text().splitlines()]


def frames(record: dict[str, Any]) -> list[bytes]:
    return [base64.b64decode(frame) for frame in record["frames"]]


def test_the_scripted_publisher_answers_like_the_real_one() -> None:
    """Frame for frame; else the tests beside this one would prove nothing."""
    real = [r for r in records() if r["kind"] == "replay"]
    start = real[0]["start"]
    expected = [frames(r) for r in real if r["start"] == start and r["note"] == real[0]["note"]]
    assert expected[-1] == [b"", b"", END, b""]
    highest = int.from_bytes(expected[-2][-2], "big")
    publisher = Publisher(bodies=[frames(r)[2] for r in records() if r["kind"] == "sub"][: highest + 1])
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        assert publisher.replay is not None
        dealer.connect(publisher.replay)
        dealer.send_multipart([b"", int(start).to_bytes(8, "big")])
        dealer.set(zmq.RCVTIMEO, 10_000)
        assert [dealer.recv_multipart() for _ in expected] == expected
    finally:
        context.destroy(linger=0)
        publisher.close()


async def test_half_by_replay_half_live() -> None:
    index = ReferenceIndex()
    fleet = Fleet(sink=index)
    await fleet.manager.start()
    try:
        published = [frames(r) for r in records() if r["kind"] == "sub"]
        publisher = fleet.publisher(bodies=[payload for _, _, payload in published[:12]])
        await fleet.follow(publisher)
        await fleet.live()
        for topic, seq, payload in published[12:]:
            publisher.send_live(topic, seq, payload)
        direct = ReferenceIndex()
        direct.add_worker("a", "m", usable_blocks=63, rank=0)
        for _, _, payload in published:
            direct.apply("a", payload)
        prompts = [r["prompt_token_ids"] for r in records() if r["kind"] == "resp" and r.get("prompt_token_ids")]
        right = [direct.match(prompt, "m") for prompt in prompts]
        assert any(match["a"].credit for match in right)
        await fleet.until(lambda: [index.match(prompt, "m") for prompt in prompts] == right)
        await fleet.until(lambda: fleet.status().last_sequence == len(published) - 1)
        assert fleet.status().whole
    finally:
        await fleet.close()
