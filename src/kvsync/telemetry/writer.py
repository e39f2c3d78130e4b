"""Log lines written by a thread of their own.

Whoever reads standard error may stop reading: a stuck collector, a pager, a full disk behind a pipe. A write then waits
for ever, and on the event loop everything would wait with it, health checks and signals too. What must always hold: who
logs never waits. Lines wait here, up to :data:`MOST_WAITING`; what has no room, or can't be written, is dropped,
counted, and told in a line of its own once lines can be written again.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from typing import Final

MOST_WAITING: Final = 10_000
"""Lines."""
FLUSHED_WITHIN: Final = 2.0
"""Seconds that the end of the process waits for the last lines."""


class LineWriter(logging.Handler):
    """Writes to a descriptor.

    Args:
        descriptor: of a file, a pipe or a terminal; not closed here.
        most: lines that may wait.
    """

    def __init__(self, descriptor: int, most: int = MOST_WAITING) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._most = most
        self._news = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._writing = False
        self._ended = False
        self._told = 0
        """Of ``dropped``, those that a line told of."""
        self.dropped = 0
        """Lines."""
        # Daemon: what hangs in a write must not keep the process.
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception:
            self.handleError(record)
            return
        with self._news:
            if len(self._waiting) < self._most:
                self._waiting.append(line)
                self._news.notify_all()
            else:
                self.dropped += 1

    def flush(self) -> None:
        """Wait a little until all is written."""
        with self._news:
            self._news.wait_for(lambda: not self._waiting and not self._writing, FLUSHED_WITHIN)

    def close(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode(errors="backslashreplace")

    def _run(self) -> None:
        while True:
            with self._news:
                self._writing = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                line = self._waiting.popleft()
                self._writing = True
            written = self._write(line)
            with self._news:
                self.dropped += not written
                dropped = self.dropped - self._told
            if written and dropped and self._write(self._line(_told(dropped))):
                self._told += dropped

    def _write(self, line: bytes) -> bool:
        """Whether it could be written. May take for ever."""
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody who shares it made it so
                select.select([], [self._descriptor], [], 1.0)
            except OSError:
                return False
        return True


def _told(dropped: int) -> logging.LogRecord:
    message = "%d lines of this log were dropped: they could not be written, or not fast enough"
    return logging.LogRecord("kvsync.telemetry", logging.WARNING, __file__, 0, message, (dropped,), None)


__all__ = ["FLUSHED_WITHIN", "MOST_WAITING", "LineWriter"]
