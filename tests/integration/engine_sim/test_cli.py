"""``kvsync sim`` as a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from click.testing import CliRunner

from kvsync.cli.sim import sim

COMMAND = [sys.executable, "-c", "from kvsync.cli.sim import sim; sim()"]
PORTS = ["--port", "0", "--events-port", "0", "--replay-port", "0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    options = [
        *PORTS,
        "--model",
        "m",
        "--adapter",
        "a",
        "--adapter",
        "b",
        "--data-parallel-size",
        "2",
        "--blocks",
        "300",
    ]
    process = subprocess.Popen([*COMMAND, *PORTS, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        assert re.fullmatch(r"m at http://127\.0\.0\.1:\d+ as vLLM 0\.32\.0: 300 blocks of 16, 2 ranks\n", first)
        assert re.fullmatch(r"events tcp://127\.0\.0\.1:\d+  replay tcp://127\.0\.0\.1:\d+\n", second)
        with urllib.request.urlopen(first.split()[2] + "/v1/models", timeout=10) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["m", "a", "b"]
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--blocks", "10"], "needs 256 blocks"),
        (["--version", "0.8"], "too old"),
        (["--speed", "0"], "speed must be above 0"),
        (["--port", "99999"], "port must be a port number"),
        (["--tokenizer", "."], "tokenizer.json"),
        (["--hash-form", "long"], "hash-form"),
        (["--host", "256.1.1.1"], ""),
    ],
)
def test_options_that_make_no_engine(options: list[str], message: str) -> None:
    result = CliRunner().invoke(sim, [*PORTS, *options])
    assert result.exit_code in (1, 2)
    assert "Error" in result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_help_names_every_setting() -> None:
    text = CliRunner().invoke(sim, ["--help"]).output
    assert "/sim/fault" in text
    for option in ("--blocks", "--version", "--data-parallel-size", "--prefill-rate", "--speed", "--sliding-window"):
        assert option in text


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvsync.engine_sim")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zmq", None)
    result = CliRunner().invoke(sim, PORTS)
    assert result.exit_code == 1
    assert "pip install 'kvsync[sim]'" in result.output
