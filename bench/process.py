"""Processes that are measured: CPU time with all threads, memory, and a line of JSON to and fro.

What must always hold: whoever is started here is ended here, by its own id, whatever happens; nobody waits for it
without a deadline.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

ROOT = Path(__file__).parent.parent
PATIENCE = 120.0
"""Seconds for one answer."""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all its threads, also those that have ended (Linux: a process's CPU
    clock is known by its number, clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def memory(pid: int) -> int:
    """Bytes of its own that a process has in RAM: anonymous pages, no files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def quiet_cpu(pid: int, over: float = 0.2, share: float = 0.02, patience: float = 10.0) -> float:
    """CPU seconds of a process once it does (almost) nothing more: work put off belongs to the work."""
    deadline = time.monotonic() + patience
    before = cpu_seconds(pid)
    while time.monotonic() < deadline:
        time.sleep(over)
        now = cpu_seconds(pid)
        if now - before < share * over:
            return now
        before = now
    return before


class Failed(RuntimeError):
    """A subject ended or did not answer; the text has what it said last."""


class Process:
    """A process with its output in a file, ended with the ``with`` block.

    Args:
        command: the whole command line.
        environment: beside the inherited one.
        pipes: keep its standard input and output as pipes (see :class:`Subject`).
    """

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None, *, pipes: bool = False
    ):
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (open until :meth:`end`)
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else self._said,
            stderr=self._said,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            bufsize=0,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, patience: float = 10.0) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._said.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def said(self) -> str:
        """The end of what it wrote."""
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 4000))
        return self._said.read().decode(errors="replace")

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def memory(self) -> int:
        return memory(self.pid)


class Subject(Process):
    """A process that answers requests: one line of JSON each way, ``{"do": name, …}`` → any value.

    The other end is :func:`bench.subjects.serve`.
    """

    def __init__(self, module: str, *arguments: str, python: Path | str, environment: Mapping[str, str] | None = None):
        super().__init__([str(python), "-m", f"bench.subjects.{module}", *arguments], environment, pipes=True)
        assert self._process.stdout is not None
        self._module = module
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def ask(self, do: str, patience: float = PATIENCE, **arguments: Any) -> Any:
        """
        Raises:
            Failed: it ended, refused or gave no answer in time.
        """
        self.tell(do, **arguments)
        return self.answer(patience)

    def tell(self, do: str, **arguments: Any) -> None:
        """Ask without waiting; :meth:`answer` has the answer, in order."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except BrokenPipeError:
            raise Failed(f"{self._module} ended: {self.said()}") from None

    def answer(self, patience: float = PATIENCE) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + patience
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise Failed(f"{self._module} gave no answer within {patience:g} s: {self.said()}")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise Failed(f"{self._module} ended: {self.said()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(f"{self._module}: {answer['error']}")
        return answer["value"]

    def end(self, patience: float = 10.0) -> None:
        self._selector.close()
        super().end(patience)


@contextmanager
def all_of(processes: Sequence[Process]) -> Iterator[None]:
    """Ends every one of them."""
    try:
        yield
    finally:
        for process in processes:
            process.end()


def until(done: Any, patience: float = PATIENCE, every: float = 0.005) -> None:
    """Wait for a condition.

    Raises:
        Failed: it did not come about.
    """
    deadline = time.monotonic() + patience
    while not done():
        if time.monotonic() > deadline:
            raise Failed(f"waited {patience:g} s in vain")
        time.sleep(every)
