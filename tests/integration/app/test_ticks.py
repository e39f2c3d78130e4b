"""What the application does each second keeps no request waiting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.faults.client import until
from tests.faults.engine import Engine
from tests.faults.serving import serving


class Slow:
    """An index that takes its time to end what ran out."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_end = threading.Event()
        self.ended = False

    def expire(self, now: float) -> None:
        self.asked.set()
        self.may_end.wait(5)
        self.ended = True


async def test_requests_are_served_while_the_index_gives_back_what_a_worker_held(tmp_path: Path) -> None:
    slow: Any = Slow()

    async def asked() -> bool:
        return bool(slow.asked.is_set())

    async with Engine("a") as engine, serving(tmp_path, engine) as gateway:
        gateway.app.index = slow
        await until(asked, "the index is told the time")
        await gateway.complete("tiny", [1, 2, 3])
        assert not slow.ended
        slow.may_end.set()
