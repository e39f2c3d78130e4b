"""Tokenizing in this process: a model's ``tokenizer.json`` and chat template.

Always holds: the ids are those that ``tokenizers`` makes of the whole text at once, whoever makes them: its twin
(:mod:`kvsync.tokenize.twin`) is several times as fast, where there is one. What is remembered of a text's beginning is
reused only up to a place where the tokenizer provably splits (:mod:`kvsync.tokenize.boundaries`). A chain of digests
names each piece by all the text up to its end, so a piece can't be taken for that of another beginning.

Everything here blocks, and is called in a thread of the pool unless it is quick. ``tokenizers``, ``tiktoken`` and
``jinja2`` are an extra of the package, imported when the first model is loaded.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvsync.extras import how_to_install
from kvsync.tokenize.boundaries import Boundaries, Cut, spaced
from kvsync.tokenize.cache import TokenCache
from kvsync.tokenize.errors import LocalFailed
from kvsync.tokenize.messages import unsupported
from kvsync.tokenize.request import Chat, Text, Work
from kvsync.tokenize.twin import Twin, Unlike, twin

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvsync.tokenize.template import ChatTemplate

log = logging.getLogger(__name__)

QUICK: Final = 4096
"""Characters of a prompt that a twin encodes in less time than a busy event loop takes to hand them to a thread."""
_QUICK_MESSAGES: Final = 32
_LONGEST_ROLE: Final = 32
SPACING: Final = 512
"""Characters between two remembered places: a piece costs 250 bytes beside its tokens."""
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class LocalTokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        cache: TokenCache,
        templates: Mapping[str, ChatTemplate] | None = None,
        *,
        spacing: int = SPACING,
        twin: Twin | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._twin = twin
        self._cache = cache
        self._templates = dict(templates or {})
        self._spacing = spacing
        self._boundaries = Boundaries(tokenizer.get_added_tokens_decoder().items())
        # Two models in one cache never share a piece, even when their texts do.
        self._seed = blake2b(tokenizer.to_str().encode("utf-8", "surrogatepass"), digest_size=16).digest()

    @classmethod
    def load(cls, folder: Path, cache: TokenCache, *, now: Callable[[], datetime] = datetime.now) -> LocalTokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of a model's folder.

        Raises:
            LocalFailed: one sentence says what is missing or broken.
        """
        try:
            from tokenizers import Tokenizer

            from kvsync.tokenize.template import ChatTemplate
        except ImportError as error:
            raise LocalFailed("no_extra", f"{error.name} is not installed ({how_to_install('tokenizers')})") from error
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise LocalFailed("no_file", f"{path} does not exist")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise LocalFailed("bad_file", f"{path}: {error}") from error
        config = _read_config(folder / "tokenizer_config.json")
        special = _special_tokens(config)
        sources = _template_sources(folder, config)
        templates = {name: ChatTemplate(text, special, now=now) for name, text in sources.items()}
        return cls(tokenizer, cache, templates, twin=_twin(tokenizer, path))

    def unsupported(self, work: Work) -> str | None:
        """Why ``work`` is not for this tokenizer, as a short word; ``None`` when it is. Cheap: no rendering."""
        if isinstance(work, Chat):
            return unsupported(work) if self._template(work) else "no_template"
        return None

    def is_quick(self, work: Work) -> bool:
        """Whether the tokens of ``work`` are had in well below a millisecond."""
        if self._twin is None or work.size > QUICK:
            return False
        if isinstance(work, Text):
            return True
        # A chat's size is that of its contents: nothing else may be large.
        return (
            work.shape == "plain"
            and len(work.messages) <= _QUICK_MESSAGES
            and all(
                message.keys() <= {"role", "content"} and len(message["role"]) <= _LONGEST_ROLE
                for message in work.messages
            )
        )

    def tokens(self, work: Work, apart: bytes = b"") -> bytes:
        """Packed native-endian uint32 ids of a prompt. What is remembered of it serves prompts with the same ``apart``.

        Raises:
            LocalFailed: the template or the tokenizer refused.
        """
        if not isinstance(work, Chat):
            return self._encode(work.text, work.add_special_tokens)
        template = self._template(work)
        if template is None:
            raise LocalFailed("no_template", "the model has no chat template")
        text = template.render(work)
        # Special tokens around the whole belong to no piece of it.
        return self._encode(text, True) if work.add_special_tokens else self.encode_by_pieces(text, apart)

    def encode_by_pieces(self, text: str, apart: bytes = b"") -> bytes:
        """As the whole text at once, with the beginning taken from the cache as far as it is known.

        Raises:
            LocalFailed: the tokenizer refused.
        """
        everywhere = self._boundaries.cuts(text)
        cuts = spaced(everywhere, self._spacing)
        if not cuts:
            return self._encode(text, False)
        keys = self._keys(text, cuts, apart)
        known: list[bytes] = []
        for key in keys:
            piece = self._cache.get(key)
            if piece is None:
                break
            known.append(piece)
        new = len(known)
        if not known:
            behind = self._encode(text, False)
            start = 0
        else:
            last = cuts[new - 1]
            start = last.end
            behind = self._encode(last.token + text[start:], False)
            if behind[:4] != _packed((self._boundaries.ids[last.token],)):
                raise LocalFailed("bad_split", "a boundary token is not the first of its text")
            behind = behind[4:]
        self._remember(behind, [cut for cut in everywhere if cut.end > start], cuts[new:], keys[new:])
        # When the cache is full the later pieces go first: without the earlier ones they could not be found.
        self._cache.refresh(reversed(keys))
        return b"".join((*known, behind))

    def _remember(self, tokens: bytes, everywhere: Sequence[Cut], cuts: Sequence[Cut], keys: Sequence[bytes]) -> None:
        """Keep the pieces of ``tokens`` that end at ``cuts``.

        Each match of a boundary token gives exactly one id. Ids of boundary tokens that come from elsewhere (a
        normalizer can make one out of other characters) show as a different sequence, and then nothing is kept.
        """
        numbers = {cut.token: self._boundaries.ids[cut.token] for cut in everywhere}
        found = sorted((end, token) for token, number in numbers.items() for end in _ends(tokens, number))
        if [token for _, token in found] != [cut.token for cut in everywhere]:
            return
        end_of = {cut.end: end for cut, (end, _) in zip(everywhere, found, strict=True)}
        ends = [end_of[cut.end] for cut in cuts]
        # The last piece first: see encode_by_pieces about a full cache.
        for key, begin, end in reversed(list(zip(keys, [0, *ends], ends, strict=False))):
            self._cache.put(key, tokens[begin:end])

    def _keys(self, text: str, cuts: Sequence[Cut], apart: bytes) -> list[bytes]:
        digest = blake2b(self._seed, digest_size=16, key=apart)
        keys = []
        begin = 0
        for cut in cuts:
            digest.update(text[begin : cut.end].encode("utf-8", "surrogatepass"))
            keys.append(digest.copy().digest())
            begin = cut.end
        return keys

    def _encode(self, text: str, special: bool) -> bytes:
        if self._twin is not None and (tokens := self._twin.encode(text, special)) is not None:
            return tokens
        try:
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
        except Exception as error:  # the library raises bare Exceptions
            raise LocalFailed("encode", f"{type(error).__name__}: {error}") from error
        return _packed(encoding.ids)

    def _template(self, chat: Chat) -> ChatTemplate | None:
        if chat.tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default")


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def _ends(tokens: bytes, number: int) -> Iterator[int]:
    """Where each token of this number ends, in bytes."""
    wanted = _packed((number,))
    place = tokens.find(wanted)
    while place >= 0:
        if place % 4:
            place += 1  # parts of two tokens
        else:
            place += 4
            yield place
        place = tokens.find(wanted, place)


def _twin(tokenizer: Tokenizer, path: Path) -> Twin | None:
    try:
        return twin(tokenizer)
    except (Unlike, ImportError) as error:
        log.info("%s: texts are encoded by tokenizers, not by tiktoken, which is faster: %s", path, error)
        return None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LocalFailed("bad_file", f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise LocalFailed("bad_file", f"{path}: not an object")
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a template may name; each a string, or an object that holds it."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. The file wins over the configuration; several of them have names, ``default`` among them."""
    file = folder / "chat_template.jinja"
    sources: dict[str, str] = {}
    given = config.get("chat_template")
    if file.is_file():
        sources["default"] = file.read_text(encoding="utf-8")
        sources |= {
            extra.stem: extra.read_text(encoding="utf-8")
            for extra in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        }
    elif isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        for entry in given:
            if not (isinstance(entry, dict) and isinstance(entry.get("template"), str)):
                raise LocalFailed("bad_file", f"{folder / 'tokenizer_config.json'}: chat_template")
            sources[str(entry.get("name"))] = entry["template"]
    return sources


__all__ = ["QUICK", "SPACING", "LocalTokenizer"]
