"""Local tokenizing: cached equals uncached, whatever the tokenizer; loading of a model's folder."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvsync.tokenize.cache import TokenCache
from kvsync.tokenize.errors import LocalFailed
from kvsync.tokenize.local import LocalTokenizer
from kvsync.tokenize.request import Chat, Text
from kvsync.tokenize.twin import Twin, Unlike, twin
from tests.unit.tokenize.support import TINY, unpack

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "user assistant system tool hello world",
    "  a\n\nb\tc  d",
    "éà",
]
MARKS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]


def _trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def _bpe(**parts: Any) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    return _trained(models.BPE(), trainer, **parts)


def _unigram(**parts: Any) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=[*MARKS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    return _trained(models.Unigram(), trainer, **parts)


def byte_level() -> Tokenizer:
    return _bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel())


def byte_level_prefix_space() -> Tokenizer:
    return _bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))


def byte_level_nfkc() -> Tokenizer:
    return _bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.NFKC())


def metaspace(scheme: str) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        return _unigram(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme))

    return make


def metaspace_nfkc() -> Tokenizer:
    # NFKC makes "</s>" out of full-width characters: an id of a boundary token that is no match in the raw text.
    return _unigram(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"), normalizer=normalizers.NFKC())


def prepended() -> Tokenizer:
    steps = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _unigram(normalizer=steps)


def stripped_and_lower() -> Tokenizer:
    steps = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    return _bpe(normalizer=steps, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))


def overlapping() -> Tokenizer:
    """Added tokens of every awkward kind, all in each other's way."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        [
            AddedToken("<|im_end|>\n", normalized=False),
            AddedToken("<|im", normalized=False),
            AddedToken("|><|", normalized=False),
            AddedToken("<r>", normalized=False, rstrip=True),
            AddedToken("<l>", normalized=False, lstrip=True),
            AddedToken(" <b>", normalized=False),
            AddedToken("word", normalized=False, single_word=True),
        ]
    )
    tokenizer.add_tokens([AddedToken("fox", normalized=True), AddedToken("d>", normalized=False)])
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("cafe", normalized=True)])
    return tokenizer


def stripped_lower_marks() -> Tokenizer:
    """A token that is found in the normalized text only, next to one found in the raw text."""
    tokenizer = stripped_and_lower()
    tokenizer.add_special_tokens([AddedToken("<S>", normalized=False)])
    tokenizer.add_tokens([AddedToken("fox", normalized=True), AddedToken("a<S>f", normalized=True)])
    return tokenizer


def tiny_llama() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "tiny_llama": tiny_llama,
    "byte_level": byte_level,
    "byte_level_prefix_space": byte_level_prefix_space,
    "byte_level_nfkc": byte_level_nfkc,
    "metaspace_first": metaspace("first"),
    "metaspace_always": metaspace("always"),
    "metaspace_never": metaspace("never"),
    "metaspace_nfkc": metaspace_nfkc,
    "prepended": prepended,
    "stripped_and_lower": stripped_and_lower,
    "stripped_lower_marks": stripped_lower_marks,
    "composing": composing,
    "overlapping": overlapping,
}


