"""Answers in vLLM 0.32's shapes: whole JSON documents, and the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvsync.engine_sim.calls import Call
from kvsync.engine_sim.request import FinishReason, Request
from kvsync.engine_sim.tokens import ModelTokenizer

_LOGPROB = -1.0
"""There is no model: every token is as likely as any other."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice."""

    index: int
    token: int
    text: str
    finish: FinishReason | None


class Answer:
    """The answer to one call.

    Args:
        fingerprint: ``system_fingerprint``.
        block_size: for the number of tokens that the call added to the cache.
    """

    def __init__(self, call: Call, tokenizer: ModelTokenizer, *, fingerprint: str, block_size: int) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._block_size = block_size
        self.id = f"{'chatcmpl' if call.chat else 'cmpl'}-{secrets.token_hex(8)}"
        self._created = int(time.time())
        self._texts = [""] * len(call.requests)
        self._sent = [0] * len(call.requests)
        """Output tokens per choice that chunks were made of."""

    def document(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The whole answer, from all its deltas."""
        for delta in deltas:
            self._texts[delta.index] += delta.text
        make = self._chat_choice if self._call.chat else self._completion_choice
        document = self._head("chat.completion" if self._call.chat else "text_completion") | {
            "choices": [make(index, request) for index, request in enumerate(self._call.requests)],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            # Of several prompts, and of several samples, the last one's hit is what vLLM reports here.
            "usage": self._usage(self._call.requests[-1]),
        }
        if self._call.chat:
            document |= {
                "prompt_logprobs": None,
                "prompt_token_ids": list(self._call.prompts[0].tokens) if self._call.token_ids else None,
                "prompt_text": None,
            }
        return document | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks that go before the first token."""
        if not self._call.chat:
            return
        for index in range(len(self._call.requests)):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
            chunk = self._chunk(choice | {"logprobs": None, "finish_reason": None})
            chunk["prompt_token_ids"] = list(self._call.prompts[0].tokens) if self._call.token_ids else None
            chunk["prompt_text"] = None
            yield chunk

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One step's chunk for one choice."""
        request = self._call.requests[delta.index]
        choice: dict[str, Any] = {"index": delta.index}
        first = not self._sent[delta.index]
        self._sent[delta.index] += 1
        token_ids = [delta.token] if self._call.token_ids else None
        if self._call.chat:
            choice |= {"delta": {"content": delta.text}, "logprobs": None, "finish_reason": delta.finish}
            if delta.finish:
                choice["stop_reason"] = None
            choice["token_ids"] = token_ids
        else:
            text, tokens = delta.text, [delta.token]
            if first and self._call.echo:
                text, tokens = self._echo(delta.index) + text, [*request.prompt, *tokens]
            choice |= {
                "text": text,
                "logprobs": self._logprobs(tokens, echoed=first and self._call.echo),
                "finish_reason": delta.finish,
                "stop_reason": None,
                "prompt_token_ids": list(request.prompt)
                if first and (self._call.token_ids or self._call.echo)
                else None,
                "token_ids": token_ids,
            }
        chunk = self._chunk(choice)
        if delta.finish and not self._call.usage_chunk:
            chunk["system_fingerprint"] = self._fingerprint
        return chunk

    def closing(self) -> Iterator[dict[str, Any]]:
        """The chunks that follow the last token: usage, where it was asked for."""
        if not self._call.usage_chunk:
            return
        # A stream reports the hit of the sequence whose output came first, not the last one's.
        usage = self._usage(self._call.requests[0])
        usage["prompt_tokens_details"] = _without_none(usage["prompt_tokens_details"])
        yield self._head(self._stream_object()) | {
            "choices": [],
            "system_fingerprint": self._fingerprint,
            "usage": _without_none(usage),
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head(self._stream_object()) | {"choices": [choice]}
        if self._call.usage_always:
            prompt, produced = len(self._call.requests[choice["index"]].prompt), self._sent[choice["index"]]
            chunk["usage"] = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + produced,
                "completion_tokens": produced,
            }
        return chunk

    def _stream_object(self) -> str:
        return "chat.completion.chunk" if self._call.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._call.model}

    def _completion_choice(self, index: int, request: Request) -> dict[str, Any]:
        text, tokens = self._texts[index], list(request.outputs)
        if self._call.echo:
            text, tokens = self._echo(index) + text, [*request.prompt, *tokens]
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens, echoed=self._call.echo),
            "finish_reason": request.finish,
            "stop_reason": None,
            "token_ids": list(request.outputs) if self._call.token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": list(request.prompt) if self._call.token_ids else None,
            "routed_experts": None,
        }

    def _chat_choice(self, index: int, request: Request) -> dict[str, Any]:
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": self._texts[index],
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": request.finish,
            "stop_reason": None,
            "token_ids": list(request.outputs) if self._call.token_ids else None,
            "routed_experts": None,
        }

    def _echo(self, index: int) -> str:
        prompt = self._call.prompts[index // self._call.samples]
        if self._call.token_ids:
            return ""
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.tokens, skip_special=True)

    def _logprobs(self, tokens: Sequence[int], *, echoed: bool) -> dict[str, Any] | None:
        if not self._call.logprobs:
            return None
        strings = self._tokenizer.strings(tokens)
        chances: list[float | None] = [_LOGPROB] * len(tokens)
        if echoed:
            # Nothing comes before a prompt's first token that could make it likely.
            chances[0] = None
        offsets = [0]
        for string in strings[:-1]:
            offsets.append(offsets[-1] + len(string))
        return {
            "text_offset": offsets,
            "token_logprobs": chances,
            "tokens": strings,
            "top_logprobs": [
                None if chance is None else {string: chance} for string, chance in zip(strings, chances, strict=True)
            ],
        }

    def _usage(self, reported: Request) -> dict[str, Any]:
        prompt = sum(len(prompt.tokens) for prompt in self._call.prompts)
        completion = sum(request.produced for request in self._call.requests)
        created = None
        if self._call.chat:
            created = len(reported.prompt) // self._block_size * self._block_size - reported.cached
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {
                "cached_tokens": reported.cached,
                "created_cache_tokens": created,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
