"""A YAML file as plain values, with the line of every one of them.

Only what JSON could say as well is read: mappings with text keys, lists, text, numbers, true/false, null. Anchors,
aliases, merge keys, tags and several documents are faults, never guesses, and so are duplicate keys. The size and the
depth are bounded before anything is built, so no file can cost more than reading it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from kvsync.config.faults import Fault

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_INT = 1 << 63
"""No setting needs more, and text of a number of any length costs more than reading it."""

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"
Path_: TypeAlias = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"


class Document(NamedTuple):
    value: dict[str, Value]
    lines: dict[Path_, int]
    """1-based, of every key and every list item."""
    faults: list[Fault]


class _Stop(Exception):
    """The rest of the file can't be understood."""

    def __init__(self, event: yaml.Event, message: str, mend: str) -> None:
        super().__init__(message)
        self.line = _line(event)
        self.mend = mend


def read_yaml(file: Path) -> Document:
    """The file's content; what is wrong with it stands in ``faults``, never in an exception."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        return _broken(str(file), f"can't be read: {reason}", "give the path of a readable YAML file")
    return parse_yaml(raw, str(file))


def parse_yaml(raw: bytes, name: str) -> Document:
    """As :func:`read_yaml`, of bytes already read; ``name`` is what faults call the file."""
    if len(raw) > MAX_BYTES:
        return _broken(name, f"is larger than {MAX_BYTES} bytes", "this can't be a configuration of kvsync")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return _broken(f"{name}:{line}", "is not UTF-8 text", "save the file as UTF-8")
    try:
        builder = _Builder(text, name)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return _broken(f"{name}:{line}", "holds a control character", "remove it")
    try:
        value = builder.document()
    except _Stop as stop:
        builder.faults.append(Fault(f"{name}:{stop.line}", "", str(stop), stop.mend))
        value = {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = name if mark is None else f"{name}:{mark.line + 1}"
        builder.faults.append(Fault(where, "", f"is not YAML: {error.problem or error.context}", _yaml_mend(error)))
        value = {}
    except (ValueError, OverflowError):  # of chr(), in PyYAML's scanner
        where = f"{name}:{builder.line}"
        builder.faults.append(Fault(where, "", "holds an escape that is no character", "write the character itself"))
        value = {}
    return Document(value, builder.lines, builder.faults)


def _broken(origin: str, message: str, mend: str) -> Document:
    return Document({}, {}, [Fault(origin, "", message, mend)])


def _yaml_mend(error: yaml.MarkedYAMLError) -> str:
    if "'\\t'" in (error.problem or ""):
        return "indent with spaces, never with tabs"
    return "check indentation, quotes and brackets at this line"


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


class _Builder:
    """Values from the parser's events: PyYAML's own composer recurses without a bound and follows aliases."""

    def __init__(self, text: str, name: str) -> None:
        self.lines: dict[Path_, int] = {}
        self.faults: list[Fault] = []
        self._loader: Any = yaml.SafeLoader(text)  # the stubs leave its reading half untyped
        self._name = name

    @property
    def line(self) -> int:
        """Where reading has come to."""
        return int(self._loader.line) + 1

    def document(self) -> dict[str, Value]:
        self._next()  # the stream's start
        if self._loader.check_event(yaml.StreamEndEvent):
            return {}
        self._next()  # the document's start
        event = self._next()
        value = self._value(event, ())
        self._next()
        if not self._loader.check_event(yaml.StreamEndEvent):
            raise _Stop(self._loader.peek_event(), "holds more than one document", "keep one document")
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise _Stop(event, "is not a mapping of sections", "begin with lines such as `gateway:`")
        return value

    def _next(self) -> Any:
        return self._loader.get_event()

    def _value(self, event: Any, path: Path_) -> Value:
        if isinstance(event, yaml.AliasEvent):
            raise _Stop(event, f"aliases (*{event.anchor}) are not read", "write the value out")
        if getattr(event, "anchor", None) is not None:
            raise _Stop(event, f"anchors (&{event.anchor}) are not read", "write the value out where it is needed")
        if len(path) > MAX_DEPTH:
            raise _Stop(event, f"is nested more than {MAX_DEPTH} levels deep", "remove the inner levels")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        tag = event.tag
        if tag not in (None, "!", _TAG + ("map" if isinstance(event, yaml.MappingStartEvent) else "seq")):
            raise _Stop(event, f"tags ({tag}) are not read", "remove the tag")
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._sequence(path)

    def _sequence(self, path: Path_) -> list[Value]:
        items: list[Value] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            place = (*path, len(items))
            self.lines[place] = _line(event)
            items.append(self._value(event, place))
        return items

    def _mapping(self, path: Path_) -> dict[str, Value]:
        values: dict[str, Value] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._key(event)
            place = (*path, key)
            line = _line(event)
            value = self._value(self._next(), place)
            if key in values:
                where = f"{self._name}:{line}"
                first = self.lines[place]
                self.faults.append(Fault(where, dotted(place), f"is given twice (first in line {first})", "keep one"))
                continue
            self.lines[place] = line
            values[key] = value
        return values

    def _key(self, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None:
            raise _Stop(event, "a key is not plain text", "write `name: value`")
        tag = self._tag(event)
        if tag == _TAG + "merge":
            raise _Stop(event, "merge keys (<<) are not read", "write the values out")
        if tag not in (_TAG + "str", "!"):
            raise _Stop(event, f"the key {event.value} is not text", f'put it in quotes: "{event.value}"')
        return self._text(event)

    def _text(self, event: Any) -> str:
        if not event.value.isascii() and any("\ud800" <= char <= "\udfff" for char in event.value):
            raise _Stop(event, "holds half a character (an escape \\ud800 to \\udfff)", "write the character itself")
        if "\0" in event.value:
            raise _Stop(event, "holds a NUL character (an escape \\0)", "remove it: no name, path or address has one")
        return str(event.value)

    def _tag(self, event: Any) -> str:
        return str(event.tag or self._loader.resolve(yaml.ScalarNode, event.value, event.implicit))

    def _scalar(self, event: Any) -> Value:
        tag = self._tag(event)
        node = yaml.ScalarNode(tag, event.value)
        try:
            if tag == _TAG + "int":
                number = int(self._loader.construct_yaml_int(node))
                if not -MAX_INT <= number < MAX_INT:
                    raise ValueError
                return number
            if tag == _TAG + "float":
                return float(self._loader.construct_yaml_float(node))
            if tag == _TAG + "bool":
                return bool(self._loader.construct_yaml_bool(node))
        except (ValueError, KeyError, IndexError, OverflowError):  # PyYAML checks nothing of a tagged scalar
            message = f"{event.value!r} is not a value of the type {tag.removeprefix(_TAG)}"
            raise _Stop(event, message, "correct the value, or put it in quotes if it is text") from None
        if tag == _TAG + "null":
            return None
        # Dates and the lone "=" are types to YAML only.
        if tag in (_TAG + "str", _TAG + "timestamp", _TAG + "value", "!"):
            return self._text(event)
        raise _Stop(event, f"tags ({tag}) are not read", "remove the tag")


def dotted(path: Path_) -> str:
    """``("models", 0, "name")`` as ``models[0].name``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


__all__ = ["Document", "Path_", "Value", "dotted", "parse_yaml", "read_yaml"]
