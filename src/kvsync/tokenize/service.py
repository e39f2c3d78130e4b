"""The tokenizer as the gateway sees it: any request in, its tokens or a reason out.

Always holds: :meth:`TokenizerService.tokenize` never raises for a body or a tokenizer, and never takes longer than the
budget. Where tokens stay unknown the request is routed by load, and the reason is counted.

Token ids need nothing. Text goes to the local tokenizer where that is proved for this name and shape, else to the
remote one, whose whole answers are remembered for a while and shared by equal requests under way. Of a chat with images
only what stands before them is known, unless a server renders it whole (``remote.render``). What is remembered serves
requests with the same ``cache_salt`` only: how fast tokens come must not tell what others asked. Without a remote
tokenizer there is nobody to prove the local one by (and no KV sync): then it serves as it is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, Literal, TypeAlias

from msgspec import structs

from kvsync.config import ModelSettings, TokenizerSettings
from kvsync.discovery.access import EngineAccess
from kvsync.tokenize.block0 import FirstBlocks, Held
from kvsync.tokenize.cache import TokenCache
from kvsync.tokenize.endpoints import LARGE
from kvsync.tokenize.errors import LocalFailed, QueueFull, RemoteFailed, Untokenized
from kvsync.tokenize.flight import SingleFlight
from kvsync.tokenize.local import LocalTokenizer
from kvsync.tokenize.pool import BoundedPool
from kvsync.tokenize.prove import Proof, common_tokens
from kvsync.tokenize.remote import RemoteTokenizer, first_sound, question
from kvsync.tokenize.render import Renderer
from kvsync.tokenize.request import Reading, Text, Truncation, Work, read_request
from kvsync.tokenize.truncate import cut, cut_text
from kvsync.tokenize.types import Prompt, TokenizedRequest

log = logging.getLogger(__name__)

Source: TypeAlias = Literal["ids", "remote", "local", "cache", "none"]

ANSWER_AGE: Final = 300.0
"""Seconds that a remote answer is remembered: a template may print the date, and a rollout may change it."""
_COMPARISONS: Final = 8
"""Comparisons under way at most; further ones are skipped and counted."""


class TokenizerService:
    """Requests → token ids. Used from one event loop, between :meth:`start` and :meth:`close`.

    ``engines`` gives the base URLs of the engines that serve a (base) model now; it is asked when the endpoint is
    ``engines``. ``served`` gives the models that discovery found, beside those of the settings. ``access`` is how
    engines are spoken to. ``held`` says whether they hold what they should, if local tokens are right.
    """

    def __init__(
        self,
        settings: TokenizerSettings,
        models: Sequence[ModelSettings],
        engines: Callable[[str], Sequence[str]],
        *,
        served: Callable[[], Iterable[str]] = tuple,
        access: EngineAccess | None = None,
        held: Held = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._models = tuple(models)
        self._served = served
        self._pool = BoundedPool(settings.local.threads, settings.local.queue)
        remote = settings.remote
        usable = remote.enabled and remote.endpoint is not None
        self._remote = self._renderer = None
        if usable:
            self._remote = RemoteTokenizer(remote, engines, self._pool, access=access, clock=clock)
        if usable and remote.render:
            self._renderer = Renderer(remote, engines, self._pool, access=access, clock=clock)
        self._answers = TokenCache(remote.cache_bytes, max_age=ANSWER_AGE, clock=clock)
        self._pieces = TokenCache(settings.local.cache_bytes, clock=clock)
        self._flights: SingleFlight[bytes] = SingleFlight()
        self._local: dict[str, LocalTokenizer] = {}
        self._without_local: dict[str, str] = {}
        self._proof = Proof(settings.local.prove, settings.local.compare, chance=chance)
        self._first_blocks = FirstBlocks(held, self._proof.suspect, clock)
        self._updating = asyncio.Lock()
        self._limits: dict[str, int] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._sources: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._left_to_remote: Counter[str] = Counter()
        self._comparisons: Counter[str] = Counter()

    async def start(self) -> None:
        """Open the connections and load the tokenizers. One that can't be loaded is logged, and served remotely."""
        if self._remote is not None:
            await self._remote.start()
        if self._renderer is not None:
            await self._renderer.start()
        await self.update_models(self._models)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._pool.close()
        if self._remote is not None:
            await self._remote.close()
        if self._renderer is not None:
            await self._renderer.close()

    async def update_models(self, models: Sequence[ModelSettings]) -> None:
        """Take over a changed list of models. Tokenizers that stay are not read again."""
        async with self._updating:
            loaded, without = await self._load(models)
            self._models, self._local, self._without_local = tuple(models), loaded, without

    async def _load(self, models: Sequence[ModelSettings]) -> tuple[dict[str, LocalTokenizer], dict[str, str]]:
        """Tokenizers by model, and for the other models why they have none."""
        loaded: dict[str, LocalTokenizer] = {}
        without: dict[str, str] = {}
        before = {model.name: model.tokenizer for model in self._models}
        for model in models:
            if not self._settings.local.enabled:
                without[model.name] = "local tokenizing is off"
            elif model.tokenizer is None:
                without[model.name] = "no tokenizer folder is given"
            elif model.name in self._local and before.get(model.name) == model.tokenizer:
                loaded[model.name] = self._local[model.name]
            else:
                try:
                    loaded[model.name] = await asyncio.to_thread(LocalTokenizer.load, model.tokenizer, self._pieces)
                except (LocalFailed, OSError, UnicodeDecodeError) as error:
                    without[model.name] = str(error)
                    log.warning("no local tokenizer for model %s: %s", model.name, error)
        return loaded, without

    async def tokenize(self, path: str, body: dict[str, Any], model: str, adapter: str | None) -> TokenizedRequest:
        """The tokens of a request to ``path``, or why they are unknown. Never raises for a body or a tokenizer.

        ``model`` is the base model's name, ``adapter`` the adapter's, where the request asks for one.
        """
        known = self.begin(path, body, model, adapter)
        return known if isinstance(known, TokenizedRequest) else await known

    def begin(
        self, path: str, body: dict[str, Any], model: str, adapter: str | None
    ) -> TokenizedRequest | Coroutine[Any, Any, TokenizedRequest]:
        """As :meth:`tokenize`, but what needs no waiting comes at once: token ids, an unsupported API, text where
        nobody could tokenize it."""
        reading = read_request(path, body)
        if reading.reason is not None:
            return self._result(reading, (), "none", reading.reason)
        if reading.ids and (reading.truncation is None or self._keep(reading.truncation, model) is not None):
            return self._result(reading, self._cut_ids(reading, model), "ids")
        if not reading.ids and self._remote is None and model not in self._local:
            return self._result(reading, (), "none", "no_tokenizer")
        return self._within_budget(reading, body, model, adapter)

    def answered(self, tokenized: TokenizedRequest, worker: str) -> None:
        """``worker`` answered this request, and successfully."""
        if tokenized.sample is not None:
            self._first_blocks.answered(tokenized.sample, worker)

    async def probe(self) -> str | None:
        """``None`` when the remote tokenizer answers, else a sentence that says what is wrong."""
        remote = self._settings.remote
        if not remote.enabled:
            return "the remote tokenizer is off (set AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER=true)"
        if self._remote is None:
            return "the remote tokenizer has no endpoint (set AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT)"
        if remote.endpoint != "engines":
            return await self._remote.probe("")
        models = dict.fromkeys([*(model.name for model in self._models), *self._served()])
        if not models:
            return "no model is known whose engines could tokenize"
        return await first_sound(self._remote.probe(model) for model in models)

    def stats(self) -> dict[str, Any]:
        return {
            "requests": dict(self._sources),
            "reasons": dict(self._reasons),
            "remote": self._remote.stats() if self._remote is not None else None,
            "render": self._renderer.stats() if self._renderer is not None else None,
            "answers": self._answers.stats(),
            "shared_calls": self._flights.shared,
            "local": {"ready": sorted(self._local), "missing": dict(self._without_local)},
            "left_to_remote": dict(self._left_to_remote),
            "pieces": self._pieces.stats(),
            "shapes": self._proof.stats(),
            "comparisons": dict(self._comparisons),
            "first_blocks": self._first_blocks.stats(),
            "pool": self._pool.stats(),
        }

    # --- one request

    async def _within_budget(
        self, reading: Reading, body: dict[str, Any], model: str, adapter: str | None
    ) -> TokenizedRequest:
        reason = None
        try:
            async with asyncio.timeout(self._settings.remote.budget):
                if reading.ids:
                    await self._learn_limit(model)
                    return self._result(reading, self._cut_ids(reading, model), "ids")
                if reading.media and self._renderer is not None:
                    rendered = await self._renderer.prompt(body, model)
                    if rendered is not None:
                        return self._result(reading, (rendered,), "remote")
                    reason = "not_rendered"
                prompts, source = await self._prompts(reading, model, adapter)
        except TimeoutError:
            return self._result(reading, (), "none", "tokenizer_timeout")
        except Untokenized as error:
            return self._result(reading, (), "none", error.reason)
        result = self._result(reading, prompts, source, reason)
        if source != "local" or self._remote is None or len(prompts) != 1 or reading.media or reading.truncation:
            return result
        shape = reading.works[0].shape
        sample = self._first_blocks.sample(model, adapter, reading.cache_salt, shape, prompts[0].tokens)
        return structs.replace(result, sample=sample)

    def _result(
        self, reading: Reading, prompts: tuple[Prompt, ...], source: Source, reason: str | None = None
    ) -> TokenizedRequest:
        whole = not reading.media or any(prompt.images for prompt in prompts)
        if reason is None and not reading.reads_cache:
            reason = "skips_cache"
        self._sources[source] += 1
        if reason is not None:
            self._reasons[reason] += 1
        return TokenizedRequest(
            prompts=prompts,
            source=source,
            reason=reason,
            cache_salt=reading.cache_salt,
            reads_cache=reading.reads_cache,
            hides_keys=reading.hides_keys,
            reannounces=reading.reannounces,
            comparable=len(prompts) == 1 and reading.single and reading.reads_cache and whole,
        )

    async def _prompts(self, reading: Reading, model: str, adapter: str | None) -> tuple[tuple[Prompt, ...], Source]:
        if len(reading.works) == 1:
            answers = [await self._one(reading, reading.works[0], model, adapter)]
        else:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._one(reading, w, model, adapter)) for w in reading.works]
            except ExceptionGroup as failures:
                untokenized, others = failures.split(Untokenized)
                if others is not None or untokenized is None:
                    raise
                raise _first(untokenized) from failures
            answers = [task.result() for task in tasks]
        sources = [source for _, source in answers]
        source: Source = "remote" if "remote" in sources else sources[0]
        if reading.media:
            one, other = (tokens for tokens, _ in answers)
            # The last common token may be merged with what really follows it.
            common = max(0, common_tokens(one, other) - 1)
            return (Prompt(one[: common * 4], common + reading.rest),), source
        return tuple(_prompt(tokens) for tokens, _ in answers), source

    async def _one(self, reading: Reading, work: Work, model: str, adapter: str | None) -> tuple[bytes, Source]:
        """One prompt's tokens, cut as the request asks."""
        apart = _apart(reading.cache_salt)
        tokens, source = await self._tokens(work, model, adapter, apart)
        if reading.truncation is None:
            return tokens, source
        keep = self._keep(reading.truncation, model)
        if keep is None:
            await self._learn_limit(model)
            keep = self._keep(reading.truncation, model)
        if keep is None:
            raise Untokenized("unknown_limit")
        if len(tokens) <= keep * 4 or reading.truncation.side is not None or not work.add_special_tokens:
            return cut(tokens, keep, reading.truncation.side), source
        if not isinstance(work, Text):
            # A chat with special tokens around it: its text without them is known to nobody here.
            raise Untokenized("truncated_special")
        bare, _ = await self._tokens(replace(work, add_special_tokens=False), model, adapter, apart)
        kept = cut_text(tokens, bare, keep)
        if kept is None:
            raise Untokenized("truncated_special")
        return kept, source

    async def _tokens(self, work: Work, model: str, adapter: str | None, apart: bytes) -> tuple[bytes, Source]:
        """The whole tokens of one prompt, by whoever may be trusted with it."""
        name, shape, remote = adapter or model, work.shape, self._remote
        local = self._local.get(model)
        if local is not None and (unsupported := local.unsupported(work)) is not None:
            self._left_to_remote[unsupported] += 1
            local = None
        if local is not None and (remote is None or self._proof.state(name, shape) == "proved"):
            try:
                if local.is_quick(work):
                    tokens = local.tokens(work, apart)
                else:
                    tokens = await self._pool.run(local.tokens, work, apart)
            except LocalFailed as error:
                self._left_to_remote[error.cause] += 1
                if remote is None:
                    raise
            else:
                if remote is not None and self._proof.wants_comparison(name, shape):
                    self._later(self._compare_remote(remote, work, model, name, tokens))
                return tokens, "local"
        if remote is None:
            raise Untokenized("no_tokenizer")
        return await self._remote_tokens(remote, local, work, model, name, apart)

    async def _remote_tokens(
        self, remote: RemoteTokenizer, local: LocalTokenizer | None, work: Work, model: str, name: str, apart: bytes
    ) -> tuple[bytes, Source]:
        if work.size > LARGE:
            body, key = await self._pool.run(_question_and_key, work, name, apart)
        else:
            body, key = _question_and_key(work, name, apart)
        remembered = self._answers.get(key)
        if remembered is not None:
            return remembered, "cache"

        async def call() -> bytes:
            tokens = await self._ask(remote, body, work, model, name)
            self._answers.put(key, tokens)
            # Answers from the cache or a shared call are no further evidence: only this one is compared.
            if local is not None and self._proof.wants_comparison(name, work.shape):
                self._later(self._compare_local(local, work, name, tokens, apart))
            return tokens

        return await self._flights.run(key, call), "remote"

    async def _ask(self, remote: RemoteTokenizer, body: bytes, work: Work, model: str, name: str) -> bytes:
        try:
            answer = await remote.ask(body, model)
        except RemoteFailed as error:
            if error.cause != "status_404" or name == model:
                raise
            # An adapter that this tokenizer does not know: it tokenizes as its base model does.
            answer = await remote.ask(question(work, model), model)
        if answer.max_model_len is not None:
            self._limits[model] = answer.max_model_len
        return answer.tokens

    # --- truncation

    def _keep(self, truncation: Truncation, model: str) -> int | None:
        if truncation.keep is not None:
            return truncation.keep
        limit = self._limits.get(model)
        return None if limit is None else max(1, limit - truncation.reserve)

    async def _learn_limit(self, model: str) -> None:
        """Have the remote tokenizer say how many tokens the model takes: its answers carry that.

        Raises:
            Untokenized: it can't be learned.
        """
        if self._remote is None:
            raise Untokenized("unknown_limit")
        await self._ask(self._remote, question(Text(""), model), Text(""), model, model)
        if model not in self._limits:
            raise Untokenized("unknown_limit")

    def _cut_ids(self, reading: Reading, model: str) -> tuple[Prompt, ...]:
        truncation = reading.truncation
        keep = None if truncation is None else self._keep(truncation, model)
        if truncation is None or keep is None:
            return tuple(map(_prompt, reading.ids))
        return tuple(_prompt(cut(ids, keep, truncation.side)) for ids in reading.ids)

    # --- comparing

    def _later(self, comparison: Coroutine[Any, Any, None]) -> None:
        if len(self._background) >= _COMPARISONS:
            comparison.close()
            self._comparisons["skipped"] += 1
            return
        task = asyncio.get_running_loop().create_task(comparison)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _compare_local(self, local: LocalTokenizer, work: Work, name: str, remote: bytes, apart: bytes) -> None:
        try:
            tokens = await self._pool.run(local.tokens, work, apart)
        except LocalFailed as error:
            self._comparisons[f"local_{error.cause}"] += 1
        except QueueFull:
            self._comparisons["skipped"] += 1
        else:
            self._compared(name, work.shape, tokens, remote)

    async def _compare_remote(self, remote: RemoteTokenizer, work: Work, model: str, name: str, local: bytes) -> None:
        try:
            async with asyncio.timeout(self._settings.remote.budget):
                tokens = await self._ask(remote, question(work, name), work, model, name)
        except (Untokenized, TimeoutError):
            self._comparisons["remote_failed"] += 1
        else:
            self._compared(name, work.shape, local, tokens)

    def _compared(self, name: str, shape: str, local: bytes, remote: bytes) -> None:
        self._comparisons["equal" if local == remote else "different"] += 1
        self._proof.compared(name, shape, local, remote)


def _question_and_key(work: Work, name: str, apart: bytes) -> tuple[bytes, bytes]:
    body = question(work, name)
    return body, blake2b(body, digest_size=16, key=apart).digest()


def _apart(cache_salt: str | None) -> bytes:
    """What keeps the memories of requests with different salts apart."""
    return b"" if cache_salt is None else blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _prompt(tokens: bytes) -> Prompt:
    return Prompt(tokens, len(tokens) // 4)


def _first(group: BaseExceptionGroup[Untokenized]) -> Untokenized:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


__all__ = ["ANSWER_AGE", "TokenizerService"]
