"""Events over ZMQ CURVE, and what a wrong key looks like."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from kvsync.config.model import CurveSettings
from tests.integration.events.conftest import SETTINGS, SINKS, Fleet, RecordingSink

SERVER, CLIENT, OTHER = (zmq.curve_keypair() for _ in range(3))


@asynccontextmanager
async def followed_with(
    folder: Path,
    server_key: bytes = SERVER[0],
    secret: bytes = CLIENT[1],
    recorder: type[RecordingSink] = RecordingSink,
) -> AsyncIterator[Fleet]:
    file = folder / "secret"
    file.write_bytes(secret + b"\n")
    keys = CurveSettings(server_key=server_key.decode(), public_key=CLIENT[0].decode(), secret_key_file=file)
    fleet = Fleet(SETTINGS.model_copy(update={"curve": keys}), recorder=recorder())
    await fleet.manager.start()
    try:
        yield fleet
    finally:
        await fleet.close()


@pytest.mark.parametrize("recorder", SINKS)
async def test_live_events_and_replays(tmp_path: Path, recorder: type[RecordingSink]) -> None:
    async with followed_with(tmp_path, recorder=recorder) as fleet:
        publisher = fleet.publisher(curve_secret=SERVER[1], already=[1, 2])
        await fleet.follow(publisher)
        await fleet.holds([1, 2])
        await fleet.live()
        publisher.publish(3)
        publisher.publish(4, lost=True)
        publisher.publish(5)
        await fleet.holds([1, 2, 3, 4, 5])
        assert fleet.status().whole
        assert fleet.status().errors == {}


async def test_the_wrong_key_of_a_publisher_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with followed_with(tmp_path, server_key=OTHER[0]) as fleet:
        await fleet.follow(fleet.publisher(curve_secret=SERVER[1], already=[1]))
        await fleet.until(lambda: fleet.status().alarm == "handshake")
        status = fleet.status()
        assert status.errors["handshake"] >= 1
        assert status.state == "connecting"
        assert "events.curve.server_key has to be the public key of the publisher" in str(status.problem)
        await fleet.until(lambda: f"a: {status.problem}" in caplog.messages)  # written by the reader's thread
        assert fleet.sink.applied == {"a": []}


async def test_a_publisher_without_curve_is_not_believed(tmp_path: Path) -> None:
    async with followed_with(tmp_path) as fleet:
        await fleet.follow(fleet.publisher(already=[1]))
        await fleet.until(lambda: fleet.status().alarm == "handshake")
        assert fleet.sink.applied == {"a": []}


async def test_a_publisher_that_demands_curve_says_so(fleet: Fleet) -> None:
    await fleet.follow(fleet.publisher(curve_secret=SERVER[1], already=[1]))
    await fleet.until(lambda: fleet.status().alarm == "handshake")
    assert "events.curve if the publisher wants CURVE" in str(fleet.status().problem)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can't be read"),
        (b"nonsense", "is not a CURVE secret key"),
        (OTHER[1], "events.curve.public_key does not belong to the secret key"),
    ],
    ids=["gone", "garbage", "of-another"],
)
async def test_keys_that_can_not_be_used_are_told_before_anything_starts(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    keys = CurveSettings(server_key=SERVER[0].decode(), public_key=CLIENT[0].decode(), secret_key_file=file)
    fleet = Fleet(SETTINGS.model_copy(update={"curve": keys}))
    with pytest.raises(OSError, match=says) as refused:
        await fleet.manager.start()
    assert OTHER[1].decode() not in str(refused.value)
    await fleet.close()
