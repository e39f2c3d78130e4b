"""The soak itself, a hundredth of it: everything that it does is done, and its judgement can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .figures import Part, Sample

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_a_hundredth_of_the_soak_passes() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.soak"],
        cwd=ROOT,
        env={**os.environ, "SOAK_SCALE": "0.01"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    document, _ = json.JSONDecoder().raw_decode(run.stdout)
    assert [part["name"] for part in document["parts"]] == [
        "trickle",
        "pauses",
        "freeze",
        "evictions",
        "suffixes",
        "lifetimes",
    ]


SAMPLE = Sample(done=0, rss=100 << 20, threads=10, files=60, sockets=40, series=400)


def test_what_grows_is_not_flat() -> None:
    part = Part("p", "w", samples=[SAMPLE, SAMPLE])
    assert part.verdict() == []
    for name, grown in (("rss", 106 << 20), ("threads", 12), ("files", 64), ("sockets", 43), ("series", 421)):
        more: dict[str, Any] = {name: grown}
        last = replace(SAMPLE, **more)
        assert len(Part("p", "w", samples=[SAMPLE, last]).verdict()) == 1, name
        # Also when it is given back in the end.
        assert len(Part("p", "w", samples=[SAMPLE, last, SAMPLE]).verdict()) == 1, name


def test_series_that_are_new_are_named() -> None:
    last = replace(SAMPLE, series=421, added=('a{b="c"}', "d"))
    assert Part("p", "w", samples=[SAMPLE, last]).verdict() == ['p: series grew from 400 to 421: a{b="c"}, d']
    assert "added" not in Part("p", "w", samples=[SAMPLE, last]).document()["samples"][1]


def test_what_shrinks_or_trembles_is_flat() -> None:
    last = replace(SAMPLE, rss=90 << 20, threads=11, files=62, sockets=42, series=380)
    assert Part("p", "w", samples=[SAMPLE, last]).verdict() == []


def test_a_fault_fails_a_part_without_samples() -> None:
    part = Part("p", "w")
    part.require(False, "it broke")
    assert part.verdict() == ["p: it broke"]
