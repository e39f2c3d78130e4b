"""How the gateway writes its log: one line an event, as text or JSON, on standard error, by a thread of its own.

What happens once per request or per batch must not fill the log when it goes wrong ten thousand times a second:
:class:`Throttle` lets one line of a kind through per interval, and says how many it kept back.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from kvsync.telemetry.writer import LineWriter

_LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """``2026-01-31T10:00:00.000Z WARNING kvsync.routing: message``; a message's line breaks are indented."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_utc(record.created)} {record.levelname:7} {record.name}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        # What a client or an engine sent may stand in a message: it must not be able to begin a line of its own.
        return text.replace("\r", "\\r").replace("\n", "\n  ")


class JsonFormatter(logging.Formatter):
    """One object a line: ``time``, ``level``, ``logger``, ``message``, ``exception``, and the record's ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _PLAIN and name not in fields}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def _utc(seconds: float) -> str:
    milliseconds = int(seconds * 1000) % 1000
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"


def setup(level: str, form: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Send all logging of this process there, and nowhere else.

    Args:
        level: of ``telemetry.log_level``; other packages' records are shown from ``warning`` on.
        form: of ``telemetry.log_format``.
        stream: standard error by default.
    """
    handler = _handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        if isinstance(old, LineWriter):
            old.close()
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, _LEVELS[level]))
    logging.getLogger("kvsync").setLevel(_LEVELS[level])
    logging.captureWarnings(True)


def dropped() -> int:
    """Lines of this process's log that could not be written."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LineWriter))


def _handler(stream: TextIO) -> logging.Handler:
    try:
        return LineWriter(stream.fileno())
    except (AttributeError, OSError, ValueError):  # no file, so nothing that could have to be waited for
        return logging.StreamHandler(stream)


class Throttle:
    """Log lines that may come in floods: one per key and interval.

    Args:
        logger: where they go.
        interval: seconds.
        clock: monotonic seconds.
        keys: how many kinds are told apart; the oldest is forgotten first.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        keys: int = 1024,
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._limit = keys
        self._kinds: dict[str, tuple[float, int]] = {}
        """By key: when its next line may come, and how many were kept back since the last."""

    def warning(self, key: str, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a warning, unless a line of this kind was logged within the interval."""
        self.log(logging.WARNING, key, message, *args, exc_info=exc_info)

    def log(self, level: int, key: str, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """As :meth:`warning`, at another level."""
        now = self._clock()
        until, kept_back = self._kinds.pop(key, (now, 0))
        if now < until:
            self._kinds[key] = (until, kept_back + 1)
            return
        if len(self._kinds) >= self._limit:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[key] = (now + self._interval, 0)
        if kept_back:
            message, args = message + " (and %d more like it)", (*args, kept_back)
        self._logger.log(level, message, *args, exc_info=exc_info)


__all__ = ["JsonFormatter", "TextFormatter", "Throttle", "dropped", "setup"]
