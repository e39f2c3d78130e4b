"""From a request body to sequences: which model, which prompts, which tokens, how much output.

Every rule is vLLM's: what it rejects is rejected with its status and shape, what it cuts is cut at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from kvsync.engine_sim.bodies import ApiError, ChatBody, CompletionBody, GenerationBody, TokenizeChatBody
from kvsync.engine_sim.config import SimConfig
from kvsync.engine_sim.outputs import Outputs
from kvsync.engine_sim.request import Adapter, FinishReason, Request
from kvsync.engine_sim.tokens import BadPrompt, ModelTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str | None
    """``None`` where it came as token ids."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One API call, ready to run."""

    model: str
    """As the client named it, or the base model."""
    chat: bool
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    """All samples of the first prompt, then of the second, …: the order of ``choices``."""
    samples: int
    stream: bool
    usage_chunk: bool
    usage_always: bool
    token_ids: bool
    echo: bool
    logprobs: bool


class Calls:
    """Reads calls for one engine."""

    def __init__(self, config: SimConfig, tokenizer: ModelTokenizer, outputs: Outputs) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._outputs = outputs
        self._adapters = {name: Adapter(name, number) for number, name in enumerate(config.adapters, start=1)}

    def check_model(self, model: str | None) -> str:
        """The model's name, the base model's where none is given.

        Raises:
            ApiError: 404.
        """
        if model is None or model == self._config.model or model in self._adapters:
            return model or self._config.model
        served = ", ".join([self._config.model, *self._adapters])
        raise ApiError(404, f"The model `{model}` does not exist. Valid aliases: {served}.", "model")

    def completion(self, body: CompletionBody, headers: Mapping[str, str]) -> Call:
        """Raises:
        ApiError: the engine refuses it.
        """
        model = self._check(body)
        echo, logprobs = bool(body.echo), body.logprobs is not None
        prompts = [
            self._text_prompt(prompt, body, body.add_special_tokens)
            if isinstance(prompt, str)
            else Prompt(None, tuple(self._cut(prompt, body)))
            for prompt in _prompts(body)
        ]
        skip_cache = body.prompt_logprobs is not None or (echo and logprobs)
        return self._call(model, body, headers, prompts, body.max_tokens, False, skip_cache, echo, logprobs)

    def chat(self, body: ChatBody, headers: Mapping[str, str]) -> Call:
        """Raises:
        ApiError: the engine refuses it.
        """
        model = self._check(body)
        prompt = self._text_prompt(self.render(body), body, body.add_special_tokens)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        skip_cache = body.prompt_logprobs is not None
        return self._call(model, body, headers, [prompt], limit, True, skip_cache, False, False)

    def render(self, body: ChatBody | TokenizeChatBody) -> str:
        """A conversation as text.

        Raises:
            ApiError: 400.
        """
        if body.continue_final_message and body.add_generation_prompt:
            raise ApiError(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if body.chat_template is not None:
            raise ApiError(
                400,
                "Chat template is passed with request, but --trust-request-chat-template is not set. "
                "Refused request with untrusted chat template.",
            )
        try:
            return self._tokenizer.render(
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
            )
        except BadPrompt as error:
            raise ApiError(400, str(error)) from error

    def _check(self, body: GenerationBody) -> str:
        model = self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "Stream options can only be defined when `stream=True`.", "stream_options")
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(400, "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if body.cache_salt == "":
            raise ApiError(
                400,
                "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
                "cache_salt",
            )
        longest = self._config.max_model_len
        if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens > longest:
            raise ApiError(
                400,
                f"truncate_prompt_tokens={body.truncate_prompt_tokens} cannot be greater than max_total_tokens = "
                f"{longest}. Please request a smaller truncation size.",
                "truncate_prompt_tokens",
            )
        if body.forced_output_token_ids is not None and not self._config.test_hooks:
            raise ApiError(400, "forced outputs need an engine with test hooks", "forced_output_token_ids")
        return model

    def _text_prompt(self, text: str, body: GenerationBody, add_special_tokens: bool) -> Prompt:
        keep = self._keep(body)
        if keep is None or body.truncation_side is not None:
            tokens = self._cut(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), body)
        else:
            # Without a side asked for, the tokenizer itself cuts: on the left, around its special tokens.
            tokens = self._tokenizer.encode_last(text, keep, add_special_tokens=add_special_tokens)
        return Prompt(text, tuple(tokens))

    def _keep(self, body: GenerationBody) -> int | None:
        # −1: as much as leaves room for one token of output.
        return self._config.max_model_len - 1 if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens

    def _cut(self, tokens: list[int], body: GenerationBody) -> list[int]:
        keep = self._keep(body)
        if keep is None or keep >= len(tokens):
            return tokens
        return tokens[:keep] if body.truncation_side == "right" else tokens[len(tokens) - keep :]

    def _call(
        self,
        model: str,
        body: GenerationBody,
        headers: Mapping[str, str],
        prompts: list[Prompt],
        limit: int | None,
        chat: bool,
        skip_cache: bool,
        echo: bool,
        logprobs: bool,
    ) -> Call:
        requests = []
        for prompt in prompts:
            room = self._room(prompt.tokens)
            for sample in range(body.n):
                finish: FinishReason = "length"
                if body.forced_output_token_ids is not None:
                    outputs = tuple(body.forced_output_token_ids[:room])
                else:
                    outputs, finish = self._outputs.draw(
                        prompt.tokens,
                        sample,
                        limit=room if limit is None else min(limit, room),
                        least=body.min_tokens,
                        ignore_eos=body.ignore_eos,
                    )
                requests.append(
                    Request(
                        prompt=prompt.tokens,
                        outputs=outputs,
                        finish=finish,
                        salt=body.cache_salt,
                        adapter=self._adapters.get(model),
                        session_id=body.session_id or headers.get("X-Session-ID"),
                        skip_cache=skip_cache,
                        report_full=self._config.dialect.reports_full
                        and body.vllm_xargs is not None
                        and body.vllm_xargs.kv_cache_report_mode == "full",
                    )
                )
        options = body.stream_options
        return Call(
            model=model,
            chat=chat,
            prompts=tuple(prompts),
            requests=tuple(requests),
            samples=body.n,
            stream=bool(body.stream),
            usage_chunk=options is not None and bool(options.include_usage),
            usage_always=options is not None and bool(options.include_usage and options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
            echo=echo,
            logprobs=logprobs,
        )

    def _room(self, tokens: tuple[int, ...]) -> int:
        """Output tokens that fit behind a prompt."""
        if not tokens:
            raise ApiError(400, "The decoder prompt cannot be empty", "prompt")
        if (highest := max(tokens)) >= self._tokenizer.vocabulary:
            raise ApiError(400, f"Token id {highest} is out of vocabulary", "prompt")
        longest = self._config.max_model_len
        if len(tokens) >= longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens. However, your prompt contains "
                f"{len(tokens)} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                f"the length of the input prompt. (parameter=input_tokens, value={len(tokens)})",
                "input_tokens",
            )
        return longest - len(tokens)


def _prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts one by one, whichever of the four forms they came in."""
    match body.prompt:
        case None | [] | "":
            raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        case str() as text:
            return [text]
        case [int(), *_]:
            return [cast(list[int], body.prompt)]
        case several:
            return cast(list[str] | list[list[int]], several)
