"""Parts of this package that are installed only where they are asked for (``pyproject.toml`` says which bring what).

What must always hold: importing this needs none of them.
"""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """For whoever misses it, wherever the package came from."""
    return f"pip install 'kvsync[{extra}]', or '.[{extra}]' in its checkout"


__all__ = ["how_to_install"]
