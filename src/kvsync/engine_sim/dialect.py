"""The wire forms of cache events, from vLLM 0.9.2 to 0.33: which fields, in which order, as array or map.

A version decides everything: nothing here mixes forms of two versions. Arrays keep their fixed length (nils are
written); maps always have the required fields, and leave out optional ones that have no value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from kvsync.engine_sim.events import CacheEvent, Cleared, Removed, Stored
from kvsync.engine_sim.hashing import BlockHash, as_bytes, as_signed, as_unsigned

HashForm = Literal["signed", "unsigned", "bytes"]
WireHash: TypeAlias = int | bytes
Version: TypeAlias = tuple[int, int, int]

END_OF_REPLAY = b"\xff" * 8
"""The sequence number −1, which ends a replay."""

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?\Z")
_OLDEST: Version = (0, 9, 1)
_FORMS: dict[HashForm, Callable[[BlockHash], WireHash]] = {
    "signed": as_signed,
    "unsigned": as_unsigned,
    "bytes": as_bytes,
}


def parse_version(text: str) -> Version:
    """``0.24`` or ``0.24.1`` as numbers.

    Raises:
        ValueError: not a version, or one from before data-parallel ranks were part of a batch (0.9.1).
    """
    found = _VERSION.match(text)
    if not found:
        raise ValueError(f"{text!r} is not a vLLM version such as 0.32.0")
    version = (int(found[1]), int(found[2]), int(found[3] or 0))
    if version < _OLDEST:
        raise ValueError(f"vLLM {text} is too old: events are simulated from 0.9.1 on")
    return version


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one vLLM version writes events and replays."""

    version: Version
    hash_form: HashForm

    @classmethod
    def of(cls, version: str, hash_form: HashForm | None = None) -> Dialect:
        """The dialect of a version; without ``hash_form``, that version's default."""
        parsed = parse_version(version)
        return cls(parsed, hash_form or ("signed" if parsed < (0, 10, 2) else "unsigned"))

    @property
    def maps(self) -> bool:
        return self.version >= (0, 24, 0)

    @property
    def topic_in_replay(self) -> bool:
        return self.version >= (0, 26, 0)

    @property
    def reports_full(self) -> bool:
        """Whether ``kv_cache_report_mode`` exists."""
        return self.version >= (0, 26, 0)

    @property
    def has_event_sources(self) -> bool:
        """Whether ``GET /kv_event_sources`` exists."""
        return self.version >= (0, 31, 0)

    @property
    def replay_high_water(self) -> Literal["default", "buffer"]:
        """What the replay socket may queue per client: ZMQ's 1,000, beyond which it drops silently, or all it has."""
        return "buffer" if self.version >= (0, 33, 0) else "default"

    def encode_batch(self, timestamp: float, events: Sequence[CacheEvent], rank: int) -> bytes:
        """One message's payload."""
        return msgspec.msgpack.encode([timestamp, [self._event(event) for event in events], rank])

    def replay_frames(self, topic: bytes, seq: int, payload: bytes) -> list[bytes]:
        """A replayed batch, without the client's identity."""
        frames = [b"", topic, seq.to_bytes(8, "big"), payload]
        return frames if self.topic_in_replay else [b"", *frames[2:]]

    def replay_end(self) -> list[bytes]:
        """What follows the last replayed batch."""
        return [b"", b"", END_OF_REPLAY, b""] if self.topic_in_replay else [b"", END_OF_REPLAY, b""]

    def _event(self, event: CacheEvent) -> list[Any] | dict[str, Any]:
        match event:
            case Stored():
                tag, required, optional = "BlockStored", *self._stored(event)
            case Removed():
                tag, required, optional = "BlockRemoved", *self._removed(event)
            case Cleared():
                tag, required, optional = "AllBlocksCleared", {}, {}
        if self.maps:
            return {"type": tag} | required | {name: value for name, value in optional.items() if value is not None}
        return [tag, *required.values(), *optional.values()]

    def _stored(self, event: Stored) -> tuple[dict[str, Any], dict[str, Any]]:
        wire = _FORMS[self.hash_form]
        required: dict[str, Any] = {
            "block_hashes": [wire(block_hash) for block_hash in event.hashes],
            "parent_block_hash": None if event.parent is None else wire(event.parent),
            "token_ids": event.tokens,
            "block_size": event.block_size,
            "lora_id": event.lora_id,
        }
        if self.version >= (0, 10, 2):
            required["medium"] = "GPU"
        if self.version >= (0, 14, 0):
            required["lora_name"] = event.lora_name
        optional: dict[str, Any] = {}
        if self.version >= (0, 17, 0):
            optional["extra_keys"] = event.extra_keys or None
        if self.version >= (0, 20, 0):
            optional["group_idx"] = event.group
        if self.version >= (0, 22, 0):
            optional["kv_cache_spec_kind"] = event.kind
            optional["kv_cache_spec_sliding_window"] = event.window
        if self.version >= (0, 30, 0):
            optional["session_id"] = event.session_id
        return required, optional

    def _removed(self, event: Removed) -> tuple[dict[str, Any], dict[str, Any]]:
        required: dict[str, Any] = {"block_hashes": [_FORMS[self.hash_form](event.block_hash)]}
        if self.version >= (0, 10, 2):
            required["medium"] = "GPU"
        return required, {"group_idx": event.group} if self.version >= (0, 20, 0) else {}
