"""The demo's conversations: many users, a few shared system prompts, several turns each.

A turn's prompt is all that was said before plus a new message, as chat clients send it, so each turn's prefix is what
the turn before left in some engine's cache. The same seed gives the same conversations and times for every policy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

_TEXT = """
about above after again air all almost along also always animal another answer any area ask away back because
become before began being below between big black blue boat body book both box bring build busy call came car
carry change city class clear close cold color come complete contain could country course cover cross cry cut
dark day deep did differ direct distant door draw drive dry during each early earth ease east eat end enough
even every example eye face fact fall family far farm fast father feel feet few field figure fill find fine
fire first fish five fly follow food foot force form found four free friend from front full game gave girl
give glass gold good govern great green ground group grow half hand happen hard have head hear heart heat help
here high hill hold home
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Conversation:
    """One user's talk."""

    start: float
    """Seconds after the trace's beginning."""
    system: str
    messages: tuple[str, ...]
    """What the user says, turn by turn."""
    answer_tokens: tuple[int, ...]
    """How long each turn's answer is."""
    pauses: tuple[float, ...]
    """Seconds between an answer and the next message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the conversations are like."""

    conversations: int = 56
    turns: tuple[int, int] = (4, 8)
    system_prompts: int = 6
    system_words: int = 40
    first_words: tuple[int, int] = (60, 180)
    later_words: tuple[int, int] = (20, 60)
    answer_tokens: tuple[int, int] = (12, 32)
    pause: tuple[float, float] = (0.05, 0.25)


def conversations(seed: int, shape: Shape) -> list[Conversation]:
    """The trace. Conversations begin as a Poisson process of one per second: see :func:`paced`."""
    source = random.Random(seed)
    systems = [_text(source, shape.system_words) for _ in range(shape.system_prompts)]
    at = 0.0
    made = []
    for _ in range(shape.conversations):
        turns = source.randint(*shape.turns)
        made.append(
            Conversation(
                start=at,
                system=source.choice(systems),
                messages=tuple(
                    _text(source, source.randint(*(shape.later_words if turn else shape.first_words)))
                    for turn in range(turns)
                ),
                answer_tokens=tuple(source.randint(*shape.answer_tokens) for _ in range(turns)),
                pauses=tuple(source.uniform(*shape.pause) for _ in range(turns)),
            )
        )
        at += source.expovariate(1.0)
    return made


def _text(source: random.Random, words: int) -> str:
    return " ".join(source.choices(WORDS, k=words))


@dataclass(frozen=True, slots=True)
class Size:
    """What a trace asks of a fleet, in tokens."""

    prompt_tokens: int
    """Of all requests."""
    working_set: int
    """That differ in what they hold: what a cache would need to keep everything."""


def size(trace: Sequence[Conversation], count: Callable[[str], int]) -> Size:
    """``count`` gives the tokens of a text; the few that a chat template adds are left out."""
    prompt_tokens = 0
    working_set = sum(count(system) for system in {talk.system for talk in trace})
    for talk in trace:
        so_far = count(talk.system)
        for message, answer in zip(talk.messages, talk.answer_tokens, strict=True):
            so_far += count(message)
            prompt_tokens += so_far
            so_far += answer
        working_set += so_far - count(talk.system)
    return Size(prompt_tokens, working_set)


def paced(trace: Sequence[Conversation], rate: float) -> list[Conversation]:
    """A trace made at rate 1, with its conversations beginning at ``rate`` per second."""
    return [replace(talk, start=talk.start / rate) for talk in trace]
