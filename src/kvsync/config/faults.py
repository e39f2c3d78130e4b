"""What is wrong with a configuration: where it was said, what is wrong, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

SHOWN = 50
"""Faults that a message lists. A file that is something else altogether has one in each line."""


@dataclass(frozen=True, slots=True)
class Fault:
    origin: str
    """``FILE:LINE``, the name of an environment variable, or ``flag NAME``."""
    path: str
    """The setting, dotted: ``models[0].engines[1].url``. Empty when the fault is not about one setting."""
    message: str
    mend: str

    def __str__(self) -> str:
        where = f"{self.origin}: {self.path}" if self.path and self.path != self.origin else self.origin
        return f"{where}: {self.message} ({self.mend})"


class ConfigError(Exception):
    """The configuration can't be used. ``faults`` has all of them, never only the first."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        head = f"{count} fault{'s' if count != 1 else ''} in the configuration:"
        rest = [f"and {count - SHOWN} more"] if count > SHOWN else []
        super().__init__("\n  ".join([head, *map(str, self.faults[:SHOWN]), *rest]))


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str | None:
    """The known word that ``word`` was probably meant to be; a prefix that all of them share tells nothing."""
    words = [other.removeprefix(prefix) for other in known]
    found = get_close_matches(word.removeprefix(prefix), words, n=1, cutoff=0.6)
    return prefix + found[0] if found else None


__all__ = ["ConfigError", "Fault", "nearest"]