@cache
def made(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def twins(kind: str) -> tuple[Twin | None, ...]:
    """Who encodes: the tokenizer itself, and its twin where it has one."""
    try:
        return None, twin(made(kind))
    except Unlike:
        return (None,)


PIECES = st.sampled_from(
    [
        *MARKS,
        *CORPUS,
        "<|im_end|>\n",
        "<|im",
        "|>",
        "<|",
        "<r>",
        "<l>",
        "<b>",
        "word",
        "words",
        " word ",
        "fox",
        "d>",
        " ",
        "\n",
        "\n\n",
        "  ",
        "user\n",
        "＜/ｓ＞",
        "ﬁ",
        "é",
        "é",
        "▁",
        "<",
        ">",
        "🦊",
        "</",
        "s>",
        "A",
        "\x00",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=14).map("".join)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS, st.sampled_from(MARKS), st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from([1, 7, 40]))
def test_cached_equals_uncached(kind: str, beginning: str, mark: str, endings: Sequence[str], spacing: int) -> None:
    """Texts with a common beginning, in one cache: every answer is that of the whole text at once."""
    tokenizer = made(kind)
    for other in twins(kind):
        local = LocalTokenizer(tokenizer, TokenCache(1 << 20), spacing=spacing, twin=other)
        for text in (beginning + mark + ending for ending in (*endings, *endings)):
            assert unpack(local.encode_by_pieces(text)) == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_some_of_them_have_twins() -> None:
    assert {kind for kind in KINDS if len(twins(kind)) > 1} == {"byte_level", "composing", "tiny_llama"}


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        pytest.param("metaspace_first", "a<s>world", "a<s>worlds", id="the beginning of a text is special"),
        pytest.param("overlapping", "a<r>b", "a<r>  b", id="a token that swallows blanks behind it"),
        pytest.param("overlapping", "a<r> <b>c", "a<r> <b>d", id="a token that begins with a swallowed blank"),
        pytest.param("overlapping", "<|im_end|>x", "<|im_end|>\nx", id="a longer token in the same place"),
        pytest.param("overlapping", "a<|im x", "a<|im_end|>b", id="a shorter token in the same place"),
        pytest.param("composing", "a cafe b", "a cafe\u0301 b", id="a token that a normalizer may undo"),
        pytest.param("overlapping", "a word<|im", "a words<|im", id="a token that must be a word"),
        pytest.param("overlapping", "<|im_start|><|im_end|>", "<|im_start|><|x", id="tokens that overlap"),
        pytest.param("stripped_lower_marks", "a<S>FOX b", "a<S>FOXES b", id="a token found after normalizing"),
        pytest.param("metaspace_nfkc", "a＜/ｓ＞b<s>c", "a＜/ｓ＞b<s>d", id="an id that is no match"),
    ],
)
def test_where_a_careless_split_goes_wrong(kind: str, first: str, second: str) -> None:
    tokenizer = made(kind)
    local = LocalTokenizer(tokenizer, TokenCache(1 << 20), spacing=1)
    for text in (first, second, first):
        assert unpack(local.encode_by_pieces(text)) == tokenizer.encode(text, add_special_tokens=False).ids


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TEXTS, min_size=1, max_size=8), st.integers(300, 1500))
def test_cached_equals_uncached_while_the_cache_overflows(texts: Sequence[str], limit: int) -> None:
    cache_ = TokenCache(limit)
    local = LocalTokenizer(made("byte_level"), cache_, spacing=1)
    for text in [*texts, *texts]:
        assert unpack(local.encode_by_pieces(text)) == made("byte_level").encode(text, add_special_tokens=False).ids
        assert cache_.stats()["bytes"] <= limit


def test_a_conversation_is_tokenized_from_its_last_known_piece_on() -> None:
    cache_ = TokenCache(1 << 20)
    local = LocalTokenizer(made("byte_level"), cache_, spacing=10)
    turn = "<|im_start|>user\nhello world<|im_end|>\n"
    local.encode_by_pieces(turn * 3)
    known = cache_.stats()
    assert known["entries"] > 0
    longer = turn * 4
    assert unpack(local.encode_by_pieces(longer)) == made("byte_level").encode(longer, add_special_tokens=False).ids
    assert cache_.stats()["hits"] == known["hits"] + known["entries"], "all pieces of the shorter text were found"


def test_pieces_are_shared_within_one_salt_only() -> None:
    """(X3) How fast tokens come must not tell what another asked."""
    cache_ = TokenCache(1 << 20)
    local = LocalTokenizer(made("byte_level"), cache_, spacing=1)
    text = "<|im_start|>user\nhi<|im_end|>\n" * 5
    plain = local.encode_by_pieces(text)
    entries = cache_.stats()["entries"]
    assert entries
    for salts, apart in enumerate((b"a", b"b"), start=2):
        assert local.encode_by_pieces(text, apart) == plain
        assert cache_.stats()["entries"] == salts * entries
        assert local.encode_by_pieces(text, apart) == plain
        assert cache_.stats()["entries"] == salts * entries


def test_the_head_of_a_long_chain_outlives_its_tail() -> None:
    """A full cache drops late pieces first: without the early ones they could never be found."""
    turns = [f"<|im_start|>user\nhello world {n}<|im_end|>\n" for n in range(40)]
    cache_ = TokenCache(6_000)
    local = LocalTokenizer(made("byte_level"), cache_, spacing=10)
    local.encode_by_pieces("".join(turns))
    assert cache_.stats()["evictions"] > 0
    before = cache_.stats()["hits"]
    local.encode_by_pieces("".join(turns[:3]))
    assert cache_.stats()["hits"] - before >= 3


