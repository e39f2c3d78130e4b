"""Growing conversations, the same ones for the same seed.

Several conversations are open at a time and take turns in random order. Each grows by what the engine answered and a
new question, until the model's length is reached; then a new one takes its place. Conversations share a few system
prompts, differ in API (chat, text completion, completion of token ids), a few carry a cache salt, some requests
stream. What must always hold:

* the shape (who speaks when, how much is asked, which API) depends on ``seed`` alone; the words also on ``name``, so
  two workloads of one seed ask the same amount of work and share not one block;
* no prompt and answer together exceed ``max_model_len`` (a byte of text is at most one token);
* every request asks for the token ids that the engine saw, and for usage.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Api = Literal["chat", "text", "ids"]

_WORDS = (
    *("river", "stone", "lantern", "market", "copper", "window", "garden", "letter", "winter", "harbor", "silver"),
    *("bridge", "thunder", "orchard", "candle", "meadow", "engine", "pepper", "saddle", "compass", "marble", "velvet"),
    *("anchor", "timber", "cinder", "falcon", "walnut", "ribbon", "glacier", "hammer", "island", "kettle", "mirror"),
    *("needle", "parcel", "quarry", "rocket", "signal", "temple", "valley", "whistle", "zipper", "basket", "canyon"),
)
_SYSTEMS = 3
_OVERHEAD = 48
"""Tokens that the markers around one more exchange cost at most."""
_IDS = range(300, 4000)
"""Ordinary tokens of the tiny models' vocabulary."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to be sent, and the conversation it belongs to."""

    conversation: Conversation
    path: str
    body: Mapping[str, object]
    salt: str | None


@dataclass(slots=True)
class Conversation:
    """One growing prompt. ``messages`` serves chat, ``text`` and ``ids`` the completions."""

    api: Api
    salt: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    """An upper bound on the prompt's tokens."""


class Workload:
    """Ask :meth:`next_turn`, send it, tell :meth:`answered`; as often as wanted."""

    def __init__(self, seed: int, name: str, *, open_conversations: int = 8, max_model_len: int = 1024) -> None:
        self._shape = random.Random(seed)
        self._words = random.Random(f"{seed} {name}")
        self._max_model_len = max_model_len
        self._begun = 0
        self._turns = 0
        self._systems = [self._sentence(90) for _ in range(_SYSTEMS)]
        self._system_ids = [self._some_ids(100) for _ in range(_SYSTEMS)]
        self._open = [self._begin() for _ in range(open_conversations)]

    def next_turn(self) -> Turn:
        """The next request: of a random open conversation, with a new question at its end."""
        place = self._shape.randrange(len(self._open))
        words, max_tokens = self._shape.randint(6, 40), self._shape.randint(8, 48)
        question, question_ids = self._sentence(words), self._some_ids(2 * words)
        grown = (len(question_ids) if self._open[place].api == "ids" else len(question)) + _OVERHEAD
        if self._open[place].tokens + grown + max_tokens > self._max_model_len:
            self._open[place] = self._begin()
        conversation = self._open[place]
        conversation.tokens += grown
        self._turns += 1
        body: dict[str, object] = {
            "model": "tiny",
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        if conversation.salt is not None:
            body["cache_salt"] = conversation.salt
        if self._turns % 3 == 0:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        match conversation.api:
            case "chat":
                conversation.messages.append({"role": "user", "content": question})
                return Turn(
                    conversation,
                    "/v1/chat/completions",
                    body | {"messages": list(conversation.messages)},
                    conversation.salt,
                )
            case "text":
                conversation.text += f"\n\nQuestion: {question}\nAnswer:"
                return Turn(conversation, "/v1/completions", body | {"prompt": conversation.text}, conversation.salt)
            case "ids":
                conversation.ids += question_ids
                return Turn(
                    conversation, "/v1/completions", body | {"prompt": list(conversation.ids)}, conversation.salt
                )

    def answered(self, turn: Turn, text: str, token_ids: list[int], prompt_tokens: int) -> None:
        """What the engine made of ``turn``; it becomes part of the next prompt."""
        conversation = turn.conversation
        conversation.messages.append({"role": "assistant", "content": text})
        conversation.text += text
        conversation.ids += token_ids
        answer = len(token_ids) if conversation.api == "ids" else len(text.encode())
        conversation.tokens = prompt_tokens + answer

    def _begin(self) -> Conversation:
        api: Api = ("chat", "text", "ids")[self._begun % 3]
        self._begun += 1
        salt = f"tenant-{self._words.randrange(10**6)}" if self._begun % 7 == 0 else None
        system = self._shape.randrange(_SYSTEMS)
        match api:
            case "chat":
                content = self._systems[system]
                return Conversation(api, salt, messages=[{"role": "system", "content": content}], tokens=len(content))
            case "text":
                return Conversation(api, salt, text=self._systems[system], tokens=len(self._systems[system]))
            case "ids":
                return Conversation(api, salt, ids=list(self._system_ids[system]), tokens=len(self._system_ids[system]))

    def _sentence(self, words: int) -> str:
        return " ".join(self._words.choice(_WORDS) for _ in range(words))

    def _some_ids(self, count: int) -> list[int]:
        return [self._words.choice(_IDS) for _ in range(count)]
