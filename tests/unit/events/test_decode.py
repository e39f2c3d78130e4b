"""The decoder: every dialect, every kind of bad input, and nothing else than UndecodableBatch ever raised."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.events.decode import MAX_EVENTS, MAX_HASHES, MAX_PAYLOAD, decode_batch
from kvsync.events.types import (
    AllBlocksClearedEvent,
    BlockRemovedEvent,
    BlockStoredEvent,
    Embeds,
    Image,
    KVEvent,
    Opaque,
    Salt,
    SkippedEvent,
    UndecodableBatch,
    hash_to_int64,
    pack_tokens,
)
from tests.wire import ARRAY_LENGTHS, as_array, batch, cleared, removed, stored

encode = msgspec.msgpack.encode


def one(event: Any) -> KVEvent | SkippedEvent:
    (decoded,) = decode_batch(batch(event)).events
    return decoded


def one_stored(event: Any) -> BlockStoredEvent:
    decoded = one(event)
    assert isinstance(decoded, BlockStoredEvent), decoded
    return decoded


@pytest.mark.parametrize("version", ARRAY_LENGTHS)
def test_array_dialects(version: str) -> None:
    event = stored([11, 12], range(8), parent=9, lora_id=3, medium="GPU", lora_name="a", group_idx=1)
    decoded = one_stored(as_array(event, version))
    assert decoded.block_hashes == (11, 12)
    assert decoded.parent_block_hash == 9
    assert decoded.raw_token_ids == pack_tokens(range(8))
    assert decoded.token_ids == (pack_tokens(range(4)), pack_tokens(range(4, 8)))
    fields = ARRAY_LENGTHS[version][0]
    assert decoded.lora_id == 3
    assert decoded.medium == ("GPU" if fields >= 6 else None)
    assert decoded.lora_name == ("a" if fields >= 7 else None)
    assert decoded.extra_keys == (((), ()) if fields >= 8 else None)
    assert decoded.group_idx == (1 if fields >= 9 else None)
    assert decoded.kv_cache_spec_kind == ("full_attention" if fields >= 10 else None)
    gone = one(as_array(removed([11]), version))
    assert isinstance(gone, BlockRemovedEvent)
    assert gone.medium == ("GPU" if ARRAY_LENGTHS[version][1] >= 2 else None)
    assert one(["AllBlocksCleared"]) == AllBlocksClearedEvent()


def test_map_with_shuffled_and_unknown_keys() -> None:
    event = stored([1], range(4), kv_cache_spec_sliding_window=64, session_id="s", unheard_of={"x": [1]})
    shuffled = dict(sorted(event.items(), reverse=True))
    assert one(shuffled) == one(event)
    assert one_stored(event).kv_cache_spec_sliding_window == 64
    assert one_stored(event).session_id == "s"


def test_dialects_mixed_in_one_batch_and_longer_arrays() -> None:
    longer = [*as_array(stored([1], range(4)), "0.22.0"), "a field of the future", {"x": 1}]
    events = decode_batch(batch(longer, stored([2], range(4)), as_array(removed([1]), "0.9.0"), cleared())).events
    assert [type(e) for e in events] == [BlockStoredEvent, BlockStoredEvent, BlockRemovedEvent, AllBlocksClearedEvent]


def test_only_hashes_are_required() -> None:
    decoded = one_stored({"type": "BlockStored", "block_hashes": [5]})
    assert (decoded.raw_token_ids, decoded.block_size, decoded.lora_id) == (b"", 0, -1)
    assert one_stored(["BlockStored", [5]]) == decoded
    assert one({"type": "BlockStored"}) == SkippedEvent("BlockStored", "missing_field", may_remove=False)
    assert one(["BlockRemoved"]) == SkippedEvent("BlockRemoved", "missing_field", may_remove=True)


@pytest.mark.parametrize("rank", [None, 0, 7])
def test_rank(rank: int | None) -> None:
    assert decode_batch(batch(rank=rank)).data_parallel_rank == rank


def test_batch_of_two_items_and_batch_as_map() -> None:
    assert decode_batch(encode([1.5, []])).data_parallel_rank is None
    decoded = decode_batch(encode({"events": [cleared()], "ts": 2, "data_parallel_rank": 1, "more": 0}))
    assert (decoded.ts, decoded.data_parallel_rank, len(decoded.events)) == (2.0, 1, 1)


@pytest.mark.parametrize("value", [-(2**63), -1, 0, 2**63, 2**64 - 1, b"\x00" * 8, bytes(range(32)), "a-string"])
def test_hash_forms(value: Any) -> None:
    assert one_stored(stored([value], range(4), parent=value)).block_hashes == (value,)
    assert one_stored(stored([value], range(4), parent=value)).parent_block_hash == value


@pytest.mark.parametrize("value", [1.5, True, None, [], {}, b"", b"x" * 65, "", "x" * 257])
def test_bad_hashes(value: Any) -> None:
    assert one(stored([value], range(4))) == SkippedEvent("BlockStored", "bad_hash", may_remove=False)
    assert one(removed([value])) == SkippedEvent("BlockRemoved", "bad_hash", may_remove=True)
    if value is not None:
        assert one(stored([1], range(4), parent=value)) == SkippedEvent("BlockStored", "bad_hash", may_remove=False)


def test_hashes_as_the_contract_gives_them() -> None:
    assert hash_to_int64(2**64 - 1) == -1
    assert hash_to_int64(-5) == -5
    assert hash_to_int64(bytes(range(32))) == int.from_bytes(bytes(range(8)), "big")
    assert hash_to_int64(b"\x01\x02") == 0x0102
    assert hash_to_int64(b"\xff" * 8 + b"rest") == -1
    assert hash_to_int64("abcdefghij") == int.from_bytes(b"abcdefgh", "big")
    assert one_stored(stored([2**63], range(4))).hashes_int64 == (-(2**63),)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.0], [None], "text", {"a": 1}, [[1]], [True]])
def test_bad_tokens(tokens: Any) -> None:
    event = stored([1], []) | {"token_ids": tokens}
    assert one(event) == SkippedEvent("BlockStored", "bad_token", may_remove=False)


@pytest.mark.parametrize("size", [-1, 2**31, 2**63 - 1])
def test_bad_block_size(size: int) -> None:
    assert one(stored([1], [], block_size=size)) == SkippedEvent("BlockStored", "bad_block_size", may_remove=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_hashes", 5),
        ("block_hashes", {"a": 1}),
        ("block_size", "16"),
        ("block_size", 16.0),
        ("lora_id", "x"),
        ("medium", 1),
        ("lora_name", b"x"),
        ("extra_keys", 3),
        ("extra_keys", [None, None]),
        ("extra_keys", [7]),
        ("group_idx", "0"),
        ("kv_cache_spec_kind", 1),
        ("kv_cache_spec_sliding_window", 1.5),
        ("session_id", 1),
    ],
)
def test_wrong_types_cost_their_event_only(field: str, value: Any) -> None:
    good = stored([2], range(4))
    events = decode_batch(batch(good, stored([1], range(4)) | {field: value}, good)).events
    assert events[1] == SkippedEvent("BlockStored", "wrong_type", may_remove=False)
    assert events[0] == events[2] == one(good)


def test_tokens_that_do_not_fill_their_blocks_stay_whole() -> None:
    decoded = one_stored(stored([1, 2], range(6)))
    assert decoded.token_ids == ()
    assert len(decoded.raw_token_ids) == 24
    assert one_stored(stored([], range(4))).token_ids == ()
    assert one_stored(stored([1], [], block_size=0)).token_ids == ()


def test_extra_keys_get_their_kinds() -> None:
    keys = [["X", "X", ["img", -3], b"\x01", 7], ["X", "img2"], None]
    decoded = one_stored(stored([1, 2, 3], range(12), lora_name="X", extra_keys=keys))
    assert decoded.extra_keys == (
        (Salt("X"), Image("img", -3), Embeds(b"\x01"), Opaque(b"\x07")),
        (Image("img2"),),
        (),
    )
    later = one_stored(stored([1], range(4), parent=9, extra_keys=[["not-a-salt"]]))
    assert later.extra_keys == ((Image("not-a-salt"),),)
    base = one_stored(stored([1], range(4), extra_keys=[["X"]]))
    assert base.extra_keys == ((Salt("X"),),)


@pytest.mark.parametrize(
    ("event", "tag", "reason", "may_remove"),
    [
        (["BlockTouched", [1]], "BlockTouched", "unknown_tag", False),
        ({"type": "TierBlocksCleared"}, "TierBlocksCleared", "unknown_tag", True),
        (["BlocksEvicted"], "BlocksEvicted", "unknown_tag", True),
        ([], "", "no_tag", True),
        ([1, 2], "", "no_tag", True),
        ({"tag": "BlockStored"}, "", "no_tag", True),
        ({"type": 4}, "", "no_tag", True),
        ("BlockStored", "", "not_an_event", True),
        (None, "", "not_an_event", True),
        ({1: 2}, "", "wrong_type", True),
    ],
)
def test_what_is_no_known_event(event: Any, tag: str, reason: str, may_remove: bool) -> None:
    assert one(event) == SkippedEvent(tag, reason, may_remove)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not_msgpack"),
        (b"\xc1", "not_a_batch"),
        (b"\x00", "not_a_batch"),
        (encode("text"), "not_a_batch"),
        (encode([]), "missing_field"),
        (encode([1.0]), "missing_field"),
        (encode({"ts": 1.0}), "missing_field"),
        (encode(["x", []]), "wrong_type"),
        (encode([None, []]), "wrong_type"),
        (encode([1.0, None]), "wrong_type"),
        (encode([1.0, {}]), "wrong_type"),
        (encode([1.0, [], "0"]), "wrong_type"),
        (batch(cleared()) + b"\x00", "not_msgpack"),
        (batch(cleared())[:-3], "not_msgpack"),
        (b"\xdd\xff\xff\xff\xff\x01", "not_msgpack"),
        (b"\x93\xcb" + b"\0" * 8 + b"\xdd\xff\xff\xff\xff\x01", "not_msgpack"),
        (b"\x91" * 100_000, "not_msgpack"),
    ],
)
def test_what_is_no_batch(payload: bytes, reason: str) -> None:
    with pytest.raises(UndecodableBatch) as caught:
        decode_batch(payload)
    assert caught.value.reason == reason


def test_an_absurdly_large_payload_is_refused_unread() -> None:
    with pytest.raises(UndecodableBatch, match="too_large"):
        decode_batch(bytes(MAX_PAYLOAD + 1))


def test_an_absurd_number_of_events_is_refused_undecoded() -> None:
    most = b"\x92\xcb" + bytes(8) + b"\xdd" + MAX_EVENTS.to_bytes(4, "big") + b"\xc0" * MAX_EVENTS
    assert len(decode_batch(most).events) == MAX_EVENTS
    more = b"\x92\xcb" + bytes(8) + b"\xdd" + (MAX_EVENTS + 1).to_bytes(4, "big") + b"\xc0" * (MAX_EVENTS + 1)
    tracemalloc.start()
    with pytest.raises(UndecodableBatch, match="too_large"):
        decode_batch(more)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_more_hashes_than_lookups_can_wait_for_are_refused() -> None:
    half = list(range(MAX_HASHES // 2))
    most = [stored(half, []), removed(half)]
    assert len(decode_batch(batch(*most)).events) == 2
    with pytest.raises(UndecodableBatch, match="too_large"):
        decode_batch(batch(*most, removed([1])))
    unreadable = removed([*half, None])
    assert decode_batch(batch(*most, unreadable)).events[-1] == SkippedEvent("BlockRemoved", "bad_hash", True)


def test_declared_lengths_cost_no_memory() -> None:
    bombs = [
        b"\x92\xcb" + b"\0" * 8 + b"\xdd\x7f\xff\xff\xff" + b"\xc0" * 64,
        b"\x92\xcb" + b"\0" * 8 + b"\x91" + b"\xdd\x00\x10\x00\x00" * 900 + b"\xc0" * 1000,
        b"\x92\xcb" + b"\0" * 8 + b"\x91\x92\xabBlockStored\xc6\xff\xff\xff\xff",
    ]
    tracemalloc.start()
    for bomb in bombs:
        with pytest.raises(UndecodableBatch):
            decode_batch(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_deeply_nested_fields_cost_their_event_only() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    events = decode_batch(batch(stored([1], range(4), unknown=deep), stored([1], range(4), extra_keys=[[deep]]))).events
    assert isinstance(events[0], BlockStoredEvent)
    assert isinstance(events[1], BlockStoredEvent)
    assert isinstance(events[1].extra_keys, tuple)


@given(st.binary(max_size=200))
def test_any_bytes_raise_nothing_else(payload: bytes) -> None:
    with suppress(UndecodableBatch):
        decode_batch(payload)


@given(st.data())
def test_any_damage_to_a_real_batch_raises_nothing_else(data: st.DataObject) -> None:
    payload = bytearray(batch(stored([1, 2], range(8), extra_keys=[["s"], None]), removed([b"x" * 32]), cleared()))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut])):
        with suppress(UndecodableBatch):
            decode_batch(damaged)
