"""The image: no container runtime is needed here, so its Dockerfile is read, and its steps are run without one.

What stands in for a build: the context that .dockerignore leaves is copied, and the RUN steps of the first stage are
run by ``sh`` with their folders moved to a scratch one. Left out: apt-get and the user of the second stage, which are
the base images' own matter, what of those images is not as their documentation says, and the installation of uv,
which is the one that ``make`` begins with.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from scripts.deploy.render import CHART, ROOT

from kvsync.config import Settings
from tests.deploy.dockerfile import assignments, context, stages

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BUILD, IMAGE = stages(DOCKERFILE.read_text(encoding="utf-8"))
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8")
DEPENDENCIES = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
ENTRYPOINT = json.loads(IMAGE.all("ENTRYPOINT")[0])
CHOICES = {
    "whole": assignments(BUILD.all("ARG")[0])["EXTRAS"],
    "without zmq": "tokenizers,redis,envoy",
}
MODULES = {"zmq": "zmq", "tokenizers": "tokenizers", "redis": "redis", "envoy": "grpc"}
"""Of each extra, a module that comes with no other."""


class Scratch:
    """A folder in place of / for the first stage's steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.venv = Path(self._moved("/opt/kvsync"))

    def _moved(self, text: str) -> str:
        for path in ("/opt/build", "/opt/kvsync", "/wheels", "/src"):
            text = re.sub(rf"(?<![\w/.-]){path}\b", f"{self._folder}{path}", text)
        return text

    def copy(self, rest: str) -> None:
        kept = context(ROOT, IGNORED)
        *wanted, target = rest.split()
        for each in map(Path, wanted):
            files = [path for path in kept if each in (path, *path.parents)]
            assert files, f"COPY {each}: not in the context"
            for path in files:
                there = Path(self._moved("/src")) / target / (path.relative_to(each) if target == str(each) else path)
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, there)

    def run(self, command: str, extras: str = "") -> None:
        source = Path(self._moved("/src"))
        if "requirements-uv.txt" in command:
            uv = Path(self._moved("/opt/build/bin/uv"))
            uv.parent.mkdir(parents=True)
            uv.symlink_to(Path(sys.executable).with_name("uv"))
            return
        if "maturin" in command:
            # Compiled where `make` has compiled it: a second, not half a minute. But the context's workspace is whole.
            look = ["cargo", "metadata", "--offline", "--locked", "--no-deps", "--format-version", "1"]
            subprocess.run(look, cwd=source / "core", check=True, stdout=subprocess.DEVNULL)
            source = ROOT
        outside = ("UV_", "PIP_", "PYTHON", "VIRTUAL_ENV", "KVSYNC_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        done = subprocess.run(
            ["sh", "-ec", self._moved(command)],
            cwd=source,
            env=environ | {"EXTRAS": extras},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scratch]:
    """The first stage, up to where EXTRAS matter."""
    compiled = ROOT / "core" / "target" / "release" / "deps" / "libkvsync_core.so"
    sources = [
        *(ROOT / "core").glob("*/src/**/*.rs"),
        *(ROOT / "core").glob("Cargo.*"),
        *(ROOT / "core").glob("*/Cargo.toml"),
    ]
    if not compiled.exists() or compiled.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        pytest.skip("the native core as it is now is not compiled: `make test` does that first, where Rust is")
    folder = tmp_path_factory.mktemp("image")
    made = Scratch(folder)
    for instruction, rest in BUILD.steps[:-1]:
        if instruction == "COPY" and not rest.startswith("--from"):
            made.copy(rest)
        elif instruction == "RUN" and not rest.startswith("apt-get"):
            made.run(rest)
    yield made
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=list(CHOICES.values()), ids=list(CHOICES))
def extras(request: pytest.FixtureRequest, scratch: Scratch) -> str:
    """What the image was built with; the rest of its first stage is done."""
    chosen: str = request.param
    shutil.rmtree(scratch.venv, ignore_errors=True)
    instruction, rest = BUILD.steps[-1]
    assert instruction == "RUN"
    scratch.run(rest, chosen)
    return chosen


