"""What stands in front of engines: ``kvsync serve`` and its peers, each as installed and started by its command line.

What must always hold: a gateway that was entered answers requests, and its CPU time is that of all its processes and
threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from bench.asked import MODEL
from bench.followers import free_port
from bench.process import Failed, Process, cpu_seconds, until
from bench.work import BLOCK

PATIENCE: Final = 60.0


def get(port: int, path: str) -> bytes:
    """Raises OSError, or HTTPException for what is no answer or none of status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"{path}: {answer.status}")
        return answer.read()
    finally:
        connection.close()


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


class Gateway(Process):
    """A gateway that listens on ``port``."""

    def __init__(self, command: Sequence[str | Path | int], port: int) -> None:
        super().__init__([str(part) for part in command])
        self.port = port
        self._processes = [self.pid]

    def __enter__(self) -> Self:
        try:
            until(self._answers, PATIENCE, 0.1)
        except Failed:
            said = self.said()
            self.end()
            raise Failed(f"it does not answer: {said}") from None
        self._processes = tree(self.pid)
        return self

    def _answers(self) -> bool:
        if not self.alive:
            raise Failed("it ended")
        try:
            get(self.port, "/v1/models")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def cpu(self) -> float:
        return sum(map(cpu_seconds, self._processes))

    def end(self, patience: float = 10.0) -> None:
        descendants = tree(self.pid)[1:] if self.alive else []
        super().end(patience)
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Kvsync(Gateway):
    """``kvsync serve`` with a configuration file in ``folder``.

    Args:
        streams: each engine's events and replay endpoint; without them KV sync is off.
        tokenizer: folder of the model's tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        engines: Sequence[int],
        streams: Sequence[Sequence[str]] = (),
        tokenizer: Path | None = None,
    ) -> None:
        port, self.admin = free_port(), free_port()
        listed: list[dict[str, Any]] = [
            {"name": f"e{at}", "url": f"http://127.0.0.1:{engine}"} for at, engine in enumerate(engines)
        ]
        for engine, (events, replay) in zip(listed, streams, strict=False):
            engine |= {"events": events, "replay": replay}
        model: dict[str, Any] = {"name": MODEL, "engines": listed}
        if tokenizer is not None:
            model["tokenizer"] = str(tokenizer)
        config: dict[str, Any] = {
            "gateway": {"host": "127.0.0.1", "port": port, "drain_delay": 0},  # no balancer is to notice its end
            "admin": {"port": self.admin},
            "models": [model],
            "telemetry": {"log_level": "warning"},
        }
        if streams:
            config["events"] = {"enabled": True}
            config["tokenizer"] = {"remote": {"enabled": True, "endpoint": "engines"}}
        file = folder / f"kvsync-{port}.yaml"
        file.write_text(json.dumps(config))
        super().__init__([sys.executable, "-m", "kvsync.cli", "serve", "-c", file], port)

    def metrics(self) -> dict[str, float]:
        """All samples of ``/metrics``, by name with labels."""
        lines = (line for line in get(self.admin, "/metrics").decode().splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def total(self, name: str, label: str = "") -> float:
        """The sum of all samples of a metric, of those with ``label`` (``name="value"``) where it is given."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name and label in key)

    def holds(self, blocks: int, workers: int) -> None:
        """Wait until the index holds so many blocks and every worker is exact.

        Raises:
            Failed: it does not get there.
        """

        def there() -> bool:
            trusted = self.total("kvsync_worker_trust", 'trust="exact"')
            return (self.total("kvsync_worker_blocks"), trusted) == (blocks, workers)

        try:
            until(there, PATIENCE, 0.2)
        except Failed:
            raise Failed(f"{self.total('kvsync_worker_blocks'):g} of {blocks} blocks arrived: {self.said()}") from None


def vllm_router(python: Path, engines: Sequence[int], policy: str, streams: Sequence[Sequence[str]] = ()) -> Gateway:
    """``streams`` as above: what ``policy`` ``kv_aware`` follows."""
    command, port = _router([python.parent / "vllm-router"], engines, policy, "warning")
    if streams:
        command += ["--kv-event-model", MODEL, "--kv-event-block-size", BLOCK]
    for engine, (events, replay) in zip(engines, streams, strict=False):
        url = f"http://127.0.0.1:{engine}"
        command += ["--kv-event-source", f"{url}={events}", "--kv-event-replay-source", f"{url}={replay}"]
    return Gateway(command, port)


def smg(python: Path, engines: Sequence[int]) -> Gateway:
    return Gateway(*_router([python.parent / "smg", "launch"], engines, "cache_aware", "warn"))


def sglang_router(python: Path, engines: Sequence[int]) -> Gateway:
    return Gateway(*_router([python, "-m", "sglang_router.launch_router"], engines, "cache_aware", "warn"))


def _router(
    program: Sequence[str | Path], engines: Sequence[int], policy: str, log_level: str
) -> tuple[list[str | Path | int], int]:
    """Command and port. All three have one family of command lines."""
    port = free_port()
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    return [
        *program,
        *("--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port()),
        *("--worker-urls", *urls, "--policy", policy, "--log-level", log_level),
    ], port


__all__ = ["Gateway", "Kvsync", "sglang_router", "smg", "vllm_router"]
