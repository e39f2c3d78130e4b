"""The examples of docs/library.md run, in order, in one namespace, and show what the page says: on the reference index,
and on the native core where it is installed."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import kvsync
from kvsync.index import Index, PrefixIndex
from kvsync.index.reference import ReferenceIndex

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
IMPLEMENTATIONS = list(dict.fromkeys([ReferenceIndex, PrefixIndex]))
"""One or two: without the native core both names mean the reference."""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda kind: kind.__module__)
def test_the_examples(implementation: type[Index], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvsync, "PrefixIndex", implementation)
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    results = doctest.DocTestRunner(optionflags=doctest.REPORT_UDIFF).run(examples)
    assert results.failed == 0
    assert results.attempted > 20


def test_every_public_name_and_every_method_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in set(kvsync.__all__) - {"__version__"}:
        assert name in text, name
    for method in [name for name in vars(ReferenceIndex) if not name.startswith("_")]:
        assert f"`{method}(" in text, method
