"""The command line as a whole: every command explains itself, whatever is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvsync.cli.process import clients_within

BLOCK = "import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"
EXTRAS = ("zmq", "tokenizers", "jinja2", "rich", "kvsync_core", "grpc", "google.protobuf")


@pytest.mark.parametrize("command", ["", "serve", "extproc", "demo", "sim", "watch", "config", "config check"])
def test_help_needs_no_extra(command: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=EXTRAS))
    result = subprocess.run(
        [sys.executable, "-m", "kvsync.cli", *command.split(), "--help"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Usage: kvsync")


@pytest.mark.parametrize("command", ["--help", "config check"])
def test_output_that_cannot_be_written_is_an_error_and_no_traceback(command: str) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "kvsync.cli", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "Error: the output can't be written: No space left on device"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "now"), [(64, 400, 200, 200), (64, 150, 200, 150), (300, 400, 200, 300)]
)
def test_as_many_files_may_be_open_as_clients_need_or_the_system_lets(
    soft: int, hard: int, wanted: int, now: int
) -> None:
    script = f"""
import resource
from kvsync.cli.process import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(allow_files({wanted}), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(now), str(now), str(hard)]


@pytest.mark.parametrize(("files", "clients"), [(21_024, 10_000), (20_000, 9_488), (4_096, 1_536), (120, 30), (1, 1)])
def test_no_more_clients_are_taken_than_files_allow_with_their_engine_connections(files: int, clients: int) -> None:
    """Else idle clients take the last file, no engine can be reached, and all of them seem to have failed."""
    assert clients_within(files) == clients


def test_what_is_there_at_the_start_is_looked_at_no_more_by_the_collector() -> None:
    script = """
import gc
from kvsync.cli.process import settle_collector
settle_collector()
assert gc.get_freeze_count() > 1000
assert gc.isenabled()
assert gc.get_threshold()[0] > 700
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_external_processor_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=("grpc",)))
    result = subprocess.run(
        [sys.executable, "-m", "kvsync.cli", "extproc", "--admin-port", "0"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("Error: ")
    assert "pip install 'kvsync[envoy]'" in result.stderr


@pytest.mark.parametrize(
    ("command", "section", "more"),
    [("serve", "gateway", {}), ("extproc", "extproc", {"gateway.enabled": False, "extproc.enabled": True})],
)
def test_flags_are_settings(
    command: str, section: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, dict[str, object]]] = []
    module = import_module(f"kvsync.cli.{command}")
    monkeypatch.setattr(module, "run", lambda file, flags: given.append((file, dict(flags))))
    flags = {
        "--host": (f"{section}.host", "::1"),
        "--port": (f"{section}.port", 9001),
        "--admin-host": ("admin.host", "127.0.0.2"),
        "--admin-port": ("admin.port", 9002),
        "--log-level": ("telemetry.log_level", "debug"),
        "--log-format": ("telemetry.log_format", "json"),
    }
    words = [str(word) for flag, (_, value) in flags.items() for word in (flag, value)]
    for arguments in (["-c", "fleet.yaml", *words], []):
        done = CliRunner().invoke(getattr(module, command), arguments)
        assert (done.exit_code, done.output) == (0, "")
    settings = dict(flags.values())
    assert given == [(Path("fleet.yaml"), more | settings), (None, more | dict.fromkeys(settings))]
