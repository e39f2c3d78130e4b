"""Log lines that nobody reads, or that can't be written: who logs goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvsync.telemetry import logs
from kvsync.telemetry.writer import LineWriter

LINE = "x" * 1000


def log(writer: LineWriter, lines: int, message: str = LINE) -> None:
    for _ in range(lines):
        writer.handle(logging.LogRecord("kvsync", logging.INFO, __file__, 0, message, (), None))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_until(end: int, last: bytes) -> bytes:
    """What comes up to ``last``; waits for it."""
    seen = b""
    while last not in seen:
        seen += os.read(end, 65536)
    return seen


def test_lines_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    for number in range(100):
        log(writer, 1, f"line {number} é\ud800")
    seen = read_until(pipe[0], b"line 99 \xc3\xa9\\ud800\n").decode().splitlines()
    assert seen == [f"line {number} é\\ud800" for number in range(100)]
    writer.flush()
    writer.close()
    assert writer.dropped == 0


def test_a_reader_that_stops_holds_up_nobody_and_is_told_what_it_missed(pipe: tuple[int, int]) -> None:
    """Its pipe is full. Written on the event loop, the next line would stop the gateway."""
    os.set_blocking(pipe[1], False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe[1], b"-" * 4096)
    os.set_blocking(pipe[1], True)
    writer = LineWriter(pipe[1], most=10)
    log(writer, 500)
    dropped = writer.dropped
    assert dropped in (500 - 10, 500 - 10 - 1), "all but those that wait and the one that is being written"
    seen = read_until(pipe[0], b" lines of this log were dropped")
    assert b"\n%d lines of this log were dropped" % dropped in seen
    log(writer, 1, "again")
    seen += read_until(pipe[0], b"again\n")
    assert seen.count(LINE.encode()) == 500 - dropped
    assert seen.count(b"dropped") == 1
    writer.close()


def test_what_can_not_be_written_is_counted() -> None:
    """As on a disk that is full."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        writer = LineWriter(full)
        log(writer, 3)
        writer.flush()
        assert writer.dropped == 3
        writer.close()
    finally:
        os.close(full)


def test_a_reader_that_is_gone_is_no_end(pipe: tuple[int, int]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        writer = LineWriter(writing)
        log(writer, 2)
        writer.flush()
        assert writer.dropped == 2
        writer.close()
    finally:
        os.close(writing)


def test_a_descriptor_that_does_not_block_loses_nothing(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    writer = LineWriter(pipe[1])
    log(writer, 200)
    log(writer, 1, "last")
    assert read_until(pipe[0], b"last\n").count(LINE.encode()) == 200
    assert writer.dropped == 0
    writer.close()


def test_the_log_of_the_process_is_written_so(pipe: tuple[int, int]) -> None:
    root, ours = logging.getLogger(), logging.getLogger("kvsync")
    before = (root.handlers[:], root.level, ours.level)
    with os.fdopen(os.dup(pipe[1]), "w") as stream:
        try:
            logs.setup("info", "text", stream)
            (handler,) = root.handlers
            assert isinstance(handler, LineWriter)
            ours.info("here")
            read_until(pipe[0], b"here\n")
            assert logs.dropped() == 0
        finally:
            handler.close()
            root.handlers[:], root.level, ours.level = before
            logging.captureWarnings(False)
