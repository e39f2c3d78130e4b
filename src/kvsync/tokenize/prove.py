"""When local tokens may stand for the engine's: proved by equal answers, kept honest by comparing on.

Per name (model or adapter) and request shape. A shape begins unproved: the remote tokenizer serves, and the local one
is compared with it. After ``needed`` equal answers local serves, and a share of its answers is still compared. One
difference, ever, disables local for that shape until the process ends. A suspicion (see
:mod:`kvsync.tokenize.block0`) sends the shape back to be proved again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

log = logging.getLogger(__name__)

State: TypeAlias = Literal["unproved", "proved", "disabled"]


@dataclass(slots=True)
class _Shape:
    equal: int = 0
    """Since the last suspicion."""
    compared: int = 0
    suspicions: int = 0
    disabled: bool = False


class Proof:
    """What is known of local tokenizing, per name and shape."""

    def __init__(self, needed: int, share: float, *, chance: Callable[[], float] = random.random) -> None:
        self._needed = needed
        self._share = share
        self._chance = chance
        self._shapes: dict[tuple[str, str], _Shape] = {}

    def state(self, name: str, shape: str) -> State:
        known = self._shapes.get((name, shape))
        if known is None:
            return "unproved"
        if known.disabled:
            return "disabled"
        return "proved" if known.equal >= self._needed else "unproved"

    def wants_comparison(self, name: str, shape: str) -> bool:
        """Whether this answer shall be compared: all before the proof, a share after it, none once disabled."""
        state = self.state(name, shape)
        return state == "unproved" or (state == "proved" and self._chance() < self._share)

    def compared(self, name: str, shape: str, local: bytes, remote: bytes) -> None:
        """The same request's tokens, by both."""
        known = self._shapes.setdefault((name, shape), _Shape())
        known.compared += 1
        if local == remote:
            known.equal += 1
            return
        if not known.disabled:
            known.disabled = True
            log.warning(
                "local tokens of model %s differ from the remote tokenizer's (shape %s, %d and %d tokens, the first "
                "difference at %d): local tokenizing is off for this shape",
                name,
                shape,
                len(local) // 4,
                len(remote) // 4,
                common_tokens(local, remote),
            )

    def suspect(self, name: str, shape: str) -> None:
        """Have the shape proved again."""
        known = self._shapes.setdefault((name, shape), _Shape())
        known.suspicions += 1
        known.equal = 0

    def stats(self) -> dict[str, Any]:
        return {
            f"{name}:{shape}": {
                "state": self.state(name, shape),
                "compared": known.compared,
                "equal": known.equal,
                "suspicions": known.suspicions,
            }
            for (name, shape), known in self._shapes.items()
        }


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two packed prompts have in common from their beginning."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * 4 : middle * 4] == other[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low


__all__ = ["Proof", "State", "common_tokens"]
