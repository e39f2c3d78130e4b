"""What the simulated model says: words, always the same ones for the same prompt, on every engine."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import xxhash

from kvsync.engine_sim.request import FinishReason
from kvsync.engine_sim.tokens import ModelTokenizer


class Outputs:
    """Makes up output tokens.

    Text made of them tokenizes to the same tokens again, so that a client that sends an answer back as part of the
    next prompt finds the blocks that the answer filled.

    Args:
        answer_tokens: about how long an answer is that nothing limits; drawn from a half to one and a half of it.

    Raises:
        ValueError: the vocabulary has no words.
    """

    def __init__(self, tokenizer: ModelTokenizer, answer_tokens: int) -> None:
        self._words = tokenizer.words()
        if not self._words:
            raise ValueError("the tokenizer has no token that is a space and letters: there is nothing to answer with")
        self._eos = tokenizer.eos
        self._answer_tokens = answer_tokens

    def draw(
        self, prompt: Sequence[int], sample: int, *, limit: int, least: int, ignore_eos: bool
    ) -> tuple[tuple[int, ...], FinishReason]:
        """The output of one sample: at most ``limit`` tokens, and an end of its own (the last token then says so) not
        before ``least`` and not at all with ``ignore_eos``."""
        source = random.Random(xxhash.xxh3_64_intdigest(array("I", prompt).tobytes(), seed=sample))
        natural = max(source.randint(-(-self._answer_tokens // 2), self._answer_tokens * 3 // 2), least)
        if ignore_eos or self._eos is None or natural >= limit:
            return tuple(source.choices(self._words, k=limit)), "length"
        return (*source.choices(self._words, k=natural), self._eos), "stop"
