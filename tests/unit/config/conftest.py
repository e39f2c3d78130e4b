from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvsync.config import ConfigError, Fault, read

Faults = Callable[..., tuple[Fault, ...]]


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    """The faults of one configuration; it has to have some."""

    def found(
        text: str | bytes | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, object] | None = None,
    ) -> tuple[Fault, ...]:
        file = None
        if text is not None:
            file = tmp_path / "kvsync.yaml"
            file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError) as caught:
            read(file, environ or {}, flags or {})
        assert caught.value.faults
        return caught.value.faults

    return found