def command(venv: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What runs in the image, with nothing in the environment but what the Dockerfile puts there."""
    environ = assignments(IMAGE.all("ENV")[0]) | {"PATH": f"{venv}/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(args, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


def test_the_native_core_and_the_chosen_extras_are_there_and_no_others(
    extras: str, scratch: Scratch, tmp_path: Path
) -> None:
    look = (
        "import importlib.util as u, json; from kvsync.index import NATIVE; "
        f"print(json.dumps([NATIVE, [e for e, m in {MODULES!r}.items() if u.find_spec(m)]]))"
    )
    done = command(scratch.venv, f"{scratch.venv}/bin/python", "-c", look, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, [name for name in MODULES if name in extras.split(",")]]


def test_every_module_is_compiled_and_nothing_is_written_by_running_it(
    extras: str, scratch: Scratch, tmp_path: Path
) -> None:
    """A root that is read-only would make each start compile everything again."""
    (package,) = scratch.venv.glob("lib/python*/site-packages/kvsync")
    for source in package.rglob("*.py"):
        assert list((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")), source
    before = {path: path.stat().st_mtime_ns for path in scratch.venv.rglob("*")}
    done = command(scratch.venv, *ENTRYPOINT, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"kvsync {version('kvsync')}\n"), done.stderr
    (tmp_path / "empty.yaml").write_text("models: []\n")
    done = command(scratch.venv, *ENTRYPOINT, "config", "check", "empty.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in scratch.venv.rglob("*")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"empty.yaml"}


def test_what_the_context_leaves_out_is_not_needed_and_what_it_takes_is_ours() -> None:
    kept = context(ROOT, IGNORED)
    assert not [path for path in kept if {"target", "__pycache__", ".venv", ".git"} & set(path.parts)]
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        tracked = {Path(line) for line in listed.stdout.splitlines()}
        assert {path for path in tracked if path.parts[0] == "src"} <= kept
        new = {path for path in kept - tracked if path.parts[0] not in ("src", "core")}
        assert not new, "not in the repository, but in the image's context"


def test_base_images_are_pinned_and_alike() -> None:
    assert BUILD.base == IMAGE.base
    images = [BUILD.base, *(rest.split()[0].removeprefix("--from=") for rest in BUILD.all("COPY") if "--from" in rest)]
    for image in images:
        assert re.fullmatch(r"[a-z]+:\d+\.\d+-slim-[a-z]+", image), image
    (python,) = re.findall(r"python:(\d+\.\d+)", BUILD.base)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={python}"
    (rust,) = {image.split("-")[0] for image in images if image.startswith("rust")}
    assert rust == "rust:" + re.findall(r"^Rust (\d+\.\d+)", DEPENDENCIES, re.MULTILINE)[0]


def test_every_step_is_shell_that_can_be_read() -> None:
    for stage in (BUILD, IMAGE):
        for step in stage.all("RUN"):
            subprocess.run(["sh", "-n", "-c", step], check=True)


def test_the_image_is_what_the_chart_runs() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    user, group = IMAGE.all("USER")[0].split(":")
    pod = values["podSecurityContext"]
    assert (int(user), int(group)) == (pod["runAsUser"], pod["runAsGroup"])
    assert f"--uid {user}" in IMAGE.all("RUN")[0]
    assert f"--gid {group}" in IMAGE.all("RUN")[0]
    settings = Settings()
    assert IMAGE.all("EXPOSE")[0].split() == [str(settings.gateway.port), str(settings.admin.port)]
    template = (CHART / "templates" / "deployment.yaml").read_text(encoding="utf-8")
    assert f"args: [{', '.join(json.loads(IMAGE.all('CMD')[0]))}]" in template
    assert ENTRYPOINT == ["kvsync"], "the chart gives arguments only"


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for choice in CHOICES.values():
        assert set(choice.split(",")) - {""} <= project["optional-dependencies"].keys()
    # everything that serves: the core is there anyway, and simulated engines are for trials
    assert set(CHOICES["whole"].split(",")) == project["optional-dependencies"].keys() - {"core", "sim"}


@pytest.mark.parametrize(
    "text", ["RUN x\nFROM a:1", "FROM a:1\nADD x y", "FROM a:1\nRUN", "FROM a:1\nrun x", "FROM a:1\nRUN a\n  b"]
)
def test_what_is_no_dockerfile_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        stages(text)
