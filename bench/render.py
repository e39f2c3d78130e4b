"""A document → docs/performance.md and its plots. All figures come from the document; the code only has the words.

What must always hold: rendering the same document again gives the same bytes (a test compares them with what is
committed), so no figure on the page can be typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import plot
from bench.judge import Verdict, figures, number, verdict, wanted
from bench.model import OURS
from bench.process import ROOT

RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "performance"

Notes = Mapping[str, Mapping[str, str]]
"""Row → figure → why its target is not met."""

HEAD = """# Performance

Measured by `make bench`: each piece of work is done by kvsync and by its peers in turns, on one machine and in one run.
The peers are installed from PyPI. What is measured is a fresh process; its CPU time is that of all its threads. What
came of the work is checked each time, and a side that lost something or answered wrongly has no figure. Compare ratios,
not figures: another machine gives others. `bench/README.md` says how it is built.

This page is rendered from `bench/results/{name}`; no figure is typed by hand. The targets are those that the project
set itself before it was built.
"""


def latest(folder: Path = RESULTS) -> Path | None:
    """The last document kept."""
    return max(folder.glob("[0-9]*.json"), default=None)


def files(document: Mapping[str, Any], name: str, notes: Notes) -> dict[Path, str]:
    """The page and its plots."""
    rows = document["rows"]
    found = {PAGE: _page(document, name, notes)}
    for row in rows:
        groups = [group for target in row["targets"] if (group := _group(row, target)).bars]
        if groups:
            found[PLOTS / f"{row['name']}.svg"] = plot.bars(groups)
    ratios = _ratios(rows)
    if ratios:
        found[PLOTS / "ratios.svg"] = plot.ratios(ratios)
    return found


def write(document_file: Path, notes: Notes) -> None:
    """Make page and plots anew; plots of rows that are gone go, too."""
    made = files(json.loads(document_file.read_text(encoding="utf-8")), document_file.name, notes)
    PLOTS.mkdir(exist_ok=True)
    for old in set(PLOTS.glob("*.svg")) - set(made):
        old.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")


def _page(document: Mapping[str, Any], name: str, notes: Notes) -> str:
    rows = document["rows"]
    parts = [HEAD.format(name=name), *_machine(document), "", "## Targets", *_table(rows), ""]
    judged = [met for row in rows for target in row["targets"] if (met := verdict(row, target).met) is not None]
    parts += [f"{sum(judged)} of {len(judged)} targets are met.", ""]
    if _ratios(rows):
        parts += ["How many times better than the best peer; the mark is the target:", ""]
        parts += ["![ratios](performance/ratios.svg)", ""]
    for row in rows:
        parts += [*_section(row, notes.get(row["name"], {})), ""]
    return "\n".join(parts).rstrip() + "\n"


def _machine(document: Mapping[str, Any]) -> Iterator[str]:
    machine = document["machine"]
    loads = [sample["load"] for row in document["rows"] for samples in row["samples"].values() for sample in samples]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commit = f"`{machine['commit']}`{' with changes' if machine['changed'] else ''}"
    yield (
        f"**{document['date']}**, commit {commit}: {machine['cpu']}, {machine['cores']} cores ({machine['vectors']}), "
        f"{machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}; {versions}. Load before the "
        f"run {machine['load_before']}, during it {min(loads, default=0)} – {max(loads, default=0)} (median "
        f"{median(loads) if loads else 0:.2f}; subjects, load makers and backends included). The run took "
        f"{document['seconds'] / 60:.0f} minutes."
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| what | target | kvsync | best peer | ratio | |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        link = f"#{anchor(row['title'])}"
        for target in row["targets"]:
            if target["aside"]:
                continue
            found = verdict(row, target)
            ours = f"{number(found.ours.median)} {target['unit']}".rstrip() if found.ours else "–"
            peer = f"{found.best}: {number(found.peers[found.best].median)}" if found.best else "–"
            ratio = f"{number(found.ratio)}×" if found.ratio is not None else "–"
            cells = (f"[{target['what']}]({link})", wanted(target) or "–", ours, peer, ratio, _met(found))
            yield f"| {' | '.join(cells)} |"
        if row["failed"]:
            yield f"| [{row['title']}]({link}) | | did not run: {_cell(row['failed'])} | | | |"


def _met(found: Verdict) -> str:
    return {True: "met", False: "**not met**", None: ""}[found.met]


def _section(row: Mapping[str, Any], notes: Mapping[str, str]) -> Iterator[str]:
    yield f"### {row['title']}"
    yield row["method"]
    yield ""
    if row["failed"]:
        yield f"Did not run here: {row['failed']}"
        yield ""
    for side, why in row["wrong"].items():
        yield f"**{side}** has no figures: {_cell(why)}"
        yield ""
    sides = list(row["samples"])
    shown = [(target, figures(row, target)) for target in row["targets"]]
    if any(found for _, found in shown):
        yield f"| median (lowest – highest) | {' | '.join(sides)} |"
        yield "|---|" + "---|" * len(sides)
        for target, found in shown:
            unit = f", {target['unit']}" if target["unit"] else ""
            yield f"| {target['what']}{unit} | {' | '.join(_spread(found, side) for side in sides)} |"
        yield ""
        counts = {side: len(samples) for side, samples in row["samples"].items()}
        repeats = sorted(set(counts.values()))
        yield f"Repeats: {' or '.join(map(str, repeats))}. ![{row['title']}](performance/{row['name']}.svg)"
        yield ""
    for target, _ in shown:
        if target["figure"] in notes and verdict(row, target).met is False:
            yield f"*Why not ({target['what']}):* {notes[target['figure']]}"
            yield ""


def _spread(found: Mapping[str, Any], side: str) -> str:
    if side not in found:
        return "–"
    figure = found[side]
    if figure.repeats == 1:
        return number(figure.median)
    return f"{number(figure.median)} ({number(figure.low)} – {number(figure.high)})"


def _group(row: Mapping[str, Any], target: Mapping[str, Any]) -> plot.Group:
    found = figures(row, target)
    bars = [
        plot.Bar(side, one.median, one.low, one.high, "ours" if side == OURS else "peer") for side, one in found.items()
    ]
    return plot.Group(target["what"], target["unit"], bars)


def _ratios(rows: Sequence[Mapping[str, Any]]) -> list[plot.Ratio]:
    found = []
    for row in rows:
        for target in row["targets"]:
            ratio = None if target["aside"] else verdict(row, target).ratio
            if ratio:
                found.append(plot.Ratio(target["what"], ratio, target["ratio"]))
    return found


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
