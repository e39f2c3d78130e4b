"""Where a tokenizer provably splits a text, so that what stands before is tokenized alike whatever follows.

A tokenizer looks for its *added* tokens first, in the raw text: leftmost, longest at its place, never overlapping.
What lies between two of them is normalized, split and merged by itself. So the text up to the end of such a match is
tokenized without regard to what comes after it, *provided that* the match is one in the whole text too. Nothing else
in a tokenizer has that property: merges, normalizers and pre-tokenizers all look across their neighbours.

Always holds for a cut that :meth:`Boundaries.cuts` gives, at the end of the added token t: tokens(text) =
tokens(text[:cut]) + tokens(t + text[cut:])[1:]. The t in front matters: some pre-tokenizers (Metaspace with
``prepend_scheme="first"``) treat the beginning of a text differently from the piece behind a token, and some added
tokens swallow the blanks behind them.

Left out, though split at by the tokenizer: tokens found only after normalizing (what follows may change them), tokens
that must stand alone as a word (what follows decides), and tokens that begin with a blank (a neighbour may have
swallowed it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol


class AddedToken(Protocol):
    """What is needed of the ``tokenizers`` library's class."""

    @property
    def content(self) -> str: ...
    @property
    def normalized(self) -> bool: ...
    @property
    def single_word(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A place behind a boundary token."""

    end: int
    """Characters before it."""
    token: str


class Boundaries:
    """The boundary tokens of one tokenizer."""

    def __init__(self, added: Iterable[tuple[int, AddedToken]]) -> None:
        raw = [(number, token) for number, token in added if not token.normalized and token.content]
        self.ids = {
            token.content: number for number, token in raw if not token.single_word and not token.content[0].isspace()
        }
        """Content of every boundary token → its id."""
        # All raw tokens take part in the search: a longer one hides a boundary token in its place.
        self._pattern = re.compile(longest_of({token.content for _, token in raw})) if self.ids else None

    def cuts(self, text: str) -> list[Cut]:
        """Every place in ``text`` behind a boundary token, in order."""
        if self._pattern is None:
            return []
        return [Cut(match.end(), match.group()) for match in self._pattern.finditer(text) if match.group() in self.ids]


def longest_of(texts: Iterable[str]) -> str:
    """An expression that matches the longest of some texts at a place.

    Texts share what they begin with alike: vocabularies have a thousand tokens that differ in a number at the end, and
    trying one after another takes longer than tokenizing.
    """
    by_first: dict[str, list[str]] = {}
    for text in sorted(texts):
        by_first.setdefault(text[:1], []).append(text)
    ends_here = by_first.pop("", None) is not None
    branches = []
    for group in by_first.values():
        # Sorted, so what the first and the last have in common all of them have.
        pairs = zip(group[0], group[-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        branches.append(re.escape(group[0][:common]) + longest_of(text[common:] for text in group))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if ends_here else "")


def spaced(cuts: Iterable[Cut], spacing: int) -> list[Cut]:
    """Some of ``cuts``, at least ``spacing`` characters apart.

    Which ones depends on the text before each alone, so two texts with a common beginning share its cuts.
    """
    chosen: list[Cut] = []
    last = 0
    for cut in cuts:
        if cut.end - last >= spacing:
            chosen.append(cut)
            last = cut.end
    return chosen


__all__ = ["AddedToken", "Boundaries", "Cut", "longest_of", "spaced"]
