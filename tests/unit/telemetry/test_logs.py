"""Log lines, and what keeps them few."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from kvsync.telemetry.logs import Throttle, setup


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("kvsync")
    before = (root.handlers[:], root.level, ours.level)
    yield io.StringIO()
    root.handlers[:], root.level, ours.level = before[0], before[1], before[2]
    logging.captureWarnings(False)


def test_text(stream: io.StringIO) -> None:
    setup("info", "text", stream)
    logging.getLogger("kvsync.x").info("a %s", "b")
    assert stream.getvalue().endswith("Z INFO    kvsync.x: a b\n")
    assert stream.getvalue()[10] == "T"


def test_a_message_can_not_begin_a_line_of_its_own(stream: io.StringIO) -> None:
    setup("info", "text", stream)
    logging.getLogger("kvsync.x").warning("a %s", "b\n2026-01-01T00:00:00.000Z ERROR kvsync: forged\rx")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("  2026")
    assert lines[1].endswith("\\rx")


def test_json(stream: io.StringIO) -> None:
    setup("debug", "json", stream)
    try:
        raise ValueError("no\nway")
    except ValueError:
        logging.getLogger("kvsync.x").exception("it %s", "broke", extra={"engine": "é", "odd": {1}})
    (line,) = stream.getvalue().splitlines()
    shown = json.loads(line)
    assert shown["level"] == "error"
    assert shown["logger"] == "kvsync.x"
    assert shown["message"] == "it broke"
    assert shown["engine"] == "é"
    assert shown["odd"] == "{1}"
    assert "ValueError: no\nway" in shown["exception"]
    assert set(shown) == {"time", "level", "logger", "message", "engine", "odd", "exception"}


def test_extra_fields_can_not_replace_the_record_s_own(stream: io.StringIO) -> None:
    setup("info", "json", stream)
    logging.getLogger("kvsync.x").info("m", extra={"level": "forged", "time": 0})
    assert json.loads(stream.getvalue())["level"] == "info"


def test_levels(stream: io.StringIO) -> None:
    setup("info", "text", stream)
    logging.getLogger("kvsync.x").debug("too fine")
    logging.getLogger("other").info("of no interest")
    logging.getLogger("other").warning("yes")
    warnings.warn("also", UserWarning, stacklevel=1)
    assert "too fine" not in stream.getvalue()
    assert "of no interest" not in stream.getvalue()
    assert "other: yes" in stream.getvalue()
    assert "also" in stream.getvalue()
    setup("error", "text", stream)
    logging.getLogger("other").warning("silent now")
    assert "silent now" not in stream.getvalue()


def test_setting_up_twice_does_not_double_the_lines(stream: io.StringIO) -> None:
    setup("info", "text", stream)
    setup("info", "text", stream)
    logging.getLogger("kvsync").info("once")
    assert stream.getvalue().count("once") == 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_line_of_a_kind_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    throttle = Throttle(logging.getLogger("kvsync.t"), interval=10, clock=clock)
    for _ in range(5):
        throttle.warning("a", "engine %s", "e0")
    throttle.warning("b", "other")
    clock.now = 10.0
    throttle.warning("a", "engine %s", "e1")
    clock.now = 20.0
    throttle.warning("a", "engine %s", "e2")
    assert [record.getMessage() for record in caplog.records] == [
        "engine e0",
        "other",
        "engine e1 (and 4 more like it)",
        "engine e2",
    ]


def test_kinds_are_bounded_the_oldest_goes_first(caplog: pytest.LogCaptureFixture) -> None:
    throttle = Throttle(logging.getLogger("kvsync.t"), interval=10, clock=Clock(), keys=2)
    for key in ("a", "b", "c", "b", "c", "a"):
        throttle.warning(key, key)
    assert [record.getMessage() for record in caplog.records] == ["a", "b", "c", "a"]
