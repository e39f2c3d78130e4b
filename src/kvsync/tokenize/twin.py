"""A tokenizer's twin: tiktoken, several times as fast, for the tokenizers of which it provably makes the same ids.

Always holds: :meth:`Twin.encode` gives the ids that ``tokenizers`` gives, or nothing; then ``tokenizers`` is asked.
:func:`twin` makes one only where every step of the tokenizer is known to be tiktoken's:

* *Added tokens* are looked for in the raw text by both, the leftmost first; none begins with another, so there is one
  at a place at most. ``tokenizers`` looks for the normalized ones in a second round, so no other may begin in these.
* *Normalizing* is none, or NFC: then only texts that are in that form already are the twin's.
* *Splitting* is by expressions that are known to mean the same to both (:mod:`kvsync.tokenize.splits`).
* *Merging* is of bytes, and the merges stand in the order of the ids that they make. ``tokenizers`` merges the pairs
  that it has a merge for, the earliest merge first, tiktoken any two tokens that together are a token, the lowest id
  first; both the leftmost of several. It is the same if the merges make every token of its own bytes:

  Let both be at the same state of a piece, and tiktoken merge a pair to the token t. Nothing was merged across the
  pair's two ends so far, so what was done between them is what tiktoken does to the bytes of t alone; and as long as
  that made tokens shorter than t, ``tokenizers`` did the same (by induction over the length). From these two parts its
  merges make t, so they have this pair. It has the lowest id of all pairs that tiktoken sees, so ``tokenizers`` merges
  a pair to t, too; and by the same reasoning that is this pair.

  A token that the merges do not make of its bytes is none to merge to. Where whole pieces are looked up before
  (``ignore_merges``) it stays, and must be more than one merge away: then no pair makes it.
* *Special tokens around a text* are a fixed beginning and end.

What this rests on beyond the tokenizer's own data (two libraries, two tables of Unicode) is tried before the twin
serves: :func:`probes` go through both.
"""

from __future__ import annotations

import random
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvsync.tokenize.boundaries import longest_of
from kvsync.tokenize.splits import BYTE_LEVEL, one_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SLICE: Final = 8192
"""Characters that are looked at in one go: Python's lock is held meanwhile."""
_apart: Final = re.compile("[\\x00-\\x7f\u4e00-\u9fa5]").search
"""A character that is never composed with what stands before it: an ASCII one, or a Han one of Unicode 1."""
_PROBES: Final = 64
"""Texts made of random tokens that are tried."""
_TOKENS_PER_PROBE: Final = 200


class _Model(msgspec.Struct):
    type: str
    vocab: dict[str, int] = {}
    merges: list[tuple[str, str]] = []
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    byte_fallback: bool = False
    ignore_merges: bool = False


class _Parts(msgspec.Struct):
    """What a tokenizer says of itself."""

    model: _Model
    added_tokens: list[dict[str, Any]]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    post_processor: dict[str, Any] | None


class Unlike(Exception):
    """Why a tokenizer has no twin, in a few words."""


class Twin:
    """Encodes texts. Safe to use from several threads; the work is done without Python's lock."""

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        expression: str,
        added: Mapping[str, int],
        *,
        around: tuple[Sequence[int], Sequence[int]],
        nfc: bool,
    ) -> None:
        # The numbers come as a buffer: tiktoken's public way to that needs numpy.
        from tiktoken._tiktoken import CoreBPE

        self._core = CoreBPE(dict(ranks), dict(added), expression)
        self._added = re.compile(longest_of(added)).findall if added else None
        self._before, self._behind = (array("I", ids).tobytes() for ids in around)
        self._nfc = nfc

    def encode(self, text: str, special: bool) -> bytes | None:
        """Packed native-endian uint32 ids, or ``None`` where ``tokenizers`` has to be asked."""
        if self._nfc and not is_nfc(text):
            return None
        # Only those that are there: handing over a thousand of them would take longer than a short text.
        added = set() if self._added is None else set(self._added(text))
        try:
            tokens = self._core.encode_to_tiktoken_buffer(text, added)
        except ValueError:
            # No Unicode, or blanks by the hundred thousand, which are more than its expressions take.
            return None
        return b"".join((self._before, tokens, self._behind)) if special else bytes(tokens)


