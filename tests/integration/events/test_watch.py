"""``kvsync watch`` as people run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvsync.extras import how_to_install
from tests.faults.publisher import Publisher

COMMAND = [sys.executable, "-c", "from kvsync.cli.watch import watch; watch(prog_name='kvsync watch')"]
# Output is buffered as it is for people, whatever these tests themselves run with.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    it = Publisher()
    yield it
    it.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=30, check=False, env=ENVIRONMENT
    )


def replay(publisher: Publisher) -> str:
    assert publisher.replay is not None
    return publisher.replay


def test_the_history_of_an_engine(publisher: Publisher) -> None:
    publisher.publish(1, 2)
    publisher.publish(1, removed=True)
    done = run(publisher.events, "--replay", replay(publisher), "--count", "2")
    assert done.returncode == 0, done.stderr
    stored, removed = done.stdout.splitlines()
    assert "stored   2 blocks" in stored
    assert "8 tokens" in stored
    assert "removed  1 blocks" in removed
    assert "-- 2 batches: 1 stored, 1 removed, 0 cleared, 0 skipped events; 0 batches undecodable" in done.stderr
    assert "-- last sequence 1, missed 0, lost 0" in done.stderr


def test_from_a_sequence_number_as_json(publisher: Publisher) -> None:
    for n in range(5):
        publisher.publish(100 + n)
    done = run(publisher.events, "--replay", replay(publisher), "--from-seq", "3", "--json", "-c", "2")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["seq"], line["block_hashes"]) for line in lines] == [(3, [103]), (4, [104])]


def test_live_until_interrupted() -> None:
    publisher = Publisher(replay_port=None, host="::1")
    try:
        watching = subprocess.Popen(
            [*COMMAND, publisher.events], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert publisher.subscribed.wait(20)
        publisher.publish(1)
        assert watching.stdout is not None
        assert "stored   1 blocks" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=20)
        assert watching.returncode == 0
        assert "-- 1 batches: 1 stored" in err
    finally:
        publisher.close()


@pytest.mark.parametrize("first", [0, 7])
def test_without_replay_it_says_once_that_what_was_before_is_not_shown(first: int) -> None:
    publisher = Publisher(replay_port=None, already=range(first))
    try:
        watching = subprocess.Popen(
            [*COMMAND, publisher.events, "-c", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert publisher.subscribed.wait(20)
        publisher.publish(100)
        publisher.publish(101)
        out, err = watching.communicate(timeout=20)
    finally:
        publisher.close()
    assert [int(line.split()[0]) for line in out.splitlines()] == [first, first + 1]
    said = err.splitlines()
    assert said[0] == "-- only what comes from now on; --replay tcp://HOST:PORT shows first what the engine still has"
    assert said[1].startswith(f"-- engine: following {publisher.events}, without replay: what it may have published")
    assert sum("out of reach" in line for line in said) == 1
    assert ("-- engine: followed from number 0 on: nothing is missing" in said) == (first == 0)
    assert "lost 0" in said[-1]


def test_the_summary_tells_of_what_was_shown(publisher: Publisher) -> None:
    for n in range(3):
        publisher.publish(100 + n)
    done = run(publisher.events, "--replay", replay(publisher), "-c", "1")
    assert len(done.stdout.splitlines()) == 1
    assert "-- 1 batches: " in done.stderr
    assert "-- last sequence 0, " in done.stderr


def test_a_reader_that_goes_away_ends_it(publisher: Publisher) -> None:
    watching = subprocess.Popen(
        [*COMMAND, publisher.events, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert publisher.subscribed.wait(20)
    assert watching.stdout is not None
    assert watching.stderr is not None
    watching.stdout.close()
    publisher.publish(1)
    said = watching.stderr.read()
    watching.stderr.close()
    assert watching.wait(20) == 0, said
    assert all(line.startswith("-- ") for line in said.splitlines()), said


def test_a_reader_of_all_that_goes_away_ends_it(publisher: Publisher) -> None:
    watching = subprocess.Popen(
        [*COMMAND, publisher.events], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT
    )
    assert publisher.subscribed.wait(20)
    assert watching.stdout is not None
    watching.stdout.close()
    publisher.publish(1)
    assert watching.wait(20) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_output_that_can_not_be_written_is_a_fault(publisher: Publisher) -> None:
    publisher.publish(1)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, publisher.events, "--replay", replay(publisher)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
            env=ENVIRONMENT,
        )
    assert done.returncode == 1
    assert "Error: standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "tcp://"),
        (["tcp://*:5557"], "listens on"),
        (["tcp://127.0.0.1:1", "--replay", "x"], "tcp://"),
        (["tcp://127.0.0.1:1", "--from-seq", "5"], "--replay"),
        (["tcp://127.0.0.1:1", "--replay", "tcp://127.0.0.1:2", "--from-seq", "-1"], "--from-seq"),
        (["tcp://127.0.0.1:1", "--replay", "tcp://127.0.0.1:2", "--from-seq", str(2**63)], "--from-seq"),
        ([], "Missing argument"),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_host_without_an_address_is_told() -> None:
    watching = subprocess.Popen([*COMMAND, "tcp://no.such.host.invalid:1"], stderr=subprocess.PIPE, text=True)
    assert watching.stderr is not None
    watching.stderr.readline()  # that without a replay endpoint only what comes is shown
    assert "no.such.host.invalid" in watching.stderr.readline()
    watching.send_signal(signal.SIGTERM)
    _, err = watching.communicate(timeout=20)
    assert watching.returncode == 0
    assert "-- last sequence none, " in err


def test_without_zmq() -> None:
    command = "import sys; sys.modules['zmq'] = None; " + COMMAND[2]
    done = subprocess.run(
        [sys.executable, "-c", command, "tcp://127.0.0.1:1"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert f"watching KV events requires ZMQ support ({how_to_install('zmq')})" in done.stderr
    assert "Traceback" not in done.stderr
