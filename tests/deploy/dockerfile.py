"""Enough of the Dockerfile's grammar to read our own: an instruction a line, ``\\`` continues it, ``#`` is a remark."""

from __future__ import annotations

import fnmatch
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "LABEL", "RUN", "USER", "WORKDIR"}


@dataclass
class Stage:
    base: str
    name: str | None
    steps: list[tuple[str, str]] = field(default_factory=list)
    """Instruction and the rest of its line."""

    def all(self, instruction: str) -> list[str]:
        return [rest for each, rest in self.steps if each == instruction]


def stages(text: str) -> list[Stage]:
    """Every stage of a Dockerfile, in order.

    Raises:
        ValueError: a line that is no instruction that we use.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction not in KNOWN or not rest.strip():
            raise ValueError(f"not an instruction: {line}")
        if instruction == "FROM":
            base, *name = rest.split(" AS ")
            found.append(Stage(base, name[0] if name else None))
        elif not found:
            raise ValueError(f"before the first FROM: {line}")
        else:
            found[-1].steps.append((instruction, rest.strip()))
    return found


def assignments(rest: str) -> dict[str, str]:
    """What an ENV or LABEL says."""
    return dict(word.partition("=")[::2] for word in shlex.split(rest))


def context(root: Path, ignored: str) -> set[Path]:
    """The files, relative to ``root``, that a build's context has: the rules of .dockerignore, the last one wins."""
    rules = [line for line in ignored.splitlines() if line.strip() and not line.startswith("#")]
    kept = set()
    for top in {root / rule.lstrip("!") for rule in rules if rule.startswith("!")}:
        for path in (top, *top.rglob("*")):
            if path.is_file() and not _ignored(path.relative_to(root), rules):
                kept.add(path.relative_to(root))
    return kept


def _ignored(path: Path, rules: list[str]) -> bool:
    """A rule for a folder holds for what is in it."""
    ways = [str(path), *(str(parent) for parent in path.parents if parent != Path())]
    out = False
    for rule in rules:
        pattern = rule.removeprefix("!")
        patterns = [pattern, pattern.removeprefix("**/")]
        if any(fnmatch.fnmatchcase(way, each) for way in ways for each in patterns):
            out = not rule.startswith("!")
    return out
