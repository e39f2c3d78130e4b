"""The seeds of the core's fuzzing are what ``core/fuzz/seeds.py`` makes of the captures that are there now."""

from __future__ import annotations

import runpy
from pathlib import Path

FUZZ = Path(__file__).parents[3] / "core" / "fuzz"


def test_the_seeds_are_those_of_the_captures() -> None:
    made = dict(runpy.run_path(str(FUZZ / "seeds.py"))["seeds"]())
    kept = {path.relative_to(FUZZ / "seeds").as_posix(): path.read_bytes() for path in FUZZ.glob("seeds/*/*")}
    assert kept.keys() == made.keys(), "run python core/fuzz/seeds.py"
    assert kept == made, "run python core/fuzz/seeds.py"
