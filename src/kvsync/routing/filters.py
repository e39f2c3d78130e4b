"""Kubernetes label selectors, as the ``external-filter`` header carries them.

A selector is a list of requirements with commas between, all of which have to hold: ``key``, ``!key``, ``key = value``,
``key == value``, ``key != value``, ``key in (a, b)``, ``key notin (a, b)``. As in Kubernetes, ``!=`` and ``notin`` hold
where the key is absent, and an empty selector holds everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from kvsync.routing.errors import BadFilter

MAX_LENGTH = 4096
"""Characters of a selector."""

_TOKEN = re.compile(r"\s*(==|!=|[=!,()]|[^\s=!,()]+)")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


class Requirement(NamedTuple):
    key: str
    operator: Literal["exists", "absent", "in", "notin"]
    values: frozenset[str]

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if self.operator == "exists":
            return value is not None
        if self.operator == "absent":
            return value is None
        return (value in self.values) == (self.operator == "in")


Selector: TypeAlias = tuple[Requirement, ...]


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    return all(requirement.holds(labels) for requirement in selector)


@lru_cache(maxsize=256)
def parse(text: str) -> Selector:
    """The selector that a text spells.

    Raises:
        BadFilter: it spells none.
    """
    if len(text) > MAX_LENGTH:
        raise BadFilter(f"longer than {MAX_LENGTH} characters")
    return _Parser(text).selector()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match[1] for match in _TOKEN.finditer(text)]
        self._at = 0

    def selector(self) -> Selector:
        if not self._tokens:
            return ()
        found = [self._requirement()]
        while self._peek() is not None:
            self._expect(",")
            found.append(self._requirement())
        return tuple(found)

    def _requirement(self) -> Requirement:
        if self._peek() == "!":
            self._take()
            return Requirement(self._key(), "absent", frozenset())
        key = self._key()
        operator = self._peek()
        if operator in (None, ","):
            return Requirement(key, "exists", frozenset())
        self._take()
        if operator in ("=", "=="):
            return Requirement(key, "in", frozenset([self._value()]))
        if operator == "!=":
            return Requirement(key, "notin", frozenset([self._value()]))
        if operator in ("in", "notin"):
            return Requirement(key, "in" if operator == "in" else "notin", self._values())
        raise self._bad(f"{operator!r} is no operator")

    def _key(self) -> str:
        token = self._take()
        prefix, slash, name = token.rpartition("/")
        if not _NAME.fullmatch(name) or (slash and not _PREFIX.fullmatch(prefix)):
            raise self._bad(f"{token!r} is no label key")
        return token

    def _values(self) -> frozenset[str]:
        self._expect("(")
        values = {self._value()}
        while self._peek() == ",":
            self._take()
            values.add(self._value())
        self._expect(")")
        return frozenset(values)

    def _value(self) -> str:
        """A label's value, which may be empty."""
        if self._peek() in (None, ",", ")"):
            return ""
        token = self._take()
        if not _NAME.fullmatch(token):
            raise self._bad(f"{token!r} is no label value")
        return token

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        token = self._peek()
        if token is None:
            raise self._bad("it ends too early")
        self._at += 1
        return token

    def _expect(self, wanted: str) -> None:
        token = self._take()
        if token != wanted:
            raise self._bad(f"{wanted!r} is missing before {token!r}")

    def _bad(self, detail: str) -> BadFilter:
        return BadFilter(f"{detail} in {self._text!r}")


__all__ = ["Requirement", "Selector", "matches", "parse"]
