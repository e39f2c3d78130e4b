"""What engines publish: event batches in vLLM's wire format (maps, as of 0.23 and later).

The first field of a batch is the time of sending, so everything behind it is made beforehand: :func:`rest`, and
:func:`payload` puts the two together.

``python -m bench.traffic`` writes batches as frames to its standard output, for subjects that must not be disturbed by
making them: lines of JSON tell of the scripts, see :func:`frames`.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bench.subjects import FRAME
from bench.work import BLOCK, Batches, Event, Remove, Store, ready, script

encode = msgspec.msgpack.encode


def payload(sent: float, rest: bytes) -> bytes:
    """A message's payload: ``[time, events, rank]``."""
    return b"\x93\xcb" + struct.pack(">d", sent) + rest


def rest(events: Sequence[Event]) -> bytes:
    return encode([_wire(event) for event in events]) + encode(0)


def _wire(event: Event) -> dict[str, Any]:
    match event:
        case Store(prompt, at, count):
            return {
                "type": "BlockStored",
                "block_hashes": prompt.names[event.span],
                "parent_block_hash": event.parent,
                "token_ids": prompt.ids[at * BLOCK : (at + count) * BLOCK],
                "block_size": BLOCK,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * count,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case Remove(name):  # vLLM tells of each block that it evicts in an event of its own
            return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}
        case _:
            return {"type": "AllBlocksCleared"}


def in_turns(scripts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, list[Event]]]:
    """One batch of each script, by its number, then the next of each, until all have ended."""
    left: list[tuple[int, Batches]] = [(number, script(**one)) for number, one in enumerate(scripts)]
    while left:
        still = []
        for number, batches in left:
            events = next(batches, None)
            if events is not None:
                yield number, events
                still.append((number, batches))
        left = still


def frames(scripts: Sequence[Mapping[str, Any]], form: str) -> Iterator[tuple[int, bytes]]:
    """Batches of all scripts in turns, with the number of their worker. ``form``: ``vllm`` (payloads), or ``ready``
    (an event each, see :func:`bench.work.ready`)."""
    for number, (worker, events) in enumerate(in_turns(scripts)):
        if form == "vllm":
            yield worker, payload(1.0 + number * 1e-4, rest(events))
        else:
            for event in events:
                yield worker, ready(event, number)


def main() -> None:
    wanted = json.loads(sys.argv[1])
    for worker, data in frames(**wanted):
        sys.stdout.buffer.write(FRAME.pack(worker, len(data)))
        sys.stdout.buffer.write(data)


if __name__ == "__main__":
    main()