def twin(tokenizer: Tokenizer) -> Twin:
    """The twin of a tokenizer, tried on :func:`probes`. Takes about a second for 100,000 tokens.

    Raises:
        Unlike: it has none.
        ImportError: tiktoken is not installed.
    """
    try:
        parts = msgspec.json.decode(tokenizer.to_str(), type=_Parts)
    except msgspec.ValidationError as error:
        raise Unlike(f"it is of a kind of its own ({error})") from error
    nfc = _normalizer(parts.normalizer)
    expression = _expression(parts.pre_tokenizer)
    around = _around(parts.post_processor)
    added = _added(parts.added_tokens)
    ranks = _ranks(parts.model)
    try:
        made = Twin(ranks, expression, added, around=around, nfc=nfc)
        for text in probes(ranks, [token.content for token in tokenizer.get_added_tokens_decoder().values()]):
            for special in (False, True):
                encoded = made.encode(text, special)
                asked = tokenizer.encode(text, add_special_tokens=special).ids
                if encoded is not None and encoded != array("I", asked).tobytes():
                    raise Unlike(f"its ids differ for {text[:40]!r}")
    except (AttributeError, TypeError, ValueError) as error:
        raise Unlike(f"this edition of tiktoken does not take it ({error})") from error
    return made


# --- normalizing


def _normalizer(part: Mapping[str, Any] | None) -> bool:
    """Whether it is NFC."""
    match part:
        case None | {"type": "Sequence", "normalizers": []}:
            return False
        case {"type": "NFC"} | {"type": "Sequence", "normalizers": [{"type": "NFC"}]}:
            return True
    raise Unlike("a normalizer that is not NFC")


def is_nfc(text: str) -> bool:
    """Whether a text is in NFC by every edition of Unicode from this Python's on, and by earlier ones.

    Characters keep their properties from the edition on that they are in, and before they are inert. So one that Python
    does not know says no.
    """
    if text.isascii():
        return True
    start = 0
    while start < len(text):
        apart = _apart(text, start + _SLICE)
        piece = text[start : apart.start() if apart else None]
        start += len(piece)
        if not unicodedata.is_normalized("NFC", piece) or any(map(_unknown, set(piece))):
            return False
    return True


def _unknown(character: str) -> bool:
    return unicodedata.category(character) == "Cn"


# --- splitting


def _expression(part: Mapping[str, Any] | None) -> str:
    steps = part["pretokenizers"] if part is not None and part["type"] == "Sequence" else [part]
    *before, last = steps
    expressions = []
    for step in before:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", "invert": False}:
                expressions.append(expression)
            case _:
                raise Unlike("a pre-tokenizer that does not split by expressions")
    match last:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(splits)}:
            if splits:
                expressions.append(BYTE_LEVEL)
        case _:
            raise Unlike("a pre-tokenizer that does not end with bytes")
    found = one_for(expressions)
    if found is None:
        raise Unlike("an expression to split by that nobody looked at yet")
    return found


# --- merging


def _ranks(model: _Model) -> dict[bytes, int]:
    """Ids by bytes, of the tokens that are merged to."""
    if model.type != "BPE":
        raise Unlike(f"its model is {model.type}")
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.byte_fallback:
        raise Unlike("it marks parts of words, falls back to bytes, or drops merges")
    made = [model.vocab[one + other] for one, other in model.merges]
    if any(later < earlier for earlier, later in pairwise(made)):
        raise Unlike("its merges stand in another order than the tokens that they make")
    letters = _letters()
    if not letters.keys() <= model.vocab.keys():
        raise Unlike("a byte is no token")
    ranks = {}
    for token, pieces in _merged(model):
        if pieces > 1:
            if not model.ignore_merges:
                continue
            if pieces == 2:
                raise Unlike("a token that is looked up whole is two to its merges")
        try:
            ranks[bytes([letters[letter] for letter in token])] = model.vocab[token]
        except KeyError:
            continue  # not of bytes: no text holds it
    return ranks


def _merged(model: _Model) -> Iterator[tuple[str, int]]:
    """Each token, and the number of tokens that the merges make of it."""
    from tokenizers.models import BPE

    merging = BPE(vocab=model.vocab, merges=model.merges, cache_capacity=0)
    for token in model.vocab:
        yield token, len(merging.tokenize(token))


