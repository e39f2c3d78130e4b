"""Starting servers and being sure that they end.

Each server leads a process group of its own and logs to a file; stopping takes the whole group. Waiting is for a
condition, with a deadline, and ends at once when the server has died; the end of its log is in the error.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

POLL = 0.02


class Server:
    """One running server process with its group and log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, *, patience: float = 30.0) -> None:
        """``patience``: seconds that the group has after SIGTERM, before SIGKILL."""
        self.name = name
        self.patience = patience
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        """Return once ``condition()`` is true; an ``OSError`` in it means "not yet".

        Raises:
            AssertionError: the server ended, or ``deadline`` seconds passed.
        """
        end = time.monotonic() + deadline
        while True:
            if self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self._process.returncode}\n{self.tail()}")
            try:
                if condition():
                    return
            except OSError:
                pass
            if time.monotonic() > end:
                raise AssertionError(f"{self.name}: {what} not within {deadline:.0f} s\n{self.tail()}")
            time.sleep(POLL)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the group: SIGTERM, then SIGKILL for whatever of it is left after :attr:`patience` seconds."""
        self._signal_group(signal.SIGTERM)
        end = time.monotonic() + self.patience
        while self._group_lives() and time.monotonic() < end:
            time.sleep(POLL)
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def _group_lives(self) -> bool:
        self._process.poll()  # reap the leader, else it stays in its group as a zombie
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _signal_group(self, number: int) -> None:
        if self._group_lives():
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


_ports = itertools.count(random.randrange(12_000, 28_000))


def free_ports(count: int = 1) -> int:
    """The first of ``count`` consecutive ports that are free and that no other call here gave away.

    vLLM has to be told its ports: it can't say which ones it took. So that nothing else takes them before it binds
    them, they come from below the range out of which Linux gives ports to those who ask for any.
    """
    while True:
        taken = [next(_ports) for _ in range(count)]
        if taken[-1] >= 32_768:
            raise OSError("no more ports to give away")
        with ExitStack() as stack:
            try:
                for port in taken:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return taken[0]
