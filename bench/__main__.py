"""``python -m bench [--quick] [ROW …]``: run the rows and show the targets; ``--render`` writes the page again.

A run of all rows that is not quick is kept in ``bench/results`` and rendered into docs/performance.md. Others are only
shown.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys

from bench import render
from bench.model import OURS
from bench.process import ROOT
from bench.rows import ROWS
from bench.run import run, say

LAST = ROOT / ".make" / "bench.json"
NOTES = {row.name: row.notes for row in ROWS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names, or patterns such as 'events-*'; all by default")
    parser.add_argument("--quick", action="store_true", help="as little work as shows that everything works")
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--render", action="store_true", help="write the page from the last results again")
    options = parser.parse_args()
    if options.list:
        for row in ROWS:
            print(f"{row.name:24} {row.title}")
        return 0
    if options.render:
        return _render()
    unknown = [wanted for wanted in options.rows if not fnmatch.filter([row.name for row in ROWS], wanted)]
    if unknown:
        parser.error(f"no row is called {', '.join(unknown)} (--list names them)")
    rows = [r for r in ROWS if not options.rows or any(fnmatch.fnmatch(r.name, wanted) for wanted in options.rows)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes it started end, too
    document = run(rows, options.quick)
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    if options.quick or options.rows:
        LAST.parent.mkdir(exist_ok=True)
        LAST.write_text(text, encoding="utf-8")
        say(f"not kept; the figures are in {LAST}")
    else:
        render.RESULTS.mkdir(exist_ok=True)
        (render.RESULTS / f"{document['date'][:10]}.json").write_text(text, encoding="utf-8")
        _render()
    failed = [row["name"] for row in document["rows"] if row["failed"] or OURS in row["wrong"]]
    if failed:
        say(f"not as it should be: {', '.join(failed)}")
    return 1 if failed else 0


def _render() -> int:
    last = render.latest()
    if last is None:
        say("there are no results yet: run all rows first")
        return 1
    render.write(last, NOTES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
