"""The native core and the reference agree: the same streams, sound or broken, give the same answers and counters.

Agreement alone proves nothing (test_oracle.py and test_captures.py judge both against other things than each other);
what it adds is the breadth that only a random stream has: every dialect, hashes and tokens from so small a universe
that parents, second copies, twins, removals, groups and tiers really meet, wrong types in any field, damaged bytes.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from random import Random
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from kvsync.events.decode import decode_batch
from kvsync.events.types import Embeds, Image, Opaque, Salt, UndecodableBatch
from kvsync.index.match import Index, Match, Matches
from kvsync.index.reference import ReferenceIndex
from tests.contract import test_oracle_losses as losses
from tests.contract.captures import DATA, payload, records
from tests.contract.conftest import IMPLEMENTATIONS
from tests.wire import ARRAY_LENGTHS, as_array, batch, cleared, removed, stored

pytestmark = pytest.mark.skipif("core" not in IMPLEMENTATIONS, reason="the native core (kvsync-core) is not installed")

MODEL = "m"
BLOCK = 2
WORKERS = ("v", "w")


POSITIONS = 2**41
"""``as_of`` beyond the number of the registration, which each implementation counts for itself."""


NOBODY = Match(0)


class Pair:
    """Both implementations, led through the same life."""

    def __init__(self, max_blocks: int | None = None) -> None:
        self.indexes: tuple[Index, Index] = (ReferenceIndex(max_blocks), IMPLEMENTATIONS["core"](max_blocks))
        self.asked: list[tuple[Any, dict[str, Any], tuple[Matches, ...]]] = []
        """Prompt, its keys, and what each answered."""

    def do(self, method: str, *args: Any, **kwargs: Any) -> None:
        for index in self.indexes:
            getattr(index, method)(*args, **kwargs)

    def same_stats(self) -> dict[str, Any]:
        ours, theirs = (index.stats()["workers"] for index in self.indexes)
        assert ours == theirs
        for model in (MODEL, "nobody's"):
            sizes, their_sizes = (index.block_sizes(model) for index in self.indexes)
            assert sizes == their_sizes
        return ours  # type: ignore[return-value]

    def same_match(self, tokens: Any, **keys: Any) -> Matches:
        ours, theirs = (index.match(tokens, MODEL, **keys) for index in self.indexes)
        assert ours == theirs
        assert dict(ours.hits()) == dict(theirs.hits())
        assert ours.doubts() == theirs.doubts()
        for worker, match in ours.items():
            assert match.as_of % POSITIONS == theirs[worker].as_of % POSITIONS
        self.asked = [*self.asked[-20:], (tokens, keys, (ours, theirs))]
        return ours

    def same_observation(self, worker: str, rng: Random, until: float) -> str:
        """An answer to one of the last prompts, true or not."""
        tokens, keys, matches = rng.choice(self.asked)
        cached = rng.choice([0, BLOCK, BLOCK, 2 * BLOCK, 2 * BLOCK, 3 * BLOCK, 1, 2**40])
        given = [answer.get(worker, NOBODY) for answer in matches]
        odd = rng.choice([None] * 8 + [0, 2**63])
        found = [
            index.observe(
                worker, tokens, MODEL, cached, match.credit, match.as_of if odd is None else odd, until, **keys
            )
            for index, match in zip(self.indexes, given, strict=True)
        ]
        assert found[0] == found[1]
        return found[0]


# -- streams of events


def tokens_of(letters: Iterable[int]) -> list[int]:
    return [letter * 1000 + i for letter in letters for i in range(BLOCK)]


PATHS = [path for length in (1, 2, 3) for path in itertools.product((0, 1), repeat=length)]
HASHES: list[Any] = [1, 2, -1, 2**64 - 1, 2**63, b"\x01" * 8, b"1", "1", "p" * 256, b"z" * 64, 5, 6, 7, 8]
"""One per path, of every kind: numbers and texts that look alike among them."""
HASH_OF = dict(zip(PATHS, HASHES, strict=True))
PROMPTS = [[*tokens_of(path), 9] for path in PATHS if len(path) == 3]
JUNK: list[Any] = [
    None, True, 1.5, -1, 2**63, 2**64 - 1, 2**32, b"", b"x" * 65, "", "y" * 257, [], [None], [1, 2], ["a", True], {},
    {"a": 1}, [[["A"]]], [[], []], msgspec.msgpack.Ext(5, b"x"), "GPU", "Moon", 0, 1, 3,
]  # fmt: skip

FULL = "full_attention"
KINDS = [
    FULL,
    FULL,
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "chunked_local_attention",
    None,
    ...,
]
GROUPS = [0, 0, 0, 1, 2, None, -3]


def one_in(n: int, rng: Random) -> bool:
    return rng.randrange(n) == 0


def store_event(rng: Random, wild: bool) -> Any:
    path = rng.choice(PATHS if wild else PATHS[:8])
    first = rng.randrange(len(path))
    hashes = [HASH_OF[path[: i + 1]] for i in range(first, len(path))]
    parent = HASH_OF[path[:first]] if first else None
    if one_in(8, rng):
        hashes[rng.randrange(len(hashes))] = rng.choice(HASHES)
    if one_in(12, rng):
        parent = rng.choice([None, *HASHES])
    adapter = rng.choice([None, None, None, "A", "B"])
    keys: list[list[Any]] = [[adapter] if adapter else [] for _ in hashes]
    if one_in(4, rng):
        odd: list[Any] = ["A", "A", "B", ["img", 1], ["img", -(2**63)], b"digest", 4, {"k": [1]}, ["img", True]]
        keys[0] += rng.choices(odd, k=rng.randrange(3))
    shown = [key or None for key in keys]
    fields: dict[str, Any] = {
        "block_size": BLOCK,
        "medium": rng.choice(["GPU", "GPU", "GPU", "gpu", None, "CPU", "cpu", "FS", "storage", "Obj"]),
        "lora_name": adapter,
        "lora_id": rng.choice([None, None, 1, -1]),
        "kv_cache_spec_sliding_window": rng.choice([None, 3, 5]),
        "extra_keys": rng.choice([shown, shown, None, ...]),
    }
    tokens: list[Any] = tokens_of(path[first:])
    if wild:
        fields["group_idx"] = rng.choice(GROUPS)
        fields["kv_cache_spec_kind"] = rng.choice(KINDS)
        shape = rng.randrange(14)
        if shape == 0:  # sparse: fewer hashes than the tokens hold
            hashes = hashes[:-1]
        elif shape == 1:
            tokens = [*tokens, 7]
        elif shape == 2:  # an offload placeholder
            fields["block_size"], tokens = 0, []
        elif shape == 3:
            fields["block_size"] = rng.choice([1, 4, 2**31 - 1, 2**31, -1])
        elif shape == 4:
            fields["medium"] = "Moon"
        elif shape == 5:
            fields["kv_cache_spec_kind"] = "cross_attention"
        elif shape == 6:
            fields["kv_cache_spec_sliding_window"] = 0
        elif shape == 7:
            hashes[-1] = rng.choice(JUNK)
        elif shape == 8:
            tokens[-1] = rng.choice(JUNK)
    return stored(hashes, tokens, parent, **fields)


def removal_event(rng: Random, wild: bool) -> Any:
    hashes = rng.choices(HASHES if wild else HASHES[:8], k=rng.choice([1, 1, 2]))
    fields: dict[str, Any] = {"medium": rng.choice(["GPU", "GPU", "gpu", "CPU", "storage"])}
    if wild:
        fields["group_idx"] = rng.choice(GROUPS)
        fields["medium"] = rng.choice([fields["medium"], None, "Moon"])
    if one_in(5, rng):
        counts = rng.choices([0, 0, 1, 2, 2**32 - 1, 2**32, -1] if wild else [0, 1, 2], k=len(hashes))
        fields["remaining_copy_counts"] = counts[one_in(6, rng) :]
    return removed(hashes, **fields)


def event(rng: Random, wild: bool) -> Any:
    made = rng.choices([store_event, removal_event, lambda *_: cleared()], [20, 8, 1])[0](rng, wild)
    if not wild:
        return made
    if one_in(8, rng):
        return rng.choice([["BlocksEvicted"], ["BlockTouched", 1], [], {}, {"type": 4}, 5, None, ["BlockStored"]])
    if one_in(10, rng):
        made[rng.choice(sorted(made))] = rng.choice(JUNK)
        if not isinstance(made.get("type"), str):
            return made
    form = rng.choice(["map", "map", *ARRAY_LENGTHS])
    return made if form == "map" else as_array(made, form)


def a_payload(rng: Random, wild: bool) -> bytes:
    some = [event(rng, wild) for _ in range(rng.randrange(6))]
    if not wild:
        return batch(*some)
    rank = rng.choice([0, 0, None, 1, 2**64 - 1])
    data = batch(*some, rank=rank)
    if one_in(6, rng):
        data = msgspec.msgpack.encode({"ts": 1, "events": some, "data_parallel_rank": rank, "more": [1]})
    return data[: rng.randrange(len(data))] if one_in(20, rng) else data


def some_facts(rng: Random) -> dict[str, Any]:
    facts = {
        "usable_blocks": rng.choice([1, 2, 4, 2**70]),
        "attention_chunk_size": rng.choice([2, 4, 2**70]),
        "spec_decode": rng.choice([None, "eagle"]),
        "hit_alignment": rng.choice([2, 4, 2**70]),
        "rank": rng.choice([None, 0, 1]),
    }
    return {name: value for name, value in facts.items() if one_in(4, rng)}


MARKS = [
    "forget", "forget", "forget", "new_epoch", "relearn", "mark_reannouncing", "mark_reannouncing", "mark_hidden_keys",
    "drops_last_block", "suspend", "resume", "resume", "remove_worker",
]  # fmt: skip


def step(pair: Pair, rng: Random, wild: bool) -> None:
    worker = rng.choice(WORKERS)
    what = rng.randrange(20)
    if what == 0 or what == 3:
        pair.do(rng.choice(MARKS), worker)
    elif what == 1:
        pair.do("add_worker", worker, MODEL, **some_facts(rng))
    elif 4 <= what < 8 and pair.asked:
        pair.same_observation(worker, rng, rng.choice([1.0, 2.0]))
    elif what == 8:
        pair.do("expire", rng.choice([0.5, 1.0, 1.0, 2.0]))
    else:
        data = a_payload(rng, wild)
        if what == 2:
            with suppress(UndecodableBatch):
                decoded = decode_batch(data)
                pair.do("apply_many", [(worker, decoded), ("nobody", decoded)])
        else:
            pair.do("apply", worker, data)


def test_streams_of_every_dialect() -> None:
    """Each step comes from a generator of its own, so that what fails is cut down to few steps."""
    seen: Counter[str] = Counter()

    @settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.booleans(), st.lists(st.randoms(use_true_random=True), min_size=4, max_size=16))
    def run(wild: bool, life: list[Random]) -> None:
        pair = Pair(life[0].choice([None, None, None, 2, 6]))
        for worker in WORKERS:
            pair.do("add_worker", worker, MODEL, **some_facts(life[0]))
        for rng in life:
            step(pair, rng, wild)
            for state in pair.same_stats().values():
                seen.update(state["counts"].keys())
                seen.update(word for word in ("doubtful", "reannouncing", "suspended") if state[word])
            for prompt, adapter, salt in itertools.product(rng.sample(PROMPTS, 3), (None, "A"), (None, "A")):
                for match in pair.same_match(prompt, adapter=adapter, cache_salt=salt).values():
                    seen.update([f"trust {match.trust}", *match.by_tier, *["expected"] * match.expected])

    run()
    counted = """
        batches stored removed cleared forgotten epochs wrong_rank unknown_medium removed_unknown unplaced
        waiting_offload parked undecodable_not_msgpack skipped_unknown_tag skipped_no_tag skipped_not_an_event
        skipped_missing_field skipped_wrong_type skipped_bad_hash skipped_bad_token
        skipped_bad_block_size skipped_bad_group relearned capped observed_runs observed_unusable
    """
    states = {
        "doubtful",
        "reannouncing",
        "trust exact",
        "trust partial",
        "trust none",
        "gpu",
        "cpu",
        "storage",
        "expected",
    }
    wanted = states | set(counted.split())
    assert wanted <= seen.keys(), wanted - seen.keys()


@pytest.mark.parametrize("usable", [1, 3, None])
def test_lives_in_doubt(usable: int | None) -> None:
    """A worker that announces hits again, and answers that end its doubts or confirm them."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        rng = Random(seed)
        pair = Pair()
        pair.do("add_worker", "w", MODEL, usable_blocks=usable)
        pair.do("mark_reannouncing", "w")
        for _ in range(40):
            pair.do("apply", "w", a_payload(rng, wild=False))
            for prompt in rng.sample(PROMPTS, 3):
                pair.same_match(prompt)
            seen[pair.same_observation("w", rng, 1.0)] += 1
            state = pair.same_stats()["w"]
            seen.update(word for word in state["counts"] if word.startswith("doubtful"))
            seen["doubtful"] += state["doubtful"] > 0
    wanted = {"doubtful", "doubtful_missed", "steady", "evicted", *["doubtful_dropped"] * (usable is not None)}
    assert wanted <= seen.keys(), wanted - seen.keys()


