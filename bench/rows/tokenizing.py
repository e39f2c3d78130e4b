"""Text to token ids in the gateway's own process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Final

from bench.model import OURS, Figures, Row, Run, Sides, Target
from bench.process import Subject
from bench.vocabularies import VOCABULARIES, folder

TOKENS: Final = 32_768
HF: Final = f"tokenizers {version('tokenizers')}"
CASES: Final = {"whole": "new text", "grown": "conversation grown by two messages"}


@contextmanager
def open_(run: Run) -> Iterator[Sides]:
    python = run.environment("vocabularies")
    folders = [(name, folder(name, python)) for name in VOCABULARIES]
    with ExitStack() as stack:

        def side(which: str) -> Callable[[], Figures]:
            subjects = []
            for name, made in folders:
                subject = stack.enter_context(Subject("tokenizing", which, python=sys.executable))
                subject.ask("load", folder=str(made))
                subject.ask("whole", seed=0, tokens=TOKENS)
                subjects.append((name, subject))
            seeds = itertools.count(1)  # both sides get the same texts, each once

            def measure() -> Figures:
                seed = next(seeds)
                figures: dict[str, float] = {}
                for name, subject in subjects:
                    for case in CASES:
                        went = subject.ask(case, seed=seed, tokens=TOKENS)
                        figures |= {f"{case} {name}": went["seconds"], f"{case} {name} cpu": went["cpu"]}
                return figures

            return measure

        yield {OURS: side("ours"), HF: side("hf")}


ROWS: Final = (
    Row(
        "tokenizing",
        f"tokenizing {TOKENS:,} tokens locally",
        "Text is this repository's own pages and sources, in another order each time; both sides have tokenized as "
        "much of it before, so that their own caches of words are warm. A conversation's beginning was tokenized with "
        "the message before. Ours: text or messages to packed ids, template included; the peer: rendered text to a "
        "list of ids. All ids are compared. CPU time is judged, of all threads: neither waits for anything.",
        tuple(
            Target(f"{text}, vocabulary {name}", f"{case} {name} cpu", "ms CPU", factor=1e3, ratio=4.0)
            for case, text in CASES.items()
            for name in VOCABULARIES
        ),
        open_,
    ),
)
