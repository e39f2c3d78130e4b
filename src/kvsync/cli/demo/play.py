"""Plays conversations against an OpenAI-compatible address and measures what a client sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from kvsync.cli.demo.workload import Conversation


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, as its client saw it."""

    sent: float
    """Seconds after the play's beginning."""
    first_token: float
    """Seconds from sending to the first piece of the answer."""
    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    cached_tokens: int
    """Of the prompt, as the engine reported."""
    engine: str


async def play(
    url: str, model: str, policy: str, conversations: Sequence[Conversation], on_turn: Callable[[Turn], None]
) -> list[Turn]:
    """Send all turns at their times; turns in the order in which they were sent.

    Raises:
        RuntimeError: an answer is an error, or is not whole.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()
    turns: list[Turn] = []

    async def talk(session: aiohttp.ClientSession, conversation: Conversation) -> None:
        await asyncio.sleep(begin + conversation.start - loop.time())
        messages = [{"role": "system", "content": conversation.system}]
        for text, length, pause in zip(
            conversation.messages, conversation.answer_tokens, conversation.pauses, strict=True
        ):
            messages.append({"role": "user", "content": text})
            turn, answer = await _ask(session, begin, model, policy, messages, length)
            messages.append({"role": "assistant", "content": answer})
            turns.append(turn)
            on_turn(turn)
            await asyncio.sleep(pause)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session, asyncio.TaskGroup() as group:
        for conversation in conversations:
            group.create_task(talk(session, conversation))
    return sorted(turns, key=lambda turn: turn.sent)


async def _ask(
    session: aiohttp.ClientSession,
    begin: float,
    model: str,
    policy: str,
    messages: list[dict[str, str]],
    answer_tokens: int,
) -> tuple[Turn, str]:
    loop = asyncio.get_running_loop()
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    sent = loop.time()
    first = None
    text: list[str] = []
    prompt: tuple[int, ...] = ()
    answer: list[int] = []
    cached = None
    async with session.post("/v1/chat/completions", json=body, headers={"routing-strategy": policy}) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            prompt = tuple(chunk.get("prompt_token_ids") or prompt)
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    first = first or loop.time()
                    text.append(choice["delta"]["content"])
                answer += choice.get("token_ids") or ()
            if chunk.get("usage"):
                cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        engine = response.headers.get("target-pod", "?")
    if first is None or cached is None:
        raise RuntimeError("an answer ended without its text or its usage")
    return Turn(sent - begin, first - sent, prompt, tuple(answer), cached, engine), "".join(text)


__all__ = ["Turn", "play"]
