"""tests/README.md points from every known failure to tests that exist and say which failure they show."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
KNOWN = [
    f"{family}{number}"
    for family, numbers in {
        "W": (1, 2, 3, 4, 5, 6),
        "S": (2, 4, 7, 8, 9, 10),
        "I": (3, 4, 6, 9, 10, 12, 13, 14, 17, 18, 19),
        "T": (1, 2, 3, 5, 6, 7),
        "R": (2, 4, 5, 6, 7),
        "P": (1, 3, 4, 5, 6, 7, 8, 9),
        "K": (2, 3, 4, 5),
        "D": (1, 2),
        "M": (1, 2),
        "L": (1, 2),
        "F": (1, 2),
        "X": (2, 3),
        "O": (1, 2),
    }.items()
    for number in numbers
]


def table() -> dict[str, list[str]]:
    """Each failure's tests, as the page names them."""
    rows = ROW.findall((TESTS / "README.md").read_text())
    assert len(rows) == len({name for name, *_ in rows}), "a failure stands there twice"
    return {name: re.findall(r"`([^`]+::[^`]+)`", cell) for name, _, cell in rows}


@cache
def docstrings(file: Path) -> dict[str, str]:
    """The tests of a file, by what follows its name in their ids."""
    found = {}

    def look(nodes: list[ast.stmt], before: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{before}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[before + node.name] = ast.get_docstring(node) or ""

    look(ast.parse(file.read_text()).body, "")
    return found


def test_every_known_failure_has_a_test() -> None:
    rows = table()
    assert list(rows) == KNOWN
    assert [name for name, tests in rows.items() if not tests] == []


def test_every_test_exists_and_says_what_it_shows() -> None:
    faults = []
    for name, tests in table().items():
        for test in tests:
            path, _, function = test.partition("::")
            docstring = docstrings(TESTS / path).get(function)
            if docstring is None:
                faults.append(f"{name}: {test} does not exist")
            elif not any(name in re.findall(r"[A-Z]\d+", group) for group in re.findall(r"\(([^()]*)\)", docstring)):
                faults.append(f"{test} does not say that it shows {name}")
    assert faults == []
