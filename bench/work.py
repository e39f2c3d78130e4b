"""The work that all sides get: prompts as token ids, and hashes, each from a seed (nothing has to be sent along).

Standard library only: peers' environments use it too.
"""

from __future__ import annotations

import random
import struct
from array import array

BLOCK = 16
"""Tokens per block."""
VOCABULARY = 1 << 17
"""Token ids are spread evenly below this: half of them need five bytes on the wire."""


def tokens(seed: int, blocks: int) -> array[int]:
    """The token ids of a chain of blocks. A shorter chain of the same seed is the beginning of a longer one."""
    count = blocks * BLOCK
    raw = int.from_bytes(random.Random(seed).randbytes(4 * count), "little")
    mask = int.from_bytes(struct.pack("<I", VOCABULARY - 1) * count, "little")
    return array("I", (raw & mask).to_bytes(4 * count, "little"))


def hashes(seed: int, blocks: int) -> array[int]:
    """An engine's names for the blocks of a chain: 64-bit, as different as random numbers."""
    return array("Q", random.Random(~seed).randbytes(8 * blocks))
