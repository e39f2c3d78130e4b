"""Asking engines for the usage of streamed answers whose clients did not ask for it, and taking it out again.

Usage says how much of a prompt the engine had cached; without it a streamed answer can't be audited. Asked for by
``stream_options.include_usage``, it comes as one more chunk before the end: ``choices`` empty, ``usage`` filled.

What must always hold:

- Exactly that one chunk is taken out; every other byte of the stream passes as it came.
- A request that says anything of usage itself is not touched. ``continuous_usage_stats`` counts as that: it does
  nothing by itself, and would begin to.
- Nothing is held back but the unfinished rest of an event, and of that no more than :data:`MAX_EVENT`.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kvsync.requests.edit import edit_object, field_text
from kvsync.requests.ports import JsonObject

STREAMS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose streams know ``include_usage``, and end with ``data: [DONE]``."""
MAX_EVENT: Final = 64 << 10
"""Bytes of one event that may wait for its end. A chunk with usage alone is much smaller."""

_OPTIONS: Final = "stream_options"
_event_end = re.compile(rb"\n\r?\n").search
_lead = re.compile(rb"(?>(?:(?::[^\r\n]*+)?\r?\n)*)").match
"""Blank lines and comments, which keep connections alive and wait for nothing."""
_decode = msgspec.json.Decoder(dict[str, object]).decode


def ask_for_usage(path: str, asked: JsonObject, text: bytes) -> bytes | None:
    """The request with usage asked for; ``None`` when that is its own business, or makes no sense.

    Args:
        asked: the request.
        text: the same as it goes to an engine.
    """
    if path not in STREAMS or asked.get("stream") is not True:
        return None
    options = asked.get(_OPTIONS)
    if options is None:
        given = b"{}"
    elif isinstance(options, dict) and not options.get("include_usage") and not options.get("continuous_usage_stats"):
        given = field_text(text, _OPTIONS) or b"{}"
    else:
        return None
    return edit_object(text, {_OPTIONS: edit_object(given, {"include_usage": b"true"})})


def must_ask_for_usage(path: str, asked: JsonObject) -> bool:
    """Whether the answer would have no usage for want of being asked for it."""
    if path not in STREAMS or asked.get("stream") is not True:
        return False
    options = asked.get(_OPTIONS)
    return not (isinstance(options, dict) and options.get("include_usage") is True)


class UsageChunk:
    """Takes the chunk out of one stream. The work is linear in the stream, however finely it is cut."""

    __slots__ = ("_found", "_held", "_looked", "_passing")

    def __init__(self) -> None:
        self._found = False
        self._held = bytearray()
        self._looked = 0
        """Bytes of what is held in which no event ends and no comment; the next look begins where they end."""
        self._passing = False
        """Within an event that is too long to wait for its end."""

    def feed(self, piece: bytes) -> bytes:
        """What of the stream can pass now."""
        if self._found:
            return piece
        held = self._held
        if not held and not self._passing and b'"usage"' not in piece and piece.endswith(b"\n\n"):
            return piece  # whole events, none of them with usage
        held += piece
        start, looked = 0, self._looked
        while True:
            if not self._passing:
                if held[start : start + 1] == b":" and held.find(b"\n", max(start, looked)) < 0:
                    break  # within a comment
                lead = _lead(held, start)
                assert lead is not None  # it matches nothing as well
                start = lead.end()
            ended = _event_end(held, max(start, looked - 2))  # an end of event may begin with the last two
            if ended is None:
                break
            stop = ended.end()
            if not self._passing and _is_usage_alone(bytes(held[start:stop])):
                self._found = True
                del held[start:stop]
                return self.rest()
            self._passing = False
            start = stop
        if self._passing or len(held) - start > MAX_EVENT:
            self._passing = True
            start = len(held) - min(2, len(held) - start)
        passing = bytes(held[:start])
        del held[:start]
        self._looked = len(held)
        return passing

    def rest(self) -> bytes:
        """What was held back when the stream ended."""
        held = bytes(self._held)
        self._held.clear()
        return held


def _is_usage_alone(event: bytes) -> bool:
    if b'"usage"' not in event or len(event) > MAX_EVENT:
        return False
    lines = [line.rstrip(b"\r") for line in event.split(b"\n")]
    data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)


__all__ = ["MAX_EVENT", "STREAMS", "UsageChunk", "ask_for_usage", "must_ask_for_usage"]
