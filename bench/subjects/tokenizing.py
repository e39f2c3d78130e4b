"""Tokenizing by kvsync's local tokenizer (``ours``), or by Hugging Face's `tokenizers` as it is (``hf``).

Texts are this repository's own pages and sources, in an order that a seed gives. What must always hold: ids that kvsync
gave equal those that `tokenizers` gives for the whole text.

    load      a model's folder
    whole     a plain prompt of which nothing is known
    grown     a conversation of which all but the last two messages were tokenized before
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from bench.process import ROOT
from bench.subjects import serve
from kvsync.tokenize.cache import TokenCache
from kvsync.tokenize.local import LocalTokenizer
from kvsync.tokenize.request import Chat, Text
from kvsync.tokenize.template import ChatTemplate

MESSAGE = 2_000
"""Characters of a message."""


@cache
def _files() -> list[str]:
    found = [*ROOT.glob("docs/*.md"), *ROOT.glob("src/kvsync/**/*.py"), *ROOT.glob("core/index/src/**/*.rs")]
    return [path.read_text(encoding="utf-8") for path in sorted(found)]


class Tokenizing:
    def __init__(self, ours: bool) -> None:
        self._ours = ours

    def load(self, folder: str) -> None:
        self._hf = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        self._template = ChatTemplate(Path(folder, "chat_template.jinja").read_text(encoding="utf-8"), {})
        self._local = LocalTokenizer.load(Path(folder), TokenCache(64 << 20))

    def _text(self, seed: int, tokens: int) -> str:
        """So many tokens of text."""
        files = list(_files())
        random.Random(seed).shuffle(files)
        text = "\n\n".join(files)[: 8 * tokens]
        offsets = self._hf.encode(text, add_special_tokens=False).offsets
        return text[: offsets[min(tokens, len(offsets) - 1)][0]]

    def whole(self, seed: int, tokens: int) -> dict[str, float]:
        text = self._text(seed, tokens)
        work = Text(text, add_special_tokens=False)
        return self._timed(lambda: self._local.tokens(work), text)

    def grown(self, seed: int, tokens: int) -> dict[str, float]:
        text = self._text(seed, tokens)
        messages = [
            {"role": "user" if at // MESSAGE % 2 == 0 else "assistant", "content": text[at : at + MESSAGE]}
            for at in range(0, len(text), MESSAGE)
        ]
        if len(messages) % 2 == 0:
            messages.pop()
        chat = Chat(messages)
        if self._ours:
            self._local.tokens(Chat(messages[:-2]))
        return self._timed(lambda: self._local.tokens(chat), self._template.render(chat))

    def _timed(self, ours: Callable[[], bytes], text: str) -> dict[str, float]:
        cpu, begun = time.process_time(), time.perf_counter()
        if self._ours:
            packed = ours()
        else:
            ids = self._hf.encode(text, add_special_tokens=False).ids
        took, cpu = time.perf_counter() - begun, time.process_time() - cpu
        if self._ours:
            ids = array("I", packed).tolist()
            if ids != self._hf.encode(text, add_special_tokens=False).ids:
                raise AssertionError("kvsync's ids are not those of `tokenizers`")
        return {"seconds": took, "cpu": cpu, "tokens": len(ids)}


if __name__ == "__main__":
    tokenizing = Tokenizing(sys.argv[1] == "ours")
    serve({name: getattr(tokenizing, name) for name in ("load", "whole", "grown")})
