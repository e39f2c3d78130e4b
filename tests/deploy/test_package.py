"""The wheel alone in a clean environment, without one extra: everything that does not follow events runs.

No ZMQ, no tokenizers, no core, no Redis client and no gRPC are there, and nothing of this checkout.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from scripts.deploy.render import ROOT

from kvsync.extras import how_to_install
from tests.faults.fleet import SYNC, Listed, models, sim
from tests.faults.process import running, write
from tests.faults.words import asks, text

EXTRAS = ("zmq", "tokenizers", "tiktoken", "jinja2", "rich", "redis", "grpc", "google", "kvsync_core")
"""The modules that extras bring."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("package")
    uv = str(Path(sys.executable).with_name("uv"))
    environment = str(folder / "venv")
    subprocess.run([uv, "build", "-q", "--wheel", "--out-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = map(str, folder.glob("*.whl"))
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, environment], check=True)
    locked = ["-c", str(ROOT / "requirements-dev.txt")]
    subprocess.run([uv, "pip", "install", "-q", "-p", environment, *locked, wheel], check=True)
    return f"{environment}/bin/python"


def kvsync(python: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(python).with_name("kvsync")), *args]
    return subprocess.run(command, cwd=cwd, env={}, capture_output=True, text=True, check=False, timeout=60)


def test_only_what_the_package_declares_is_there(python: str, tmp_path: Path) -> None:
    look = f"import importlib.util as u; print([name for name in {EXTRAS} if u.find_spec(name)])"
    done = subprocess.run([python, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_loads_or_misses_an_extra(python: str, tmp_path: Path) -> None:
    """Extras are needed by what follows events, by the simulated engine, and by the rooms that extras are for."""
    look = """
import importlib, json, pkgutil, kvsync
missing = {}
for module in pkgutil.walk_packages(kvsync.__path__, "kvsync.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name.partition(".")[0]
print(json.dumps(missing))
"""
    done = subprocess.run([python, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=True)
    missing = json.loads(done.stdout)
    assert set(missing.values()) <= set(EXTRAS)
    rooms: dict[str, set[str]] = {}
    for name, module in missing.items():
        rooms.setdefault(module, set()).add(name.split(".")[1])
    assert rooms.pop("zmq") <= {"events", "engine_sim", "cli"}
    assert set().union(*rooms.values()) <= {"cli", "engine_sim", "extproc", "store", "tokenize"}, rooms


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("sim", f"it needs the extra 'sim' ({how_to_install('sim')})"),
        ("demo", f"the demo needs the extra 'sim' ({how_to_install('sim')})"),
        (
            "extproc",
            f"Envoy's external processor needs the extra 'envoy' ({how_to_install('envoy')})",
        ),
        (
            "watch tcp://127.0.0.1:5557",
            f"watching KV events requires ZMQ support ({how_to_install('zmq')})",
        ),
    ],
)
def test_what_needs_an_extra_says_which(python: str, tmp_path: Path, command: str, sentence: str) -> None:
    done = kvsync(python, *command.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"kvsync\[(\w+)\]", done.stderr)) <= extras.keys()


def test_a_configuration_is_checked_and_its_doubts_are_told(python: str, tmp_path: Path) -> None:
    write(tmp_path / "fleet.yaml", {**SYNC, "models": []})
    done = kvsync(python, "config", "check", "fleet.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "events.enabled = true  # fleet.yaml" in done.stdout
    assert f"Warning: KV event sync requires ZMQ support ({how_to_install('zmq')})" in done.stderr


async def test_requests_are_served_without_events_and_it_is_said(python: str, tmp_path: Path) -> None:
    async with sim("tiny") as engine:
        config = models({"tiny": [Listed("a", engine)]}) | SYNC | {"redis": {"url": "redis://127.0.0.1:6379"}}
        async with running(tmp_path, config, python=python) as gateway:
            details = await gateway.ready()
            assert details["kv_sync"]["state"] == "waiting"
            (sentence,) = details["kv_sync"]["unmet"]
            assert sentence == f"KV event sync requires ZMQ support ({how_to_install('zmq')})"
            assert details["redis"]["state"] == "unavailable"
            assert "pip install 'kvsync[redis]'" in details["redis"]["problem"]
            messages = asks(text())
            for _ in range(2):
                answer, decision = await gateway.chat("tiny", messages, max_tokens=2)
                assert answer.engine == "a"
            # what the engine itself said it had is known, by the tokens that the engine gave
            assert decision.record["mode"] == "observed"
            assert answer.cached > 0
            assert "prefix index: pure Python" in gateway.process.log
            assert "Traceback" not in gateway.process.log


def test_strict_does_not_start_without_what_events_need(python: str, tmp_path: Path) -> None:
    write(tmp_path / "fleet.yaml", {"events": {"enabled": True, "strict": True}, "tokenizer": SYNC["tokenizer"]})
    done = kvsync(python, "serve", "-c", "fleet.yaml", "--port", "0", "--admin-port", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert f"KV event sync requires ZMQ support ({how_to_install('zmq')})" in done.stderr.partition("Error: ")[2]
    assert "Traceback" not in done.stderr
