"""Instructions that the core needs for fixed work, counted by callgrind and held against those of the last time.

    make instructions              count, show what changed, fail where something takes over 2 % more
    make instructions ACCEPT=1     and keep the counts in bench/instructions.json

Unlike times they come out the same on a busy machine. Hash tables are seeded from addresses, which callgrind gives out
the same each time to a program with the same arguments and environment; elsewhere counts differ by some tenths of a
percent. They say nothing of waiting for memory; the benchmarks against the clock do. Another compiler or processor
gives other counts: where it is not that of the file, changes are shown and nothing fails.

The work is in ``core/benches/src/counted.rs``.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CRATE = ROOT / "core" / "benches"
FILE = ROOT / "bench" / "instructions.json"
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work: instructions per ``unit``."""

    unit: str
    instructions: float


@dataclass(frozen=True, slots=True)
class Counts:
    """All cases, and the compiler and processor that they hold for."""

    built_by: str
    cases: Mapping[str, Case]

    def dump(self) -> str:
        cases = {name: {"unit": case.unit, "instructions": case.instructions} for name, case in self.cases.items()}
        return json.dumps({"built_by": self.built_by, "cases": cases}, indent=2) + "\n"

    @classmethod
    def load(cls, text: str) -> Counts:
        found: dict[str, Any] = json.loads(text)
        return cls(found["built_by"], {name: Case(**case) for name, case in found["cases"].items()})


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of the counts: a line for each case, and those that got worse by more than is allowed."""

    lines: tuple[str, ...]
    worse: tuple[str, ...]
    changed: bool
    """Something is not as it was, for better or worse, by more than is allowed: worth being kept."""


def compare(before: Counts | None, now: Counts, tolerance: float = TOLERANCE) -> Comparison:
    """A case that is gone counts as worse: it would not be noticed otherwise that nobody counts it any more."""
    kept: Mapping[str, Case] = {} if before is None else before.cases
    lines, worse = [], []
    changed = False
    for name in [*now.cases, *(name for name in kept if name not in now.cases)]:
        old, new = kept.get(name), now.cases.get(name)
        if new is None:
            verdict, bad, differs = "gone", True, True
        elif old is None or old.unit != new.unit:
            verdict, bad, differs = "new", False, True
        else:
            change = new.instructions / old.instructions - 1
            bad, differs = change > tolerance, abs(change) > tolerance
            verdict = f"{change:+.1%}" + ("  worse" if bad else "  better" if differs else "")
        changed |= differs
        if bad:
            worse.append(name)
        shown = f"{new.instructions:>14,.1f} a {new.unit:<7}" if new else " " * 24
        lines.append(f"{name:<28}{shown}  {verdict}")
    if before is not None and before.built_by != now.built_by:
        lines.append(f"(counted before with {before.built_by}, now with {now.built_by}: no judgement)")
        worse, changed = [], True
    return Comparison(tuple(lines), tuple(worse), changed)


def count() -> Counts:
    """Build the work and count it."""
    binary = _built()
    listed = (line.split("\t") for line in _output(str(binary)).splitlines())
    cases = {name: Case(unit, round(_count(binary, name) / int(units), 1)) for name, unit, units in listed}
    return Counts(f"{_output('rustc', '--version').strip()}, {platform.machine()}", cases)


def _count(binary: Path, case: str) -> int:
    """Callgrind begins and ends counting with the function ``counted::counted``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        command = (
            shutil.which("valgrind") or "valgrind",
            "--tool=callgrind",
            "--collect-atstart=no",
            "--toggle-collect=counted::counted",
        )
        _output(*command, f"--callgrind-out-file={out}", str(binary), case, environment={})
        found = re.search(r"^summary: (\d+)$", out.read_text(), re.MULTILINE)
    if found is None or found[1] == "0":
        raise SystemExit(f"callgrind counted nothing of {case!r}: is the function's name what is asked for?")
    return int(found[1])


def _built() -> Path:
    """The program, as cargo says."""
    command = ("cargo", "build", "--release", "--locked", "--bin", "counted", "--message-format=json")
    lines = map(json.loads, _output(*command, cwd=CRATE).splitlines())
    return next(Path(line["executable"]) for line in lines if line.get("executable"))


def _output(*command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help=f"keep the counts in {FILE.relative_to(ROOT)}")
    accept: bool = parser.parse_args().accept
    for tool in ("cargo", "valgrind"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is needed to count instructions, and is not there.")
    now = count()
    comparison = compare(Counts.load(FILE.read_text()) if FILE.exists() else None, now)
    print(*comparison.lines, sep="\n")
    if accept:
        FILE.write_text(now.dump())
    elif comparison.worse:
        names = ", ".join(comparison.worse)
        sys.exit(f"Over {TOLERANCE:.0%} more instructions: {names}. Meant so? make instructions ACCEPT=1")
    elif comparison.changed:
        print("Keep these counts with: make instructions ACCEPT=1")


if __name__ == "__main__":
    main()
