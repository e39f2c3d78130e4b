"""How tokenizers split a text before they merge: for tiktoken, which knows one expression, what ``tokenizers`` does
with one or several.

``tokenizers`` cuts a text at each match of the first expression, each piece at each match of the second, and so on;
what stands between two matches is a piece, too. tiktoken takes the matches of its one expression, and drops the rest.

Always holds: the one expression matches everywhere, and its matches are the pieces. Only expressions whose meaning was
looked at are here; they use nothing that Oniguruma and fancy-regex read in two ways, and the two must know the same
edition of Unicode (:mod:`kvsync.tokenize.twin` makes sure).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_BLANKS: Final = r"|\s+(?!\S)|\s+"
BYTE_LEVEL: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _BLANKS
"""What a byte-level pre-tokenizer splits at by itself (GPT-2's)."""

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_BLANKS: Final = r"\s*[\r\n]+" + _BLANKS
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(numbers: str) -> str:
    """Llama 3's, Qwen 2's and 3's."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_BLANKS}"
    )


def _cased_words(ending: str, numbers: str) -> str:
    """GPT-4o's and what follows it: a word ends where capitals begin."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}[{_UPPER}]*[{_LOWER}]+{ending}|{before}[{_UPPER}]+[{_LOWER}]*{ending}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_BLANKS}"
    )


_MARKED_WORDS: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_BLANKS}"
)
"""Qwen 3.5's: marks belong to words."""

_HAN: Final = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_PUNCTUATED: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK: Final = (
    r"\p{N}{1,3}",
    f"[{_HAN}]+",
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_BLANKS}",
)
"""DeepSeek's since V3."""


def _deepseek() -> str:
    """Three in one: numbers stand apart, so do runs of Han and kana; the third sees nothing beyond its piece.

    So each of its classes is cut down to the characters of such a run, or to those outside of one, and blanks before a
    number or a run stand at their piece's end. What no alternative matches goes in one piece up to the next that does,
    or to where a run begins or ends.
    """
    easy = "|".join(
        [
            r"\p{N}{1,3}",
            rf"[{_HAN}&&[^\p{{L}}\p{{P}}\p{{S}}]]?[{_HAN}&&[\p{{L}}\p{{M}}]]+",
            rf"[{_HAN}&&[\p{{P}}\p{{S}}]]+",
            _PUNCTUATED,
            rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_HAN}]?[\p{{L}}\p{{M}}&&[^{_HAN}]]+",
            rf" ?[\p{{P}}\p{{S}}&&[^{_HAN}]]+[\r\n]*",
            r"\s*[\r\n]+",
        ]
    )
    matched = rf"(?:{easy})|\s+(?![^\s\p{{N}}{_HAN}])|\s+"
    return rf"{matched}|(?:(?!{matched})[{_HAN}])+|(?:(?!{matched})[^{_HAN}])+"


def _grouped(expression: str) -> str:
    """The same. What needs no look ahead stands in one group: fancy-regex has such a group done by an automaton at
    once, and tries alternatives one after another otherwise."""
    return f"(?:{expression.removesuffix(_BLANKS)}){_BLANKS}"


_ONE_FOR: Final[dict[tuple[str, ...], str]] = {
    **{
        (expression,): _grouped(expression)
        for expression in (
            BYTE_LEVEL,
            _words(r"\p{N}"),
            _words(r"\p{N}{1,3}"),
            _MARKED_WORDS,
            _cased_words("", r"\p{N}"),
            _cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}"),
        )
    },
    _DEEPSEEK: _deepseek(),
}


def one_for(expressions: Iterable[str]) -> str | None:
    """tiktoken's expression for those of a tokenizer, in their order; ``None`` where nobody looked at them yet."""
    # Some files hold line breaks, others their escapes.
    return _ONE_FOR.get(tuple(one.replace("\r", r"\r").replace("\n", r"\n") for one in expressions))


__all__ = ["BYTE_LEVEL", "one_for"]
