"""The publisher's sockets: sequence numbers, replay and its limits, faults."""

from __future__ import annotations

from contextlib import closing

import pytest
import zmq
from msgspec import msgpack

from kvsync.engine_sim.dialect import Dialect
from kvsync.engine_sim.events import Removed
from kvsync.engine_sim.publisher import Publisher
from tests.integration.engine_sim.subscriber import END, Subscriber

LOCAL = "tcp://127.0.0.1:0"
EVENT = Removed(bytes(16), 0)


def publisher(version: str = "0.32.0", **options: object) -> Publisher:
    return Publisher(
        Dialect.of(version),
        3,
        endpoint=LOCAL,
        replay_endpoint=LOCAL,
        topic="kv@pod",
        clock=lambda: 12.5,
        **options,  # type: ignore[arg-type]
    )


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def test_messages() -> None:
    with closing(publisher()) as source, Subscriber(source) as reader:
        source.publish([EVENT])
        source.publish([EVENT, EVENT])
        topic, seq, payload = reader.frames()
        assert (topic, seq) == (b"kv@pod", number(reader.base))
        event = {"type": "BlockRemoved", "block_hashes": [0], "medium": "GPU", "group_idx": 0}
        assert msgpack.decode(payload) == [12.5, [event], 3]
        assert reader.batch() == (reader.base + 1, [12.5, [event, event], 3])


def test_numbers_begin_at_0() -> None:
    with closing(publisher()) as source, Subscriber(source) as reader:
        assert [seq for seq, _ in reader.replay(0)] == list(range(reader.base))


@pytest.mark.parametrize(
    ("version", "topic", "end"),
    [("0.25.0", [], [b"", END, b""]), ("0.26.0", [b"kv@pod"], [b"", b"", END, b""])],
)
def test_replay_in_both_layouts(version: str, topic: list[bytes], end: list[bytes]) -> None:
    with closing(publisher(version)) as source, Subscriber(source) as reader:
        source.publish([EVENT])
        _, seq, payload = reader.frames()
        reader.ask(b"", seq)
        assert reader.answer() == [b"", *topic, seq, payload]
        assert reader.answer() == end
        assert source.replays == 1


def test_replay_from_the_middle_from_beyond_and_of_a_short_buffer() -> None:
    with closing(publisher(buffer_steps=5)) as source, Subscriber(source) as reader:
        for _ in range(9):
            source.publish([EVENT])
        live = [reader.batch()[0] for _ in range(9)]
        assert live == list(range(reader.base, reader.base + 9))
        assert [seq for seq, _ in reader.replay(0)] == live[-5:]
        assert [seq for seq, _ in reader.replay(live[7])] == live[7:]
        assert reader.replay(live[-1] + 1) == []
        assert reader.replay(2**64 - 2) == []


def test_requests_that_are_none_get_no_answer() -> None:
    with closing(publisher()) as source, Subscriber(source) as reader:
        reader.ask(bytes(8))
        reader.ask(b"", bytes(8), b"more")
        reader.ask(b"")
        # Answered in order: when this one's end marker is the first that comes, the others got nothing.
        reader.ask(b"", number(reader.base))
        assert reader.answer() == [b"", b"", END, b""]
        assert (source.bad_requests, source.replays) == (3, 1)


@pytest.mark.parametrize("start", [b"", b"\0", b"\0" * 40])
def test_a_start_of_any_length_is_a_number_all_the_same(start: bytes) -> None:
    with closing(publisher()) as source, Subscriber(source) as reader:
        reader.ask(b"", start)
        answer = reader.answer()
        assert answer is not None
        assert answer[-2] == number(0)


@pytest.mark.parametrize(("version", "loses"), [("0.32.0", True), ("0.33.0", False)])
def test_a_slow_client_loses_batches_of_a_long_replay_from_an_old_engine(version: str, loses: bool) -> None:
    """Up to 0.32 the replay socket queues 1,000 messages, however many are asked for."""
    count = 4_000
    with (
        closing(publisher(version, buffer_steps=count)) as source,
        Subscriber(source) as reader,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as slow,
    ):
        for _ in range(count):
            source.publish([EVENT] * 100)
        while reader.batch()[0] < reader.base + count - 1:
            pass
        slow.linger = 0
        slow.rcvhwm = 10
        slow.rcvbuf = 65_536
        slow.connect(source.replay_endpoint)
        slow.send_multipart([b"", bytes(8)])
        # Requests are answered one after another: when one that came later is answered, this one's is sent or lost.
        asked = 0
        while source.replays <= asked:
            asked += 1
            assert reader.replay(2**63) == []
        assert reader.replay(2**63) == []
        found = 0
        while slow.poll(1_000):
            if slow.recv_multipart()[-2] == END:
                break
            found += 1
        assert found >= 1_000
        assert (found < count) == loses


def test_dropped_batches_are_in_a_replay_and_lost_ones_are_not() -> None:
    with closing(publisher()) as source, Subscriber(source) as reader:
        source.publish([EVENT])
        assert reader.batch()[0] == reader.base
        source.faults.lose_next = 1
        source.faults.drop_next = 1
        for _ in range(3):
            source.publish([EVENT])
        assert reader.batch()[0] == reader.base + 3
        assert [seq - reader.base for seq, _ in reader.replay(reader.base)] == [0, 2, 3]


def test_a_cut_replay_has_no_end() -> None:
    with closing(publisher()) as source, Subscriber(source) as reader:
        for _ in range(4):
            source.publish([EVENT])
        live = [reader.batch()[0] for _ in range(4)]
        source.faults.replay_frames = 2
        reader.ask(b"", number(live[0]))
        assert [(reader.answer() or [])[-2] for _ in range(2)] == [number(seq) for seq in live[:2]]
        assert reader.answer(100) is None
        source.faults.replay_frames = None
        assert [seq for seq, _ in reader.replay(live[1])] == live[1:]


def test_standing_still() -> None:
    with closing(publisher()) as source, Subscriber(source) as reader:
        source.running.clear()
        source.publish([EVENT])
        reader.ask(b"", bytes(8))
        assert reader.silent()
        assert reader.answer(1) is None
        source.running.set()
        assert reader.batch()[0] == reader.base
        assert reader.answer() is not None


def test_closing_numbers_what_is_queued_and_frees_the_ports() -> None:
    source = publisher()
    for _ in range(100):
        source.publish([EVENT])
    source.close()
    assert source.published == 100
    again = Publisher(
        Dialect.of("0.32.0"), 0, endpoint=source.endpoint, replay_endpoint=source.replay_endpoint, topic="x"
    )
    with closing(again), Subscriber(again) as reader:
        assert reader.replay(0)[0][0] == 0