class Both:
    """Both implementations as one index, for :class:`~tests.contract.test_oracle_losses.LossyLife`."""

    def __init__(self, max_blocks: int | None) -> None:
        self._pair = Pair(max_blocks)
        self._their_position: dict[int, int] = {}

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args: self._pair.do(method, *args)

    def match(self, tokens: Any, model: str, **keys: Any) -> Matches:
        ours = self._pair.same_match(tokens, **keys)
        theirs = self._pair.asked[-1][2][1]
        self._their_position.update({match.as_of: theirs[worker].as_of for worker, match in ours.items()})
        return ours

    def observe(
        self, worker: str, tokens: Any, model: str, cached: int, credit: int, as_of: int, until: float, **keys: Any
    ) -> str:
        ours, theirs = self._pair.indexes
        found = ours.observe(worker, tokens, model, cached, credit, as_of, until, **keys)
        their_position = self._their_position[as_of]
        assert theirs.observe(worker, tokens, model, cached, credit, their_position, until, **keys) == found
        return found

    def stats(self) -> dict[str, Any]:
        return {"workers": self._pair.same_stats()}


@pytest.mark.parametrize("kind", losses.KINDS)
def test_lives_with_losses_and_answers(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        life = losses.LossyLife(cast(Index, Both(12 if seed % 2 else None)), losses.KINDS[kind], seed)
        for _ in range(60):
            life.step()
            seen.update(life.index.stats()["workers"]["w"]["counts"].keys())  # type: ignore[index]
    wanted = {"observed_runs", "adopted", "capped", "relearned"}
    if losses.KINDS[kind].reannounces:
        wanted.add("doubtful_missed")
    assert wanted <= seen.keys(), wanted - seen.keys()


def test_what_is_parked_and_what_makes_room() -> None:
    rng = Random(1)
    pair = Pair()
    pair.do("add_worker", "w", MODEL)
    big = list(range(1 << 17))
    for number in range(400):
        orphans = []
        for hash_ in range(number * 12, number * 12 + 12):
            parent = 10**6 + rng.randrange(3000)
            orphans.append(stored([hash_], [parent, hash_], parent, BLOCK))
        if one_in(10, rng):
            orphans.append(stored([10**7 + number], big, 10**6 + rng.randrange(3000), block_size=len(big)))
        if one_in(4, rng):
            orphans.append(stored([10**6 + rng.randrange(3000)], [rng.randrange(9), 1], None, BLOCK))
        pair.do("apply", "w", batch(*orphans))
        state = pair.same_stats()["w"]
    assert state["counts"]["parked_dropped"] > 100
    assert state["placed"] > 100


# -- damaged bytes


def captured() -> list[bytes]:
    """Batches of every capture: the first of each that is small, and a few from its middle."""
    chosen = []
    for path in sorted(DATA.glob("*.jsonl*")):
        frames = [payload(r) for r in records(path.name.split(".jsonl")[0]) if r["kind"] in ("sub", "replay")]
        small = [data for data in frames if data and len(data) < 2000]
        chosen += small[:6] + small[len(small) // 2 : len(small) // 2 + 3]
    return chosen


SAMPLES = captured()
INTERESTING = bytes([0x00, 0x7F, 0x80, 0x90, 0x91, 0xA0, 0xC0, 0xC1, 0xC2, 0xC4, 0xC6, 0xC7, 0xC9, 0xCA, 0xCC, 0xCF,
                     0xD3, 0xD4, 0xD6, 0xD7, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF])  # fmt: skip


def damaged(rng: Random) -> bytes:
    data = bytearray(rng.choice(SAMPLES))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(max(1, rng.choice([12, len(data)])))  # often in the batch's own frame
        byte = rng.choice([*INTERESTING, rng.randrange(256)])
        how = rng.randrange(8)
        if how <= 2:
            data[at : at + 1] = bytes([byte])
        elif how == 3:
            data[at:at] = bytes([byte])
        elif how == 4:
            del data[at : at + rng.randrange(1, 10)]
        elif how == 5:
            del data[at:]
        else:
            other = rng.choice(SAMPLES)
            begin = rng.randrange(len(other))
            data[at : at + rng.randrange(9)] = other[begin : begin + 16]
    return bytes(data)


def test_damaged_captures() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=1500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.randoms(use_true_random=True), min_size=1, max_size=4), st.binary(max_size=30))
    def run(stream: list[Random], noise: bytes) -> None:
        pair = Pair()
        pair.do("add_worker", "w", MODEL)
        pair.do("apply_many", [("w", data) for data in [*map(damaged, stream), noise]])
        seen.update(pair.same_stats()["w"]["counts"].keys())

    run()
    undecodable = {f"undecodable_{why}" for why in ("not_msgpack", "not_a_batch", "missing_field", "wrong_type")}
    assert undecodable | {"stored", "removed", "skipped_wrong_type"} <= seen.keys()


