"""Changing single fields of a JSON object as text, every other byte left as it came.

Decoding and encoding a request again would change what an engine reads: ``1e400``, integers beyond 64 bits, keys that
come twice, escapes. So the text is edited in place.

What must always hold:

- Every spelling of a field's name counts (``"cache_salt"``, ``"cache\\u005fsalt"``) and every repetition of it:
  whichever of them an engine's parser prefers, it finds the new value, or nothing.
- The work is linear in the text, whatever it holds, and needs no recursion.

The text is one that a JSON parser accepted before. Only the structure is looked at here; values are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

_CLOSING: Final = ord("}")
_SPACE: Final = rb"[ \t\n\r]*+"
# A group is repeated inside an atomic one, never possessively: up to Python 3.11.4 a possessive repeat of a group may
# keep what the last, failing turn of it consumed, and a salt of the client's was passed on (CPython issue 106052).
_STRING: Final = rb'"(?>(?:[^"\\]++|\\.)*)"'
_SCALAR: Final = rb'[^",:\[\]{} \t\n\r]++'
_LEVELS: Final = 4
"""Nesting that one regular expression steps over. What is nested deeper is stepped through bracket by bracket."""


def _run(levels: int) -> bytes:
    """Whatever stands inside a container, as far as it has no more than ``levels`` further levels of them."""
    inner = rb"|[\[{]" + _run(levels - 1) + rb"[\]}]" if levels else b""
    return rb'(?>(?:[^"\[\]{}]++|' + _STRING + inner + rb")*)"


_NAME: Final = rb"%b(%b)%b:%b" % (_SPACE, _STRING, _SPACE, _SPACE)
_VALUE: Final = rb"%b|%b|[\[{]%b[\]}]" % (_STRING, _SCALAR, _run(_LEVELS))
_member = re.compile(rb"%b(%b)%b[,}]" % (_NAME, _VALUE, _SPACE), re.DOTALL).match
_name = re.compile(_NAME, re.DOTALL).match
_brackets = re.compile(rb"%b(?:([\[{]++)|([\]}]++))" % _run(_LEVELS), re.DOTALL).match
_after = re.compile(rb"%b[,}]" % _SPACE).match
_open = re.compile(rb"%b\{" % _SPACE).match
_empty = re.compile(rb"%b\}" % _SPACE).match
_decode = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


class _Member(NamedTuple):
    start: int
    """Just behind the brace or comma before it."""
    name: str
    value: int
    end: int
    """Of the value."""
    stop: int
    """At the comma or brace behind it."""


def edit_object(text: bytes, changes: Mapping[str, bytes | None]) -> bytes:
    """The object with some of its top-level fields set or removed.

    Args:
        text: a JSON object.
        changes: by field, the JSON text of its new value, or ``None`` to remove it. A field that is not there yet is
            put in front of the others.

    Raises:
        ValueError: the text is no object, as far as it was looked at.
    """
    runs: list[bytes] = []
    missing = {name: value for name, value in changes.items() if value is not None}
    opening = stop = _opening(text)
    if all(_never_in(text, name) for name in changes):
        added = _members_text(missing)
        comma = b"," if added and not _empty(text, opening) else b""
        return b"".join((text[:opening], added, comma, text[opening:]))
    start: int | None = None
    """Of the members since the last change: they are copied at once."""
    for member in _members(text, opening):
        if member.name not in changes:
            if start is None:
                start = member.start
        else:
            if start is not None:
                runs.append(text[start:stop])
                start = None
            value = changes[member.name]
            if value is not None:
                runs.append(text[member.start : member.value] + value + text[member.end : member.stop])
                missing.pop(member.name, None)
        stop = member.stop
    if start is not None:
        runs.append(text[start:stop])
    if missing:
        runs.insert(0, _members_text(missing))
    return b"".join((text[:opening], b",".join(runs), text[stop:]))


def _members_text(members: Mapping[str, bytes]) -> bytes:
    return b",".join(b"%b:%b" % (_encode(name), value) for name, value in members.items())


def _never_in(text: bytes, name: str) -> bool:
    """Whether a name surely occurs nowhere, in no spelling: found at the speed of memory, where the text is long."""
    return name.isascii() and name.isidentifier() and name.encode() not in text and b"\\u" not in text


def field_text(text: bytes, name: str) -> bytes | None:
    """The JSON text of a top-level field's value, or ``None`` where there is none. The last counts, as for a parser.

    Raises:
        ValueError: the text is no object.
    """
    found = None
    for member in _members(text, _opening(text)):
        if member.name == name:
            found = text[member.value : member.end]
    return found


def _opening(text: bytes) -> int:
    """The place behind the object's opening brace."""
    opened = _open(text)
    if opened is None:
        raise ValueError("not a JSON object")
    return opened.end()


def _members(text: bytes, place: int) -> Iterator[_Member]:
    if _empty(text, place):
        return
    while True:
        found = _member(text, place)
        if found is not None:
            raw, (value, end), stop = found[1], found.span(2), found.end() - 1
        else:
            raw, value, end, stop = _deep_member(text, place)
        yield _Member(place, _decode(raw) if b"\\" in raw else raw[1:-1].decode(), value, end, stop)
        if text[stop] == _CLOSING:
            return
        place = stop + 1


def _deep_member(text: bytes, place: int) -> tuple[bytes, int, int, int]:
    """Name, value, end and stop of a member with a value that is nested too deeply for one expression."""
    name = _name(text, place)
    if name is None:
        raise ValueError("malformed JSON object")
    end, depth = name.end(), 0
    while (brackets := _brackets(text, end)) is not None:
        if brackets[1]:
            depth += len(brackets[1])
            end = brackets.end()
            continue
        closed = min(depth, len(brackets[2]))
        depth -= closed
        end = brackets.start(2) + closed
        if not depth:
            break
    after = _after(text, end)
    if depth or after is None:
        raise ValueError("malformed JSON object")
    return name[1], name.end(), end, after.end() - 1


__all__ = ["edit_object", "field_text"]
