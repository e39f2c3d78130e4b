"""The ten lines of tests/README.md run, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.faults
async def test_the_ten_lines_run_as_they_stand(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    _, _, test = example.partition("\n\n\n")
    assert len(test.strip().splitlines()) <= 10
    names: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), names)
    (shown,) = (value for name, value in names.items() if name.startswith("test_"))
    assert callable(shown)
    await shown(tmp_path)
