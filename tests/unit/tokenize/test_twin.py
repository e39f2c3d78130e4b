"""The twin's ids are those of ``tokenizers``, or there is no twin: proved cases, refused ones, and random texts."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from kvsync.tokenize import splits, twin
from kvsync.tokenize.cache import TokenCache
from kvsync.tokenize.local import QUICK, LocalTokenizer
from kvsync.tokenize.request import Chat, Text
from tests.unit.tokenize.support import TINY, unpack

CORPUS = [
    "The quick brown fox's jump, it's we'll I'D\r\n\r\n  two   three \t four\n\n five",
    "1 12 123 1234 12345 ٣٤ ²½ 1a2b",
    "天地玄黃，宇宙。 ひらがな・カタカナ゛ 한국어 a天1",
    "Grüße naïve café e\u0301e\u0301e\u0301 Привет CamelCase HTTPServer aBaBaBaB 1212 ../../ it'sx",
    "if a<=b&&c||!d: pass;;;---=== \x00\x00 👍🏽 \u3097\u3097",
]
MARKS = ["<|im_start|>", "<|im_end|>", "<s>", "<s2>"]


def trained() -> Tokenizer:
    """Merges that go across whatever a text is split at, so that other splits make other ids."""
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS * 3, *("".join(pair) for pair in product(CORPUS, CORPUS))], trainer)
    return tokenizer.to_str()


def splitting(*expressions: str) -> Tokenizer:
    tokenizer = trained()
    steps: list[Any] = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in expressions]
    own = expressions == (splits.BYTE_LEVEL,)
    steps = [] if own else steps
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = splitting(splits.BYTE_LEVEL)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<think>", normalized=True), AddedToken("é!", normalized=True)])
    return tokenizer


def overlapping() -> Tokenizer:
    """The leftmost of added tokens that stand over each other, or in each other, is the one."""
    tokenizer = splitting(splits.BYTE_LEVEL)
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in ("s>a", "a<s>b", "||", "|b|", ">|")])
    tokenizer.add_tokens(
        [AddedToken("天天", normalized=True), AddedToken("天地天", normalized=True), AddedToken("b天", normalized=True)]
    )
    return tokenizer


def surrounded() -> Tokenizer:
    tokenizer = splitting(splits.BYTE_LEVEL)
    template = processors.TemplateProcessing(single="<s> <s2> $A <s2>", special_tokens=[("<s>", 2), ("<s2>", 3)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def every_way() -> Tokenizer:
    """As vocabularies are converted that were tiktoken's: a merge for each way to make a token of two."""
    parts = json.loads(splitting(splits.BYTE_LEVEL).to_str())
    vocabulary: dict[str, int] = parts["model"]["vocab"]
    parts["model"]["merges"] = [
        [token[:cut], token[cut:]]
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        for cut in range(1, len(token))
        if token not in MARKS and token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    parts["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(parts))


def small(vocabulary: Iterable[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    """Bytes, then these tokens in their order."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {token: number for number, token in enumerate([*letters, *vocabulary])}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def not_made_of_three() -> Tokenizer:
    """``abc`` is no merge: tiktoken would make it of ``ab`` and ``c``."""
    return small(["ab", "abc", "abcd", "bcd"], [("a", "b"), ("b", "c")][:1])


def tiny_llama() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def split_kind(expressions: tuple[str, ...]) -> Callable[[], Tokenizer]:
    return lambda: splitting(*expressions)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "tiny_llama": tiny_llama,
    "composing": composing,
    "overlapping": overlapping,
    "surrounded": surrounded,
    "every_way": every_way,
    "not_made_of_three": not_made_of_three,
    **{f"splits{number}": split_kind(expressions) for number, expressions in enumerate(splits._ONE_FOR)},
}


@cache
def pair(kind: str) -> tuple[Tokenizer, twin.Twin]:
    tokenizer = KINDS[kind]()
    return tokenizer, twin.twin(tokenizer)


PIECES = st.sampled_from(
    [
        *MARKS,
        "<s", "s>", "<think>", "|>", "|", ">", "天地",
        " ", "  ", "\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u2028", "\x00", "\u200b", "\ufeff",
        "a", "b", "c", "d", "abcd", "The", " the", "B", "ß", "ж", "Ж", "ǅ", "ʰ", "ª", "K", "ſ",
        "'s", "'S", "'ſ", "'", "'ll", "'re",
        "1", "23", "٣", "²", "ⅷ", "３",
        "天", "ひ", "カ", "゛", "・", "゠", "\u3097", "\u3099", "한", "ᄒ", "ᅡ", "क", "़",
        "é", "e", "\u0301", "\u0323", "é!", "!", "...", '"', "_", "-", "/", "[", "\\", "^", "`", "€", "👍", "🏽",
        "\u0378", "\ue000", "\U00011381", "\U000113b8",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=24).map("".join)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS, st.booleans())
def test_a_twin_makes_the_same_ids(kind: str, text: str, special: bool) -> None:
    tokenizer, made = pair(kind)
    encoded = made.encode(text, special)
    assert encoded is None or unpack(encoded) == tokenizer.encode(text, add_special_tokens=special).ids
    if text.isascii():
        assert encoded is not None


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_probes_are_encoded(kind: str) -> None:
    """What a twin is tried on before it serves is its work, not left to the other."""
    _, made = pair(kind)
    texts = list(twin.probes([b"a"], MARKS))
    assert sum(made.encode(text, False) is not None for text in texts) > len(texts) * 0.8
    assert len(texts) > 100


def test_other_splits_would_show() -> None:
    """These tests could not tell splits apart if all gave the same ids."""
    text = "".join(CORPUS)
    ids = {kind: tuple(pair(kind)[0].encode(text).ids) for kind in KINDS if kind.startswith("splits")}
    assert len(set(ids.values())) == len(ids) == len(splits._ONE_FOR)


# --- who has no twin


def changed(**parts: Any) -> Tokenizer:
    tokenizer = trained()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_tokens(*tokens: AddedToken) -> Tokenizer:
    tokenizer = changed()
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def two_merges(*, swapped: bool) -> Tokenizer:
    merges = [("a", "b"), ("b", "c")]
    return small(["ab", "bc"], merges[::-1] if swapped else merges)


def unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("a", -1.0), ("b", -1.0)], 0))


REFUSED: dict[str, Callable[[], Tokenizer]] = {
    "kind of its own": unigram,
    "normalizer": lambda: changed(normalizer=normalizers.NFKC()),
    "does not end with bytes": lambda: changed(pre_tokenizer=pre_tokenizers.Whitespace()),
    "nobody looked at": lambda: splitting(r"\w+"),
    "does not split by expressions": lambda: changed(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "another order": lambda: two_merges(swapped=True),
    "a byte is no token": lambda: changed(model=models.BPE(vocab={"a": 0}, merges=[])),
    "marks parts of words": lambda: changed(
        model=models.BPE(vocab=trained().get_vocab(), merges=[], end_of_word_suffix="</w>")
    ),
    "is two to its merges": lambda: small(["ab", "abc"], [("a", "b")], ignore_merges=True),
    "more than its text": lambda: with_tokens(AddedToken("<l>", lstrip=True)),
    "begins with another": lambda: with_tokens(AddedToken("<s>a")),
    "may begin in 'a<s>b'": lambda: with_tokens(AddedToken("a<s>b", normalized=True)),
    "may begin in 'a<'": lambda: with_tokens(AddedToken("a<", normalized=True)),
    "is normalized": lambda: with_tokens(AddedToken("e\u0301", normalized=True)),
    "no template": lambda: changed(post_processor=processors.BertProcessing(("<s>", 2), ("<s2>", 3))),
    "twice": lambda: changed(
        post_processor=processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 2)])
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_who_has_no_twin(reason: str) -> None:
    with pytest.raises(twin.Unlike, match=reason):
        twin.twin(REFUSED[reason]())
    if reason == "another order":
        assert twin.twin(two_merges(swapped=False)).encode("abc", False) is not None


@pytest.mark.parametrize("change", ["expression", "added", "around", "ranks"])
def test_a_twin_that_differs_does_not_serve(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial finds what the rules missed."""
    match change:
        case "expression":
            monkeypatch.setattr(twin, "one_for", lambda _: r"\S+|\s+")
        case "added":
            monkeypatch.setattr(twin, "_added", lambda _: {})
        case "around":
            monkeypatch.setattr(twin, "_around", lambda _: ([], []))
        case "ranks":
            right = twin._ranks
            monkeypatch.setattr(twin, "_ranks", lambda model: {**right(model), b"fo": 699, b"ox": 698})
    with pytest.raises(twin.Unlike, match="differ"):
        twin.twin(surrounded())


def test_an_edition_of_tiktoken_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken._tiktoken as inner

    monkeypatch.setattr(inner, "CoreBPE", lambda *_: object())
    with pytest.raises(twin.Unlike, match="edition"):
        twin.twin(tiny_llama())


@pytest.mark.parametrize("missing", [False, True])
def test_a_model_is_loaded_with_its_twin(
    missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without tiktoken the log says so, once, and the ids are the same."""
    caplog.set_level(logging.INFO, logger="kvsync")
    if missing:
        monkeypatch.setitem(sys.modules, "tiktoken._tiktoken", None)
    local = LocalTokenizer.load(Path(shutil.copytree(TINY, tmp_path / "model")), TokenCache(1 << 20))
    assert (local._twin is None) == missing
    assert len([record for record in caplog.records if "tiktoken" in record.getMessage()]) == missing
    text = "hello world, <|im_start|> " * 50
    assert unpack(local.tokens(Text(text))) == tiny_llama().encode(text).ids


def test_what_is_quick(tmp_path: Path) -> None:
    """Prompts that are small in every respect, where there is a twin."""
    local = LocalTokenizer.load(Path(shutil.copytree(TINY, tmp_path / "model")), TokenCache(0))

    def chat(*messages: dict[str, Any], **fields: Any) -> bool:
        return local.is_quick(Chat(messages=messages, size=sum(len(m["content"]) for m in messages), **fields))

    message = {"role": "user", "content": "hi"}
    assert local.is_quick(Text("a" * QUICK))
    assert chat(message)
    assert chat(*[message] * 8)
    assert not local.is_quick(Text("a" * (QUICK + 1)))
    assert not chat({"role": "user", "content": "a" * (QUICK + 1)})
    assert not chat(*[message] * 33)
    assert not chat(message, tools=[{}])
    assert not chat(message, kwargs={"documents": []})
    assert not chat({"role": "u" * 33, "content": ""})
    assert not chat({"role": "user", "content": "", "name": "n"})
    alone = LocalTokenizer(tiny_llama(), TokenCache(0))
    assert not alone.is_quick(Text("a"))


# --- texts that are left to the other


def test_texts_that_are_left_to_the_other() -> None:
    tokenizer, made = pair("composing")
    blanks = " " * 1_200_000 + "x"
    for text in ("e\u0301", "\u0958", "\u0378", "a\ud800", blanks):
        assert made.encode(text, False) is None, text[:8]
    assert LocalTokenizer(tokenizer, TokenCache(0), twin=made)._encode("e\u0301", False) == made.encode("é", False)
    local = LocalTokenizer(tokenizer, TokenCache(0), twin=made)
    assert unpack(local._encode(blanks, False)) == tokenizer.encode(blanks, add_special_tokens=False).ids


@given(st.text() | TEXTS)
def test_what_is_nfc(text: str) -> None:
    """Not more than Python says, and what it says is what the library does."""
    if twin.is_nfc(text):
        assert unicodedata.is_normalized("NFC", text)
        assert normalizers.NFC().normalize_str(text) == text
    elif all(unicodedata.category(character) != "Cn" for character in text):
        assert unicodedata.normalize("NFC", text) != text


@pytest.mark.parametrize("mark", ["\u0301", "़", "ᅡ"])
def test_a_long_text_is_looked_at_in_pieces(mark: str) -> None:
    """A character that is composed with the one before it is seen wherever it stands."""
    for place in range(twin._SLICE - 2, twin._SLICE + 3):
        for letter in ("e", "क", "ᄒ"):
            text = "é" * place + letter + mark + "é" * 9 + "a" * twin._SLICE
            assert twin.is_nfc(text) == unicodedata.is_normalized("NFC", text)
            assert twin.is_nfc(text.replace("a", "天")) == unicodedata.is_normalized("NFC", text)


@pytest.mark.parametrize("characters", [r"\p{L}", r"\p{M}", r"\p{N}", r"[\p{P}\p{S}]", r"\s", r"[\p{Lu}\p{Lt}]"])
def test_both_libraries_know_the_same_unicode(characters: str) -> None:
    from tiktoken._tiktoken import CoreBPE

    everything = "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    matches = CoreBPE({bytes([byte]): byte for byte in range(256)}, {}, characters + "+").encode_ordinary(everything)
    split = pre_tokenizers.Split(Regex(characters + "+"), "removed", invert=True)
    assert bytes(matches).decode() == "".join(piece for piece, _ in split.pre_tokenize_str(everything))