def _letters() -> dict[str, int]:
    """The bytes by the characters that stand for them in a byte-level vocabulary: their own, where it can be seen, and
    those from U+0100 on for the others, in order."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in seen else next(others)): byte for byte in range(0x100)}


# --- added tokens, and those around a text


def _added(tokens: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    ids = {}
    first: set[str] = set()
    second: set[str] = set()
    for token in tokens:
        content = token["content"]
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            raise Unlike(f"the added token {content!r} is more than its text")
        if token["normalized"] and not is_nfc(content):
            raise Unlike(f"the added token {content!r} is normalized")
        if content:
            ids[content] = token["id"]
            (second if token["normalized"] else first).add(content)
    for content in ids:
        if any(beginning in ids for beginning in _beginnings(content) if beginning != content):
            raise Unlike(f"the added token {content!r} begins with another")
    beginnings = {beginning for content in first for beginning in _beginnings(content)}
    for content in second:
        for rest in (content[start:] for start in range(len(content))):
            if rest in beginnings or not first.isdisjoint(_beginnings(rest)):
                raise Unlike(f"another added token, which is looked for before it, may begin in {content!r}")
    return ids


def _beginnings(text: str) -> set[str]:
    return {text[:length] for length in range(1, len(text) + 1)}


def _around(part: Mapping[str, Any] | None) -> tuple[list[int], list[int]]:
    """The ids before a text and behind it."""
    around: tuple[list[int], list[int]] = ([], [])
    steps = part["processors"] if part is not None and part["type"] == "Sequence" else [part]
    for step in steps:
        match step:
            case None | {"type": "ByteLevel"}:
                continue
            case {"type": "TemplateProcessing", "single": list(template), "special_tokens": dict(ids)}:
                place = 0
                for item in template:
                    match item:
                        case {"SpecialToken": {"id": name}}:
                            inner = ids[name]["ids"]
                            if place:
                                around[1].extend(inner)
                            else:
                                around[0].extend(inner)
                        case {"Sequence": {"id": "A"}} if not place:
                            place = 1
                        case _:
                            raise Unlike("a text that stands twice between its special tokens")
            case _:
                raise Unlike("a post-processor that is no template")
    return around


# --- trying


_AWKWARD: Final = (
    "",
    " ",
    "The quick brown fox's 'Quick' BROWN foxes' jump; IT'S we'll I'D 'ſ 'K they'Re don''t 'llama 've",
    "  two   three    four \n\n five\r\n\r\n  six\t\tseven \n \n eight\u00a0nine\u2003ten\u3000 eleven",
    " \x0b\x0c\x1c\x85\u2028\u2029.\u180e \n\u3000\n a\u00a0\u00a0b",
    "1 12 123 1234 12345 1234567890 1,234.56 ٣٤٥٦ १२३४ ⅷ²½ 一二三 1a2b ３４",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x // 2}  # ok?!\n\n\tif a<=b&&c||!d: pass;;;---===***///\n",
    'https://example.org/a_b/c-d?e=f&g=%20#h <html><body class="x">&amp;</body></html> a@b.c C:\\d\\e',
    "Grüße aus Köln, çà et là, ação, Übergrößenträger, naïve café, e\u0301 a\u0308 o\u0302\u0323 ẹ\u0302, ÅÅÅ, ﬁ ﬃ ŉ",
    "天地玄黃，宇宙洪荒。日月盈昃 ひらがな・カタカナー゛゜ゟ゠ヿ 한국어 한국 中a文1字",
    "カ゚\u3097\u3040x\u3097\u3099 \u309b ・・ 、。",
    "Привет, мир! Ελληνικά ΆΈ עברית שָׁלוֹם العربية مُحَمَّد हिन्दी क़ ড় ไทย ภาษา తెలుగు မြန်မာ አማርኛ ქართული ⴰⴱ",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ☃️ ✈ → ∀x∈ℝ ∑ √2 ≠ ± € £ ¥ ™ … “quotes” ‘single’ — – ‐ • ·",
    "\x00\x01\x02\x7f\x80\x9f\xad\u200b\u200d\ufeff\ufffd\ufffe\uffff\U0010ffff\ue000\U000f0000 a\x00b \x00\x00 \u0378",
    "CamelCase HTTPServer iPhone XMLHttpRequest ABCdef ǅabc ʰʱ ªº ΑΒγδ АБвг ABC's ABCd'S",
    "a" * 700 + " " * 700 + "x" + "\n" * 300 + "ab" * 400 + "!" * 600 + "天" * 600 + "0" * 700,
    # Letters, marks, numbers and signs of each edition of Unicode since 13: the two libraries must know the same ones.
    "\u08c7\u0b55\U00010fb0\U0001fbf0\u31bb \u0870\u0898\U00010f70\u20c0\U0001fac3"
    " \U00011f02\U00011f00\U0001e4f0\U0001fae8"
    " \u2ffc\U0002ebf0 \U00011381\U000113b8\U00016d70\U0001cc00\ua7cb \U00010940\U00011db0\U0001faea\U00011de0\u20c1",
)


def probes(tokens: Iterable[bytes], added: Iterable[str]) -> Iterator[str]:
    """Awkward texts; the added tokens, whole and cut; and texts of random tokens."""
    yield from _AWKWARD
    marks = sorted(added)
    yield "".join(marks)
    yield " a ".join(marks)
    yield "\n".join(mark[:-1] + " " + mark[1:] + mark[:1] + mark for mark in marks)
    every = list(tokens)
    chance = random.Random(0)
    for _ in range(_PROBES):
        text = b"".join(chance.choices(every, k=_TOKENS_PER_PROBE)).decode("utf-8", "replace")
        yield text
        yield unicodedata.normalize("NFC", text)


__all__ = ["Twin", "Unlike", "is_nfc", "probes", "twin"]
