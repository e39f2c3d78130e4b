"""Asking the index about a prompt, images included.

An engine names a block by its tokens and by every image that overlaps it: the image's identifier and where it begins,
counted from the block's first token (vLLM ≥ 0.19; negative in the blocks behind its first). So a prompt with images has
other block keys for every block size in use. What must always hold: a worker is judged by the keys of its own block
size. Prompts without images have no such keys and need one lookup for all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from kvsync.events.types import ExtraKey, Image
from kvsync.index.match import Matches, MatchTable, Tokens
from kvsync.tokenize.types import ImageSpan, Prompt


class Lookup(Protocol):
    """The part of the index that answers lookups."""

    def match(
        self,
        tokens: Tokens,
        model: str,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    ) -> Matches: ...

    def block_sizes(self, model: str) -> dict[str, int]: ...


def block_keys(images: Sequence[ImageSpan], block_size: int) -> list[list[Image] | None]:
    """The images of every block up to the one in which the last image ends.

    ``images`` are in the order in which they stand, and none stands over another.
    """
    if not images:
        return []
    keys: list[list[Image] | None] = [None] * -(-(images[-1].offset + images[-1].length) // block_size)
    for span in images:
        for block in range(span.offset // block_size, (span.offset + span.length - 1) // block_size + 1):
            image = Image(span.identifier, span.offset - block * block_size)
            known = keys[block]
            if known is None:
                keys[block] = [image]
            else:
                known.append(image)
    return keys


def match_prompt(
    index: Lookup, prompt: Prompt, model: str, *, adapter: str | None = None, cache_salt: str | None = None
) -> Matches:
    """What each worker of ``model`` can do for the prompt. Raises what the index raises."""
    if not prompt.images:
        return index.match(prompt.tokens, model, adapter=adapter, cache_salt=cache_salt)
    sizes = index.block_sizes(model)
    found = MatchTable()
    for size in dict.fromkeys(sizes.values()):
        # A worker without a block size has stored nothing: whatever is asked, it is credited with nothing.
        keys = block_keys(prompt.images, size) if size else None
        answer = index.match(prompt.tokens, model, adapter=adapter, cache_salt=cache_salt, block_keys=keys)
        found.update({worker: match for worker, match in answer.items() if sizes.get(worker) == size})
    return found


def told_apart(prompt: Prompt) -> bytes:
    """The prompt's tokens with every image's first placeholder replaced by a hash of what the image is.

    Two images have the same placeholders; hashes of these tokens tell them apart, and agree up to the first image that
    differs. For hints only: it is no prompt that an engine knows.
    """
    if not prompt.images:
        return prompt.tokens
    tokens = bytearray(prompt.tokens)
    for span in prompt.images:
        tokens[span.offset * 4 : span.offset * 4 + 4] = xxhash.xxh32_digest(span.identifier.encode())
    return bytes(tokens)


def holds_beginning(
    index: Lookup, worker: str, model: str, adapter: str | None, cache_salt: str | None, tokens: bytes
) -> bool | None:
    """Whether a worker of ``model`` holds the beginning of a prompt that ``worker`` computed a moment ago.

    ``None`` when that can't be told: ``worker`` is not followed, or not exactly, or the prompt has no more than two of
    its blocks (the last token is never taken from the cache, and a speculating engine gives one block less).
    ``False`` may mean, too, that the blocks were evicted again.
    """
    size = index.block_sizes(model).get(worker, 0)
    if not size or len(tokens) // 4 <= 2 * size:
        return None
    found = index.match(tokens, model, adapter=adapter, cache_salt=cache_salt)
    if any(match.credit or match.expected for match in found.values()):
        return True
    return False if worker in found and found[worker].trust == "exact" else None


__all__ = ["Lookup", "block_keys", "holds_beginning", "match_prompt", "told_apart"]
