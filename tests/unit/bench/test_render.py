"""The page says what the document says, and the committed page is what the committed document renders to."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from bench import render
from bench.__main__ import NOTES
from bench.model import Target
from bench.rows import ROWS

from tests.unit.bench.documents import document, row

RATIO = Target("work", "f", "µs", factor=1e6, ratio=3.0)


def page(*rows: dict[str, object], notes: render.Notes | None = None) -> str:
    return render.files(document(*rows), "2026-11-30.json", notes or {})[render.PAGE]


def test_a_target_that_is_met() -> None:
    made = page(row(RATIO, ours=[{"f": 1e-6}], peer=[{"f": 4e-6}]))
    assert "| [work](#a-row-with-commas--arrows) | ≥ 3× | 1 µs | peer: 4 | 4× | met |" in made
    assert "1 of 1 targets are met." in made


def test_a_target_that_is_not_met_is_shown_with_its_reason() -> None:
    notes = {"row": {"f": "Tried everything."}}
    missed = row(RATIO, ours=[{"f": 2e-6}, {"f": 3e-6}], peer=[{"f": 4e-6}])
    made = page(missed, notes=notes)
    assert "| 1.60× | **not met** |" in made
    assert "*Why not (work):* Tried everything." in made
    assert "2.50 (2 – 3)" in made
    met = row(RATIO, ours=[{"f": 1e-6}], peer=[{"f": 4e-6}])
    assert "Tried everything" not in page(met, notes=notes)


def test_what_did_not_run_or_was_wrong_is_said() -> None:
    failed = row(RATIO) | {"failed": "no such | tool", "samples": {}}
    assert "| did not run: no such / tool | | | |" in page(failed)
    wrong = row(RATIO, ours=[{"f": 1e-6}]) | {"wrong": {"peer": "lost\na batch"}}
    made = page(wrong)
    assert "**peer** has no figures: lost a batch" in made
    assert "| 1 µs | – | – | **not met** |" in made


def test_asides_stand_in_their_section_only() -> None:
    made = page(row(RATIO, Target("more", "g", "s", aside=True), ours=[{"f": 1e-6, "g": 7.0}]))
    assert "[more]" not in made
    assert "| more, s | 7 |" in made


def test_plots_are_well_formed_and_always_the_same() -> None:
    target = Target("a < b & c", "f", "µs", factor=1e6, ratio=3.0)
    doc = document(row(target, ours=[{"f": 1e-6}, {"f": 2e-6}], peer=[{"f": 4e-6}]))
    made = render.files(doc, "x.json", {})
    plots = [text for path, text in made.items() if path.suffix == ".svg"]
    assert len(plots) == 2
    for text in plots:
        svg = ET.fromstring(text)
        bars = [one for one in svg.iter() if one.tag.endswith("rect")]
        assert bars
        width = float(svg.attrib["width"])
        assert all(float(bar.attrib["x"]) >= 0 and float(bar.attrib["x"]) < width for bar in bars)
        assert "a &lt; b &amp; c" in text
    assert made == render.files(json.loads(json.dumps(doc)), "x.json", {})


def test_bars_are_as_long_as_their_figures() -> None:
    made = render.files(document(row(RATIO, ours=[{"f": 1e-6}], peer=[{"f": 4e-6}])), "x.json", {})
    svg = ET.fromstring(made[render.PLOTS / "row.svg"])
    ours, peer = (float(one.attrib["width"]) for one in svg.iter() if one.tag.endswith("rect"))
    assert peer == pytest.approx(4 * ours, rel=0.01)


def test_the_committed_page_is_what_the_last_results_render_to() -> None:
    last = render.latest()
    assert (last is None) == (not render.PAGE.exists())
    if last is None:
        pytest.skip("nothing has been measured yet")
    made = render.files(json.loads(last.read_text(encoding="utf-8")), last.name, NOTES)
    assert {path: path.read_text(encoding="utf-8") for path in made} == made
    assert {path for path in made if path.suffix == ".svg"} == set(render.PLOTS.glob("*.svg"))


def test_rows_have_names_and_figures_of_their_own() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    titles = [render.anchor(row.title) for row in ROWS]
    assert len(set(titles)) == len(titles)
    for one in ROWS:
        figures = [target.figure for target in one.targets]
        assert len(set(figures)) == len(figures), one.name
        assert set(one.notes) <= set(figures), one.name
