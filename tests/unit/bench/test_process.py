"""Processes are measured with all their threads, asked with a deadline, and ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.environments import PINS, pinned
from bench.process import Failed, Process, Subject, cpu_seconds, memory, quiet_cpu, until

SPIN = """
import threading, time
def work():
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done", flush=True)
time.sleep(60)
"""


def test_cpu_is_that_of_all_threads_also_of_those_that_ended() -> None:
    with Process([sys.executable, "-c", SPIN]) as process:
        until(lambda: "done" in process.said(), 30)
        assert quiet_cpu(process.pid) >= 0.6
        assert process.memory() == pytest.approx(memory(process.pid), rel=0.2)
        assert process.memory() > 1 << 20
    assert not process.alive
    with pytest.raises(OSError):
        cpu_seconds(process.pid)


def test_a_process_that_ignores_sigterm_is_ended_all_the_same() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = Process([sys.executable, "-c", code])
    until(lambda: "up" in process.said(), 30)
    process.end(patience=0.1)
    assert not process.alive


def test_a_subject_answers_and_its_errors_are_told() -> None:
    with Subject("applier", python=sys.executable) as subject:
        assert isinstance(subject.ask("begin", workers=2), bool)
        scripts = [{"kind": "store", "wanted": [(1, 32)], "per_batch": 16}] * 2
        assert subject.ask("load", scripts=scripts) == 4
        assert set(subject.ask("apply")) == {"cpu", "seconds"}
        assert subject.ask("held", chains=[(1, 32), (1, 16), (2, 16)]) == [
            {"w0": 32, "w1": 32},
            {"w0": 16, "w1": 16},
            {},
        ]
        with pytest.raises(Failed, match="no_such"):
            subject.ask("load", no_such=1)
        assert subject.ask("load", scripts=[]) == 0


def test_a_subject_that_ends_or_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    with Subject("applier", python=silent) as subject, pytest.raises(Failed, match="no answer within"):
        subject.ask("begin", patience=0.1)
    silent.write_text("#!/bin/sh\necho out of order >&2\n")
    with Subject("applier", python=silent) as subject, pytest.raises(Failed, match="out of order"):
        subject.ask("begin")


def test_waiting_has_an_end() -> None:
    with pytest.raises(Failed):
        until(lambda: False, patience=0.01)


def test_every_peer_is_pinned_with_hashes_and_names_no_host() -> None:
    files = sorted(PINS.glob("*.txt"))
    assert files
    for file in files:
        text = file.read_text()
        assert "--hash=sha256:" in text
        assert "://" not in text
    assert pinned("dynamo", "ai-dynamo-runtime").count(".") == 2
    with pytest.raises(KeyError):
        pinned("dynamo", "no-such-package")
