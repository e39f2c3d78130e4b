"""Prompts with images, from a render endpoint's answer and an engine's events to credit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvsync.index.match import Index
from kvsync.routing.lookup import match_prompt
from kvsync.tokenize.render import read_rendering
from kvsync.tokenize.types import Prompt
from tests.contract.captures import payload, records
from tests.wire import batch, stored

M = "model"
PAD = 7
"""The placeholder token."""


def rendered(ids: Sequence[int], *images: tuple[str, int, int]) -> Prompt:
    """What the gateway makes of an answer with these items: name, offset, length."""
    features = {
        "mm_hashes": {"image": [name for name, _, _ in images]},
        "mm_placeholders": {"image": [{"offset": offset, "length": length} for _, offset, length in images]},
    }
    return read_rendering(json.dumps({"token_ids": list(ids), "features": features}).encode())


def credit(index: Index, prompt: Prompt, **keys: Any) -> dict[str, int]:
    return {worker: match.credit for worker, match in match_prompt(index, prompt, M, **keys).items()}


def test_the_recorded_shape_is_credited_whole_for_the_same_images_and_not_at_all_for_others(index: Index) -> None:
    """Its extra keys: ``[[["img-a", 2]], [["img-a", -2], ["img-b", 1]]]``."""
    index.add_worker("w", M)
    (shape,) = (r for r in records("synthetic_shapes_v0.32") if r["note"].startswith("multimodal"))
    data = payload(shape)
    assert data is not None
    index.apply("w", data)
    ids = [PAD] * 9
    assert credit(index, rendered(ids, ("img-a", 2, 3), ("img-b", 5, 3))) == {"w": 8}
    assert credit(index, rendered(ids, ("img-a", 2, 3), ("img-c", 5, 3))) == {"w": 4}
    assert credit(index, rendered(ids, ("img-c", 2, 3), ("img-b", 5, 3))) == {"w": 0}
    assert credit(index, rendered(ids, ("img-a", 1, 3), ("img-b", 5, 3))) == {"w": 0}
    assert credit(index, rendered(ids, ("img-a", 2, 3))) == {"w": 4}


def conversation(size: int) -> tuple[list[int], list[Any]]:
    """24 tokens: 9 of text, an image of 10 placeholders, 5 of text; and their extra keys, written out by hand."""
    ids = [*range(100, 109), *[PAD] * 10, *range(200, 205)]
    keys: dict[int, list[Any]] = {
        4: [None, None, [["cat", 1]], [["cat", -3]], [["cat", -7]], None],
        8: [None, [["cat", 1]], [["cat", -7]]],
    }
    return ids, keys[size]


def test_an_image_over_several_blocks_for_workers_of_different_block_sizes(index: Index) -> None:
    for worker, size in (("four", 4), ("eight", 8)):
        ids, keys = conversation(size)
        index.add_worker(worker, M)
        index.apply(worker, batch(stored(range(1, len(ids) // size + 1), ids, None, size, extra_keys=keys)))
    index.add_worker("new", M)
    assert credit(index, rendered([*ids, 1], ("cat", 9, 10))) == {"four": 24, "eight": 24, "new": 0}
    assert credit(index, rendered([*ids, 1], ("dog", 9, 10))) == {"four": 8, "eight": 8, "new": 0}
    assert credit(index, Prompt(rendered([*ids, 1], ("cat", 9, 10)).tokens, 25)) == {"four": 8, "eight": 8, "new": 0}
    assert credit(index, rendered([*ids, 1], ("cat", 9, 9))) == {"four": 24, "eight": 24, "new": 0}, (
        "the image's last token shares its block with one before it"
    )


def test_with_an_adapter_and_a_salt(index: Index) -> None:
    ids, keys = conversation(4)
    shown = [["ad", *(key or [])] for key in keys]
    shown[0].append("salt")
    index.add_worker("w", M)
    index.apply("w", batch(stored(range(1, 7), ids, None, 4, lora_name="ad", lora_id=1, extra_keys=shown)))
    prompt = rendered([*ids, 1], ("cat", 9, 10))
    assert credit(index, prompt, adapter="ad", cache_salt="salt") == {"w": 24}
    assert credit(index, prompt, adapter="ad") == {"w": 0}
    assert credit(index, prompt, cache_salt="salt") == {"w": 0}
