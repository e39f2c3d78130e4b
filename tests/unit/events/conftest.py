from __future__ import annotations

import pytest

from kvsync.events import stream


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine drops all replies behind the first two."""
    monkeypatch.setattr(stream, "UNDROPPED", 2)