def test_two_tokenizers_in_one_cache_share_nothing() -> None:
    cache_ = TokenCache(1 << 20)
    one = LocalTokenizer(made("byte_level"), cache_, spacing=1)
    other = LocalTokenizer(made("metaspace_first"), cache_, spacing=1)
    text = "<|im_start|>user\nhello<|im_end|>\nworld"
    for local, kind in ((one, "byte_level"), (other, "metaspace_first")):
        assert unpack(local.encode_by_pieces(text)) == made(kind).encode(text, add_special_tokens=False).ids


def test_special_tokens_stand_around_a_whole_text_only() -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    local = LocalTokenizer(tokenizer, TokenCache(1 << 20), spacing=1)
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    assert unpack(local.tokens(Text("hello"))) == [2, *ids, 3]
    assert unpack(local.tokens(Text("hello", add_special_tokens=False))) == ids


def test_a_tokenizers_own_truncation_and_padding_are_off() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    local = LocalTokenizer(tokenizer, TokenCache(0))
    assert len(unpack(local.tokens(Text("hello world, hello")))) not in (2, 64)


class TestLoading:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(TINY, tmp_path / "model"))

    def load(self, folder: Path) -> LocalTokenizer:
        return LocalTokenizer.load(folder, TokenCache(1 << 20))

    def chat(self, **fields: Any) -> Chat:
        return Chat(messages=[{"role": "user", "content": "hi"}], **fields)

    def test_the_template_file_wins_over_the_configuration(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 'hello' }}"}))
        local = self.load(folder)
        assert unpack(local.tokens(self.chat()))[0] == 2
        (folder / "chat_template.jinja").unlink()
        assert self.load(folder).tokens(self.chat()) == self.load(folder).tokens(Text("hello", False))

    def test_named_templates(self, folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        local = self.load(folder)
        assert local.tokens(self.chat()) == local.tokens(Text("plain", False))
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert local.tokens(self.chat(tools=tools)) == local.tokens(Text("tools", False))

    def test_additional_template_files(self, folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        local = self.load(folder)
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert local.tokens(self.chat(tools=tools)) == local.tokens(Text("tools", False))

    def test_special_tokens_of_both_spellings_reach_the_template(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token }}")
        config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert unpack(self.load(folder).tokens(self.chat())) == [0, 3]

    def test_a_model_without_template_tokenizes_texts(self, folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        (folder / "tokenizer_config.json").unlink()
        local = self.load(folder)
        assert local.unsupported(self.chat()) == "no_template"
        assert local.unsupported(Text("hi")) is None
        assert unpack(local.tokens(Text("hello world"))) == [0, 282, 79, 332, 1559, 506]
        with pytest.raises(LocalFailed, match="no_template"):
            local.tokens(self.chat())

    @pytest.mark.parametrize(
        ("name", "text", "cause"),
        [
            ("tokenizer.json", "{}", "bad_file"),
            ("tokenizer.json", "not json", "bad_file"),
            ("tokenizer_config.json", "not json", "bad_file"),
            ("tokenizer_config.json", "[]", "bad_file"),
            ("chat_template.jinja", "{% for %}", "bad_template"),
        ],
    )
    def test_a_broken_folder_is_one_sentence(self, folder: Path, name: str, text: str, cause: str) -> None:
        (folder / name).write_text(text)
        with pytest.raises(LocalFailed) as failed:
            self.load(folder)
        assert failed.value.cause == cause

    def test_a_broken_template_list(self, folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default"}]}))
        with pytest.raises(LocalFailed, match="bad_file"):
            self.load(folder)

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(LocalFailed, match="no_file"):
            self.load(tmp_path / "nowhere")

    @pytest.mark.parametrize("missing", ["tokenizers", "jinja2"])
    def test_the_missing_extra_is_named(self, folder: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "kvsync.tokenize.template", raising=False)
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(LocalFailed, match=r"kvsync\[tokenizers\]"):
            self.load(folder)

    def test_a_text_that_is_no_unicode(self, folder: Path) -> None:
        with pytest.raises(LocalFailed, match="encode"):
            self.load(folder).tokens(Text("\ud800"))
        with pytest.raises(LocalFailed, match="encode"):
            self.load(folder).encode_by_pieces("<|im_end|>" * 200 + "\ud800")
