"""``python -m tests.soak [part …]``: run the soak, print its figures as JSON and as a table, fail where they grow.

``SOAK_SCALE`` (1) shortens it: counts shrink with it, pauses with its square root. Parts that keep the CPU busy run one
after the other (unless they are very short); the long streams, which mostly wait, run beside them. Each part has a
gateway of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from . import churn, freeze, streams
from .figures import Part, table

PARTS: Final[Mapping[str, Callable[[float, Path], Awaitable[list[Part]]]]] = {
    "streams": streams.run,
    "freeze": freeze.run,
    "churn": churn.run,
}


async def _apart(name: str, folder: Path) -> list[dict[str, Any]]:
    """One part in a process of its own, so that its clients and engines slow nobody else's."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.soak", name, "--into", str(folder), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    if process.returncode:
        wrong = f"{name}: ended with status {process.returncode}"
        part = Part(name, "", faults=[wrong])
        return [part.document()]
    documents: list[dict[str, Any]] = json.loads(said)
    return documents


async def _all(folder: Path, at_once: int) -> list[dict[str, Any]]:
    """Run every part, the streams beside the others, of which so many run at once."""
    turns = asyncio.Semaphore(at_once)

    async def in_turn(name: str) -> list[dict[str, Any]]:
        async with turns:
            return await _apart(name, folder / name)

    found = await asyncio.gather(_apart("streams", folder / "streams"), in_turn("freeze"), in_turn("churn"))
    return [document for documents in found for document in documents]


def main() -> int:
    scale = float(os.environ.get("SOAK_SCALE", "1"))
    if len(sys.argv) > 1:
        name, _, folder = sys.argv[1:]
        parts = asyncio.run(_run(name, scale, Path(folder)))
        print(json.dumps([part.document() for part in parts]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        documents = asyncio.run(_all(Path(folder), at_once=1 if scale >= 0.1 else 2))
    print(json.dumps({"scale": scale, "parts": documents}, indent=1))
    print()
    for document in documents:
        print(f"{document['name']}: {document['work']}; {json.dumps(document['facts'])}")
    print()
    print(table(documents))
    return 1 if any(document["wrong"] for document in documents) else 0


async def _run(name: str, scale: float, folder: Path) -> list[Part]:
    return await PARTS[name](scale, folder)


if __name__ == "__main__":
    sys.exit(main())
