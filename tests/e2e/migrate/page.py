"""What docs/migrate.md prints, for tests that do it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

PAGE: Final = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text(encoding="utf-8")


def block(after: str, kind: str = "sh") -> str:
    """The first code block of this kind behind a text that the page has once."""
    assert PAGE.count(after) == 1, after
    found = re.search(rf"^```{kind}\n(.*?)^```", PAGE.partition(after)[2], re.DOTALL | re.MULTILINE)
    assert found, f"no {kind} block after {after!r}"
    return found[1]


def section(after: str) -> dict[str, Any]:
    """A piece of a configuration file."""
    found: dict[str, Any] = yaml.safe_load(block(after, "yaml"))
    return found


def exports(after: str, variables: Mapping[str, str]) -> dict[str, str]:
    """What a block of ``export`` lines sets."""
    return {
        name: re.sub(r"\$(\w+)", lambda variable: variables[variable[1]], value)
        for name, value in re.findall(r"^export (\w+)=(\S+)", block(after), re.MULTILINE)
    }


class Row(NamedTuple):
    """Of a table of what becomes of what."""

    first: str
    """The whole first cell."""
    verdict: str
    text: str


def rows(heading: str) -> dict[str, Row]:
    """The rows under one heading, one for each name in a first cell (a number, or what stands in backticks)."""
    found: dict[str, Row] = {}
    text = PAGE.partition(f"\n### {heading}\n")[2]
    for line in re.split(r"^##", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines():
        if not line.startswith("|") or line.startswith("|---") or "| why, and what to do |" in line:
            continue
        first, verdict, why = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`([^`]+)`", first) or re.split(r", ", first):
            assert name not in found, f"{name} stands twice under {heading}"
            found[name] = Row(first, verdict, why)
    return found


async def run(after: str, variables: Mapping[str, str], deadline: float = 30.0) -> str:
    """What a block of commands says on standard output; it has to succeed."""
    return await run_text(block(after), variables, deadline)


async def run_text(commands: str, variables: Mapping[str, str], deadline: float = 30.0) -> str:
    """The same for commands that are no block."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-euo",
        "pipefail",
        "-c",
        commands,
        env={**os.environ, "PATH": path, **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(deadline):
            said, complained = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, (commands, said, complained)
    return said.decode()


__all__ = ["PAGE", "Row", "block", "exports", "rows", "run", "run_text", "section"]