def test_every_prefix_of_a_batch() -> None:
    data = batch(stored([1, b"x" * 8, "p"], range(6), None, BLOCK, extra_keys=[["s"], None, [["i", 1]]]), removed([1]))
    for length in range(len(data) + 1):
        pair = Pair()
        pair.do("add_worker", "w", MODEL)
        pair.do("apply", "w", data[:length])
        assert pair.same_stats()["w"]["counts"].get("undecodable_not_msgpack", 0) == (length < len(data))


# -- values that a decoder may judge in more than one way


def timestamp(seconds: int, nanoseconds: int) -> bytes:
    return b"\xc7\x0c\xff" + nanoseconds.to_bytes(4, "big") + seconds.to_bytes(8, "big", signed=True)


FIRST, LAST = -62_135_596_800, 253_402_300_799
VALUES: dict[str, bytes] = {
    **{f"byte {first:02x}": bytes([first]) for first in range(256)},
    **{f"{first:02x} and zeros": bytes([first]) + bytes(17) for first in range(0xC0, 0xE0)},
    "bad utf-8": b"\xa1\xff",
    "surrogate": b"\xa3\xed\xa0\x80",
    "overlong": b"\xa2\xc0\x80",
    "nested bad utf-8": b"\x91\x81\xa1k\xa1\xff",
    "u64 above": b"\xcf" + (2**63).to_bytes(8, "big"),
    "i64 lowest": b"\xd3" + (2**63).to_bytes(8, "big"),
    "u32 in u64": b"\xcf" + (2**32 - 1).to_bytes(8, "big"),
    "beyond u32": b"\xcf" + (2**32).to_bytes(8, "big"),
    "positive in i8": b"\xd0\x05",
    "negative in i8": b"\xd0\xfb",
    "nan": b"\xca\x7f\xc0\x00\x00",
    "whole float": msgspec.msgpack.encode(1.0),
    "map with array key": b"\x81\x91\x01\x01",
    "map with map key": b"\x81\x80\x01",
    "map with map in array key": b"\x81\x91\x80\x01",
    "map with ext key": b"\x81\xd4\x05a\x01",
    "map with timestamp key": b"\x81\xd6\xff\x00\x00\x00\x01\x01",
    "map with nan keys": b"\x82\xca\x7f\xc0\x00\x00\x01\xca\x7f\xc0\x00\x00\x01",
    "map in map value": b"\x81\x01\x81\x02\x80",
    "pair": msgspec.msgpack.encode(["img", 3]),
    "pair with bytes": msgspec.msgpack.encode([b"img", 3]),
    "pair with u64": msgspec.msgpack.encode(["img", 2**64 - 1]),
    "three": msgspec.msgpack.encode(["img", 3, 3]),
    "ext": b"\xd4\x05a",
    "ext without bytes": b"\xc7\x00\x05",
    "timestamp 32": b"\xd6\xff\xff\xff\xff\xff",
    "timestamp 64": b"\xd7\xff" + b"\x00" * 7 + b"\x01",
    "timestamp 64 ns": b"\xd7\xff" + ((10**9) << 34).to_bytes(8, "big"),
    "timestamp 64 last ns": b"\xd7\xff" + ((10**9 - 1) << 34).to_bytes(8, "big"),
    "timestamp of 1 byte": b"\xd4\xff\x00",
    "timestamp of 16 bytes": b"\xd8\xff" + bytes(16),
    "timestamp of 0 bytes": b"\xc7\x00\xff",
    **{
        f"timestamp 96 {seconds} {nanoseconds}": timestamp(seconds, nanoseconds)
        for seconds in (FIRST - 1, FIRST, -1, LAST, LAST + 1, 2**62, -(2**62))
        for nanoseconds in (0, 499, 500, 999_999_499, 999_999_500, 999_999_999, 10**9, 2**32 - 1)
    },
    "deep": b"\x91" * 400 + b"\xc0",
    "deeper than is read": b"\x91" * 100_000 + b"\xc0",
    "deep maps": b"\x81\x01" * 400 + b"\xc0",
    "maps deeper than is read": b"\x81\x01" * 100_000 + b"\xc0",
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge string": b"\xdb\xff\xff\xff\xffx",
    "huge bytes": b"\xc6\xff\xff\xff\xffx",
    "huge ext": b"\xc9\xff\xff\xff\xff\x01x",
    "64 bytes": msgspec.msgpack.encode(b"x" * 64),
    "65 bytes": msgspec.msgpack.encode(b"x" * 65),
    "256 bytes of text": msgspec.msgpack.encode("é" * 128),
    "257 bytes of text": msgspec.msgpack.encode("é" * 128 + "x"),
}
encode: Callable[[Any], bytes] = msgspec.msgpack.encode
PLACES: dict[str, Callable[[Raw], bytes]] = {
    "payload": bytes,
    "timestamp": lambda raw: encode([raw, []]),
    "events": lambda raw: encode([1.0, raw]),
    "rank": lambda raw: encode([1.0, [], raw]),
    "fourth item": lambda raw: encode([1.0, [], 0, raw]),
    "batch key": lambda raw: b"\x83" + bytes(raw) + b"\x01" + encode("ts") + b"\x01" + encode("events") + b"\x90",
    "batch value": lambda raw: encode({"ts": 1.0, "events": [], "data_parallel_rank": raw}),
    "event": lambda raw: batch(raw),
    "tag": lambda raw: batch([raw, [1]]),
    "type": lambda raw: batch({"type": raw, "block_hashes": [1]}),
    "event key": lambda raw: b"\x92\x01\x91\x82" + bytes(raw) + b"\x01" + encode("type") + encode("AllBlocksCleared"),
    "clear's item": lambda raw: batch(["AllBlocksCleared", raw]),
    "unknown field": lambda raw: batch(stored([1], range(2), None, BLOCK, new_field=raw)),
    "hashes": lambda raw: batch({"type": "BlockStored", "block_hashes": raw}),
    "hash": lambda raw: batch(stored([raw, 1], range(4), None, BLOCK)),
    "bad hash, then": lambda raw: batch(stored([None, raw], range(4), None, BLOCK)),
    "removed hash": lambda raw: batch(removed([1, raw])),
    "remaining copies": lambda raw: batch(removed([1], remaining_copy_counts=[raw])),
    "all remaining copies": lambda raw: batch(removed([1], remaining_copy_counts=raw)),
    "token": lambda raw: batch(stored([1], [5, raw], None, BLOCK)),  # type: ignore[list-item]
    "extra key": lambda raw: batch(stored([1, 2], range(4), None, BLOCK, extra_keys=[[raw], [raw]])),
    "adapter's extra key": lambda raw: batch(stored([1], range(2), 9, BLOCK, lora_name="a", extra_keys=[["a", raw]])),
    "extra keys of a block": lambda raw: batch(stored([1], range(2), None, BLOCK, extra_keys=[raw])),
    "field block_size": lambda raw: batch(stored([1], range(2), None) | {"block_size": raw}),
    **{
        f"field {name}": lambda raw, name=name: batch(stored([1], range(2), None, BLOCK, **{name: raw}))  # type: ignore[misc]
        for name in (
            "parent_block_hash", "token_ids", "lora_id", "medium", "lora_name", "extra_keys", "group_idx",
            "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "session_id",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_odd_values_in_every_place(place: str) -> None:
    for name, value in VALUES.items():
        pair = Pair()
        pair.do("add_worker", "w", MODEL)
        pair.do("apply", "w", PLACES[place](Raw(value)))
        try:
            pair.same_stats()
            pair.same_match([0, 1, 2, 3, 4])
            pair.same_match([0, 1, 2, 3, 4], block_keys=[[Opaque(value)], [Opaque(value)]])
        except AssertionError as error:
            raise AssertionError(f"{place}: {name} ({value[:20].hex()})") from error


def test_payloads_up_to_the_limit() -> None:
    for size in (16 << 20, (16 << 20) + 1):
        pair = Pair()
        pair.do("add_worker", "w", MODEL)
        pair.do("apply", "w", b"\x93\x01\x90\xc6" + (size - 8).to_bytes(4, "big") + bytes(size - 8))
        pair.same_stats()


def test_media_fold_case_as_unicode_does() -> None:
    ascii_folds: dict[str, list[str]] = {}
    for char in map(chr, itertools.chain(range(0xD800), range(0xE000, 0x110000))):
        if (folded := char.casefold()).isascii() and folded.isalpha():
            ascii_folds.setdefault(folded, []).append(char)
    pair = Pair()
    pair.do("add_worker", "w", MODEL)
    for name in ("gpu", "cpu", "storage", "fs", "obj", "disk"):
        for folded, chars in ascii_folds.items():
            for char in chars if folded in name else ():
                pair.do("apply", "w", batch(stored([1], [], block_size=0, medium=name.replace(folded, char))))
    assert "unknown_medium" not in pair.same_stats()["w"]["counts"]
    for medium in ("", " gpu", "gpu\0", "ﬀs", "gpü", "storages", "gpu" * 100_000):
        pair.do("apply", "w", batch(stored([1], [], block_size=0, medium=medium)))
    assert pair.same_stats()["w"]["counts"]["unknown_medium"] == 7


# -- what callers hand over


@pytest.mark.parametrize(
    "tokens",
    [
        [], (), range(5), [True, False, 1], array("I", range(5)), array("B", bytes(8)), bytes(20), bytearray(20),
        memoryview(b""), memoryview(bytes(24)).cast("I", (2, 3)), [2**32], [-1], [1.0], ["1"], "12345", b"12345",
        array("i", [1]), array("q", [1]),
        memoryview(array("I", range(8)))[::2], 5, None, {1: 2}, {1, 2}, iter([1]),
    ],
)  # fmt: skip
def test_tokens_of_every_form(tokens: Any) -> None:
    pair = Pair()
    pair.do("add_worker", "w", MODEL)
    pair.do("apply", "w", batch(stored([1, 2], range(4), None, BLOCK), stored([3, 4], [0] * 4, None, BLOCK)))
    try:
        expected = pair.indexes[0].match(tokens, MODEL)
    except (TypeError, ValueError, OverflowError) as error:
        with pytest.raises(type(error)):
            pair.indexes[1].match(tokens, MODEL)
    else:
        assert pair.indexes[1].match(tokens, MODEL) == expected


@pytest.mark.parametrize(
    "keys",
    [
        None, [], [None], [[]], [[Image("i", 0)]], [[Image("i")]], [None, [Image("i", 0)]], ([Embeds(b"e")],),
        [[Embeds(b"e"), Image("i", 0)]], [[Image("i", 0), Embeds(b"e")]], [[Image("i", 0), Image("j", 0)]],
        [[Image("j", 0), Image("i", 0)]], [[Opaque(b"o")]], [[Salt("s")]], [None] * 9,
    ],
)  # fmt: skip
def test_block_keys_of_every_form(keys: Any) -> None:
    pair = Pair()
    pair.do("add_worker", "w", MODEL)
    shown = [[["i", 0]], [b"e"], [["i", 0], b"e"], [["i", 0], ["j", 0]], ["s"], [["i", 0], "s"], None]
    for number, wire in enumerate(shown):
        hashes = [2 * number, 2 * number + 1]
        pair.do("apply", "w", batch(stored(hashes, range(4), None, BLOCK, extra_keys=[wire, None])))
    pair.do("apply", "w", batch(stored([99], range(2, 4), 12, BLOCK, extra_keys=[[["i", 0]]])))
    for salt in (None, "s", ""):
        pair.same_match(range(5), block_keys=keys, cache_salt=salt)


@pytest.mark.parametrize("worker_known", [True, False])
@pytest.mark.parametrize("bad", ["text", 5, None, memoryview(bytes(8))[::2]])
def test_a_payload_that_is_none(bad: Any, worker_known: bool) -> None:
    """It is an error of the caller for a worker that is known; what came before it is applied."""
    for index in Pair().indexes:
        index.add_worker("w", MODEL)
        batches: list[Any] = [("w", batch(cleared())), ("w" if worker_known else "x", bad), ("w", batch(cleared()))]
        if worker_known:
            with pytest.raises(TypeError):
                index.apply_many(batches)
        else:
            index.apply_many(batches)
        counts = index.stats()["workers"]["w"]["counts"]  # type: ignore[index]
        assert counts["cleared"] == (1 if worker_known else 2)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda data: array("B", data)])
def test_payloads_in_any_buffer(form: Callable[[bytes], Any]) -> None:
    pair = Pair()
    pair.do("add_worker", "w", MODEL)
    pair.do("apply", "w", form(batch(stored([1], range(2), None, BLOCK))))
    pair.do("apply", "w", form(b""))
    assert pair.same_stats()["w"]["counts"]["undecodable_not_msgpack"] == 1


def test_a_wide_buffer_is_read_as_its_bytes() -> None:
    data = batch(stored([1], range(2), None, BLOCK, new_field=Raw(b"\xc4\x08" + bytes(8))))
    data += bytes(-len(data) % 4)
    pair = Pair()
    pair.do("add_worker", "w", MODEL)
    pair.do("apply", "w", array("I", data))
    pair.same_stats()


@pytest.mark.parametrize("name", ["usable_blocks", "attention_chunk_size", "hit_alignment"])
@pytest.mark.parametrize("value", [0, -1, -(2**70), "1"])
def test_facts_that_can_not_be(name: str, value: Any) -> None:
    for index in Pair().indexes:
        with pytest.raises((ValueError, TypeError)):
            index.add_worker("w", MODEL, **{name: value})
        assert index.stats()["workers"] == {}
